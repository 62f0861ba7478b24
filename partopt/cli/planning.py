"""The options of the verbs that plan, as `partopt.options` declares them, and their job."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import click

import partopt
from partopt.cli.options import (
    COUNT,
    TOKENS,
    Command,
    declare,
    integers,
    is_given,
    option,
    parse_facts,
    with_option,
)
from partopt.cli.terminal import say
from partopt.cli.words import as_flags, print_notes
from partopt.documents.transformer import Transformer
from partopt.errors import PartoptError
from partopt.options import BATCH, MEMORY, STAGES, TRAINER, Options, kinds

_NOT_OF_JOB = ("topology", "servers", "target", "rules")
_KINDS_OF_COST = ("time", "flops", "parameters")

_FLAGS = {name: kind.flag for name, kind in kinds().items() if kind.flag is not None}
# headings in the help of planning verbs, and the options below them beside those of a job; a star:
# in --help-all alone
_BESIDE = {
    "Cluster": "topology servers devices*",
    TRAINER: "target targets layout layouts beside* sequence dtype calibrate* facts* rules*",
    BATCH: "",
    STAGES: "chosen files",
    MEMORY: "",
    "Numbers of devices": "scaling weak* tokens* days* budget* price*",
}
_COUNTS = {"sequence": TOKENS}  # numbers that people write otherwise
_HELP_ALL = "partopt.help_all"  # in the context: whether all options are shown


class Verb(click.Command):
    """A verb of many options: --help is one screen of them in groups, --help-all has all."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        help_all = click.Option(
            ["--help-all"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=self._show_all,
            help="Show every option.",
        )
        self.params.append(help_all)

    def _show_all(self, context: click.Context, _: click.Parameter, value: bool) -> None:
        if value and not context.resilient_parsing:
            context.meta[_HELP_ALL] = True
            say(self.get_help(context))
            context.exit()

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The options below their headings; those without one come last."""
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        left = {param.name: param.get_help_record(ctx) for param in options}
        every, groups = ctx.meta.get(_HELP_ALL), {}
        for heading, beside in _BESIDE.items():
            rare = {name.rstrip("*"): name.endswith("*") for name in beside.split()}
            rare |= {name: flag.rare for name, flag in _FLAGS.items() if flag.heading == heading}
            records = {name: left.pop(name, None) for name in rare}
            groups[heading] = [records[name] for name in rare if every or not rare[name]]
        for heading, listed in [*groups.items(), ("Output", list(left.values()))]:
            if rows := [record for record in listed if record]:
                with formatter.section(heading):
                    formatter.write_dl(rows)


class _WordOrNumber(click.Choice):  # type: ignore[type-arg]
    """One of some words, or a whole number."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The word, or the number as one."""
        text = str(value)
        return int(text) if text.isdecimal() else super().convert(value, param, ctx)


class Sizes(NamedTuple):
    """A range of sizes of the outermost level."""

    least: int
    most: int

    def __str__(self) -> str:
        return f"{self.least}-{self.most}"


class _Servers(click.IntRange):
    """A number; for `partopt plan` also a range, `1-64`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number, or the range."""
        found = re.fullmatch(r"([0-9]+)-([0-9]+)", str(value))
        if found is None or ctx is None or ctx.info_name != "plan":
            return super().convert(value, param, ctx)
        sizes = Sizes(*(super(_Servers, self).convert(int(n), param, ctx) for n in found.groups()))
        if sizes.least > sizes.most:
            self.fail(f"{value}: begins with the larger number", param, ctx)
        return sizes


def flag_of(name: str, help: str = "") -> Callable[[Command], Command]:
    """The flag of the option of a job of this name, as `partopt.options.Options` declares it.

    `help` says what it is of a verb where that is something else.
    """
    kind, flag = kinds()[name], _FLAGS[name]
    value: Any = click.Choice(kind.words) if kind.words else None
    if kind.counts:
        value = _WordOrNumber(kind.words) if kind.words else _COUNTS.get(name, COUNT)
    return option(
        f"--{name.replace('_', '-')}",
        flag.letter,
        help or as_flags(flag.help),
        value,
        default=getattr(Options, name, None) or None,
        multiple=kind.items is str,
    )


memory_option = flag_of("memory")
split_options = declare(*(flag_of(name) for name, flag in _FLAGS.items() if flag.split))
job_options = declare(  # `state_job` turns their values into one
    option(
        "--topology",
        "FILE|NAME",
        "A YAML file, - or a shipped name.",
        required=True,
    ),
    option("--servers", "N", "Size of its outermost level.", _Servers(min=1)),
    *(flag_of(name) for name, flag in _FLAGS.items() if not (flag.split or flag.apart)),
    with_option,
)


def choose_schedule(given: dict[str, Any], trainers: Sequence[str], several: bool) -> None:
    """Put the schedule that `trainers` run into `given` where this command line names none."""
    fixed = "schedule=" in (given.get("layout") or "")
    if trainers and not is_given("schedule") and not fixed:
        found = partopt.schedule_for(trainers, given, several)
        given["schedule"] = found or given["schedule"]


def state_options(given: dict[str, Any]) -> dict[str, Any]:
    """The options of a job among `given`, but those that are not on this command line.

    Cuts and replicas may be numbers.
    """
    options = {
        name: value
        for name, value in given.items()
        if name not in _NOT_OF_JOB
        and (is_given(name) or value not in ((), getattr(Options, name, None)))
    }
    for name in options.keys() & {"cuts", "replicas"}:
        if isinstance(value := given[name], str):
            options[name] = integers(value, f"--{name}")
    if "layout" in options:
        options["layout"] = partopt.Layout.parse(options["layout"])
    if options.get("cost", "time") not in _KINDS_OF_COST:
        options["cost"] = _read_costs(given["cost"])
    return options | {"facts": parse_facts(given["facts"])}


def state_job(
    model: partopt.Profile | Transformer, topology: partopt.Topology, given: dict[str, Any]
) -> partopt.Job:
    """The job that the values of `job_options` state. PartoptError where they contradict."""
    options = state_options(given)
    if isinstance(model, Transformer) and "calibrate" in options:
        options["calibrate"] = _read_measured(options["calibrate"])
    try:
        return partopt.Job(model, topology, **options)
    except PartoptError as error:
        if error.fields.get("option") == "cost" and options.get("cost", "time") != given["cost"]:
            message = error.message.replace("`cost`", given["cost"])
            raise PartoptError(message, error.hint, code=error.code, option="cost") from None
        raise


def print_job_notes(job: partopt.Job, profile: str) -> None:
    """Print the notes of a job; of those that its `profile` has, how many there are."""
    of_profile = [] if isinstance(job.model, Transformer) else job.profile.notes
    print_notes(note for note in job.notes if note not in of_profile)
    if count := sum(not note.known for note in of_profile):
        warnings = "a warning" if count == 1 else f"{count} warnings"
        say(f"note:    the profile has {warnings}: partopt show {shlex.quote(profile)}", err=True)


def _read_measured(given: Sequence[str]) -> partopt.Profile | dict[str, partopt.Profile]:
    """A profile of a block, or those of blocks of kinds: `dense=a.json`."""
    pairs = [text.rpartition("=") for text in given]
    kinds = [kind for kind, _, _ in pairs]
    if kinds == [""]:
        return partopt.Profile.load(given[0])
    if "" in kinds or len({*kinds}) < len(kinds):
        what = f"--calibrate {' --calibrate '.join(given)}: one file, or one for every kind"
        raise PartoptError(what, "write --calibrate dense=a.json", code="invalid-option")
    return {kind: partopt.Profile.load(path) for kind, _, path in pairs}


def _read_costs(path: str) -> list[float]:
    """The numbers in a file, one a line."""
    from partopt.documents import read_bytes

    try:
        return [float(line) for line in read_bytes(path).decode().split()]
    except ValueError:
        raise PartoptError(
            f"{path}: not a list of numbers",
            "give one number a line, one for each layer, or --cost time, flops or parameters",
            code="invalid-option",
        ) from None
