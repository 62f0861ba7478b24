"""`partopt plan --schedule auto` and `--scaling`: several problems stated from one command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from partopt.cli import options, progress
from partopt.errors import PartoptError

if TYPE_CHECKING:
    from partopt.cost.problem import Problem
    from partopt.plan import Plan
    from partopt.profile import Profile
    from partopt.topology import Topology


def chosen_schedules(profile: Profile, topology: Topology, given: dict[str, Any]) -> list[Plan]:
    """The best plan under every synchronous schedule, the best first; options that were given are kept to.

    PartoptError for options that only a schedule of one's own can have.
    """
    from dataclasses import replace

    from partopt.search.schedule import chosen

    for flag in ("planner", "stages", "chunks", "cuts", "replicas"):
        if given[flag] is not None:
            raise PartoptError(f"--{flag}: --schedule auto chooses that itself", f"drop --{flag}, or name a schedule")
    sizes = [given["microbatch_size"]] if given["microbatch_size"] else [m.microbatch_size for m in profile.measured()]
    recomputes = [given["recompute"] == "always"] if _stated("recompute") else [False, True]

    with progress.shown() as tell:

        def stated(size: int, recompute: bool) -> Problem:
            kept = given | {"schedule": "1f1b", "microbatch_size": size, "recompute": "always" if recompute else "never"}
            return replace(options.problem(profile, topology, kept), progress=tell)

        return chosen(sizes, recomputes, stated)


def _stated(name: str) -> bool:
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def scaled(profile: Profile, topology: Topology, given: dict[str, Any], weak: bool) -> list[Plan]:
    """The best plan on each of the numbers of devices in --scaling; `weak`: the batch grows with them."""
    from dataclasses import replace

    from partopt.search.scaling import scaling

    devices = options.integers(given["scaling"], "--scaling")
    if not devices or min(devices) < 1 or devices != sorted(set(devices)):
        raise PartoptError(f"--scaling {given['scaling']}: not ascending numbers of devices", "write --scaling 8,16,32")

    with progress.shown() as tell:

        def stated(on: Topology, times: int) -> Problem:
            larger = {flag: given[flag] and given[flag] * times for flag in ("microbatches", "global_batch")}
            return replace(options.problem(profile, on, given | larger), progress=tell)

        return scaling(topology, devices, given["planner"], weak, stated)
