"""Plans in numbers, executed: a plan, or what a search tries without making it a plan.

Stages are rows of numbers, which depend on their layers and replicas; groups of ranks bring their
rings. Where pipelines are alike, one of them is executed for all.

    S   stages
    M   microbatches of an iteration, None for an asynchronous schedule
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt.cost.memory import Kept, kept_by, recomputes_apart
from partopt.cost.problem import Problem
from partopt.cost.sharding import early_bytes, exchange_of, exchange_topology
from partopt.documents.actions import KINDS
from partopt.documents.plan import Plan
from partopt.documents.stage import Stage
from partopt.documents.topology import Topology
from partopt.schedules import order, schedule
from partopt.schedules.entry import Counts
from partopt.schedules.order import Order
from partopt.schedules.placement import Placement
from partopt.simulator.kernel import Run, run_order
from partopt.simulator.steady import (
    Steady,
    fill_starts,
    is_long,
    microbatches_at_first,
    steady_of,
)
from partopt.simulator.work import Links, Pipeline, Work, action_seconds, early_of

KEPT_ACTIONS = 1_000_000  # of orders that are remembered
ROUNDING = 1e-9  # of a limit of seconds: what rounding may change

Floats = NDArray[np.float64]


class Numbers(NamedTuple):
    """What runs need of stages beside the seconds of their actions, of shape (S,)."""

    input_bytes: Floats
    back_bytes: Floats
    output_bytes: Floats
    trained_bytes: Floats
    frozen_bytes: Floats
    layer_bytes: Floats
    stash_bytes: Floats
    split_stash_bytes: Floats
    transient_bytes: Floats
    whole: Floats  # 1 where the stage keeps its input alone
    messages: Floats
    back_messages: Floats
    head_start_s: Floats  # as of `early_of`
    tail: Floats


class NumberedPlan(NamedTuple):
    """A plan in numbers; `pipeline` is executed, and `work` is of its stages."""

    pipeline: Pipeline
    counts: Sequence[Counts]
    numbers: Numbers
    work: Work

    @property
    def passing(self) -> list[int]:
        """Replicas of every stage in the pipeline."""
        return list(map(len, self.pipeline.ranks))

    @property
    def replicas(self) -> NDArray[np.int64]:
        """Replicas of every stage in all pipelines, shape (S,)."""
        return np.array(self.passing) * self.pipeline.copies


class Runs:
    """Runs of one plan, or of all plans of one problem, with what they have in common."""

    def __init__(
        self, of: Plan | Problem, topology: Topology, kept: Kept, links: Links | None = None
    ) -> None:
        engine, self.M, self.topology = of.engine, of.microbatches, topology
        self.entry, self.waits = schedule(of.schedule), of.waits
        self.exchange = exchange_of(kept, self.M is not None)
        overlaps = engine.allreduce == "overlap"
        early = self.M is not None and overlaps
        self.bucket_bytes = early_bytes(engine.bucket_bytes, self.exchange, early)
        self.blocking = self.M is None and not overlaps
        self.apart, self.in_turn = recomputes_apart(of), of.schedule in engine.in_turn
        self.links = links or Links(exchange_topology(topology, self.exchange))
        self._orders, self._actions = dict[object, Order](), 0

    # ---- from stages to numbers ---------------------------------------------------------------

    def row(self, stage: Stage) -> Floats:
        """The seconds of a stage's actions, by kind, and its `Numbers`.

        They depend on where its ranks lie only where these gather parameters or scatter gradients.
        """
        split = self.entry.split
        seconds = action_seconds(stage, self.topology, self.exchange, self.apart)
        numbers = [  # in the order of `Numbers`
            *(stage.input_bytes, stage.gradient_bytes, stage.output_bytes),
            *(stage.trained_bytes, stage.frozen_bytes, stage.layer_bytes),
            *(stage.stash_bytes, stage.split_stash_bytes, stage.transient(split)),
            *(stage.recomputes_whole, stage.messages, stage.back_messages),
            *early_of(stage, self.bucket_bytes, split),
        ]
        return np.array([*seconds, *numbers], dtype=np.float64)

    def pipeline(self, ranks: tuple[Sequence[int], ...], whole: bool = False) -> Pipeline:
        """One of the pipelines on the ranks of all stages, for all; or the `whole` as one."""
        if whole:
            return Pipeline(1, ranks, self.links, self.links.groups(ranks))
        return self.links.pipeline(ranks, self.M)

    def number(
        self,
        pipeline: Pipeline,
        rows: Sequence[Floats],
        counts: Sequence[Counts],
        tied_s: Sequence[float],
    ) -> NumberedPlan:
        """The plan of stages with these rows, counts and exchanges with other stages."""
        columns = np.ascontiguousarray(np.array(rows).T)
        numbers = Numbers(*columns[len(KINDS) :])
        crossing, messages = np.zeros((2, 2, len(rows) + 1))
        crossing[0, :-1], crossing[1, :-1] = numbers.input_bytes, numbers.back_bytes
        messages[0, :-1], messages[1, :-1] = numbers.messages, numbers.back_messages
        work = Work(
            ranks=pipeline.ranks,
            seconds=columns[: len(KINDS)],
            cut_bytes=crossing[0],
            gradient_bytes=numbers.trained_bytes,
            tied_s=np.array(tied_s),
            topology=pipeline.links.topology,
            serial=self.waits,
            blocking=self.blocking,
            early=columns[-2:],
            back_bytes=crossing[1],
            messages=messages,
            known=pipeline,
        )
        return NumberedPlan(pipeline, counts, numbers, work)

    # ---- from numbers to times ----------------------------------------------------------------

    def microbatches(self, plan: NumberedPlan) -> int | None:
        """Microbatches of the pipeline in an iteration; None under an asynchronous schedule."""
        return self.M and self.M // plan.pipeline.copies

    def first_count(self, plan: NumberedPlan) -> int:
        """Microbatches of the pipeline in an iteration or, asynchronous, that pass at first."""
        at_first = microbatches_at_first(plan.counts[0].warmup, plan.passing)
        return self.microbatches(plan) or at_first

    def settle(
        self, plan: NumberedPlan, microbatches: int | None = None, allowed_s: float = math.inf
    ) -> tuple[Run, Steady | None]:
        """The run of an iteration or, asynchronous, of so many microbatches, and its steady state.

        By default of as many as it takes to settle. One that is late or stuck has no steady state.
        """
        count = self.microbatches(plan) or microbatches or self.first_count(plan)
        while True:
            run = self.run(plan, count, count, allowed_s)
            if self.M is not None or run.is_stuck:
                return run, None
            steady = self.steady(plan, run, count)
            if microbatches or steady.settled or is_long(count, plan.passing):
                return run, steady
            count *= 2

    def run(
        self, plan: NumberedPlan, microbatches: int, count: int, allowed_s: float = math.inf
    ) -> Run:
        """The order of a plan that passes so many microbatches through, executed.

        It is broken off where `count` of them, as long as a device works for them at the least,
        would take `allowed_s` a microbatch or more.
        """
        actions = self.order(plan, microbatches)
        if allowed_s == math.inf or self.M is None:
            return run_order(actions, plan.work)
        limit_s = allowed_s * count * (1 + ROUNDING)
        return run_order(actions, plan.work, limit_s, self._follows_s(plan, count - microbatches))

    def _follows_s(self, plan: NumberedPlan, more: int) -> Floats:
        """What follows the last backward of every stage at the least, shape (S,).

        So many `more` microbatches of a straight schedule and, where backwards are whole, those of
        the last one in the stages before.
        """
        split, (forward, whole, first, second, *_) = self.entry.split, plan.work.seconds
        backward = np.minimum(whole, first + second) if split else whole
        before = np.zeros_like(whole) if split else np.cumsum(whole) - whole
        follows: Floats = more / np.array(plan.passing) * (forward + backward) + before
        return follows

    def order(self, plan: NumberedPlan, microbatches: int) -> Order:
        """The order in which the pipeline passes so many microbatches; known ones are kept."""
        _, ranks, links, groups = plan.pipeline
        warmups, whole = [count.warmup for count in plan.counts], plan.numbers.whole > 0
        exchanging = (plan.work.tied_s > 0) | (plan.replicas > 1)
        key = id(groups), microbatches, tuple(warmups), whole.tobytes(), exchanging.tobytes()
        if key in self._orders:
            return self._orders[key]
        found = order(
            self.entry.name,
            Placement(
                *(ranks, links.ports.devices, microbatches, whole.tolist(), warmups),
                *(exchanging.tolist(), self.in_turn),
            ),
        )
        if self._actions + len(found.kind) <= KEPT_ACTIONS:
            self._actions += len(found.kind)
            self._orders[key] = found
        return found

    def flying(self, plan: NumberedPlan, microbatches: int) -> int:
        """Microbatches in flight in the whole pipeline, of so many."""
        counts, replicas = plan.counts, plan.passing
        if self.M is None:  # the first stage has them all
            return min(counts[0].warmup + 1, -(-microbatches // replicas[0])) * replicas[0]
        behind = len(replicas) * max(replicas) * self.entry.split  # whose second parts wait
        most = max((count.warmup + 1) * r for count, r in zip(counts, replicas, strict=True))
        return most + behind

    def steady(self, plan: NumberedPlan, run: Run, microbatches: int) -> Steady:
        """How a run of so many microbatches goes on."""
        replicas = plan.passing
        x = np.empty((microbatches, 5 * len(replicas)))
        given = run.actions.kind, run.actions.stage, run.actions.microbatch, run.actions.start
        rounds = run.done if self.entry.asynchronous else run.done[:0]
        fill_starts(x, *given, run.network.sent, rounds, np.array(replicas))
        return steady_of(x, run.makespan_s, self.flying(plan, microbatches), replicas)


def number_plan(plan: Plan, whole: bool = False) -> tuple[Runs, NumberedPlan]:
    """A plan in numbers, and its runs; the `whole` of it, also where pipelines are alike."""
    runs, stages = Runs(plan, plan.topology, kept_by(plan)), plan.stages
    pipeline = runs.pipeline(tuple(tuple(stage.ranks) for stage in stages), whole)
    counts = [Counts(stage.warmup, stage.in_flight, 1) for stage in stages]
    tied_s = [stage.tied_exchange_s for stage in stages]
    return runs, runs.number(pipeline, list(map(runs.row, stages)), counts, tied_s)


def work_of(plan: Plan) -> Work:
    """The work of the whole plan."""
    return number_plan(plan, whole=True)[1].work
