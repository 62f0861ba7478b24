"""The options that planning verbs share, and the job that they state."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from partopt.cli.terminal import EXPLAIN, say
from partopt.errors import PartoptError

if TYPE_CHECKING:
    from msgspec import Struct

    from partopt import Job, Profile, Topology

Command = Callable[..., None]

_KINDS_OF_COST = ("time", "flops", "parameters")


# Headings in the help of planning verbs, and the options below each; --help-all alone shows those
# with a star.
_GROUPS = {
    "Cluster": "topology servers",
    "Trainer": "target targets layout layouts facts* rules*",
    "Schedule and batch": "schedule global_batch microbatches microbatch_size chunks*",
    "Stages": "planner chosen files cuts replicas stages* cut_at* replication* tied* cost* effort*",
    "Memory of a device": "memory recompute optimizer shard",
    "Numbers of devices": "scaling weak*",
}
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
        """The options below the headings of their groups; those of no group come last."""
        options = [own for own in self.get_params(ctx) if isinstance(own, click.Option)]
        left = {own.name: own.get_help_record(ctx) for own in options}
        groups = []
        for heading, listed in _GROUPS.items():
            names = [name for name in listed.split() if left.get(name.rstrip("*"))]
            shown = [name for name in names if ctx.meta.get(_HELP_ALL) or not name.endswith("*")]
            groups.append((heading, [left[name.rstrip("*")] for name in shown]))
            for name in names:
                del left[name.rstrip("*")]
        for heading, records in [*groups, ("Output", list(left.values()))]:
            rows = [record for record in records if record]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)


class _WordOrNumber(click.Choice):  # type: ignore[type-arg]
    """One of some words, or a whole number."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The word, or the number as one."""
        text = str(value)
        return int(text) if text.isdecimal() else super().convert(value, param, ctx)


def job_options(command: Command) -> Command:
    """Add the options that state a job; `job` turns their values into one."""
    for option in reversed(_JOB_OPTIONS):
        command = option(command)
    return command


def output_options(what: str, printed: bool = True) -> Callable[[Command], Command]:
    """`-o FILE` and `--force`, for a command that writes `what`; `printed`: with `-`, too."""

    def add(command: Command) -> Command:
        command = click.option("--force", is_flag=True, help="Replace the file.")(command)
        return click.option(
            "-o",
            "--output",
            metavar="FILE",
            help=f"Write {what} to FILE{' (or - to print)' if printed else ''}.",
        )(command)

    return add


def json_option(command: Command) -> Command:
    """`--json`: one document on standard output and nothing more."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document alone.")(
        command
    )


def explain_option(command: Command) -> Command:
    """`--explain`: `terminal.say_page` prints what the terms of a page mean below it."""

    def note(context: click.Context, _: click.Parameter, value: bool) -> None:
        context.meta[EXPLAIN] = value

    return click.option(
        "--explain",
        is_flag=True,
        expose_value=False,
        callback=note,
        help="Define the terms of the page below it.",
    )(command)


map_option = click.option(
    "--map",
    "rules",
    multiple=True,
    metavar="GLOB=KIND",
    help="What layers are, if names do not say: embedding, block, norm, head (repeat).",
)
memory_option = click.option(
    "--memory",
    metavar="SIZE",
    help="Limit, such as 40GB (default: the topology's).",
)
with_option = click.option(
    "--with",
    "facts",
    multiple=True,
    metavar="FACT=VALUE",
    help="Replace a fact of its engine, such as bucket=50MB (repeat; see trainer show).",
)

_JOB_OPTIONS = [
    click.option(
        "--topology",
        required=True,
        metavar="FILE|NAME",
        help="A YAML file, - or a shipped name.",
    ),
    click.option(
        "--servers",
        type=click.IntRange(min=1),
        metavar="N",
        help="Size of its outermost level.",
    ),
    click.option(
        "--schedule",
        default="pipedream",
        show_default=True,
        metavar="NAME",
        help="1f1b, gpipe, .. or auto.",
    ),
    click.option(
        "--chunks",
        type=click.IntRange(min=1),
        metavar="V",
        help="Stages on a device, where it is interleaved (default: 2).",
    ),
    click.option(
        "--stages",
        type=click.IntRange(min=1),
        metavar="S",
        help="How many, where a planner takes that (default: one a device).",
    ),
    click.option(
        "--cut-at",
        multiple=True,
        metavar="GLOB",
        help="Stages begin only with layers of such names (repeat).",
    ),
    click.option(
        "--tied",
        type=click.Choice(["exchange", "together"]),
        default="exchange",
        show_default=True,
        metavar="WORD",
        help="Layers that share parameters: exchange gradients, or stay together.",
    ),
    click.option(
        "--microbatch-size",
        type=click.IntRange(min=1),
        metavar="B",
        help="Samples (default: the fastest measured size).",
    ),
    click.option(
        "--microbatches",
        type=click.IntRange(min=1),
        metavar="M",
        help="Instead of --global-batch.",
    ),
    click.option(
        "--global-batch",
        type=click.IntRange(min=1),
        metavar="G",
        help="Samples of a synchronous iteration.",
    ),
    click.option(
        "--replication",
        type=click.Choice(["free", "uniform", "none"]),
        default="free",
        show_default=True,
        metavar="WORD",
        help="Replicas of the stages: free (any), uniform (equally many) or none (one).",
    ),
    click.option(
        "--recompute",
        type=_WordOrNumber(["never", "always", "auto"]),
        metavar="WORD|N",
        help="Re-materialise activations: never, always, auto, the first N blocks of each stage.",
    ),
    click.option(
        "--optimizer",
        type=click.Choice(["sgd", "momentum", "adam", "adam8bit", "adafactor"]),
        default="adam",
        show_default=True,
        metavar="WORD",
        help="sgd, momentum, adam8bit, adafactor.",
    ),
    click.option(
        "--shard",
        type=click.Choice(["none", "optimizer", "gradients", "parameters"]),
        default="none",
        show_default=True,
        metavar="WORD",
        help="ZeRO: optimizer, gradients, parameters.",
    ),
    memory_option,
    with_option,
    click.option(
        "--cost",
        default="time",
        show_default=True,
        metavar="KIND",
        help="What GPipe balances: time, flops, parameters or a FILE.",
    ),
    click.option(
        "--effort",
        type=click.Choice(["quick", "normal", "thorough"]),
        default="normal",
        show_default=True,
        metavar="WORD",
        help="How long plans are improved: quick, normal, thorough.",
    ),
]


def choose_schedule(given: dict[str, Any], trainers: Sequence[str], several: bool) -> None:
    """Put the schedule that `trainers` run into `given` where this command line names none."""
    import partopt

    fixed = "schedule=" in (given.get("layout") or "")
    if trainers and not is_given("schedule") and not fixed:
        found = partopt.schedule_for(trainers, given, several)
        given["schedule"] = found or given["schedule"]


def job(profile: str, given: dict[str, Any]) -> Job:
    """The job that the values of `job_options` state, of a profile in a file or of a shipped name.

    Raises PartoptError where they contradict each other.
    """
    import partopt

    loaded = partopt.Profile.load(profile)
    return state_job(loaded, partopt.Topology.load(given["topology"], given["servers"]), given)


def state_job(profile: Profile, topology: Topology, given: dict[str, Any]) -> Job:
    """As `job`, of a profile and a topology that are loaded; cuts and replicas may be numbers."""
    import partopt

    options = {name: value for name, value in given.items() if name not in ("topology", "servers")}
    for name in ("cuts", "replicas"):
        value = given.get(name)
        options[name] = integers(value, f"--{name}") if isinstance(value, str) else value
    if (layout := options.pop("layout", None)) is not None:
        options["layout"] = partopt.Layout.parse(layout)
    options["facts"] = parse_facts(given["facts"])
    if given["cost"] not in _KINDS_OF_COST:
        options["cost"] = _read_costs(given["cost"])
    try:
        return partopt.Job(profile, topology, **options)
    except PartoptError as error:
        if error.fields.get("option") == "cost" and options["cost"] is not given["cost"]:
            message = error.message.replace("`cost`", given["cost"])
            raise PartoptError(message, error.hint, code=error.code, option="cost") from None
        raise


def parse_facts(given: Sequence[str]) -> dict[str, str]:
    """The values of `FACT=VALUE` by fact. Raises PartoptError for one without a value, or twice."""
    found: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        fact = name.strip().replace("-", "_")
        if not equals or not value.strip():
            what, hint = "not of the form FACT=VALUE", "write --with bucket=50MB"
            raise PartoptError(f"--with {text}: {what}", hint, code="usage")
        if fact in found:
            raise PartoptError(f"--with {fact}: given twice", "give each fact once", code="usage")
        found[fact] = value.strip()
    return found


def write_json(document: Struct | dict[str, Any]) -> None:
    """Print one JSON document."""
    from partopt import documents

    documents.write_bytes("-", documents.encode(document))


def is_given(name: str) -> bool:
    """Whether the option stands on this command line."""
    source = click.get_current_context().get_parameter_source(name)
    return source is ParameterSource.COMMANDLINE


def repeat_options(given: Iterable[str]) -> str:
    """The options among `given` that stand on this command line, as another command takes them."""
    return shlex.join(repeat_words(given))


def repeat_words(given: Iterable[str]) -> list[str]:
    """The words of `repeat_options`."""
    context = click.get_current_context()
    words: list[str] = []
    for parameter in context.command.params:
        name = parameter.name or ""
        if name in given and is_given(name):
            value = context.params[name]
            for each in value if parameter.multiple else [value]:
                words += [parameter.opts[-1], str(each)]
    return words


def integers(text: str, flag: str) -> list[int]:
    """The numbers in `5,9,12`. Raises PartoptError where one is not a whole number."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise PartoptError(
            f"{flag} {text}: not a list of whole numbers",
            f"write {flag} 5,9,12",
            code="invalid-option",
        ) from None


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
