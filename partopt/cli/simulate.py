"""`partopt simulate`."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from partopt.cli import options, progress, timeline, whatif
from partopt.cli.terminal import say, say_page
from partopt.cli.words import as_flags, change_command
from partopt.errors import ANSWER_IS_NO, PartoptError

if TYPE_CHECKING:
    from partopt import Simulation
    from partopt.documents.simulation import SimulationDocument

_ASK_AGAIN_S = 0.2


@click.command(short_help="execute a plan: where its time goes, and what would change it")
@click.argument("plan")
@whatif.what_if_options
@options.output_options(
    "the timeline (.json for Perfetto), a figure (.svg, .pdf, .png) or the schedule (.csv)"
)
@click.option(
    "--window",
    metavar="FROM,TO",
    help='With -o of a figure: the time to draw, such as "0.2 s,0.4 s" (default: all).',
)
@options.explain_option
@options.json_option
def command(
    plan: str,
    output: str | None,
    force: bool,
    window: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Execute PLAN on its own cluster, or under other conditions, and say where the time goes.

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
      partopt simulate plan.json -o begin.svg --window "0 s,50 ms"
    """
    import partopt
    from partopt.report.phrases import basis_text

    timeline.check_output(output, force, as_json)
    drawn = timeline.parse_window(output, window)
    loaded = partopt.Plan.load(plan)
    conditions = whatif.parse_conditions(given, [level.name for level in loaded.topology.levels])
    if loaded.profile.estimated is not None:
        say(f"warning: {basis_text(loaded.profile.estimated)}", err=True)

    def run() -> Simulation:
        return partopt.simulate(loaded, **conditions, save_as=output)

    try:
        simulation = _in_background(run)
    except PartoptError as error:
        raise error.at(plan) if error.fields.get("where") == "plan" else error from None
    if as_json:
        options.write_json(simulation.document)
    elif output != "-":
        show_simulation(simulation.document, plan)
    if output:
        simulation.save(output, force, drawn)
        if output != "-":
            say(f"Wrote {output}", err=True)
    if not as_json and output != "-":
        say(_next(plan, output), err=True)
    if not simulation.fits:
        raise _does_not_fit(simulation.document, plan)


def _in_background(work: Callable[[], Simulation]) -> Simulation:
    """What `work` returns, with a progress bar where that takes long; Ctrl-C does not wait."""
    done: list[Simulation] = []
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


def show_simulation(document: SimulationDocument, plan: str | None = None) -> None:
    """Print the page of a simulation; `plan` is the file of its plan."""
    from partopt.report.simulation import render

    ascii_only, colour = timeline.page_style()
    command = partial(change_command, plan)
    say_page(render(document, ascii_only, colour, as_flags, command))


def _next(plan: str, output: str | None) -> str:
    if output and Path(output).suffix.lower() == ".json":
        return f"next:    open {output} in https://ui.perfetto.dev"
    return f"next:    partopt simulate {shlex.quote(plan)} -o trace.json"


def _does_not_fit(document: SimulationDocument, plan: str) -> PartoptError:
    from partopt.units import format_bytes

    fullest, limit = document.fullest, document.memory_limit_bytes
    assert limit is not None
    peak = fullest.peak_memory_bytes
    [fault] = [found for found in document.advice if found.code == "memory"]
    hint = f"with `memory={limit} B` `solve` keeps within that where any plan does"
    if fault.verb:
        hint = f"{fault.change}: {shlex.join(change_command(plan, fault))}"
    return PartoptError(
        f"the plan does not fit: rank {fullest.rank} needs {format_bytes(peak)}, "
        f"which exceeds the limit by {format_bytes(peak - limit)}",
        hint,
        ANSWER_IS_NO,
        code="does-not-fit",
    )
