"""Plans of layers that are a stage each, for the simulator to execute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from msgspec import structs

from partopt import planners
from partopt.cost.pricing import under
from partopt.cost.problem import problem_of
from partopt.documents.plan import Plan
from partopt.documents.topology import Topology
from partopt.schedules import SCHEDULES
from partopt.schedules.placement import ranks_of
from tests.helpers import chain_profile, flat
from tests.simulator.cases import topologies


def plan_of(
    replicas: Sequence[int],
    forward: Sequence[float] | None = None,
    backward: Sequence[float] | None = None,
    cuts: Sequence[int] | None = None,
    weights: Sequence[int] | None = None,
    topology: Topology | None = None,
    tied: tuple[Sequence[int], int] = ((), 0),
    **options: Any,
) -> Plan:
    """A stage a layer, asynchronous unless `options` say otherwise; stages of 1 s and 2 s for each
    replica where no costs are given.

    `cuts` are the bytes between the stages, over links of 1 byte/s where no topology is given;
    `tied` are stages that share a parameter, and its bytes.
    """
    S = len(replicas)
    own = [0] * S if weights is None else weights
    profile = chain_profile(
        [float(r) for r in replicas] if forward is None else forward,
        [2.0 * r for r in replicas] if backward is None else backward,
        [*([0] * (S - 1) if cuts is None else cuts), 0],
        [size + (tied[1] if s in tied[0] else 0) for s, size in enumerate(own)],
        shared=[("tied", *tied)],
        stash_groups=[((s,), 10 + s) for s in range(S)],
    )
    on = topology or flat(sum(replicas), 1.0)
    options = {"schedule": "pipedream"} | options
    return planners.plan(
        "manual",
        problem_of(profile, on, cuts=list(range(1, S)), replicas=list(replicas), **options),
    )


def limited(plan: Plan, memory_bytes: int | None) -> Plan:
    """The plan on devices with that much memory; None: no limit is known."""
    device = structs.replace(plan.topology.device, memory_bytes=memory_bytes)
    return structs.replace(plan, topology=structs.replace(plan.topology, device=device))


def chunked(name: str, P: int, v: int, microbatches: int, d: int = 1, **costs: Any) -> Plan:
    """A plan under a schedule of several stages a device: made as a straight pipeline, its stages
    then laid where they belong.
    """
    ranks = ranks_of(SCHEDULES[name].shape, P, v, d)
    straight = plan_of([1] * len(ranks), schedule="1f1b", microbatches=microbatches, **costs)
    stages = [
        structs.replace(stage, ranks=own, replicas=len(own), split_stash_bytes=s % 3)
        for s, (stage, own) in enumerate(zip(straight.stages, ranks, strict=True))
    ]
    laid = structs.replace(
        straight, stages=stages, topology=costs.get("topology") or flat(P * d, 1.0)
    )
    return under(laid, name, microbatches)


@st.composite
def plans(
    draw: st.DrawFn,
    messages: bool = True,
    gradients: bool = True,
    stages: int = 4,
    replicas: int = 3,
    **options: Any,
) -> Plan:
    """Asynchronous plans on random topologies of single links.

    Their times add up without rounding: where two events are due at once and rounding decided which
    comes first, it would decide on what follows for hundreds of microbatches.
    """
    counts = draw(st.lists(st.integers(1, replicas), min_size=1, max_size=stages))
    S = len(counts)

    def drawn(least: int, most: int, size: int) -> list[int]:
        return draw(st.lists(st.integers(least, most), min_size=size, max_size=size))

    return plan_of(
        counts,
        [float(seconds) for seconds in drawn(1, 6, S)],
        [float(seconds) for seconds in drawn(0, 12, S)],
        drawn(0, 10, S - 1) if messages else None,
        # a ring moves 2(r-1)/r of them: whole numbers
        [6 * size for size in drawn(0, 5, S)] if gradients else None,
        draw(topologies(sum(counts), (0.0, 0.5) if messages else (0.0,), ties=True)),
        **options,
    )
