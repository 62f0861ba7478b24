"""`partopt simulate`."""

from __future__ import annotations

import shlex
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from partopt.cli import options, progress, whatif
from partopt.errors import ANSWER_IS_NO, PartoptError, did_you_mean

if TYPE_CHECKING:
    from partopt.documents.plan import Plan
    from partopt.documents.simulation import SimulationDocument
    from partopt.simulator.execution import Execution

FORMS = (".json", ".svg", ".pdf", ".png", ".csv")
_WIDTH = 80  # columns, where it is not a terminal
_ASK_AGAIN_S = 0.2


@click.command(short_help="execute a plan: where its time goes, and what would change it")
@click.argument("plan")
@whatif.what_if_options
@options.output_options(
    "the timeline (.json for Perfetto), a figure (.svg, .pdf, .png) or the schedule (.csv)"
)
@options.json_option
def command(plan: str, output: str | None, force: bool, as_json: bool, **given: Any) -> None:
    """Execute PLAN on the cluster for which it was made, or under other circumstances, and say
    where the time goes.

    Draws the timeline, splits the time of every device into work and kinds of waiting, and points
    at what costs most. Where something is changed, stages stay as they are, and the plan's own
    prediction stands beside what becomes of it. Exits with 1 where the plan does not fit the
    devices' memory.

    \b
    Example:
      partopt simulate plan.json
      partopt simulate plan.json --schedule zb-h1 --microbatches 64 -o trace.json
      partopt simulate plan.json --bandwidth cluster="100 Gb/s" --latency cluster="5 us"
      partopt simulate plan.json --schedule mine.csv
    """
    from partopt.documents.plan import Plan
    from partopt.simulator.advice import findings
    from partopt.simulator.document import document_of

    _check_output(output, force, as_json)
    before = Plan.load(plan)
    execution = _in_background(_prepared(before, plan, given, _most_actions(output)))
    if execution.makespan_s == 0:
        raise PartoptError(
            f"{plan}: all that it does takes 0 s, there is nothing to see",
            "were its layers measured? partopt show",
        )
    result = document_of(execution, before, findings(execution))
    _show(result, as_json, output)
    if output:
        _write(execution, output, force)
    if not as_json and output != "-":
        click.echo(_next(plan, output), err=True)
    if not result.fits:
        raise _does_not_fit(result)


def _check_output(output: str | None, force: bool, as_json: bool) -> None:
    """PartoptError for an output that could not be written, or of no known form, before any work is
    done.
    """
    from partopt import documents

    if output == "-" and as_json:
        raise PartoptError("-o - --json: both print on standard output", "choose one of them")
    if output and _form(output) not in FORMS:
        raise PartoptError(
            (
                f"-o {output}: the extension chooses what is written, and this is none that "
                "partopt writes"
            ),
            "choose .json (trace for Perfetto), .svg, .pdf, .png (figure) or .csv (schedule)",
        )
    if output:
        documents.check_writable(output, force)


def _most_actions(output: str | None) -> int:
    """How many actions may be simulated: a trace holds fewer."""
    from partopt.report.trace import MOST_ACTIONS
    from partopt.simulator.execution import ACTION_LIMIT

    return MOST_ACTIONS if output and _form(output) == ".json" else ACTION_LIMIT


def _form(output: str) -> str:
    """The extension of what is written to `output`; on standard output, that of a trace."""
    return ".json" if output == "-" else Path(output).suffix.lower()


def _prepared(plan: Plan, path: str, given: dict[str, Any], most: int) -> Callable[[], Execution]:
    """What is to be simulated: the plan under the options' circumstances.

    Raises PartoptError where it cannot be.
    """
    from partopt.schedules import SCHEDULES
    from partopt.simulator import execute

    if whatif.own_order(given["schedule"]):
        return _own(plan, given, most)
    if given["schedule"] is None and plan.schedule not in SCHEDULES:
        raise PartoptError(
            f'{path}: schedule: there is no "{plan.schedule}"',
            did_you_mean(plan.schedule, SCHEDULES),
        )
    changed, passing = whatif.changed(plan, given, most), given["microbatches"]

    def run() -> Execution:
        try:
            return execute(changed, passing)
        except PartoptError as error:
            hint = (
                "let more forwards come first: a deeper --warmup" if given["warmup"] else error.hint
            )
            raise PartoptError(f"{path}: {changed.schedule}: {error.message}", hint) from None

    return run


def _own(plan: Plan, given: dict[str, Any], most: int) -> Callable[[], Execution]:
    """The order in the file that --schedule names."""
    from msgspec.structs import replace as restated

    from partopt.documents import read_bytes
    from partopt.simulator.own_order import microbatches_in, simulation_of_csv

    path = given["schedule"]
    for flag in ("warmup", "allreduce"):
        if given[flag] is not None:
            raise PartoptError(
                f"--{flag}: the order in {path} says itself what is done when", f"drop --{flag}"
            )
    text = read_bytes(path).decode(errors="replace")
    changed = restated(
        plan, topology=whatif.network(plan.topology, given), comm=given["comm"] or plan.comm
    )
    try:
        M = given["microbatches"] or microbatches_in(text, plan)
        whatif.check_size(plan, path, M, most)
    except PartoptError as error:
        raise error.at(path) from None

    def run() -> Execution:
        try:
            return simulation_of_csv(text, Path(path).name, changed, M)
        except PartoptError as error:
            raise error.at(path) from None

    return run


def _in_background(work: Callable[[], Execution]) -> Execution:
    """What `work` returns, with a progress bar where that takes long; Ctrl-C does not wait for
    it.
    """
    done: list[Execution] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            done.append(work())
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    with progress.shown() as tell:
        thread.start()
        while thread.is_alive():
            thread.join(_ASK_AGAIN_S)
            tell("simulating", 0, 1)
    if failed:
        raise failed[0]
    return done[0]


def _show(result: SimulationDocument, as_json: bool, output: str | None) -> None:
    from partopt import documents

    if as_json:
        documents.write_bytes("-", documents.encode(result))
    elif output != "-":
        show_simulation(result)


def show_simulation(document: SimulationDocument) -> None:
    """Print the page of a simulation, as wide as the terminal."""
    from partopt.cli.words import as_flags
    from partopt.report.simulation import render

    terminal = sys.stdout.isatty()
    width = max(_WIDTH, shutil.get_terminal_size((_WIDTH, 24)).columns) if terminal else _WIDTH
    context = click.get_current_context()
    colour = terminal if context.color is None else context.color
    click.echo(render(document, width, options.ascii_only(), colour, as_flags))


def _write(execution: Execution, output: str, force: bool) -> None:
    """The form that the extension of `output` chooses; the trace on standard output."""
    from partopt import documents
    from partopt.report import trace
    from partopt.schedules.torch_csv import to_csv
    from partopt.simulator.drawing import drawn_window
    from partopt.simulator.restate import layout_of

    form = _form(output)
    if form == ".json":
        documents.write_bytes(
            output, b"".join(trace.write(execution.timeline, execution.plan)), force
        )
    elif form == ".csv":
        layout = layout_of(execution.plan, execution.microbatches)
        documents.write_bytes(output, to_csv(execution.order, layout).encode(), force)
    else:
        from partopt.report import figure

        figure.save(execution.timeline, output, force, drawn_window(execution))
    if output != "-":
        click.echo(f"Wrote {output}", err=True)


def _next(plan: str, output: str | None) -> str:
    if output and _form(output) == ".json":
        return f"next:    open {output} in https://ui.perfetto.dev"
    return f"next:    partopt simulate {shlex.quote(plan)} -o trace.json"


def _does_not_fit(result: SimulationDocument) -> PartoptError:
    from partopt.units import format_bytes

    fullest, limit = result.fullest, result.memory_limit_bytes
    assert limit is not None
    peak = fullest.peak_memory_bytes
    over = f"{format_bytes(peak)}, which exceeds the limit by {format_bytes(peak - limit)}"
    hint = next((finding.change for finding in result.advice if finding.code == "memory"), "")
    return PartoptError(
        f"the plan does not fit: rank {fullest.rank} needs {over}",
        hint,
        ANSWER_IS_NO,
        code="does-not-fit",
        rank=fullest.rank,
        peak_memory_bytes=peak,
        memory_limit_bytes=limit,
    )
