"""`partopt compare`."""

from __future__ import annotations

import shlex
from typing import Any

import click

from partopt.cli import options, progress
from partopt.cli.words import print_notes


@click.command(short_help="every planner side by side")
@click.argument("profile")
@click.option(
    "--planner",
    "chosen",
    multiple=True,
    metavar="NAME",
    help="A planner to compare (repeat; default: all).",
)
@click.option(
    "--plan",
    "files",
    multiple=True,
    metavar="FILE",
    help="A plan of yours to set beside them (repeat).",
)
@options.job_options
@options.json_option
def command(
    profile: str,
    chosen: tuple[str, ...],
    files: tuple[str, ...],
    as_json: bool,
    **given: Any,
) -> None:
    """Compare the planners on PROFILE, fastest first, all judged by one simulator.

    \b
    Example:
      partopt compare gpt.cpu.float32 --topology v100-pcie
      partopt compare gpt.json --topology dgx-a100 --planner pipedream --plan mine.json
    """
    import partopt
    from partopt.report import comparison

    job = options.job(profile, given)
    print_notes(job.notes)
    plans = {path: partopt.Plan.load(path) for path in files}
    with progress.shown() as tell:
        result, notes = partopt.compare(job, chosen, plans, tell)
    print_notes(note for note in notes if note not in job.notes)
    if as_json:
        options.write_json(result)
        return
    click.echo(comparison.render(result))
    best = next((row.planner for row in result.rows if row.fits), result.rows[0].planner)
    again = (
        f"plan {shlex.quote(profile)} {options.repeat_options(given)} --planner {best} -o plan.json"
    )
    following = f"show {shlex.quote(best)}" if best in files else again
    click.echo(f"\nnext:    partopt {following}", err=True)
