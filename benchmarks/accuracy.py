"""Predicted against measured: plans that sleep, and plans that compute, on this machine.

    python benchmarks/accuracy.py [--quick]

Four processes of one launch run all plans one after the other. Sleeping stages take what the plan
says, on any number of cores, and send what it says: what a run takes longer is the schedule's, the
engine's or the links'. Links are measured first, by `partopt topology measure`'s own code, and the
plans are simulated on what was found. `own times` puts the run's own times of all actions into the
simulator. Goals: sleeping stages 3 % in the mean for small messages, 5 % for 4 MB and for
all-reduces, 3 % with own times.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from typing import NamedTuple

from machine import describe

from partopt import Job, Plan, prepare_links, solve
from partopt.documents.profile import (
    Device,
    Layer,
    LayerMeasurement,
    Measurement,
    Model,
    Profile,
)
from partopt.documents.topology import Topology
from partopt.runtime.context import Context
from partopt.runtime.engine import execute
from partopt.runtime.launcher import run_local
from partopt.runtime.measured import measured_execution, with_measured_times
from partopt.runtime.rank_record import RankRecord
from partopt.runtime.sleeping import SleepingStage
from partopt.schedules import SCHEDULES
from partopt.schedules.layout import STRAIGHT
from partopt.simulator import execute as simulate
from partopt.simulator.execution import Execution

RANKS = 4
STEPS = 5
PASSING = 48  # microbatches of a step of an asynchronous plan: most of them in steady state
FORWARD_S, BACKWARD_S = 0.008, 0.016  # of a stage, one replica
KB, MB = 10**3, 10**6
SIZES = [4 * KB, 64 * KB, 400 * KB, MB, 4 * MB, 16 * MB]


class Case(NamedTuple):
    """A plan to run; an asynchronous one passes so many microbatches in a step."""

    group: str
    plan: Plan
    microbatches: int | None


class Found(NamedTuple):
    """A case, its predicted and its median measured seconds, and those with its own times."""

    case: Case
    predicted_s: float
    measured_s: float
    own_s: float


def profile_of(layers: int, shares: Sequence[float], cut_bytes: int, weights: int) -> Profile:
    """Layers that take these shares of a stage's seconds each."""
    return Profile(
        model=Model(name="sleeping"),
        device=Device(name="any"),
        dtype="float32",
        layers=[
            Layer(name=f"layer{k}", type="Sleep", parameter_bytes=weights) for k in range(layers)
        ],
        measurements=[
            Measurement(
                microbatch_size=1,
                layers=[
                    LayerMeasurement(
                        forward_s=FORWARD_S * share,
                        backward_s=BACKWARD_S * share,
                        output_bytes=cut_bytes,
                    )
                    for share in shares
                ],
            )
        ],
    )


def plan_of(
    name: str,
    topology: Topology,
    shares: Sequence[float],
    replicas: Sequence[int] | None = None,
    cut_bytes: int = 40 * KB,
    weights: int = 0,
) -> Plan:
    """A plan of a schedule: a layer a stage with these replicas, or stages folded on devices."""
    asynchronous = SCHEDULES[name].asynchronous
    options: dict[str, object] = {"schedule": name, "optimizer": "sgd"}
    if not asynchronous:
        options["microbatches"] = 8
    if replicas is not None:
        options |= {"cuts": list(range(1, len(shares))), "replicas": list(replicas)}
    else:
        options |= {"planner": "gpipe", "replication": "none"}
    profile = profile_of(len(shares), shares, cut_bytes, weights)
    return solve(Job(profile, topology, **options)).plan


def cases(topologies: dict[int, Topology], quick: bool) -> list[Case]:
    """The grid."""
    found = []

    def add(group: str, plan: Plan) -> None:
        passing = PASSING if plan.microbatches is None else None
        found.append(Case(group, plan, passing))

    for P in (2, 4):
        for name, entry in SCHEDULES.items():
            if entry.shape == STRAIGHT:
                add("schedules", plan_of(name, topologies[P], [1.0] * P, [1] * P))
            elif P % 2 == 0:
                add("schedules", plan_of(name, topologies[P], [0.5] * 2 * P))
    if quick:
        return found[:6]
    for name in ("1f1b", "gpipe", "pipedream", "zb-h1"):
        uneven = [0.6, 1.4, 0.8, 1.2]
        add("uneven cuts", plan_of(name, topologies[4], uneven, [1] * 4))
        for size in (4 * MB, 16 * MB):
            group = f"messages of {size // MB} MB"
            add(group, plan_of(name, topologies[2], [1.0] * 2, [1, 1], size))
            add(group, plan_of(name, topologies[4], [1.0] * 4, [1] * 4, size))
    for name in [name for name, entry in SCHEDULES.items() if entry.uneven]:
        for replicas in ([2, 1], [3, 1], [2, 1, 1]):
            P = sum(replicas)
            shares = [float(r) for r in replicas]
            add("replicas", plan_of(name, topologies[P], shares, replicas))
            add(
                "all-reduces of 4 MB",
                plan_of(name, topologies[P], shares, replicas, 40 * KB, 4 * MB),
            )
    return found


def run_all(context: Context, given: Sequence[Case]) -> list[list[RankRecord]]:
    """The records of every case, by rank."""
    records = []
    for case in given:

        def stage_of(s: int, plan: Plan = case.plan) -> SleepingStage:
            return SleepingStage(plan, s)

        record = execute(
            case.plan, stage_of, context=context, steps=STEPS, microbatches=case.microbatches
        )
        records.append(context.gather(record))
    return records


class Main:
    """What every process runs."""

    def __init__(self, given: Sequence[Case]) -> None:
        self.given = given

    def __call__(self, context: Context) -> list[list[RankRecord]]:
        """The records of all ranks."""
        return run_all(context, self.given)


def judge(case: Case, records: list[RankRecord]) -> Found:
    """The median step of a case; the first warms up."""
    plan, M = case.plan, case.microbatches
    every = [measured_execution(plan, records, step, M) for step in range(1, STEPS)]

    def seconds(run: Execution) -> float:
        return run.makespan_s if M is None else run.period_s

    ordered = sorted(every, key=seconds)
    middle = ordered[(len(ordered) - 1) // 2]
    own = with_measured_times(middle)
    # an asynchronous run is compared over its steady state, and own times over the whole of it
    own_s = own.makespan_s / middle.makespan_s * seconds(middle)
    return Found(case, seconds(simulate(case.plan)), seconds(middle), own_s)


def main() -> None:
    """Print the table, its means by group, and what the machine did meanwhile."""
    quick = "--quick" in sys.argv
    print(describe())
    before = os.getloadavg()[0]
    topologies = {}
    for P in (2, 3, 4):
        links = prepare_links(SIZES, ranks=P).fit(f"here-{P}", lambda _: None)
        topologies[P] = links.topology
        level = links.topology.levels[0]
        print(
            f"links of {P} ranks: {level.bandwidth_bytes_per_s / 1e9:.2f} GB/s, "
            f"{level.latency_s * 1e6:.0f} us, worst error of the fit {links.worst.error:+.0%}"
        )
    given = cases(topologies, quick)
    records = run_local(RANKS, Main(given), limit_s=60.0)[0]
    print(f"load {before:.1f} before, {os.getloadavg()[0]:.1f} after; {os.cpu_count()} cores\n")
    print(f"{'':22}{'schedule':16}{'shape':10}{'predicted':>11}{'measured':>11}", end="")
    print(f"{'error':>8}{'own times':>11}")
    errors: dict[str, list[tuple[float, float]]] = {}
    for case, own in zip(given, records, strict=True):
        found = judge(case, own)
        error = found.predicted_s / found.measured_s - 1
        rest = found.own_s / found.measured_s - 1
        errors.setdefault(case.group, []).append((abs(error), abs(rest)))
        print(
            f"{case.group:22}{case.plan.schedule:16}{case.plan.shape:10}"
            f"{found.predicted_s * 1e3:8.1f} ms{found.measured_s * 1e3:8.1f} ms"
            f"{error:+8.1%}{rest:+11.1%}",
            flush=True,
        )
    print(f"\n{'mean of the errors':22}{'predicted':>12}{'worst':>9}{'own times':>12}{'worst':>9}")
    for group, both in errors.items():
        first, second = zip(*both, strict=True)
        print(
            f"{group:22}{statistics.mean(first):12.1%}{max(first):9.1%}"
            f"{statistics.mean(second):12.1%}{max(second):9.1%}"
        )


if __name__ == "__main__":
    main()
