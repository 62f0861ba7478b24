"""The library's words for options and functions, as the command line writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import partopt
from partopt.cli.terminal import progress, say
from partopt.errors import ANSWER_IS_NO, PartoptError
from partopt.printable import without_numbers

if TYPE_CHECKING:
    from partopt.documents import Note
    from partopt.documents.simulation import Finding

# where the flag is not `--` and the option's name with hyphens
_OWN_FLAGS = {
    "microbatch_sizes": "--microbatch",
    "arguments": "--set",
    "units": "--unit",
    "all_layers": "--all",
    "facts": "--with",
    "for": "--for",
}
_NOT_TYPED = {"engine", "block_bounds", "trainer"}  # options of a job that have no flag
_OPTIONS = (  # beside those of a job
    "servers warmup bandwidth latency links device devices granularity steps autocast "
    "compile resume repeat name force scaling weak estimate jitter slow seed draws "
    "backend rate check save every ranks engine per_server sizes accept_poor map "
    "pipeline_size profile forward backward weight_gradient transfer activations days "
    "budget price"
)
VERBS = {
    "solve": "partopt plan",
    "simulate": "partopt simulate",
    "compare": "partopt compare",
    "verify": "partopt show --verify",
    "measure": "partopt profile",
    "estimate_source": "partopt profile --estimate",
}
LARGER = "take larger devices, or more of them"
_NAMED = re.compile(r"`(?P<name>[a-z_-]+)(?:=(?P<value>[^`]*))?`")
_OF_FACTS = ("yes", "no")  # values that no option has


@cache
def flags() -> dict[str, str]:
    """The flags of all options of the library, by their names."""
    from partopt.options import kinds

    names = [*_OPTIONS.split(), *(kinds().keys() - _NOT_TYPED)]
    return {name: f"--{name.replace('_', '-')}" for name in names} | _OWN_FLAGS


def as_flags(text: str) -> str:
    """The text of an error or a note with its options and functions as they are typed.

    `` `microbatches=64` `` becomes `--microbatches 64`, `` `cuts=[5, 9]` `` `--cuts 5,9`,
    `` `force=True` `` `--force` and `` `solve` `` `partopt plan`; a fact of a trainer becomes
    `--with async-tp=yes`. What is none of these stays as it is, in its backquotes.
    """
    return _NAMED.sub(_spell, text)


def flags_of(options: Mapping[str, Any]) -> list[str]:
    """Options of the library as the words of a command line; others stay as they are.

    One that is left open, None or an empty layout, has no words.
    """
    from partopt.documents.engine import Layout

    words: list[str] = []
    for name, value in options.items():
        flag = flags().get(name, name)
        if value in (None, Layout()):
            continue
        if isinstance(value, Mapping):
            for level, setting in value.items():
                words += [flag, f"{level}={setting}"]
        elif isinstance(value, list | tuple):
            words += [flag, ",".join(map(str, value))]
        else:
            words += [flag, str(value)]
    return words


def change_command(plan: str | None, finding: Finding) -> list[str]:
    """The words of the command that makes a change; its flags alone where the plan is no file."""
    flags = flags_of(finding.options)
    return flags if plan in (None, "-") else ["partopt", "simulate", str(plan), *flags]


def print_notes(notes: Iterable[Note]) -> None:
    """Print `warning: ...` on standard error for the notes, `note: ...` for a known one.

    Of those that differ in numbers alone, as those of several sizes, the first stands for all.
    """
    alike: dict[tuple[str, bool], dict[str, None]] = {}
    for note in notes:
        alike.setdefault((without_numbers(note.text), note.known), {})[note.text] = None
    for (_, known), (text, *others) in alike.items():
        more = f" (and {len(others)} alike)" if others else ""
        say(f"{'note:   ' if known else 'warning:'} {as_flags(text)}{more}", err=True)


def _spell(match: re.Match[str]) -> str:
    name, value = match["name"], match["value"]
    if value is None and name in VERBS:
        return VERBS[name]
    flag = flags().get(name)
    if flag is None or value in _OF_FACTS:
        fact = name if name in _facts() else name.replace("_", "-")
        stated = fact if value is None else f"{fact}={value}"
        return f"--with {_word(stated)}" if fact in _facts() else match[0]
    if value is not None and value.startswith("{"):
        levels = json.loads(value).items()
        return " ".join(f"{flag} {level}={_word(str(setting))}" for level, setting in levels)
    return " ".join(filter(None, [flag, _word(value)]))


@cache
def _facts() -> set[str]:
    """The facts of all trainers."""
    from partopt.options import FACTS

    return {*FACTS}.union(*(trainer.choices for trainer in partopt.TRAINERS.values()))


def _word(value: str | None) -> str:
    """A value as one word of a shell.

    A switch becomes nothing, a list loses its brackets, spaces and quotes, a phrase is put in
    quotes.
    """
    if value in (None, "True"):
        return ""
    if value[:1] + value[-1:] in ("[]", "()"):
        return re.sub(r"[\s'\"]|,$", "", value[1:-1])
    return f'"{value}"' if " " in value else value


def hint_at_fitting(
    plan: partopt.Plan,
    job: partopt.Job,
    command: Callable[[Mapping[str, Any]], str],
    rules: Sequence[str] = (),
) -> str:
    """The command with which a plan of the job fits, where `plan` does not.

    `command` gives the command that plans the job with some options changed; `rules` are as in
    `solve`.
    """
    from partopt.report.phrases import speed_text

    with progress() as tell:
        fitting = partopt.find_fitting(job, tell, rules)
    if fitting is not None:
        tokens, speed = plan.profile.tokens_per_sample, ""
        if fitting.samples_per_s is not None:
            speed = f" ({speed_text(fitting.samples_per_s, tokens)})"
        return f"this fits{speed}: {command(fitting.options)}"
    if plan.transformer:
        return f"no layout fits on any number of servers that was tried; {LARGER}"
    tried = ", ".join(partopt.list_tried(job))
    return f"nothing found fits, whatever {tried}; {LARGER}" if tried else LARGER


def does_not_fit(plan: partopt.Plan, job: partopt.Job, hint: str) -> PartoptError:
    """The error of a plan of the job that does not fit."""
    from partopt.documents.engine import Layout
    from partopt.documents.plan import needed_bytes
    from partopt.documents.stage import stages_text
    from partopt.units import format_bytes

    if not plan.transformer:
        where = f"a device of {stages_text(plan.fullest_stages)}"
        return exceeds_limit(where, plan.peak_memory_bytes, plan.memory_limit_bytes, hint)
    free, limit = plan.transformer.asked == Layout(), format_bytes(job.limit_bytes or 0)
    needed = f"a device needs {format_bytes(needed_bytes(plan))} of {limit}"
    what = f"{'no layout fits' if free else 'the layout does not fit'}: {needed}"
    return PartoptError(what, hint, ANSWER_IS_NO, code="does-not-fit")


def exceeds_limit(where: str, peak_bytes: int, limit_bytes: int | None, hint: str) -> PartoptError:
    """The error of a plan that needs more than the limit on a device: `where`, and how much."""
    from partopt.report.phrases import excess_text

    assert limit_bytes is not None
    what = f"the plan does not fit: {where} {excess_text(peak_bytes, limit_bytes)}"
    return PartoptError(what, hint, ANSWER_IS_NO, code="does-not-fit")
