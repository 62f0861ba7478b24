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

import partopt
from partopt.cli.terminal import say
from partopt.errors import PartoptError
from partopt.options import LAYER_KINDS

if TYPE_CHECKING:
    from msgspec import Struct

    from partopt.documents.tables import Comparison, Scaling

Command = Callable[..., None]


class WholeNumber(click.IntRange):
    """A whole number in a range, by the name that messages have for it."""

    name = "whole number"


class _Tokens(WholeNumber):
    """A number of tokens: `131072`, or `128k` and `1M` as people say it of sequences."""

    name = "number of tokens"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number, k of 1,024 and M of 1,048,576."""
        parts = re.fullmatch(r"([0-9]+)([kKM])", str(value))
        if parts is None:
            return super().convert(value, param, ctx)
        times = 2**20 if parts[2] == "M" else 2**10
        return super().convert(int(parts[1]) * times, param, ctx)


class _Amount(click.FloatRange):
    """A positive number: `2.1`, or `15T` of tokens and `2M` of money."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number, in powers of a thousand."""
        parts = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kMBT])", str(value))
        if parts is None:
            return super().convert(value, param, ctx)
        return super().convert(float(parts[1]) * 1e3 ** (1 + "kMBT".index(parts[2])), param, ctx)


FILE = click.Path(readable=False)  # or a shipped name: shells complete it, and nothing is checked
COUNT, TOKENS = WholeNumber(min=1), _Tokens(min=1)
AMOUNT = _Amount(min=0, min_open=True, max=1e18)
_A_FILE = re.compile(r"[^\n|(]*(/[^\n|(]*|\.(py|sh|csv|json|ya?ml|toml|txt))")  # a layout


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
    type = FILE if type is None and "FILE" in metavar else type
    shown = {"default": default, "show_default": True} if default is not None else {}
    return click.option(*flags.split(), type=type, metavar=metavar, help=help, **shown, **more)


def output_options(what: str, printed: bool = True) -> Callable[[Command], Command]:
    """`-o FILE` and `--force`, for a command that writes `what`; `printed`: with `-`, too."""
    text = f"Write {what} to FILE{' (or - to print)' if printed else ''}."
    return declare(
        option("-o --output", "FILE", text),
        click.option("--force", is_flag=True, help="Replace the file."),
    )


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document alone.")
map_option = option(
    "--map rules",
    "GLOB=KIND",
    f"What layers are, if names do not say: {', '.join(LAYER_KINDS)} (repeat).",
    multiple=True,
)
set_option = option(
    "--set assignments", "K=V", "An argument for the function that builds the model.", multiple=True
)
with_option = option(
    "--with facts",
    "FACT=VALUE",
    "Replace a fact of its engine, such as bucket=50MB (repeat; see trainer show).",
    multiple=True,
)


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
            for entry in value if parameter.multiple else [value]:
                flag = isinstance(parameter, click.Option) and parameter.is_flag
                words += [parameter.opts[-1], *([] if flag else [str(entry)])]
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


def layout_text(layout: str) -> str:
    """The text of a layout: of a file or standard input, or the word itself."""
    from partopt.documents import is_file, read_bytes

    if layout != "-" and not _A_FILE.fullmatch(layout) and not is_file(layout):
        return layout
    return read_bytes(layout).decode(errors="replace")


def refuse_options(names: Iterable[str], why: str, hint: str = "leave {} out") -> None:
    """Refuse those among the options `names` that stand on this command line."""
    for parameter in click.get_current_context().command.params:
        if parameter.name in names and is_given(parameter.name):
            flag = parameter.opts[-1]
            raise PartoptError(f"{flag}: {why}", hint.replace("{}", flag), code="unused-option")


def check_table(output: str, force: bool) -> None:
    """Refuse, before any work is done, a file in which a table could not be written."""
    from partopt import documents
    from partopt.report import pictures

    if Path(output).suffix.lower() == ".json":
        documents.check_writable(output, force)
    else:
        pictures.check(output, force, beside=["json"])


def deliver_table(
    table: Comparison | Scaling,
    page: Callable[[], str],
    output: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Print a table or its `page`; write it as its document (`.json`) or as a picture of it."""

    def save(output: str, force: bool) -> None:
        if Path(output).suffix.lower() == ".json":
            table.save(output, force)
        else:
            partopt.draw(table, output, force=force)

    deliver(table, lambda: say(page()), output, force, as_json, save=save)


def deliver(
    document: Any,
    page: Callable[[], object],
    output: str | None,
    force: bool,
    as_json: bool,
    *,
    save: Callable[[str, bool], object] | None = None,
    written: bool = True,
) -> None:
    """Print a document as JSON, or its `page`, and write it where it is to be `written`.

    `save` writes something else than the document. What is written to standard output stands there
    alone.
    """
    if as_json:
        write_json(document)
    elif output != "-":
        page()
    if output and written and not (as_json and output == "-"):
        (save or document.save)(output, force)
        say_wrote(output)


def write_json(document: Struct | dict[str, Any]) -> None:
    """Print one JSON document."""
    from partopt import documents

    documents.write_bytes("-", documents.encode(document))


def profile_to_draw(plan: partopt.Plan, given: str | None) -> partopt.Profile | None:
    """The profile whose layers are drawn with `plan`: the one `given`, else a shipped one."""
    profile = partopt.find_profile(plan, given)
    if profile is None:
        say("note:    stages are drawn without their layers: add --profile", err=True)
    return profile


def say_wrote(*outputs: str | None) -> None:
    """Say on standard error which files were written; standard output is none."""
    for output in outputs:
        if output and output != "-":
            say(f"Wrote {output}", err=True)
