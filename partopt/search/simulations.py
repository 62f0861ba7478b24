"""The simulations of a search: many plans of one problem, in numbers.

What `partopt.simulator.execution.execute` says of a plan is found without making it: stages are
rows of numbers, looked up by their layers and replicas, and groups of ranks bring their rings.

    S   stages; r   replicas of one
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt.cost.memory import parts_of
from partopt.cost.pricing import sum_layers, tied_exchanges_s
from partopt.cost.problem import Assignment, Partition, Problem
from partopt.errors import PartoptError
from partopt.schedules import ACTION_LIMIT, order, schedule
from partopt.schedules.entry import Counts, Replicas
from partopt.schedules.order import KINDS, Order
from partopt.schedules.placement import STRAIGHT, Placement
from partopt.simulator.kernel import Run, run_order
from partopt.simulator.memory import base_bytes, peaks, stash_steps
from partopt.simulator.steady import (
    Steady,
    fill_starts,
    is_long,
    microbatches_at_first,
    steady_of,
)
from partopt.simulator.work import Costs, Links, Pipeline, action_seconds, early_of

ACTIONS = 1000  # of a simulation: as many take about as long as beginning one
FEWER = 0.6  # of the microbatches: where more are needed to see how they go on, all are simulated
KEPT_ACTIONS = 1_000_000  # of orders that are remembered
ROUNDING = 1e-9  # of a limit of seconds: what rounding may change

Floats = NDArray[np.float64]


class Numbers(NamedTuple):
    """What simulations need of stages beside the seconds of their actions, of shape (S,)."""

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
    head_start_s: Floats  # as in `partopt.simulator.work.Early`
    tail: Floats


class NumberedPlan(NamedTuple):
    """A plan in numbers, of which one pipeline is simulated where all are alike."""

    pipeline: Pipeline  # that is simulated
    replicas: list[int]
    counts: list[Counts]
    seconds: Floats  # of every kind of action, shape (kinds, S)
    numbers: Numbers
    tied_s: Floats

    @property
    def passing(self) -> list[int]:
        """Replicas in the pipeline."""
        return list(map(len, self.pipeline.ranks))

    def microbatches(self, problem: Problem) -> int | None:
        """Microbatches of the pipeline in an iteration; None under an asynchronous schedule."""
        return problem.microbatches and problem.microbatches // self.pipeline.copies


class Simulations:
    """Simulates plans of one problem.

    `spent` is 1 for every simulation, and 1 for every `ACTIONS` of it.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.entry, self.spent = problem, schedule(problem.schedule), 0.0
        key = "links", id(problem.topology), problem.exchange
        self._links: Links = problem.known.once(key, lambda: Links(problem.exchange_topology))
        self._rows = dict[tuple[object, ...], Floats]()
        self._counts = lru_cache(maxsize=None)(self._counts_of)
        self._orders, self._actions = dict[object, Order](), 0
        self._gathers = problem.exchange.gathered + problem.exchange.scattered > 0
        self._apart = self.entry.recomputes and not problem.engine.recomputes_blocks

    def seconds(
        self,
        partition: Partition,
        warmups: Sequence[int] | None = None,
        allowed_s: float = math.inf,
    ) -> float:
        """Simulated seconds of a microbatch; infinite where the plan does not fit or run.

        `allowed_s` where it is seen on the way that they are no less. `warmups` are forwards of
        every stage before its first backward, by default the schedule's.
        """
        self.spent += 1
        try:
            candidate = self._number(partition, warmups)
            run, period_s = self._execute(candidate, allowed_s * candidate.pipeline.copies)
        except PartoptError:  # the schedule cannot run it
            return math.inf
        if run is not None and run.is_late:
            return allowed_s
        period_s /= candidate.pipeline.copies
        if run is None:
            return period_s
        limit = self.problem.memory_bytes
        return period_s if limit is None or self._needs(candidate, run) <= limit else math.inf

    # ---- from stages to numbers ---------------------------------------------------------------

    def _number(self, partition: Partition, warmups: Sequence[int] | None) -> NumberedPlan:
        """The plan in numbers; PartoptError where its replicas are unequal and may not be."""
        stages = partition.stages
        every = (stage.ranks for stage in stages)
        ranks = tuple(group if isinstance(group, range) else tuple(group) for group in every)
        replicas = list(map(len, ranks))
        counts = self._counts(tuple(replicas))
        if warmups is not None:
            pairs = zip(warmups, counts, strict=True)
            counts = [Counts(warmup, warmup + 1, usual.begun) for warmup, usual in pairs]
        rows = np.concatenate([self._row(*pair) for pair in zip(stages, ranks, strict=True)])
        columns = np.ascontiguousarray(rows.reshape(len(stages), -1).T)
        return NumberedPlan(
            self._links.pipeline(ranks, self.problem.microbatches),
            replicas,
            counts,
            columns[: len(KINDS)],
            Numbers(*columns[len(KINDS) :]),
            np.array(tied_exchanges_s(partition, self.problem)),
        )

    def _counts_of(self, replicas: tuple[int, ...]) -> list[Counts]:
        """The counts of every stage at the schedule's warm-up."""
        if self.entry.shape != STRAIGHT:
            return [Counts(0, 1, 1)] * len(replicas)  # the order tells what is in flight
        stage_replicas, M = Replicas(replicas), self.problem.microbatches
        return [self.entry.counts(s, stage_replicas, M) for s in range(len(replicas))]

    def _row(self, stage: Assignment, ranks: Sequence[int]) -> Floats:
        """The seconds of a stage's actions and its `Numbers`.

        They depend on where its ranks lie only where these gather parameters or scatter gradients.
        """
        lie = ranks if self._gathers else len(ranks)
        key = stage.start, stage.stop, stage.recompute, stage.first, lie
        if key not in self._rows:
            self._rows[key] = self._row_of(stage)
        return self._rows[key]

    def _row_of(self, assigned: Assignment) -> Floats:
        problem, stage = self.problem, sum_layers(assigned, self.problem)
        topology, exchange = problem.limited_topology, problem.exchange
        seconds = action_seconds(stage, topology, exchange, self._apart)
        numbers = [  # in the order of `Numbers`
            *(stage.input_bytes, stage.gradient_bytes, stage.output_bytes),
            *(stage.trained_bytes, stage.frozen_bytes, stage.layer_bytes),
            *(stage.stash_bytes, stage.split_stash_bytes, stage.transient(self.entry.split)),
            *(stage.recomputes_whole, stage.messages, stage.back_messages),
            *early_of(stage, problem.early_bytes, self.entry.split),
        ]
        return np.array([*seconds, *numbers], dtype=np.float64)

    # ---- from numbers to seconds --------------------------------------------------------------

    def _execute(self, candidate: NumberedPlan, allowed_s: float) -> tuple[Run | None, float]:
        """The run, None where it deadlocks or is too long, and the seconds of a microbatch.

        A run that is seen to take no less than `allowed_s` is broken off.
        """
        M, replicas = candidate.microbatches(self.problem), candidate.passing
        copies = candidate.pipeline.copies
        count = M or microbatches_at_first(candidate.counts[0].warmup, replicas)
        if 2 * len(replicas) * count > ACTION_LIMIT:
            return None, math.inf
        for fewer in self._fewer(candidate):
            run = self._run(candidate, fewer, count, allowed_s)
            if run.is_late:
                self.spent += len(run.actions.kind) * copies * count / fewer / ACTIONS
                return run, allowed_s
            steady = None if run.is_stuck else self._steady(candidate, run, fewer)
            left = count - fewer  # which take as long as the cycle that was seen
            if steady and steady.settled and left % steady.microbatches == 0:
                self.spent += len(run.actions.kind) * copies * count / fewer / ACTIONS
                return run, (run.makespan_s + left * steady.period_s) / count
        while True:
            run = self._run(candidate, count, count, allowed_s)
            if run.is_late:
                self.spent += len(run.actions.kind) * copies / ACTIONS
                return run, allowed_s
            if run.is_stuck:
                return None, math.inf
            steady = None if M is not None else self._steady(candidate, run, count)
            if steady is None or steady.settled or is_long(count, replicas):
                self.spent += len(run.actions.kind) * copies / ACTIONS
                return run, steady.period_s if steady else run.makespan_s / count
            count *= 2

    def _fewer(self, candidate: NumberedPlan) -> Iterator[int]:
        """Numbers of microbatches that may show how an iteration goes on, at most `FEWER` of all.

        They are whole cycles of all replicas fewer.
        """
        M, lcm = candidate.microbatches(self.problem), math.lcm(*candidate.passing)
        if M is None or not self.entry.repeats:
            return
        enough = 5 * (self._flying(candidate, M) + 2 * max(candidate.passing)) + 8 * lcm
        for least in (enough, 3 * enough):
            fewer = M - (M - least) // (2 * lcm) * 2 * lcm
            if fewer <= FEWER * M:
                yield fewer

    def _flying(self, candidate: NumberedPlan, microbatches: int) -> int:
        """Microbatches in flight in the whole pipeline, of so many."""
        counts, replicas = candidate.counts, candidate.passing
        if self.problem.microbatches is None:  # the first stage has them all
            return min(counts[0].warmup + 1, -(-microbatches // replicas[0])) * replicas[0]
        behind = len(replicas) * max(replicas) * self.entry.split  # whose second parts wait
        most = max((count.warmup + 1) * r for count, r in zip(counts, replicas, strict=True))
        return most + behind

    def _run(self, candidate: NumberedPlan, microbatches: int, count: int, allowed_s: float) -> Run:
        """The order of a plan that passes so many microbatches through, executed.

        It is broken off where `count` of them, as long as a device works for them at the least,
        would take `allowed_s` a microbatch or more.
        """
        problem, numbers = self.problem, candidate.numbers
        _, _, links, groups = candidate.pipeline
        actions = self._order(candidate, microbatches)
        each_way = numbers.input_bytes, numbers.back_bytes
        crossing = np.array([np.append(size, 0.0) for size in each_way])
        action_s = np.zeros(0)
        if self._links.handles:
            counts = numbers.messages, numbers.back_messages
            messages = np.array([np.append(count, 0.0) for count in counts])
            action_s = candidate.seconds[actions.kind, actions.stage]
            action_s += links.handling_s(actions, groups, messages, crossing)
        rings = groups.rings(numbers.trained_bytes, numbers.head_start_s, numbers.tail)
        costs = Costs(*groups[:2], candidate.seconds, action_s, crossing, rings, candidate.tied_s)
        blocking = problem.engine.allreduce == "blocking" and problem.microbatches is None
        given = actions, costs, links, problem.waits, blocking
        if allowed_s == math.inf or problem.microbatches is None:
            return run_order(*given)
        follows_s = self._follows_s(candidate, count - microbatches)
        return run_order(*given, allowed_s * count * (1 + ROUNDING), follows_s)

    def _follows_s(self, candidate: NumberedPlan, more: int) -> Floats:
        """What follows the last backward of every stage at the least, shape (S,).

        So many `more` microbatches of a straight schedule and, where backwards are whole, those of
        the last one in the stages before.
        """
        split, (forward, whole, first, second, *_) = self.entry.split, candidate.seconds
        backward = np.minimum(whole, first + second) if split else whole
        before = np.zeros_like(whole) if split else np.cumsum(whole) - whole
        follows: Floats = more / np.array(candidate.passing) * (forward + backward) + before
        return follows

    def _order(self, candidate: NumberedPlan, microbatches: int) -> Order:
        _, ranks, links, groups = candidate.pipeline
        warmups = [count.warmup for count in candidate.counts]
        whole = candidate.numbers.whole > 0
        exchanging = (candidate.tied_s > 0) | (np.array(candidate.replicas) > 1)
        key = id(groups), microbatches, tuple(warmups), whole.tobytes(), exchanging.tobytes()
        if key in self._orders:
            return self._orders[key]
        found = order(
            self.entry.name,
            Placement(
                ranks,
                links.ports.devices,
                microbatches,
                whole.tolist(),
                warmups,
                exchanging.tolist(),
                self.problem.schedule in self.problem.engine.in_turn,
            ),
        )
        if self._actions + len(found.kind) <= KEPT_ACTIONS:
            self._actions += len(found.kind)
            self._orders[key] = found
        return found

    def _steady(self, candidate: NumberedPlan, run: Run, microbatches: int) -> Steady:
        replicas = candidate.passing
        x = np.empty((microbatches, 5 * len(replicas)))
        given = run.actions.kind, run.actions.stage, run.actions.microbatch, run.actions.start
        rounds = run.done if self.entry.asynchronous else run.done[:0]
        fill_starts(x, *given, run.network.sent, rounds, np.array(replicas))
        return steady_of(x, run.makespan_s, self._flying(candidate, microbatches), replicas)

    # ---- memory -------------------------------------------------------------------------------

    def _needs(self, candidate: NumberedPlan, run: Run) -> int:
        """The most bytes that a device needs.

        By the order, where the formulas approximate what it keeps.
        """
        numbers, entry, whole = candidate.numbers, self.entry, candidate.numbers.whole > 0
        counts = np.array([count[1:] for count in candidate.counts]).T
        r, kept = np.array(candidate.replicas), self.problem.kept
        parts = parts_of(numbers, whole, (*counts,), r, kept, entry)
        if not (entry.split or entry.recomputes or entry.shape != STRAIGHT):
            return int((sum(parts.values()) + numbers.transient_bytes).max())
        del parts["activations_bytes"]
        sizes = sum(parts.values()), numbers.transient_bytes
        sizes += numbers.stash_bytes, numbers.split_stash_bytes
        throughout, transient, stash, parting = (size.astype(np.int64) for size in sizes)
        _, _, links, groups = candidate.pipeline
        given = groups.rank_of, candidate.passing, throughout, transient
        base = base_bytes(*given, links.ports.devices)
        stashed = peaks(run.order, stash_steps(run.order, stash, parting, whole))
        return int((base + stashed).max())
