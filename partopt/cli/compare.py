"""`partopt compare`."""

from __future__ import annotations

import shlex
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from partopt.cli import options, progress
from partopt.errors import PartoptError

if TYPE_CHECKING:
    from partopt.cost.problem import Problem
    from partopt.documents.plan import Plan


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
@options.problem_options
@options.json_option
def command(
    profile: str, chosen: tuple[str, ...], files: tuple[str, ...], as_json: bool, **given: Any
) -> None:
    """Compare the planners on PROFILE, fastest first, all judged by one simulator.

    \b
    Example:
      partopt compare gpt.cpu.float32 --topology v100-pcie
      partopt compare gpt.json --topology dgx-a100 --planner pipedream --plan mine.json
    """
    from partopt import documents
    from partopt.report import comparison
    from partopt.search import contest
    from partopt.search.tables import comparison_of

    loaded = options.load_profile(profile)
    topology = options.load_topology(given["topology"], given["servers"], given["memory"])
    options.warn_of_cpu(loaded, topology)
    problem = options.problem(loaded, topology, given)
    for name in chosen:
        options.check_planner(name, given)
    with progress.shown() as tell:
        told = replace(problem, progress=tell)
        plans = {name: contest.planned(name, told) for name in chosen} or contest.plans_of(
            contest.contestants(told), told
        )
        plans |= {path: _again(path, problem) for path in files}
    base = plans["data_parallel"] if "data_parallel" in plans else _data_parallel(problem)
    result = comparison_of(plans, base)
    if as_json:
        documents.write_bytes("-", documents.encode(result))
        return
    click.echo(comparison.render(result))
    best = next((row.planner for row in result.rows if row.fits), result.rows[0].planner)
    again = (
        f"partopt plan {shlex.quote(profile)} {options.repeated(given)} --planner {best} -o "
        "plan.json"
    )
    click.echo(
        f"\nnext:    {f'partopt show {shlex.quote(best)}' if best in files else again}", err=True
    )


def _data_parallel(problem: Problem) -> Plan | None:
    """The base of the column x DP; None under a schedule that cannot have it."""
    from partopt.search import contest

    with suppress(PartoptError):
        return contest.planned("data_parallel", problem)
    return None


def _again(path: str, problem: Problem) -> Plan:
    """The plan in a file, priced anew for this problem.

    PartoptError where it was made for another model or another number of devices.
    """
    from partopt.cost.price import price
    from partopt.cost.problem import partition_of
    from partopt.documents.plan import Plan
    from partopt.search.warmup import simulate_with_best_warmup

    plan = Plan.load(path)
    devices = problem.topology.devices
    if [name for stage in plan.stages for name in stage.modules] != problem.chain.names:
        raise PartoptError(
            (
                f"{path}: a plan of {plan.profile.name}, whose layers are not those of "
                f"{problem.profile.model.name}"
            ),
            "plan it again",
        )
    if plan.schedule != problem.schedule:
        click.echo(
            (
                f"warning: {path} was made for {plan.schedule} and is priced for "
                f"{problem.schedule}: --schedule chooses"
            ),
            err=True,
        )
    if max(rank for stage in plan.stages for rank in stage.ranks) >= devices:
        raise PartoptError(
            f"{path}: a plan for {plan.topology.devices} devices; the topology has {devices}",
            "choose its topology",
        )
    partition = partition_of(plan, problem.recompute_per_stage)
    return simulate_with_best_warmup(price(partition, problem, plan.planner))
