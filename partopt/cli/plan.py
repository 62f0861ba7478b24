"""`partopt plan`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from partopt.cli import contest, options, progress
from partopt.cli.fitting import does_not_fit
from partopt.errors import PartoptError

if TYPE_CHECKING:
    from partopt.cost.problem import Problem
    from partopt.plan import Plan
    from partopt.profile import Profile
    from partopt.topology import Topology

_BESIDE = ("gpipe", "data_parallel")  # printed under the plan of a planner that was named
_BESIDE_SHOWN = 3  # at most


@click.command(short_help="stages, replicas and microbatches in flight for a cluster")
@click.argument("profile")
@click.option("--planner", metavar="NAME", help="Which planner (default: the fastest plan of all that fits; manual with --cuts).")
@click.option("--cuts", metavar="5,9", help="Your own split: the first layer of every stage but the first.")
@click.option("--replicas", metavar="1,2,1", help="Replicas of each stage of your own split (default: one each).")
@options.problem_options
@options.output_options("the plan")
@options.json_option
def command(
    profile: str, planner: str | None, cuts: str | None, replicas: str | None, output: str | None, force: bool, as_json: bool, **given: Any
) -> None:
    """Plan PROFILE, a file, - or the name of a shipped one, on a cluster.

    Prints the stages with their ranks, load and memory, what to expect, and beside it GPipe's heuristic and data parallelism. Exits
    with 1, and writes no plan, where the plan does not fit the devices' memory.

    \b
    Example:
      partopt plan gpt.cpu.float32 --topology v100-pcie -o plan.json
      partopt plan gpt.json --topology dgx-h100 --servers 4 --schedule 1f1b --microbatches 64
      partopt plan gpt.json --topology cluster.yaml --cuts 5,9 --replicas 2,1,1
    """
    from partopt import documents
    from partopt import plan as documents_of_plans

    if output:
        documents.check_writable(output, force)
    loaded = options.load_profile(profile)
    topology = options.load_topology(given["topology"], given["servers"])
    split = options.integers(cuts, "--cuts"), options.integers(replicas, "--replicas")
    name = _planner(planner, cuts, replicas, given)
    options.warn_of_cpu(loaded, topology)
    stated = partial(_stated, loaded, topology, given, split)
    problem = stated()
    with progress.shown() as tell:
        plan, plans = _planned(name, replace(problem, progress=tell))
    if as_json:
        documents.write_bytes("-", documents.encode(plan))
    elif output != "-":
        _show(plan, plans, problem)
    if not plan.fits(problem.memory_bytes):
        raise does_not_fit(plan, problem, stated)
    if output and not (as_json and output == "-"):
        documents_of_plans.save(plan, output, force)
    if output and output != "-":
        click.echo(f"Wrote {output}", err=True)
    if not as_json and output != "-":
        click.echo(f"next:    partopt compare {shlex.quote(profile)} {options.repeated(given)}", err=True)


def _stated(
    profile: Profile, topology: Topology, given: dict[str, Any], split: tuple[Sequence[int], Sequence[int]], **changed: object
) -> Problem:
    """The problem that the options state, with some of them changed."""
    return options.problem(profile, topology, given | changed, *split)


def _planner(planner: str | None, cuts: str | None, replicas: str | None, given: dict[str, Any]) -> str | None:
    """The planner to use, None for the best of all. PartoptError for options that it would not look at: a split of one's own goes with
    `manual` alone.
    """
    from partopt.planners import PLANNERS

    own = cuts is not None or replicas is not None
    name = planner or ("manual" if own else None)
    if own and name != "manual":
        raise PartoptError(f"--planner {name}: --cuts and --replicas go with the planner manual", "drop one or the other")
    if name == "manual" and given["cut_at"]:
        raise PartoptError("--cut-at: a split of your own says itself where it cuts", "drop --cut-at, or --cuts and --replicas")
    for flag, use, unset in (("--stages", "stages", None), ("--cost", "costs", "time")):
        using = [other for other, entry in PLANNERS.items() if use in entry.uses]
        if given[flag.removeprefix("--")] != unset and name in PLANNERS and name not in using:
            raise PartoptError(f"{flag}: the planner {name} does not look at it", f"choose --planner {', '.join(using)}")
    return name


def _planned(name: str | None, problem: Problem) -> tuple[Plan, dict[str, Plan]]:
    """The plan of the planner that was named, or the best of all, and the plans to print beside it."""
    able = contest.contestants(problem)
    chosen = {} if name is None else {name: contest.planned(name, problem)}
    with contest.quiet():
        others = contest.plans_of([other for other in (able if name is None else _BESIDE) if other in able and other != name], problem)
    plans = chosen | others
    return plans[name or contest.best_of(plans, problem.memory_bytes)], plans


def _show(plan: Plan, plans: dict[str, Plan], problem: Problem) -> None:
    from partopt.report.comparison import render_beside
    from partopt.report.plan import render

    others = sorted((other for other in plans.values() if other is not plan), key=lambda other: -other.predicted.samples_per_s)
    click.echo(render(plan, problem.memory_bytes, options.ascii_only()))
    if others:
        click.echo(f"\n{render_beside(plan, others[:_BESIDE_SHOWN], problem.memory_bytes)}")
