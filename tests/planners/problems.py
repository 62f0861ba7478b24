"""Small random problems whose costs are whole numbers, so that every way of adding them up gives
the same floating-point number.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from hypothesis import strategies as st

from partopt.cost.chain import Chain
from partopt.cost.collectives import ALGORITHMS
from partopt.cost.memory import SHARDED
from partopt.cost.pricing import price
from partopt.cost.problem import Decision, Partition, Problem, as_run
from partopt.cost.ranges import Group, RangeMax, RangeSum
from partopt.documents.engine import Engine
from partopt.documents.plan import Certificate, Plan
from partopt.documents.profile import Device as ProfiledDevice
from partopt.documents.profile import Model, Profile
from partopt.documents.topology import AllReduceRates, Device, Level, Topology
from partopt.schedules import SCHEDULES

numbers = st.integers(0, 12)


def topology(
    *levels: tuple[int, float], bus: bool = False, latency_s: float = 0.0, links: int = 1
) -> Topology:
    """Levels as (size, bandwidth in bytes/s), innermost first."""
    return Topology(
        name="test",
        device=Device(name="device"),
        levels=[
            Level(
                name=f"level{k}",
                size=size,
                bandwidth_bytes_per_s=bandwidth,
                bus=bus,
                latency_s=latency_s,
                links=links,
            )
            for k, (size, bandwidth) in enumerate(levels, start=1)
        ],
    )


def chain(
    forward: list[int],
    backward: list[int],
    cuts: list[int],
    weights: list[int],
    tied: tuple[Group, ...] = (),
) -> Chain:
    """A chain of N layers; `cuts` are the N-1 inner ones."""
    return Chain(
        names=[f"layer{index}" for index in range(len(forward))],
        microbatch_size=1,
        f=np.array(forward, dtype=float),
        g=np.array(backward, dtype=float),
        gw=np.array(backward, dtype=float) / 2,
        a=np.array([0, *cuts, 0], dtype=float),
        back=np.array([0, *cuts, 0], dtype=float),
        tensors=np.ones((2, len(forward) + 1)),
        trained_bytes=RangeSum([float(weight) for weight in weights], tied),
        frozen_bytes=RangeSum([0.0] * len(forward)),
        stash_bytes=RangeSum([1.0] * len(forward)),
        transient_bytes=RangeMax([0.0] * len(forward)),
        parting=np.zeros(len(forward)),
        layer_bytes=RangeMax([float(weight) for weight in weights]),
    )


def problem(of: Chain, on: Topology, **options: object) -> Problem:
    """A problem without a profile: enough for a planner's decision."""
    return as_run(Problem(profile=None, topology=on, chain=of).with_(**options))  # type: ignore[arg-type]


def proven(decision: Decision) -> tuple[Partition, Certificate]:
    """The partition and the certificate of a planner that gives one."""
    assert decision.certificate is not None
    return decision.partition, decision.certificate


@st.composite
def shared_sizes(draw: st.DrawFn, layers: int) -> RangeSum:
    """Bytes of every layer, and bytes that some of them share."""
    members = st.lists(st.integers(0, layers - 1), min_size=1, max_size=3)
    groups = draw(st.lists(st.builds(Group, members, st.integers(1, 9)), max_size=2))
    return RangeSum(draw(st.lists(numbers, min_size=layers, max_size=layers)), groups)


@st.composite
def with_messages(draw: st.DrawFn, model: Chain) -> Chain:
    """The chain with several tensors over its cuts, of which some have no gradient."""
    back, tensors = model.a.copy(), np.ones((2, model.layers + 1))
    for c in range(1, model.layers):
        tensors[0, c] = draw(st.integers(1, 3))
        tensors[1, c] = draw(st.integers(1, int(tensors[0, c])))
        back[c] -= np.ceil(draw(st.sampled_from([0.0, 0.0, 0.5, 1.0])) * back[c])
    return replace(model, back=back, tensors=tensors)


@st.composite
def trained(draw: st.DrawFn, microbatches: int | None, **facts: Any) -> dict[str, Any]:
    """An engine with these `facts`, and shares: some depend on the replicas of a stage."""
    engine = Engine(
        waits=tuple(SCHEDULES) if draw(st.booleans()) else (),
        gradients=draw(st.sampled_from(["parameters", "float32"])),
        allreduce=draw(st.sampled_from(["overlap", "blocking"])),
        buffers=draw(st.sampled_from(["flight", "one", *["all"] * (microbatches is not None)])),
        recompute=("none", draw(st.sampled_from(["stage", "blocks"]))),
        **facts,
    )
    return {"engine": engine, "shard": draw(st.sampled_from(list(SHARDED)))}


def block_bounds(layers: int) -> st.SearchStrategy[list[int] | None]:
    """Where the blocks of a chain begin and end; None where every layer is one."""
    bounds = st.lists(st.integers(0, layers), min_size=2, unique=True).map(sorted)
    return st.none() | bounds


@st.composite
def with_memory(draw: st.DrawFn, model: Chain) -> Chain:
    """The chain with frozen parameters, a stash, and backwards that take memory beside it."""
    sizes, parting = (
        draw(st.lists(numbers, min_size=model.layers, max_size=model.layers)) for _ in range(2)
    )
    stash = draw(shared_sizes(model.layers))
    return replace(
        model,
        frozen_bytes=draw(shared_sizes(model.layers)),
        stash_bytes=stash,
        transient_bytes=RangeMax([3 * size for size in sizes], stash),
        parting=np.array(parting, dtype=float),
    )


@st.composite
def chains(draw: st.DrawFn, layers: int = 7, least: int = 1) -> Chain:
    """Chains of `least` to `layers` layers, with zeros, ties and now and then tied parameters."""
    count = draw(st.integers(least, layers))
    columns = [
        draw(st.lists(numbers, min_size=size, max_size=size))
        for size in (count, count, count - 1, count)
    ]
    columns[0][draw(st.integers(0, count - 1))] += 1
    members = st.lists(st.integers(0, count - 1), min_size=2, max_size=4, unique=True)
    sizes = st.sampled_from([6.0, 12.0, 24.0])  # rings of up to four move whole numbers of bytes
    groups = (
        draw(st.lists(st.builds(Group, members, sizes), max_size=2))
        if count > 3 and draw(st.booleans())
        else []
    )
    return chain(*columns, tied=tuple(groups))


@st.composite
def topologies(draw: st.DrawFn, levels: int = 3, devices: int = 12) -> Topology:
    """Up to `levels` levels, at most `devices` devices in all."""
    sizes: list[int] = []
    for _ in range(draw(st.integers(1, levels))):
        sizes.append(draw(st.integers(1, min(4, devices // int(np.prod(sizes, dtype=int))))))
    return topology(
        *[(size, float(draw(st.sampled_from([1, 2, 4, 8])))) for size in sizes],
        links=draw(st.sampled_from([1, 2])),
    )


@st.composite
def clusters(draw: st.DrawFn, levels: int = 3, devices: int = 6, sizes: int = 4) -> Topology:
    """One to `levels` levels, each with its own bandwidth, links, latency and bus; outer ones may
    be the faster.
    """
    made: list[Level] = []
    total = 1
    for k in range(1, draw(st.integers(1, levels)) + 1):
        size = draw(st.integers(1, max(1, min(sizes, devices // total))))
        total *= size
        rates = {
            "bandwidth_bytes_per_s": float(draw(st.sampled_from([1, 2, 4, 8, 16]))),
            "links": draw(st.sampled_from([1, 1, 2])),
        }
        waits = {
            "latency_s": float(draw(st.sampled_from([0, 0, 0, 1]))),
            "bus": draw(st.sampled_from([False, False, True])),
        }
        made.append(Level(name=f"level{k}", size=size, **rates, **waits, **draw(engines())))
    return Topology(
        name="mixed",
        device=Device(name="device"),
        levels=made,
        allreduce=draw(st.sampled_from(["fastest", *ALGORITHMS])),
    )


@st.composite
def engines(draw: st.DrawFn) -> dict[str, Any]:
    """What messages take of devices and all-reduces achieve on a level; often nothing."""
    if not draw(st.booleans()):
        return {}
    own = AllReduceRates(
        bandwidth_bytes_per_s=draw(st.sampled_from([msgspec.UNSET, 2.0, 4.0])),
        latency_s=draw(st.sampled_from([msgspec.UNSET, 0.0, 2.0])),
    )
    return {
        "overhead_s": float(draw(st.sampled_from([0, 0, 1]))),
        "copy_bytes_per_s": draw(st.sampled_from([msgspec.UNSET, 8.0])),
        "allreduce": draw(st.sampled_from([msgspec.UNSET, own])),
    }


@st.composite
def stashed(draw: st.DrawFn, layers: int = 6, least: int = 1) -> Chain:
    """Chains whose layers keep something for their backward, some of it shared; of half of them
    some parameters are frozen, and backwards take memory while they run.
    """
    model = draw(chains(layers, least))
    model = draw(with_messages(model)) if draw(st.booleans()) else model
    if draw(st.booleans()):
        return draw(with_memory(model))
    return replace(model, stash_bytes=draw(shared_sizes(model.layers)))


def priced(problem: Problem, partition: Partition) -> Plan:
    """The plan of a partition; the problem may have no profile."""
    return price(partition, profiled(problem), "optimal")


def profiled(problem: Problem) -> Problem:
    """The problem with a profile that says nothing, as plans need one."""
    profile = Profile(
        model=Model(name="test"),
        device=ProfiledDevice(name="test"),
        dtype="bfloat16" if problem.chain.sixteen_bit else "float32",
        layers=[],
        measurements=[],
    )
    return replace(problem, profile=profile)
