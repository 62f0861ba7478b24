"""The options that planning verbs share, and the job that they state."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from partopt.cli.terminal import EXPLAIN
from partopt.errors import PartoptError

if TYPE_CHECKING:
    from msgspec import Struct

    from partopt import Job, Profile, Topology

Command = Callable[..., None]

_KINDS_OF_COST = ("time", "flops", "parameters")


def job_options(command: Command) -> Command:
    """Add the options that state a job; `job` turns their values into one."""
    for option in reversed(_JOB_OPTIONS):
        command = option(command)
    return command


def output_options(what: str, printed: bool = True) -> Callable[[Command], Command]:
    """`-o FILE` and `--force`, for a command that writes `what`; `printed`: with `-`, too."""

    def add(command: Command) -> Command:
        command = click.option("--force", is_flag=True, help="Replace the file if it exists.")(
            command
        )
        return click.option(
            "-o",
            "--output",
            metavar="FILE",
            help=f"Write {what} to FILE{'; - is standard output' if printed else ''}.",
        )(command)

    return add


def json_option(command: Command) -> Command:
    """`--json`: one document on standard output and nothing more."""
    return click.option(
        "--json", "as_json", is_flag=True, help="Print one JSON document and nothing more."
    )(command)


def explain_option(command: Command) -> Command:
    """`--explain`: `terminal.say_page` prints what the terms of a page mean below it."""

    def note(context: click.Context, _: click.Parameter, value: bool) -> None:
        context.meta[EXPLAIN] = value

    return click.option(
        "--explain",
        is_flag=True,
        expose_value=False,
        callback=note,
        help="Say below the page what its terms mean.",
    )(command)


map_option = click.option(
    "--map",
    "rules",
    multiple=True,
    metavar="GLOB=KIND",
    help="What layers are, where their names do not say: embedding, block, norm or head (repeat).",
)
memory_option = click.option(
    "--memory",
    metavar="SIZE",
    help='Limit of a device, such as "40 GB", instead of the topology\'s.',
)
with_option = click.option(
    "--with",
    "facts",
    multiple=True,
    metavar="FACT=VALUE",
    help="Replace a fact of the trainer's engine, such as bucket=50MB or waits=1f1b (repeat; "
    "partopt trainer show).",
)

_JOB_OPTIONS = [
    click.option(
        "--topology",
        required=True,
        metavar="FILE|NAME",
        help="The cluster: a YAML file, - or the name of a shipped one.",
    ),
    click.option(
        "--servers", type=click.IntRange(min=1), help="Size of the topology's outermost level."
    ),
    click.option(
        "--schedule",
        default="pipedream",
        show_default=True,
        metavar="NAME",
        help="pipedream, 1f1b, gpipe, interleaved, zbv, .. or auto.",
    ),
    click.option(
        "--chunks",
        type=click.IntRange(min=1),
        metavar="V",
        help="Stages on a device, for interleaved schedules (default: 2).",
    ),
    click.option(
        "--stages",
        type=click.IntRange(min=1),
        help="Stages for the planners that take a number (default: one a device).",
    ),
    click.option(
        "--cut-at",
        multiple=True,
        metavar="GLOB",
        help="Let stages begin only with layers of such names (repeat).",
    ),
    click.option(
        "--tied",
        type=click.Choice(["exchange", "together"]),
        default="exchange",
        show_default=True,
        help=(
            "Layers that share parameters: stages that part them exchange gradients, or none does."
        ),
    ),
    click.option(
        "--microbatch-size",
        type=click.IntRange(min=1),
        metavar="B",
        help="Samples (default: the measured size with the fastest plan).",
    ),
    click.option(
        "--microbatches",
        type=click.IntRange(min=1),
        metavar="M",
        help="Microbatches per iteration of a synchronous schedule.",
    ),
    click.option(
        "--global-batch",
        type=click.IntRange(min=1),
        metavar="G",
        help="Samples per iteration, instead of --microbatches.",
    ),
    click.option(
        "--replication",
        type=click.Choice(["free", "uniform", "none"]),
        default="free",
        show_default=True,
        help="Replicas of the stages: any, equally many, one.",
    ),
    click.option(
        "--recompute",
        type=click.Choice(["never", "always", "auto"]),
        help="Re-materialise activations (default: never); auto: in the stages that the planner "
        "chooses.",
    ),
    click.option(
        "--optimizer",
        type=click.Choice(["sgd", "momentum", "adam", "adam8bit", "adafactor"]),
        default="adam",
        show_default=True,
        help="For its memory.",
    ),
    click.option(
        "--shard",
        type=click.Choice(["none", "optimizer", "gradients", "parameters"]),
        default="none",
        show_default=True,
        help="What replicas of a stage hold a share of (ZeRO 1, 2, 3; each with those before).",
    ),
    memory_option,
    with_option,
    click.option(
        "--cost",
        default="time",
        show_default=True,
        metavar="KIND",
        help="GPipe: time, flops, parameters or a FILE.",
    ),
    click.option(
        "--effort",
        type=click.Choice(["quick", "normal", "thorough"]),
        default="normal",
        show_default=True,
        help="How long the optimal planner's plan is improved in the simulator.",
    ),
]


def choose_schedule(given: dict[str, Any], trainers: Sequence[str], several: bool) -> None:
    """Put the schedule that `trainers` run into `given` where this command line names none."""
    import partopt

    if trainers and not is_given("schedule"):
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
