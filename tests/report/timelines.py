"""Plans of equal stages and what the simulator makes of them, for tests of what is drawn."""

from __future__ import annotations

from typing import Any

from partopt import schedules
from partopt.documents.engine import Engine, Layout
from partopt.documents.plan import Estimate, Plan, Predicted, ProfileReference, Request
from partopt.documents.stage import Load, Memory, Reserve, Stage
from partopt.documents.topology import Topology
from partopt.schedules.placement import Placement, ranks_of
from partopt.simulator.kernel import simulate
from partopt.simulator.runs import work_of
from partopt.simulator.timeline import Timeline
from tests.helpers import flat

MEMORY = Memory(
    parameters_bytes=100,
    gradients_bytes=50,
    optimizer_bytes=200,
    activations_bytes=30,
    buffers_bytes=20,
    total_bytes=400,
)


def stage_of(s: int, ranks: list[int], **fields: Any) -> Stage:
    """Stage s, layer s alone: 1 ms forward, 2 ms backward, half of it for the weights; it keeps 10
    bytes, or its input of 2 bytes.
    """
    usual: dict[str, Any] = {
        "start": s,
        "stop": s + 1,
        "modules": [f"layer{s}"],
        "replicas": len(ranks),
        "ranks": ranks,
        "recompute": False,
        "warmup": 0,
        "in_flight": 1,
        "weight_versions": 1,
        "compute_s": 3e-3,
        "forward_s": 1e-3,
        "backward_s": 2e-3,
        "backward_weight_s": 1e-3,
        "allreduce_s": 0.0,
        "tied_exchange_s": 0.0,
        "optimizer_s": 5e-4,
        "parameter_bytes": 1000,
        "input_bytes": 2 if s else 0,
        "output_bytes": 2,
        "stash_bytes": 10,
        "memory": MEMORY,
    }
    own = usual | fields
    return Stage(**{"again_s": own["forward_s"] * own["recompute"], **own})


def plan_of(
    schedule: str,
    ranks: list[list[int]],
    microbatches: int | None,
    topology: Topology | None = None,
    serial: bool = False,
    allreduce: Any = "overlap",
    **stage: Any,
) -> Plan:
    """A plan of equal stages on `ranks`, each a list of its replicas; `stage` are fields of all of
    them.
    """
    stages = [stage_of(s, each, **stage) for s, each in enumerate(ranks)]
    devices = max(rank for each in ranks for rank in each) + 1
    return Plan(
        planner="manual",
        family="contiguous",
        layout=Layout.of(stages, 1, tp=1, microbatch=1, shard="none", schedule=schedule),
        microbatches=microbatches,
        noam=len(ranks),
        optimizer="adam",
        trainer="partopt",
        engine=Engine(waits=(schedule,) if serial else (), allreduce=allreduce, bucket_bytes=2**40),
        reserve=Reserve(),
        request=Request(
            stages=None,
            cut_at=None,
            replication="free",
            tied="exchange",
            recompute="never",
            costs=None,
        ),
        stages=stages,
        communication=[],
        predicted=Predicted(
            period_s=3e-3,
            iteration_s=None,
            samples_per_s=1.0,
            bubble=0.0,
            speedup_over_one_device=1.0,
            bound_by="compute of stage 0",
            estimate=Estimate(
                period_s=3e-3,
                iteration_s=None,
                one_device_s=3e-3,
                bound_by="compute of stage 0",
                loads=[Load(what="compute", place=0, seconds=3e-3)],
            ),
        ),
        certificate=None,
        profile=ProfileReference(name="chain", sha256="", parameter_bytes=1000),
        topology=topology or flat(devices),
    )


def simulated(plan: Plan, microbatches: int) -> Timeline:
    """The plan's schedule, executed with `microbatches`."""
    layout = Placement(
        [stage.ranks for stage in plan.stages],
        plan.topology.devices,
        microbatches,
        [stage.recompute for stage in plan.stages],
    )
    order = schedules.order(plan.schedule, layout)
    return simulate(order, work_of(plan))


def example(
    schedule: str, P: int, M: int, v: int = 1, d: int = 1, **fields: Any
) -> tuple[Plan, Timeline]:
    """d pipelines of P devices with v stages each, side by side, and M microbatches through
    them.
    """
    ranks = ranks_of(schedules.SCHEDULES[schedule].shape, P, v, d)
    plan = plan_of(schedule, ranks, M, **fields)
    return plan, simulated(plan, M)
