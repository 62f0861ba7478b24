"""Plans that sleep: what a run takes longer is the schedule's, the engine's or the links'.

Four processes of one launch run all of them one after the other. Stages take what the plan says, on
any number of cores, and send what it says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from partopt import Job, Plan, solve
from partopt.documents.profile import (
    Device,
    Layer,
    LayerMeasurement,
    Measurement,
    Model,
    Profile,
)
from partopt.documents.topology import Topology
from partopt.runtime.actions import RankRecord
from partopt.runtime.context import Context
from partopt.runtime.engine import execute
from partopt.runtime.measured import measured_execution, with_measured_times
from partopt.runtime.processes import run_local
from partopt.schedules import SCHEDULES
from partopt.schedules.placement import STRAIGHT
from partopt.simulator import execute as simulate
from partopt.simulator.execution import Execution
from tests.runtime.sleeping import SleepingStage

RANKS = 4
STEPS = 5
PASSING = 48  # microbatches of a step of an asynchronous plan: most of them in steady state
FORWARD_S, BACKWARD_S = 0.008, 0.016  # of a stage, one replica
KB, MB = 10**3, 10**6


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

    for P in sorted(topologies.keys() - {3}):
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


def run_all(given: Sequence[Case]) -> Iterator[Found]:
    """What every case took."""
    every = run_local(RANKS, _Main(given))[0]
    for case, records in zip(given, every, strict=True):
        yield judge(case, records)


class _Main:
    """What every process runs; a class, so that it can be sent to one."""

    def __init__(self, given: Sequence[Case]) -> None:
        self.given = given

    def __call__(self, context: Context) -> list[list[RankRecord]]:
        """The records of every case, by rank."""
        return [context.gather(self._run(case, context)) for case in self.given]

    def _run(self, case: Case, context: Context) -> RankRecord:
        def stage_of(s: int) -> SleepingStage:
            return SleepingStage(case.plan, s)

        return execute(
            case.plan, stage_of, context=context, steps=STEPS, microbatches=case.microbatches
        )


def judge(case: Case, records: list[RankRecord]) -> Found:
    """The median step of a case; the first warms up."""
    plan, M = case.plan, case.microbatches
    every = [measured_execution(plan, records, step, M) for step in range(1, STEPS)]

    def seconds(run: Execution) -> float:
        return run.makespan_s if M is None else run.period_s

    ordered = sorted(every, key=seconds)
    middle = ordered[(len(ordered) - 1) // 2]
    own_s = seconds(with_measured_times(middle))
    return Found(case, seconds(simulate(case.plan)), seconds(middle), own_s)
