"""`partopt plan`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from partopt.cli import options, progress
from partopt.errors import ANSWER_IS_NO, PartoptError

if TYPE_CHECKING:
    from partopt.cost.problem import Problem
    from partopt.plan import Plan
    from partopt.profile import Profile
    from partopt.topology import Topology

_BESIDE = ("gpipe", "data_parallel")  # printed under every plan, on the same cluster


@click.command(short_help="stages, replicas and microbatches in flight for a cluster")
@click.argument("profile")
@click.option("--planner", metavar="NAME", help="Which planner (default: pipedream, or manual where --cuts is given).")
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
    from partopt import documents, planners
    from partopt import plan as plans
    from partopt.report.plan import fits

    if output:
        documents.check_writable(output, force)
    loaded = options.load_profile(profile)
    topology = options.load_topology(given["topology"], given["servers"])
    split = options.integers(cuts, "--cuts"), options.integers(replicas, "--replicas")
    stated = partial(_stated, loaded, topology, given, split)
    problem = stated()
    with progress.shown() as tell:
        plan = planners.plan(_planner(planner, cuts, replicas, given["cut_at"]), replace(problem, progress=tell))
    if as_json:
        documents.write_bytes("-", documents.encode(plan))
    elif output != "-":
        _show(plan, problem)
    if not fits(plan, problem.memory_bytes):
        raise _does_not_fit(plan, problem, stated)
    if output and not (as_json and output == "-"):
        plans.save(plan, output, force)
    if output and output != "-":
        click.echo(f"Wrote {output}", err=True)
    if not as_json and output != "-":
        click.echo(f"next:    partopt compare {profile} --topology {given['topology']}", err=True)


def _stated(
    profile: Profile, topology: Topology, given: dict[str, Any], split: tuple[Sequence[int], Sequence[int]], **changed: object
) -> Problem:
    """The problem that the options state, with some of them changed."""
    return options.problem(profile, topology, given | changed, *split)


def _planner(planner: str | None, cuts: str | None, replicas: str | None, cut_at: Sequence[str]) -> str:
    """The planner to use; a split of one's own goes with `manual` alone."""
    from partopt.planners import DEFAULT

    if cuts is None and replicas is None and planner != "manual":
        return planner or DEFAULT
    if cut_at:
        raise PartoptError("--cut-at: a split of your own says itself where it cuts", "drop --cut-at, or --cuts and --replicas")
    if planner not in (None, "manual"):
        raise PartoptError(f"--planner {planner}: --cuts and --replicas go with the planner manual", "drop one or the other")
    return "manual"


def _show(plan: Plan, problem: Problem) -> None:
    from partopt import planners
    from partopt.report.comparison import render_beside
    from partopt.report.plan import render

    others = [planners.plan(name, problem) for name in _BESIDE if name != plan.planner]
    click.echo(render(plan, problem.memory_bytes, options.ascii_only()))
    click.echo(f"\n{render_beside(plan, others, problem.memory_bytes)}")


def _does_not_fit(plan: Plan, problem: Problem, restated: Callable[..., Problem]) -> PartoptError:
    """By how much, and what was tried that would help. `restated` states the problem again with some of its options changed."""
    from partopt.units import format_bytes

    assert problem.memory_bytes is not None
    over = format_bytes(plan.peak_memory_bytes - problem.memory_bytes)
    fullest = next(s for s, stage in enumerate(plan.stages) if stage.memory.total_bytes == plan.peak_memory_bytes)
    message = f"the plan does not fit: stage {fullest} needs {format_bytes(plan.peak_memory_bytes)} a device, {over} more than there is"
    return PartoptError(message, _what_would_fit(plan.planner, problem, restated), ANSWER_IS_NO)


def _what_would_fit(planner: str, problem: Problem, restated: Callable[..., Problem]) -> str:
    """The flags, of those that keep the most speed, with which the same planner's plan fits."""
    from partopt import planners
    from partopt.report.plan import fits
    from partopt.units import format_rate

    size_now, recompute_now = problem.chain.microbatch_size, "always" if problem.recompute else "never"
    sizes = [m.microbatch_size for m in problem.profile.measured() if m.microbatch_size < size_now] + [size_now]
    found = []
    for size, recompute in itertools.product(reversed(sizes), ("never", "always")):
        with suppress(PartoptError):  # a --global-batch may be no multiple of that size
            plan = planners.plan(planner, restated(microbatch_size=size, recompute=recompute))
            if fits(plan, problem.memory_bytes):
                flags = "" if size == size_now else f" --microbatch-size {size}"
                flags += "" if recompute == recompute_now else f" --recompute {recompute}"
                found.append((plan.predicted.samples_per_s, flags))
    if not found:
        return "no measured microbatch size fits, with or without --recompute always: more or larger devices are needed"
    speed, flags = max(found)
    return f"this fits:{flags} ({format_rate(speed, 'samples')})"
