"""`partopt plan`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from partopt.cli import options, progress
from partopt.errors import ANSWER_IS_NO, PartoptError

if TYPE_CHECKING:
    from partopt.cost.problem import Problem
    from partopt.documents.plan import Plan
    from partopt.documents.profile import Profile
    from partopt.documents.topology import Topology

_BESIDE = ("gpipe", "data_parallel")  # printed under the plan of a planner that was named
_BESIDE_SHOWN = 3  # at most


@click.command(short_help="stages, replicas and microbatches in flight for a cluster")
@click.argument("profile")
@click.option(
    "--planner",
    metavar="NAME",
    help="Which planner (default: the fastest plan of all that fits; manual with --cuts).",
)
@click.option(
    "--cuts", metavar="5,9", help="Your own split: the first layer of every stage but the first."
)
@click.option(
    "--replicas",
    metavar="1,2,1",
    help="Replicas of each stage of your own split (default: one each).",
)
@options.problem_options
@click.option(
    "--scaling", metavar="8,16,32", help="A table over numbers of devices instead of one plan."
)
@click.option("--weak", is_flag=True, help="With --scaling: let the batch grow with the devices.")
@options.output_options("the plan")
@options.json_option
def command(profile: str, output: str | None, force: bool, as_json: bool, **given: Any) -> None:
    """Plan PROFILE, a file, - or the name of a shipped one, on a cluster.

    Every candidate is executed by the simulator, which gives its period. Prints the stages with
    their ranks, load and memory, what to expect, and the runners-up. Exits with 1, and writes no
    plan, where the plan does not fit the devices' memory.

    \b
    Example:
      partopt plan gpt.cpu.float32 --topology v100-pcie -o plan.json
      partopt plan gpt.json --topology dgx-h100 --servers 4 --schedule 1f1b --microbatches 64
      partopt plan gpt.json --topology dgx-h100 --schedule auto --global-batch 512
      partopt plan gpt.json --topology cluster.yaml --cuts 5,9 --replicas 2,1,1
      partopt plan gpt.json --topology v100-pcie --scaling 4,8,16
    """
    from partopt import documents

    if output:
        documents.check_writable(output, force)
    loaded = options.load_profile(profile)
    topology = options.load_topology(given["topology"], given["servers"], given["memory"])
    options.warn_of_cpu(loaded, topology)
    if given["scaling"] is not None or given["weak"]:
        _print_scaling(loaded, topology, given, output, as_json)
    elif given["schedule"] == "auto":
        _print_schedules(loaded, topology, given, output, force, as_json)
    else:
        _print_plan(loaded, topology, given, output, force, as_json)
    if not as_json and output != "-":
        click.echo(f"next:    partopt {_next(profile, output, given)}", err=True)


def _next(profile: str, output: str | None, given: dict[str, Any]) -> str:
    """The command that follows: look at the plan, compare it, or write it."""
    if output:
        return f"simulate {shlex.quote(output)}"
    if given["schedule"] == "auto" or given["scaling"]:
        return (
            f"plan {shlex.quote(profile)} "
            f"{options.repeated([name for name in given if name not in ('scaling', 'weak')])} "
            "-o plan.json"
        )
    return (
        f"compare {shlex.quote(profile)} "
        f"{options.repeated([name for name in given if name not in ('planner', 'cuts', 'replicas')])}"
    )


def _print_plan(
    profile: Profile,
    topology: Topology,
    given: dict[str, Any],
    output: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """One plan under the schedule that was named, and the runners-up."""
    from partopt.cli.fitting import does_not_fit
    from partopt.report.comparison import render_beside

    split = (
        options.integers(given["cuts"], "--cuts"),
        options.integers(given["replicas"], "--replicas"),
    )
    name = _planner(given)
    stated = partial(_stated, profile, topology, given, split)
    problem = stated()
    with progress.shown() as tell:
        plan, plans = _planned(name, replace(problem, progress=tell))
    others = sorted(
        (other for other in plans.values() if other is not plan),
        key=lambda other: -other.predicted.samples_per_s,
    )
    beside = render_beside(plan, others[:_BESIDE_SHOWN]) if others else ""
    _print(plan, beside, output, as_json)
    if not plan.fits:
        raise does_not_fit(plan, problem, stated)
    _save(plan, output, force, as_json)


def _print_schedules(
    profile: Profile,
    topology: Topology,
    given: dict[str, Any],
    output: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """The best plan under any synchronous schedule, and the best under each of the others."""
    from partopt.cli.auto import chosen_schedules
    from partopt.report.schedules import render
    from partopt.units import format_bytes

    plans = chosen_schedules(profile, topology, given)
    plan = plans[0]
    _print(plan, render(plans), output, as_json)
    if not plan.fits:
        needed = f"a device of the fastest needs {format_bytes(plan.peak_memory_bytes)}"
        raise PartoptError(
            f"no schedule fits: {needed}",
            "take larger devices, more of them, or smaller microbatches",
            ANSWER_IS_NO,
        )
    _save(plan, output, force, as_json)


def _print_scaling(
    profile: Profile, topology: Topology, given: dict[str, Any], output: str | None, as_json: bool
) -> None:
    """The best plan on each of several numbers of devices."""
    from partopt import documents
    from partopt.cli.auto import scaled
    from partopt.report import scaling
    from partopt.search.tables import scaling_of

    if output or given["scaling"] is None:
        wrong, hint = (
            ("-o: --scaling prints a table", "drop -o")
            if output
            else ("--weak goes with --scaling", "add --scaling 8,16,32")
        )
        raise PartoptError(wrong, hint)
    _planner(given)
    result = scaling_of(scaled(profile, topology, given, given["weak"]))
    if as_json:
        documents.write_bytes("-", documents.encode(result))
    else:
        click.echo(scaling.render(result))


def _print(plan: Plan, beside: str, output: str | None, as_json: bool) -> None:
    from partopt import documents
    from partopt.cli.words import as_flags
    from partopt.report.plan import render

    if as_json:
        documents.write_bytes("-", documents.encode(plan))
    elif output != "-":
        click.echo(render(plan, options.ascii_only(), as_flags))
        click.echo(f"\n{beside}" if beside else "", nl=bool(beside))


def _save(plan: Plan, output: str | None, force: bool, as_json: bool) -> None:

    if output and not (as_json and output == "-"):
        plan.save(output, force)
    if output and output != "-":
        click.echo(f"Wrote {output}", err=True)


def _stated(
    profile: Profile,
    topology: Topology,
    given: dict[str, Any],
    split: tuple[Sequence[int], Sequence[int]],
    **changed: object,
) -> Problem:
    """The problem that the options state, with some of them changed."""
    return options.problem(profile, topology, given | changed, *split)


def _planner(given: dict[str, Any]) -> str | None:
    """The planner to use, None for the best of all.

    PartoptError for options that it would not look at: a split of one's own goes with `manual`
    alone.
    """
    own = given["cuts"] is not None or given["replicas"] is not None
    name = given["planner"] or ("manual" if own else None)
    if own and name != "manual":
        raise PartoptError(
            f"--planner {name}: --cuts and --replicas go with the planner manual",
            "drop one or the other",
        )
    if name == "manual" and given["cut_at"]:
        raise PartoptError(
            "--cut-at: a split of your own says itself where it cuts",
            "drop --cut-at, or --cuts and --replicas",
        )
    options.check_planner(name, given)
    return name


def _planned(name: str | None, problem: Problem) -> tuple[Plan, dict[str, Plan]]:
    """The plan of the planner that was named, or the best of all, and the plans to print beside
    it.
    """
    from partopt.search import contest

    able = contest.contestants(problem)
    chosen = {} if name is None else {name: contest.planned(name, problem)}
    with contest.quiet():
        others = contest.plans_of(
            [
                other
                for other in (able if name is None else _BESIDE)
                if other in able and other != name
            ],
            problem,
        )
    plans = chosen | others
    return plans[name or contest.best_of(plans)], plans
