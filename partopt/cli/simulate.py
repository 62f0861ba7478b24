"""`partopt simulate`, and the timelines that it and `partopt schedule` write."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import partopt
from partopt.cli import options, planning
from partopt.cli.next_commands import say_next
from partopt.cli.terminal import progress, say
from partopt.cli.words import change_command, exceeds_limit
from partopt.errors import PartoptError

if TYPE_CHECKING:
    from partopt.documents.simulation import SimulationDocument

_ASK_AGAIN_S = 0.2
_CONDITIONS = options.declare(
    options.option(
        "--schedule",
        "NAME|FILE.csv",
        "Another schedule, or your own order as torch's compute-only CSV.",
    ),
    options.option(
        "--microbatches", "M", "In an iteration; asynchronous: that pass through.", options.COUNT
    ),
    options.option(
        "--warmup",
        "3,2,1,0|+N",
        "Forwards of each stage before its first backward, or N more than planned.",
    ),
    options.option(
        "--bandwidth",
        "LEVEL=RATE",
        'Of a level, such as cluster="25 Gb/s" (repeat).',
        multiple=True,
    ),
    options.option(
        "--latency", "LEVEL=TIME", 'Of a level, such as cluster="50 us" (repeat).', multiple=True
    ),
    options.option(
        "--links", "LEVEL=N", "Parallel links of each member of a level (repeat).", multiple=True
    ),
    planning.memory_option,
    options.with_option,
    options.option(
        "--jitter", "5%", "Let every action's time vary by chance: what the plan then loses."
    ),
    options.option(
        "--slow", "RANK=FACTOR", "A rank that takes longer, such as 3=1.2 (repeat).", multiple=True
    ),
    options.option("--seed", "N", "With --jitter (default: 0).", options.WholeNumber(min=0)),
    options.option("--draws", "N", "With --jitter (default: 50).", options.COUNT),
)


@click.command()
@click.argument("plan", type=options.FILE)
@_CONDITIONS
@options.output_options(
    "the timeline (.json for Perfetto), a figure (.svg, .pdf, .png) or the schedule (.csv)"
)
@options.option(
    "--window",
    "FROM,TO",
    'With -o of a figure: the time to draw, such as "0.2 s,0.4 s" (default: all).',
)
@options.json_option
def command(
    plan: str, output: str | None, force: bool, window: str | None, as_json: bool, **given: Any
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
    from partopt.report.phrases import basis_text

    check_timeline(output, force, as_json)
    drawn = _parse_window(output, window)
    loaded = partopt.Plan.load(plan)
    conditions = _parse_conditions(given, [level.name for level in loaded.topology.levels])
    if loaded.profile.estimated is not None:
        say(f"warning: {basis_text(loaded.profile.estimated)}", err=True)

    def run() -> partopt.Simulation:
        return partopt.simulate(loaded, **conditions, save_as=output)

    try:
        simulation = _in_background(run)
    except PartoptError as error:
        raise error.at(plan) if error.fields.get("where") == "plan" else error from None
    document, save = simulation.document, partial(simulation.save, window=drawn)
    page = partial(show_simulation, document, plan)
    options.deliver(document, page, output, force, as_json, save=save)
    if not as_json and output != "-":
        is_timeline = output and Path(output).suffix.lower() == ".json"
        say_next(*(("timeline", str(output)) if is_timeline else ("simulation", plan)))
    if not simulation.fits:
        raise _does_not_fit(simulation.document, plan)


def _parse_conditions(given: dict[str, Any], levels: list[str]) -> dict[str, Any]:
    """What `partopt.simulate` takes, from the values of its options; `levels` are for hints."""
    found = dict(given)
    examples = {"bandwidth": '"25 Gb/s"', "latency": '"5 us"', "links": "2"}
    for option, value in examples.items():
        example = f"{levels[-1]}={value}; the levels are {', '.join(levels)}"
        found[option] = options.parse_pairs(f"--{option}", given[option], "LEVEL=VALUE", example)
    found["facts"] = options.parse_facts(given["facts"])
    slow = options.parse_pairs("--slow", given["slow"], "RANK=FACTOR", "3=1.2")
    try:
        found["slow"] = {int(rank): float(factor) for rank, factor in slow.items()}
    except ValueError:
        what = f"--slow {' '.join(given['slow'])}: not ranks and factors"
        raise PartoptError(what, "write --slow 3=1.2", code="invalid-option") from None
    warmup = given["warmup"]
    if warmup is not None and not (warmup.startswith("+") and warmup[1:].isdecimal()):
        found["warmup"] = options.integers(warmup, "--warmup")
    return found


def check_timeline(output: str | None, force: bool, as_json: bool) -> None:
    """Refuse an output that could not be written, or of an unknown form, before any work."""
    from partopt import documents

    if output == "-" and as_json:
        raise PartoptError(
            "-o - --json: both print on standard output", "choose one of them", code="usage"
        )
    if output:
        partopt.Simulation.form_of(output)
        documents.check_writable(output, force)


def _parse_window(output: str | None, window: str | None) -> tuple[float, float] | None:
    """The seconds of `--window`, which goes with a figure alone."""
    from partopt.report.pictures import FORMS
    from partopt.units import parse_seconds

    if window is None:
        return None
    if output is None or Path(output).suffix.lower().removeprefix(".") not in FORMS:
        raise PartoptError(
            "--window: goes with a figure", "add -o timeline.svg", code="unused-option"
        )
    begin, comma, end = window.partition(",")
    hint = 'write it as --window "0.2 s,0.4 s"'
    try:
        found = parse_seconds(begin), parse_seconds(end)
    except PartoptError as error:
        raise PartoptError(f"--window: {error.message}", hint, code="invalid-option") from None
    if not comma or not 0 <= found[0] < found[1]:
        raise PartoptError(f"--window: {window} is no stretch of time", hint, code="invalid-option")
    return found


def _in_background(work: Callable[[], partopt.Simulation]) -> partopt.Simulation:
    """What `work` returns, with a progress bar where that takes long; Ctrl-C does not wait."""
    done: list[partopt.Simulation] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            done.append(work())
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    with progress() as tell:
        thread.start()
        while thread.is_alive():
            thread.join(_ASK_AGAIN_S)
            tell("simulating", 0, 1)
    if failed:
        raise failed[0]
    return done[0]


def show_simulation(document: SimulationDocument, plan: str | None = None) -> None:
    """Print the page of a simulation; `plan` is the file of its plan."""
    from partopt.report.simulation_text import render

    say(render(document, partial(change_command, plan)))


def _does_not_fit(document: SimulationDocument, plan: str) -> PartoptError:
    fullest, limit = document.fullest, document.memory_limit_bytes
    [fault] = [found for found in document.advice if found.code == "memory"]
    hint = f"with `memory={limit} B` `solve` keeps within that where any plan does"
    if fault.verb:
        hint = f"{fault.change}: {shlex.join(change_command(plan, fault))}"
    return exceeds_limit(f"rank {fullest.rank}", fullest.peak_memory_bytes, limit, hint)
