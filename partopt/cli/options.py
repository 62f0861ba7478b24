"""The options that verbs share, what their values say, and where results are written."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from partopt.cli import values
from partopt.cli.terminal import EXPLAIN, say
from partopt.errors import PartoptError

if TYPE_CHECKING:
    from msgspec import Struct

    from partopt import Job, Plan, Profile, Topology
    from partopt.documents.tables import Comparison, GroupComparison, Scaling

Command = Callable[..., None]

COUNT = click.IntRange(min=1)
_NOT_OF_JOB = ("topology", "servers", "target", "rules")
_A_FILE = re.compile(r"[^\n|(]*(/[^\n|(]*|\.(py|sh|csv|json|ya?ml|toml|txt))")  # a layout
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
        groups = {}
        for heading, listed in _GROUPS.items():
            records = {name: left.pop(name.rstrip("*"), None) for name in listed.split()}
            shown = {name for name in records if ctx.meta.get(_HELP_ALL) or name[-1] != "*"}
            groups[heading] = [records[name] for name in listed.split() if name in shown]
        for heading, listed_rows in [*groups.items(), ("Output", list(left.values()))]:
            if rows := [record for record in listed_rows if record]:
                with formatter.section(heading):
                    formatter.write_dl(rows)


class _WordOrNumber(click.Choice):  # type: ignore[type-arg]
    """One of some words, or a whole number."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The word, or the number as one."""
        text = str(value)
        return int(text) if text.isdecimal() else super().convert(value, param, ctx)


def declare(*added: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """One decorator that adds several options, in their order."""

    def add(command: Command) -> Command:
        for option in reversed(added):
            command = option(command)
        return command

    return add


def option(
    flags: str, metavar: str, help: str, type: Any = None, *, default: Any = None, **more: Any
) -> Callable[[Command], Command]:
    """An option with a value; `flags` are its flags and then, where that is another, its name."""
    shown = {"default": default, "show_default": True} if default is not None else {}
    return click.option(*flags.split(), type=type, metavar=metavar, help=help, **shown, **more)


def _word(
    flag: str, words: str, help: str, default: str | None = None
) -> Callable[[Command], Command]:
    """An option that is one of `words`."""
    return option(flag, "WORD", help, click.Choice(words.split()), default=default)


def output_options(what: str, printed: bool = True) -> Callable[[Command], Command]:
    """`-o FILE` and `--force`, for a command that writes `what`; `printed`: with `-`, too."""
    text = f"Write {what} to FILE{' (or - to print)' if printed else ''}."
    return declare(
        option("-o --output", "FILE", text),
        click.option("--force", is_flag=True, help="Replace the file."),
    )


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document alone.")
explain_option = click.option(
    "--explain",
    is_flag=True,
    expose_value=False,
    callback=lambda context, _, value: context.meta.update({EXPLAIN: value}),
    help="Define the terms of the page below it.",
)
map_option = option(
    "--map rules",
    "GLOB=KIND",
    "What layers are, if names do not say: embedding, block, norm, head (repeat).",
    multiple=True,
)
set_option = option(
    "--set assignments", "K=V", "An argument for the function that builds the model.", multiple=True
)
memory_option = option("--memory", "SIZE", "Limit, such as 40GB (default: the topology's).")
with_option = option(
    "--with facts",
    "FACT=VALUE",
    "Replace a fact of its engine, such as bucket=50MB (repeat; see trainer show).",
    multiple=True,
)
job_options = declare(  # `job` turns their values into one
    option(
        "--topology",
        "FILE|NAME",
        "A YAML file, - or a shipped name.",
        required=True,
        shell_complete=values.TOPOLOGIES,
    ),
    option("--servers", "N", "Size of its outermost level.", COUNT),
    option(
        "--schedule",
        "NAME",
        "1f1b, gpipe, .. or auto.",
        default="pipedream",
        shell_complete=values.SCHEDULE_OR_AUTO,
    ),
    option("--chunks", "V", "Stages on a device, where it is interleaved (default: 2).", COUNT),
    option("--stages", "S", "How many, where a planner takes that (default: one a device).", COUNT),
    option(
        "--cut-at", "GLOB", "Stages begin only with layers of such names (repeat).", multiple=True
    ),
    _word(
        "--tied",
        "exchange together",
        "Layers that share parameters: exchange gradients, or stay together.",
        "exchange",
    ),
    option("--microbatch-size", "B", "Samples (default: the fastest measured size).", COUNT),
    option("--microbatches", "M", "Instead of --global-batch.", COUNT),
    option("--global-batch", "G", "Samples of a synchronous iteration.", COUNT),
    _word(
        "--replication",
        "free uniform none",
        "Replicas of the stages: free (any), uniform (equally many) or none (one).",
        "free",
    ),
    click.option(
        "--recompute",
        type=_WordOrNumber(["never", "always", "auto"]),
        metavar="WORD|N",
        help="Re-materialise activations: never, always, auto, the first N blocks of each stage.",
    ),
    _word(
        "--optimizer",
        "sgd momentum adam adam8bit adafactor",
        "sgd, momentum, adam, adam8bit, adafactor.",
        "adam",
    ),
    _word(
        "--shard",
        "none optimizer gradients parameters",
        "ZeRO: optimizer, gradients, parameters.",
        "none",
    ),
    memory_option,
    with_option,
    option(
        "--cost", "KIND", "What GPipe balances: time, flops, parameters or a FILE.", default="time"
    ),
    _word(
        "--effort",
        "quick normal thorough",
        "How long plans are improved: quick, normal, thorough.",
        "normal",
    ),
)


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

    options = {name: value for name, value in given.items() if name not in _NOT_OF_JOB}
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


def parse_pairs(flag: str, given: Iterable[str], form: str, example: str) -> dict[str, str]:
    """The values of `KEY=VALUE` by key.

    `form` and `example` are for the error of one that is not so; a key may not be given twice.
    """
    found: dict[str, str] = {}
    for text in given:
        key, _, value = map(str.strip, text.partition("="))
        if not key or "=" not in text:
            what, hint = f"not of the form {form}", f"write {flag} {example}"
            raise PartoptError(f"{flag} {text}: {what}", hint, code="invalid-option", value=text)
        if key in found:
            hint = f"give each {form.partition('=')[0].lower()} once"
            raise PartoptError(f"{flag} {key}: given twice", hint, code="invalid-option")
        found[key] = value
    return found


def parse_facts(given: Sequence[str]) -> dict[str, str]:
    """The values of `--with FACT=VALUE` by fact."""
    found = parse_pairs("--with", given, "FACT=VALUE", "bucket=50MB")
    return {fact.replace("-", "_"): value for fact, value in found.items()}


def parse_assignments(given: Sequence[str]) -> dict[str, Any]:
    """Arguments from `--set K=V`: V is a Python literal where it reads as one, else text."""

    def literal(text: str) -> Any:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            return text
        return value if isinstance(value, int | float | str | list | dict | None) else text

    found = parse_pairs("--set", given, "K=V", "layers=12")
    for key in found:
        if not key.isidentifier():
            what, hint = f"--set {key}: not a name of Python", "write --set layers=12"
            raise PartoptError(what, hint, code="invalid-option", option="arguments", value=key)
    return {key: literal(value) for key, value in found.items()}


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


def layout_text(layout: str) -> str:
    """The text of a layout: of a file or standard input, or the word itself."""
    from partopt.documents import is_file, read_bytes

    if layout != "-" and not _A_FILE.fullmatch(layout) and not is_file(layout):
        return layout
    return read_bytes(layout).decode(errors="replace")


def check_table(output: str, force: bool) -> None:
    """Refuse, before any work is done, a file in which a table could not be written."""
    from partopt import documents
    from partopt.report import pictures

    if Path(output).suffix.lower() == ".json":
        documents.check_writable(output, force)
    else:
        pictures.check(output, force, beside=["json"])


def write_table(table: Comparison | GroupComparison | Scaling, output: str, force: bool) -> None:
    """Write a table as its document (`.json`) or as a picture of it."""
    import partopt

    if Path(output).suffix.lower() == ".json":
        table.save(output, force)
    else:
        partopt.draw(table, output, force=force)
    say_wrote(output)


def write_json(document: Struct | dict[str, Any]) -> None:
    """Print one JSON document."""
    from partopt import documents

    documents.write_bytes("-", documents.encode(document))


def profile_to_draw(plan: Plan, given: str | None) -> Profile | None:
    """The profile whose layers are drawn with `plan`: the one `given`, else a shipped one."""
    import partopt

    own = partopt.Profile.find(plan.profile.sha256, given)
    if own is None:
        say("note:    stages are drawn without their layers: add --profile", err=True)
    return own


def say_wrote(*outputs: str | None) -> None:
    """Say on standard error which files were written; standard output is none."""
    for output in outputs:
        if output and output != "-":
            say(f"Wrote {output}", err=True)
