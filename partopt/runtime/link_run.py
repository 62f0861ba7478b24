"""A measurement of links: what it runs on, checked before any process starts, and its run."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from partopt.errors import PartoptError
from partopt.links.fitted import FittedLinks
from partopt.links.layout import levels_of
from partopt.links.samples import LinkMeasurement
from partopt.runtime.backends import choose_backend
from partopt.runtime.link_measurement import LinkSettings, measure_links
from partopt.runtime.processes import is_under_torchrun, run_ranks

_DEFAULT_RANKS = 4
_SMALLEST, _LARGEST = 4, 2**32  # bytes of a message: all-reduces add numbers of 4 bytes


@dataclass(frozen=True)
class LinkRun:
    """Ranks that measure the links between them, with `gloo` or `nccl`."""

    ranks: int
    backend: str
    settings: LinkSettings

    def fit(self, name: str, tell: Callable[[str], None]) -> FittedLinks:
        """Measure, and fit the topology `name`; as `measure`."""
        return FittedLinks.of(self.measure(tell), name, self.settings.per_server)

    def measure(self, tell: Callable[[str], None]) -> LinkMeasurement:
        """Measure: as a rank that `torchrun` started, or with processes of its own.

        `tell` hears on rank 0 what is measured next. Raises PartoptError where a rank fails; no
        process is left in any case.
        """
        main = partial(measure_links, self.settings, tell)
        return run_ranks(main, self.ranks, self.backend)


def prepare_links(
    sizes: Sequence[int],
    ranks: int | None = None,
    per_server: int | None = None,
    backend: str = "auto",
    repetitions: int = 10,
) -> LinkRun:
    """The run of these options; PartoptError for what cannot be measured.

    By default there are four ranks, or as many as there are cores, in one server. Under `torchrun`
    there are as many as it started, in its servers.
    """
    if is_under_torchrun():
        if ranks is not None:
            raise _invalid("ranks", ranks, "torchrun says how many ranks there are", "leave it out")
        ranks = int(os.environ["WORLD_SIZE"])
        here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    else:
        if ranks is None:
            ranks = min(_DEFAULT_RANKS, max(2, os.cpu_count() or 2))
        here = ranks
    per_server = here if per_server is None else per_server
    levels_of(ranks, per_server)
    settings = LinkSettings(per_server, _check_sizes(sizes), repetitions)
    return LinkRun(ranks, choose_backend(backend, here), settings)


def _check_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """The sizes, ascending, each once."""
    different = sorted(set(sizes))
    for size in different:
        if not _SMALLEST <= size <= _LARGEST:
            what = f"a message has {_SMALLEST} bytes to {_LARGEST // 2**30} GiB"
            raise _invalid("sizes", size, what, "choose sizes in between")
    if len(different) < 2:
        what = "latency and bandwidth need two sizes"
        raise _invalid("sizes", ", ".join(map(str, different)), what, "give two or more")
    return tuple(different)


def _invalid(option: str, value: object, what: str, hint: str) -> PartoptError:
    return PartoptError(
        f"`{option}={value}`: {what}", hint, code="invalid-option", option=option, value=value
    )
