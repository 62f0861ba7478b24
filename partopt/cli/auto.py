"""`partopt plan --schedule auto` and `--scaling`: several problems stated from one command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from partopt.cli import options, progress
from partopt.errors import PartoptError

if TYPE_CHECKING:
    from partopt.cost.problem import Problem
    from partopt.documents.plan import Plan
    from partopt.documents.profile import Profile
    from partopt.documents.topology import Topology


def chosen_schedules(profile: Profile, topology: Topology, given: dict[str, Any]) -> list[Plan]:
    """The best plan under every synchronous schedule, the best first; options that were given are
    kept to.

    PartoptError for options that only a schedule of one's own can have.
    """
    from dataclasses import replace

    from partopt.search.schedule import chosen, with_free_replicas

    for flag in ("planner", "stages", "chunks", "cuts", "replicas"):
        if given[flag] is not None:
            raise PartoptError(
                f"--{flag}: --schedule auto chooses that itself",
                f"drop --{flag}, or name a schedule",
            )
    if given["replication"] != "free":
        raise PartoptError(
            f"--replication {given['replication']}: --schedule auto tries all grids",
            "drop --replication, or name a schedule",
        )
    if (given["microbatches"] is None) == (given["global_batch"] is None):
        raise PartoptError(
            "--schedule auto: needs either --microbatches or --global-batch",
            "for example --global-batch 512",
        )
    sizes = (
        [given["microbatch_size"]]
        if given["microbatch_size"]
        else [m.microbatch_size for m in profile.measured()]
    )
    per_stage = given["recompute"] == "auto"
    recomputes = (
        [given["recompute"] == "always"]
        if _stated("recompute") and not per_stage
        else [False, True]
    )

    with progress.shown() as tell:

        def stated(size: int, recompute: bool) -> Problem:
            kept = given | {
                "schedule": "1f1b",
                "microbatch_size": size,
                "recompute": "always" if recompute else "never",
            }
            return replace(options.problem(profile, topology, kept), progress=tell)

        return with_free_replicas(chosen(sizes, recomputes, stated), stated, per_stage)


def _stated(name: str) -> bool:
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def scaled(profile: Profile, topology: Topology, given: dict[str, Any], weak: bool) -> list[Plan]:
    """The best plan on each of the numbers of devices in --scaling.

    Strong scaling keeps the batch of an iteration; `weak`: it grows with the devices, from the
    first number on.
    """
    from dataclasses import replace

    from partopt.search.scaling import scaling

    devices = options.integers(given["scaling"], "--scaling")
    if not devices or min(devices) < 1 or devices != sorted(set(devices)):
        raise PartoptError(
            f"--scaling {given['scaling']}: not ascending numbers of devices",
            "write --scaling 8,16,32",
        )
    _check_scaled(given, weak)

    with progress.shown() as tell:

        def stated(on: Topology) -> Problem:
            grown = _grown(given, on.devices, devices[0]) if weak else {}
            return replace(options.problem(profile, on, given | grown), progress=tell)

        return scaling(topology, devices, given["planner"], stated)


def _check_scaled(given: dict[str, Any], weak: bool) -> None:
    """PartoptError for options that go with one plan, or that would change nothing."""
    from partopt.schedules import schedule

    for flag in ("cuts", "replicas"):
        if given[flag] is not None:
            raise PartoptError(
                f"--{flag}: a split of your own is for one number of devices",
                f"drop --{flag}, or --scaling",
            )
    if given["planner"] == "manual":
        raise PartoptError(
            "--planner manual: a split of your own is for one number of devices",
            "choose another planner, or drop --scaling",
        )
    if given["schedule"] == "auto":
        raise PartoptError(
            "--scaling: for one schedule, not --schedule auto",
            "name a schedule, for example --schedule 1f1b",
        )
    if weak and schedule(given["schedule"]).asynchronous:
        raise PartoptError(
            f"--weak: {given['schedule']} is asynchronous and has no batch to grow",
            "drop --weak, or choose --schedule 1f1b",
        )


def _grown(given: dict[str, Any], devices: int, first: int) -> dict[str, int]:
    """The batch that was given for the `first` number of devices, grown to `devices`.

    PartoptError where that is no whole number.
    """
    grown = {}
    for flag in ("microbatches", "global_batch"):
        if given[flag] is not None:
            if given[flag] * devices % first:
                name = f"--{flag.replace('_', '-')}"
                message = (
                    f"{name} {given[flag]}: grows to no whole number from {first} to "
                    f"{devices} devices"
                )
                raise PartoptError(
                    message,
                    f"choose a multiple of {first}: {name} {-(-given[flag] // first) * first}",
                )
            grown[flag] = given[flag] * devices // first
    return grown
