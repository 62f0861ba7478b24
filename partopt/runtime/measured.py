"""What the ranks of a run recorded, put together: an execution like a simulated one, a document.

Reports and traces that open a simulation open the execution.
"""

from __future__ import annotations

import dataclasses
import hashlib
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np
from msgspec import UNSET, structs
from numpy.typing import NDArray

from partopt import documents
from partopt.documents.actions import KINDS, A, B, F, I, R, U, W
from partopt.documents.engine import OF_TORCH, OWN, TORCH, Engine
from partopt.documents.plan import Plan
from partopt.documents.training_run import (
    Check,
    MachineLoad,
    RankSeconds,
    RanPlan,
    Run,
    RunRank,
    StageSeconds,
)
from partopt.runtime.actions import RankRecord, actions_of
from partopt.runtime.training import PlannedTraining
from partopt.schedules import ACTION_LIMIT, order, schedule
from partopt.schedules.order import Order
from partopt.schedules.placement import placement_of
from partopt.simulator import trace
from partopt.simulator.execution import Execution, execute
from partopt.simulator.kernel import simulate
from partopt.simulator.runs import work_of
from partopt.simulator.steady import steady_state
from partopt.simulator.timeline import Collectives, Timeline, Transfers
from partopt.simulator.work import Work
from partopt.what_if.conditions import Conditions, apply_conditions

BUSY = 1.5  # processes that want to run, over cores, above which a machine is busy
_NS = 1e-9


@dataclass
class RankResult:
    """What a rank found: its records of the steps, their mean losses, its peak memory.

    `memory_bytes` are those of tensors, and on a GPU those that the allocator took and those in use
    in all. On a CPU tensors were counted in `counted_step`, which took longer by that.
    """

    records: list[RankRecord]
    losses: list[float]
    memory_bytes: Sequence[int | None]
    counted_step: int | None
    device: str
    check: Check | None


@dataclass(frozen=True)
class TrainingRun:
    """A run, and its median step as an execution like a simulated one."""

    document: Run
    measured: Execution

    def save(self, path: str, force: bool = False) -> None:
        """Write the run or, to `.trace.json`, its median step as a trace for Perfetto.

        An existing file is replaced only with `force`. PartoptError where it cannot be written.
        """
        if path.endswith(".trace.json"):
            content = b"".join(trace.write(self.measured.timeline, self.measured.plan))
            documents.write_bytes(path, content, force)
        else:
            self.document.save(path, force)


def put_together(
    training: PlannedTraining, results: Sequence[RankResult], load: MachineLoad, backend: str
) -> TrainingRun:
    """The document of a run, and its median step as an execution."""
    plan, first = training.plan, results[0]
    passing = training.microbatches if training.asynchronous else None
    steps = [list(records) for records in zip(*(r.records for r in results), strict=True)]
    every = [measured_execution(plan, records, microbatches=passing) for records in steps]
    seconds = [execution.time_s for execution in every]
    # the first one warms up
    later = [step for step in range(1, len(steps)) if step != first.counted_step] or [0]
    middle = sorted(later, key=lambda step: seconds[step])[(len(later) - 1) // 2]
    measured, predicted = every[middle], execute(as_run(plan, training.engine, backend))
    document = Run(
        plan=RanPlan(
            model=plan.profile.name,
            measured_per="microbatch" if training.asynchronous else "iteration",
            parameter_bytes=plan.profile.parameter_bytes,
            dtype=plan.profile.dtype,
            autocast=plan.profile.autocast,
            sha256=hashlib.sha256(msgspec.json.encode(plan)).hexdigest(),
            schedule=plan.schedule,
            shape=plan.shape,
            microbatch_size=plan.microbatch_size,
            microbatches=training.microbatches,
            topology=plan.topology.name,
            shard=plan.shard,
            tokens_per_sample=plan.profile.tokens_per_sample,
            estimated=plan.profile.estimated,
        ),
        engine=training.engine,
        backend=backend,
        device=first.device,
        ranks_per_core=len(results) / load.cores,
        steps=len(steps),
        steps_s=seconds,
        counted_step=first.counted_step,
        losses=first.losses,
        predicted_s=predicted.time_s,
        measured_s=seconds[middle],
        own_times_s=with_measured_times(measured).time_s,
        samples_per_s=plan.microbatch_size
        * (1 if training.asynchronous else training.microbatches)
        / seconds[middle],
        check=first.check,
        machine=load,
        stages=stage_seconds(plan, [steps[step] for step in later], passing),
        ranks=[
            RunRank(
                rank=rank,
                stages=held,
                predicted=_rank_seconds(predicted, rank, int(predicted.peak_memory_bytes[rank])),
                measured=_rank_seconds(measured, rank, *results[rank].memory_bytes),
            )
            for rank, held in sorted(plan.stages_by_rank().items())
        ],
        remarks=list(_remarks(load, backend, len(results), predicted.plan.engine, plan)),
    )
    return TrainingRun(document, measured)


def as_run(plan: Plan, engine: str, backend: str) -> Plan:
    """The plan with the facts of the engine that runs it, and what its stages hold by these.

    partopt's engine exchanges gradients as the plan says, and waits for messages over gloo alone.
    """
    facts = OF_TORCH if engine == TORCH else OWN
    changes = {name: getattr(facts, name) for name in ("gradients", "buffers")}
    changes["in_turn"] = ",".join(facts.in_turn)
    if engine == TORCH:
        changes["allreduce"] = facts.allreduce
    if engine == TORCH or backend == "nccl":
        changes["waits"] = "none"
    return apply_conditions(plan, Conditions(facts=changes), ACTION_LIMIT)


def _rank_seconds(
    execution: Execution,
    rank: int,
    peak_bytes: int | None,
    reserved_bytes: int | None = None,
    device_bytes: int | None = None,
) -> RankSeconds:
    timeline, order, shares = execution.timeline, execution.order, execution.shares
    row = order.of_rank(rank)
    taken, kind = (timeline.end - timeline.start)[row], order.kind[row]
    forwards = max(1, int((kind == F).sum()))
    return RankSeconds(
        forward_s=float(taken[kind == F].sum()) / forwards,
        backward_s=float(taken[np.isin(kind, (B, I, W))].sum()) / forwards,
        transfer_s=float(shares.transfer_s[rank]),
        allreduce_s=float(shares.allreduce_s[rank]),
        idle_s=float(shares.idle_s[rank]),
        peak_memory_bytes=peak_bytes,
        reserved_bytes=reserved_bytes,
        device_bytes=device_bytes,
    )


def _remarks(
    load: MachineLoad, backend: str, ranks: int, engine: Engine, plan: Plan
) -> Iterator[str]:
    if differing := plan.engine.find_differences(engine, plan.schedule, plan.shard):
        yield (
            f"the plan is for {plan.trainer}; this engine differs in {', '.join(differing)}, and "
            "is predicted as it runs"
        )
    if load.before > BUSY * load.cores:
        yield (
            f"the machine was busy: {load.before:.1f} processes wanted to run on {load.cores} "
            "cores before the run; what was measured is not what a quiet machine takes"
        )
    if backend == "gloo" and ranks > load.cores:
        yield (
            f"{ranks} ranks shared {load.cores} cores: they computed in turns, and what was "
            "predicted for a device each cannot be judged by it"
        )


def stage_seconds(
    plan: Plan, steps: Sequence[Sequence[RankRecord]], microbatches: int | None
) -> list[StageSeconds]:
    """What the actions of every stage took: medians over microbatches, replicas and `steps`.

    `steps` are the records of all ranks in a step, `microbatches` those that passed through an
    asynchronous plan.
    """
    orders = order(plan.schedule, placement_of(plan, microbatches))
    taken: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank in range(orders.ranks):
        took_ns = [
            (record.end - record.begin).sum(axis=0)
            for records in steps
            for record in records
            if record.rank == rank
        ]
        for action in actions_of(orders, rank):
            taken[action.stage, action.kind] += [int(step_ns[action.place]) for step_ns in took_ns]
    found = []
    for s, stage in enumerate(plan.stages):
        took_s = {kind: statistics.median(ns) * _NS for (at, kind), ns in taken.items() if at == s}
        split = I in took_s
        found.append(
            StageSeconds(
                start=stage.start,
                modules=stage.modules,
                recompute=stage.recompute,
                forward_s=took_s[F],
                backward_s=took_s[I] + took_s[W] if split else took_s[B],
                backward_weight_s=took_s[W] if split else None,
                recompute_s=took_s.get(R),
                optimizer_s=took_s.get(U),
            )
        )
    return found


def measured_execution(
    plan: Plan, records: Sequence[RankRecord], step: int = -1, microbatches: int | None = None
) -> Execution:
    """The execution of `plan` in one step of a run, from the records of its ranks.

    `microbatches` are those that passed through an asynchronous plan. A message begins when both
    sides had posted it; where its receiver did not wait for it, it ended when it was sent at the
    sender, for nobody saw it arrive. Ranks of one host share a clock; the clocks of several are
    laid one over the other where the barrier before the step ended.
    """
    orders = order(plan.schedule, placement_of(plan, microbatches))
    times = _Times(records, step)
    timeline = Timeline(
        orders,
        times.of("begin"),
        times.of("end"),
        partial(_transfers, orders, times),
        _collectives(orders, times),
    )
    return _execution(plan, orders, work_of(plan), timeline)


def _execution(plan: Plan, orders: Order, work: Work, timeline: Timeline) -> Execution:
    """That of a timeline: of all of it or, asynchronous, of its steady state."""
    if not schedule(plan.schedule).asynchronous:
        return Execution(plan, orders, work, timeline, None, 0.0, float(timeline.makespan))
    steady = steady_state(timeline, [stage.replicas for stage in plan.stages])
    return Execution(plan, orders, work, timeline, steady, steady.start_s, steady.end_s)


class _Times:
    """The times of all ranks in one step, in seconds from its begin."""

    def __init__(self, records: Sequence[RankRecord], step: int) -> None:
        self.records = sorted(records, key=lambda record: record.rank)
        self.step = step
        self.begin_ns: dict[str, int] = {}  # of every host's clock
        for record in records:
            started = int(record.started_ns[step])
            self.begin_ns[record.host] = min(self.begin_ns.get(record.host, started), started)

    def of(self, name: str) -> NDArray[np.float64]:
        """A kind of times of all actions, in the order of ranks."""
        every = [
            getattr(record, name)[self.step] - self.begin_ns[record.host] for record in self.records
        ]
        return np.concatenate(every) * _NS


def _transfers(orders: Order, times: _Times) -> Transfers:
    sends, receives = {}, {}
    for rank in range(orders.ranks):
        for action in actions_of(orders, rank):
            place = int(orders.rows[rank]) + action.place
            if action.message_out:
                sends[action.message_out] = place
            if action.message_in:
                receives[action.message_in] = place
    routes = sorted(sends, key=lambda route: (route.kind, route.stage, route.microbatch))
    made = np.array([sends[route] for route in routes], dtype=np.int64)
    taken = np.array([receives[route] for route in routes], dtype=np.int64)
    received = times.of("received")[taken]
    both = np.maximum(times.of("send_posted")[made], times.of("receive_posted")[taken])
    start = np.minimum(both, received)
    end = np.maximum(start, np.minimum(times.of("sent")[made], received))
    columns = np.ascontiguousarray(np.array(routes, dtype=np.int32).reshape(-1, 5).T)
    kind, stage, microbatch, source, destination = columns
    return Transfers(kind.astype(np.int8), stage, microbatch, source, destination, start, end)


def _collectives(orders: Order, times: _Times) -> Collectives:
    """From when the last replica came to when the last one had the sums."""
    exchanges = np.flatnonzero(orders.kind == A)
    came = times.of("end")
    done = np.maximum(came, times.of("exchanged"))
    keys = np.stack([orders.stage[exchanges], orders.microbatch[exchanges]], 1).astype(np.int32)
    pairs, which = np.unique(keys, axis=0, return_inverse=True)
    start, end = np.full(len(pairs), -np.inf), np.full(len(pairs), -np.inf)
    np.maximum.at(start, which.reshape(-1), came[exchanges])
    np.maximum.at(end, which.reshape(-1), done[exchanges])
    stage, microbatch = np.ascontiguousarray(pairs.reshape(-1, 2).T)
    return Collectives(stage, microbatch, start, end)


def with_measured_times(measured: Execution) -> Execution:
    """The simulation of the same order, every action as long as it was in the run.

    What then remains between the two is the network's or the engine's, not the devices'. What
    messages take of their devices is in these times already.
    """
    timeline, work = measured.timeline, measured.work
    levels = [
        structs.replace(level, overhead_s=UNSET, copy_bytes_per_s=UNSET)
        for level in work.topology.levels
    ]
    timed = dataclasses.replace(
        work,
        seconds=np.ones((len(KINDS), len(work.ranks))),
        scale=timeline.end - timeline.start,
        topology=structs.replace(work.topology, levels=levels),
        known=None,
    )
    return _execution(measured.plan, measured.order, timed, simulate(measured.order, timed))
