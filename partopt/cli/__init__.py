"""The command line: one file a verb, which parses, calls and prints.

Here: which verbs there are, and how errors leave.
"""

from __future__ import annotations

import contextlib
import difflib
import gc
import importlib
import io
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence

import click
from click.shell_completion import shell_complete

from partopt import __version__
from partopt.cli.terminal import INTERRUPTED, ascii_only, columns, is_dumb, say
from partopt.cli.words import as_flags
from partopt.errors import PartoptError, unknown
from partopt.printable import shorten, without_numbers
from partopt.report.text import page_style

# Verb -> its module, which is imported when the verb is used, and its line in `partopt --help`.
VERBS = {
    "profile": ("partopt.cli.profile", "measure the layers of a PyTorch model on one device"),
    "plan": ("partopt.cli.plan", "stages, replicas and microbatches in flight for a cluster"),
    "compare": ("partopt.cli.compare", "every planner side by side"),
    "simulate": (
        "partopt.cli.simulate",
        "execute a plan: where its time goes, and what would change it",
    ),
    "schedule": ("partopt.cli.schedule", "schedules on equal stages, without a profile"),
    "report": ("partopt.cli.report", "a plan as one page of HTML, to look at and to send"),
    "run": ("partopt.cli.run", "train a model by a plan, measured beside predicted"),
    "export": ("partopt.cli.export", "write a plan as a trainer reads it"),
    "show": ("partopt.cli.show", "a profile, a plan or a topology, for people to read"),
    "import": ("partopt.cli.import_", "read another program's profile, or a trainer's layout"),
    "topology": ("partopt.cli.topology", "list, show and measure topologies"),
    "trainer": ("partopt.cli.trainer", "trainers: what each can say and does"),
    "doctor": ("partopt.cli.doctor", "what this machine is, tried out and written into a file"),
    "schema": ("partopt.cli.schema", "the JSON Schema of a file format"),
}
_TRAINING = {
    "profile",
    "run",
    "export",
    "topology",
    "doctor",
}  # verbs in whose process models may train
_YOUNG = 200_000  # objects made since the collector's last pass, in the other verbs
COMPLETE = "_PARTOPT_COMPLETE"  # in the environment: SHELL_source or SHELL_complete
BROKEN_PIPE = 141
INTERNAL = 70
_SHOWN = 3  # errors of one file
_LONGEST = 400  # characters of an error; the middle of a longer one is left out
_LONGEST_HINT = 1_200  # of a hint, which may be a command
_ENOUGH = 350  # characters of errors after which no more are shown


class Verbs(click.Group):
    """The verbs, imported when they are used.

    So `partopt --help` is quick, and planning never imports torch.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The verbs in the order in which a newcomer needs them."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a verb; PartoptError for an unknown one, None while a shell completes."""
        if cmd_name not in VERBS:
            if ctx.resilient_parsing:
                return None
            what = f"partopt {cmd_name}: no such command"
            raise unknown(what, cmd_name, VERBS, code="unknown-command")
        command: click.Command = importlib.import_module(VERBS[cmd_name][0]).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """One line a verb, without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(verb, summary) for verb, (_, summary) in VERBS.items()])


@click.group(
    cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(__version__, "-V", "--version", prog_name="partopt")
def partopt() -> None:
    """Plan pipeline-parallel training from measurements.

    Three steps: profile a model on one device, plan it on a cluster, compare the planners.

    \b
      partopt profile examples/gpt.py -o gpt.json
      partopt plan gpt.json --topology dgx-a100 -o plan.json
      partopt compare gpt.json --topology dgx-a100

    --debug after any command prints the traceback of an error.
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit.

    The exit code is 0 done, 1 the answer is no, 2 bad input, 130 interrupted, 143 terminated and
    129 hung up while measuring or running, 70 a fault of partopt itself.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    warnings.simplefilter("ignore")  # those of libraries are not for our users
    code = 0
    try:
        if COMPLETE in os.environ:
            sys.exit(shell_complete(partopt, {}, "partopt", COMPLETE, os.environ[COMPLETE]))
        words = [word for word in given if word != "--debug"] or ["--help"]
        plain = os.environ.get("NO_COLOR") or is_dumb()
        with (
            page_style(
                width=columns(),
                ascii_only=ascii_only(),
                spell=as_flags,
                colour=not plain and sys.stdout.isatty(),
            ),  # fmt: skip
            contextlib.nullcontext() if words[0] in _TRAINING else _collect_rarely(),
            partopt.make_context("partopt", words, color=False if plain else None) as context,
        ):
            partopt.invoke(context)  # click's main() would turn a closed pipe into exit code 1
        sys.stdout.flush()
    except click.exceptions.Exit as left:
        code = left.exit_code
    except BrokenPipeError:
        # so that the interpreter's flush at exit finds no pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = BROKEN_PIPE
    except (KeyboardInterrupt, click.Abort):
        say("interrupted", err=True)
        code = INTERRUPTED
    except Exception as error:
        if debug:
            say(traceback.format_exc(), err=True, nl=False)
        code = _report(error)
    sys.exit(code)


@contextlib.contextmanager
def _collect_rarely() -> Iterator[None]:
    """Python's search for unreachable cycles less often: it takes a tenth of a short command."""
    before = gc.get_threshold()
    gc.set_threshold(_YOUNG, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _report(error: Exception) -> int:
    """Print `error: ...` and `hint: ...` for an error's parts; the exit code.

    Of a file three are shown, of parts that differ in numbers alone the first, and of all no more
    than 2,000 characters.
    """
    if isinstance(error, click.UsageError):
        error = _usage(error)
    elif isinstance(error, click.ClickException):
        error = PartoptError(error.format_message(), code="usage")
    elif isinstance(error, OSError) and error.filename is None:
        error = PartoptError(
            f"standard output: {error.strerror}", "is the disk full?", code="cannot-write"
        )
    if not isinstance(error, PartoptError):
        what = shorten(f"{type(error).__name__}: {error}", _LONGEST)
        say(f"error: a fault of partopt's own: {what}", err=True)
        say("hint:  run it again with --debug, and report what it prints", err=True)
        return INTERNAL
    most = _SHOWN if "file" in error.fields else len(error.parts)
    alike = {without_numbers(part.message): part for part in reversed(error.parts)}
    shown = [part for part in error.parts if alike[without_numbers(part.message)] is part][:most]
    said, length = 0, 0
    for part in shown:
        if length > _ENOUGH:
            break
        text = f"error: {shorten(as_flags(part.message), _LONGEST)}"
        if part.hint:
            text += f"\nhint:  {shorten(as_flags(part.hint), _LONGEST_HINT)}"
        say(text, err=True)
        said, length = said + 1, length + len(text)
    if said < len(error.parts):
        say(f"error: and {len(error.parts) - said} more", err=True)
    return error.exit_code


def _usage(error: click.UsageError) -> PartoptError:
    """What click found wrong with the command line, in partopt's words."""
    path = error.ctx.command_path if error.ctx else "partopt"
    near = shown = getattr(error, "possibilities", None)
    kind = getattr(getattr(error, "param", None), "type", None)
    if isinstance(kind, click.Choice) and (given := re.match("'(.*?)' is not", error.message)):
        near = difflib.get_close_matches(given[1], map(str, kind.choices), n=1, cutoff=0.5)
    message = (error.message if shown else error.format_message()).rstrip(".")
    return PartoptError(
        f"{path}: {message[:1].lower()}{message[1:]}",
        f'did you mean "{near[0]}"?' if near else f"see {path} --help",
        code="usage",
    )
