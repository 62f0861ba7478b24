"""Executes a plan: every rank runs its row of the order that the simulator runs, on a stage.

One engine for all schedules. What a schedule is lies in its order; what is added here are messages
between ranks, sums of gradients, and optimizer steps.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from partopt.documents.plan import Plan
from partopt.errors import PartoptError
from partopt.runtime.context import Context
from partopt.runtime.gradients import Gradients, Sum, Tied
from partopt.runtime.groups import open_channel
from partopt.runtime.packing import Packing
from partopt.runtime.posting import AHEAD, Receives, open_sends
from partopt.runtime.progress import COMPUTING, EXCHANGING, OUTSIDE, RECEIVING, SENDING
from partopt.runtime.rank_record import RankRecord
from partopt.runtime.routes import Action, Route, actions_of
from partopt.runtime.stage import Crossing, Stage
from partopt.runtime.versions import Versions, versions_of
from partopt.schedules import order, schedule
from partopt.schedules.order import A, B, F, I, Order, R, U, W
from partopt.simulator.restate import layout_of

OptimizerOf = Callable[[int, Sequence[nn.Parameter]], Optimizer]


def execute(
    plan: Plan,
    stage_of: Callable[[int], Stage],
    *,
    context: Context,
    steps: int = 1,
    microbatches: int | None = None,
    optimizer_of: OptimizerOf | None = None,
    clip: float | None = None,
    tied: Sequence[Tied] = (),
    barrier: bool = True,
    ahead: int = AHEAD,
) -> RankRecord:
    """Execute `plan` on all ranks of `context`, each of which calls this; its record of this rank.

    `stage_of(s)` is stage s on this rank, called once for each that it holds. A step is an
    iteration; of an asynchronous plan it passes `microbatches` through, from an empty pipeline to
    an empty one. Stages see microbatches numbered on from step to step. `optimizer_of(s,
    parameters)` makes the optimizer of stage s; without it those of the last
    step stay. `clip` is
    the most that the norm of all gradients may be. With `barrier` ranks begin every step together,
    as the simulated one does. Raises PartoptError where the plan cannot run, another rank is lost,
    or stages disagree on what crosses a cut.
    """
    _check(plan, microbatches, context, clip, tied)
    orders = order(plan.schedule, layout_of(plan, microbatches))
    engine = _Engine(plan, orders, stage_of, context, optimizer_of, clip, tied)
    return engine.run(steps, barrier, ahead)


def _check(
    plan: Plan,
    microbatches: int | None,
    context: Context,
    clip: float | None,
    tied: Sequence[Tied],
) -> None:
    needed = 1 + max(rank for stage in plan.stages for rank in stage.ranks)
    if context.ranks < needed:
        raise PartoptError(
            f"the plan needs {needed} ranks, the run has {context.ranks}",
            f"start {needed} processes",
            code="too-few-ranks",
        )
    asynchronous = schedule(plan.schedule).asynchronous
    if asynchronous != (microbatches is not None):
        raise PartoptError(
            f"{plan.schedule}: `microbatches` is for asynchronous schedules, which need it",
            "give it for pipedream and pipedream-2bw, and leave it out otherwise",
            code="conflicting-options",
        )
    if asynchronous and (clip is not None or tied):
        raise PartoptError(
            f"{plan.schedule}: an asynchronous schedule has no gradients of the whole model at "
            "once, to clip them or to add up those of tied parameters",
            "use a schedule with a flush: `schedule=1f1b`",
            code="conflicting-options",
        )


class _Engine:
    """One rank of a run."""

    def __init__(
        self,
        plan: Plan,
        orders: Order,
        stage_of: Callable[[int], Stage],
        context: Context,
        optimizer_of: OptimizerOf | None,
        clip: float | None,
        tied: Sequence[Tied],
    ) -> None:
        self.plan, self.context, self.clip = plan, context, clip
        self.actions = actions_of(orders, context.rank)
        self.microbatches = int(orders.microbatch.max()) + 1
        held = [s for s, stage in enumerate(plan.stages) if context.rank in stage.ranks]
        self.stages = {s: stage_of(s) for s in held}
        parameters = {s: stage.parameters for s, stage in self.stages.items()}
        self.optimizers = {
            s: optimizer_of(s, own) for s, own in parameters.items() if optimizer_of and own
        }
        self.gradients = Gradients(context, parameters, [s.ranks for s in plan.stages], tied)
        self.versions: dict[int, Versions] = {}
        if schedule(plan.schedule).asynchronous:
            self.versions = {
                s: versions_of(plan, orders, s, own, self.optimizers.get(s))
                for s, own in parameters.items()
            }
        self.exchanging = set(orders.stage[orders.kind == A].tolist())
        self.packings = {(F, s): Packing(stage.sends) for s, stage in self.stages.items()} | {
            (B, s): _gradients_of(stage.receives) for s, stage in self.stages.items()
        }
        self.arrivals = {(F, s): Packing(stage.receives) for s, stage in self.stages.items()} | {
            (B, s): _gradients_of(stage.sends) for s, stage in self.stages.items()
        }
        self.channel = open_channel(context, orders, len(plan.stages))
        self.local: dict[Route, list[Tensor]] = {}
        self.held_back: tuple[Action, list[Tensor]] | None = None
        self.sums: dict[int, tuple[int, Sum | None]] = {}  # by stage: the round, its exchange
        self.prepared = False  # gradients of this step are summed and clipped

    def run(self, steps: int, barrier: bool, ahead: int) -> RankRecord:
        """Run all steps."""
        context = self.context
        self._check_cuts()
        self.record = RankRecord(context.rank, context.host, steps, len(self.actions))
        routes = [a.receives for a in self.actions if a.receives and not a.receives.is_local]
        repeated = itertools.chain.from_iterable(itertools.repeat(routes, steps))
        with open_sends(self.channel) as sends:
            self.sends = sends
            self.receives = Receives(context, repeated, self._bytes_of, self.channel, ahead)
            for step in range(steps):
                if barrier or step == 0:
                    context.progress.note(EXCHANGING)
                    context.barrier()
                self.record.started_ns[step] = time.perf_counter_ns()
                self._run_step(step)
                context.progress.note(SENDING)
                sends.drain()
        context.progress.note(OUTSIDE)
        return self.record

    def _bytes_of(self, route: Route) -> int:
        return self.arrivals[route.kind, route.receiver].size

    def _run_step(self, step: int) -> None:
        self.step, self.prepared = step, False
        self._drop_gradients()
        progress, record = self.context.progress, self.record
        for action in self.actions:
            place, kind = action.place, action.kind
            came_ns = time.perf_counter_ns()
            progress.act(step, kind, action.stage, action.microbatch, RECEIVING)
            received = self._receive(action)
            if kind == U:
                progress.note(EXCHANGING)
                self._prepare_update(action.stage)
            progress.note(EXCHANGING if kind == A else COMPUTING)
            begin_ns = time.perf_counter_ns()
            self._run(action, received)
            record.begin[step, place], record.end[step, place] = begin_ns, time.perf_counter_ns()
            record.waited[step, place] += begin_ns - came_ns
            if self.plan.comm == "serial" and action.sends and not action.sends.is_local:
                self._wait_for_sends(place)
        for s in self.stages:  # asynchronous: the last round's
            self._finish_exchange(s)

    def _drop_gradients(self) -> None:
        """Drop gradients of the step before, that no optimizer used."""
        for stage in self.stages.values():
            for parameter in stage.parameters:
                parameter.grad = None

    def _wait_for_sends(self, place: int) -> None:
        """Let the device wait until what it sent is gone, as one does whose messages are serial."""
        self.context.progress.note(SENDING)
        began_ns = time.perf_counter_ns()
        self.sends.drain()
        if place + 1 < len(self.actions):
            self.record.waited[self.step, place + 1] += time.perf_counter_ns() - began_ns

    def _receive(self, action: Action) -> list[Tensor]:
        route = action.receives
        if route is None:
            return []
        if route.is_local:
            return self.local.pop(route)
        taken = self.receives.take(route)
        self.record.receive_posted[self.step, action.place] = taken.posted_ns
        self.record.received[self.step, action.place] = taken.done_ns
        return self.arrivals[route.kind, action.stage].unpack(taken.message)

    def _send(self, action: Action, tensors: list[Tensor]) -> None:
        route = action.sends
        if route is None:
            return
        if route.is_local:
            self.local[route] = [tensor.detach() for tensor in tensors]
            return
        packing = self.packings[route.kind, action.stage]
        message = packing.pack(tensors, self.context.device)
        step, place, record = self.step, action.place, self.record

        def note_sent(when_ns: int) -> None:
            record.sent[step, place] = when_ns

        self.sends.post(message, route, note_sent)
        record.send_posted[step, place] = time.perf_counter_ns()

    def _run(self, action: Action, received: list[Tensor]) -> None:
        kind, s, stage = action.kind, action.stage, self.stages[action.stage]
        number = self.step * self.microbatches + action.microbatch
        versions = self.versions.get(s)
        if kind == F:
            if versions:
                versions.use_for_forward(number)
            self._send(action, stage.forward(number, received))
        elif kind == B:
            if versions:
                versions.use_for_backward(number)
            self._finish_backward(action, stage.backward(number, received), number)
        elif kind == I:
            self._send(action, stage.backward_input(number, received))
        elif kind == W:
            stage.backward_weight(number)
        elif kind == R:
            stage.recompute(number)
        elif kind == A:
            self._exchange(action)
        elif kind == U:
            self._update(s)

    def _finish_backward(self, action: Action, tensors: list[Tensor], number: int) -> None:
        versions, s = self.versions.get(action.stage), action.stage
        if versions is None:
            self._send(action, tensors)
            return
        versions.end_backward(number)
        if self.plan.allreduce == "blocking" and self._is_followed_by_exchange(action):
            self.held_back = action, tensors  # the exchange is part of the backward
            return
        self._send(action, tensors)
        if s not in self.exchanging:
            versions.end_round(action.microbatch)

    def _is_followed_by_exchange(self, action: Action) -> bool:
        after = action.place + 1
        return after < len(self.actions) and self.actions[after].kind == A

    def _exchange(self, action: Action) -> None:
        """Begin to exchange the gradients of a round, when the exchange before it has ended.

        The rank goes on meanwhile, as the simulated one does, unless the plan blocks.
        """
        s, step, place = action.stage, self.step, action.place

        def note_done(when_ns: int) -> None:
            self.record.exchanged[step, place] = when_ns

        begun = self.gradients.begin_sum(s, note_done)
        self._finish_exchange(s)
        self.sums[s] = action.microbatch, begun
        if self.held_back is not None:
            self._finish_exchange(s)
            self._send(*self.held_back)
            self.held_back = None

    def _finish_exchange(self, s: int) -> None:
        """Wait for the exchange of a stage, if it has begun one; asynchronous, use its sums."""
        if s not in self.sums:
            return
        number, begun = self.sums.pop(s)
        if begun is not None:
            begun.finish()
        if s in self.versions:
            self.versions[s].end_round(number)

    def _prepare_update(self, s: int) -> None:
        """Wait for the gradients of a step."""
        whole = self.clip is not None or self.gradients.tied
        if not whole:
            self._finish_exchange(s)
        elif not self.prepared:  # once for all stages of the rank, whose steps come last
            for each in self.stages:
                self._finish_exchange(each)
            self.gradients.sum_tied()
            if self.clip is not None:
                self.gradients.clip(self.clip)
            self.prepared = True

    def _update(self, s: int) -> None:
        if s in self.optimizers:
            self.optimizers[s].step()
            self.optimizers[s].zero_grad()

    def _check_cuts(self) -> None:
        """Raise PartoptError, on every rank, where two stages disagree on what crosses a cut."""
        own = {s: (list(each.receives), list(each.sends)) for s, each in self.stages.items()}
        every = [entry for rank in self.context.gather(own) for entry in rank.items()]
        for (s, (_, sends)), (t, (receives, _)) in itertools.product(every, every):
            if t == s + 1 and sends != receives:
                raise PartoptError(
                    f"stage {s} sends {_words(sends)}, stage {t} receives {_words(receives)}",
                    "build both from one model and one batch",
                    code="cut-mismatch",
                )


def _gradients_of(crossings: Sequence[Crossing]) -> Packing:
    return Packing([each for each in crossings if each.gradient])


def _words(crossings: Sequence[Crossing]) -> str:
    return ", ".join(f"{list(c.shape)} {c.dtype}" for c in crossings) or "nothing"
