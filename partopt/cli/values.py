"""What shells complete the values of options and arguments with: names that partopt knows."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import click
from click.shell_completion import CompletionItem

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def _completing(known: Callable[[], Iterable[str]], files: bool = False) -> Complete:
    """The known names that begin as what is typed; beside them `files`, which are as good.

    Files come first: bash forgets what came before them, and shows them where no name fits.
    """

    def complete(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
        found = [CompletionItem(name) for name in known() if name.startswith(incomplete)]
        return [CompletionItem(incomplete, type="file"), *found] if files else found

    return complete


def _shipped(*kinds: str) -> Complete:
    def known() -> list[str]:
        from partopt.documents.files import shipped_names

        return [name for kind in kinds for name in shipped_names(kind)]

    return _completing(known, files=True)


def _schedules() -> Iterable[str]:
    from partopt import SCHEDULES

    return SCHEDULES


def _schedules_or_auto() -> Iterable[str]:
    return [*_schedules(), "auto"]


def _trainers() -> Iterable[str]:
    from partopt import TRAINERS

    return TRAINERS


def _writers() -> Iterable[str]:
    from partopt import TRAINERS

    return [*(name for name, trainer in TRAINERS.items() if trainer.write), "flows"]


def _documents() -> Iterable[str]:
    from partopt.documents.kinds import DOCUMENTS

    return DOCUMENTS


def _planners() -> Iterable[str]:
    from partopt import PLANNERS

    return PLANNERS


PROFILES, TOPOLOGIES, DEVICES = map(_shipped, ("profiles", "topologies", "devices"))
PLANNED = _shipped("profiles", "models")
SHOWN = _shipped("profiles", "topologies", "devices")
SCHEDULE = _completing(_schedules)
SCHEDULE_OR_AUTO = _completing(_schedules_or_auto)
TRAINER, WRITER = _completing(_trainers), _completing(_writers)
DOCUMENT, PLANNER = _completing(_documents), _completing(_planners)
