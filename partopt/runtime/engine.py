"""Executes a plan: every rank runs its row of the order that the simulator runs, on its stages.

One engine for all schedules. What a schedule is lies in its order; what is added here are messages
between ranks (`delivery`), and sums of gradients and optimizer steps (`updates`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from partopt.cost.plan import layout_of
from partopt.documents.plan import Plan
from partopt.errors import PartoptError
from partopt.runtime.context import (
    COMPUTING,
    EXCHANGING,
    MEETING,
    OUTSIDE,
    RECEIVING,
    SENDING,
    Context,
)
from partopt.runtime.delivery import Delivery, check_cuts
from partopt.runtime.gradients import Tied
from partopt.runtime.groups import open_channel
from partopt.runtime.posting import AHEAD
from partopt.runtime.rank_record import RankRecord
from partopt.runtime.routes import Action, actions_of
from partopt.runtime.shares import NO_SHARES, Shares
from partopt.runtime.stage import Stage
from partopt.runtime.updates import OptimizerOf, Updates
from partopt.schedules import order, schedule
from partopt.schedules.order import A, B, F, I, R, U, W


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
    shares: Mapping[int, Shares] = NO_SHARES,
    barrier: bool = True,
    ahead: int = AHEAD,
) -> RankRecord:
    """Execute `plan` on all ranks of `context`, each of which calls this; the record of this one.

    `stage_of(s)` is stage s on this rank, called once for each that it holds. A step is an
    iteration; of an asynchronous plan it passes `microbatches` through, from an empty pipeline to
    an empty one, and a last round that is not whole changes no weights. Stages see microbatches
    numbered on from step to step. `optimizer_of(s, parameters)` makes the optimizer of stage s;
    without it the gradients of the last step stay. Gradients are added up over microbatches,
    replicas and holders of `tied` parameters: a loss that is a mean is divided by the stage. `clip`
    is the most that the norm of all gradients may be. `shares` are this rank's of its stages, whose
    optimizers get these alone, where the plan has replicas share (`shares_of`). With `barrier`
    ranks begin every step together, as the simulated one does. `ahead` receives are posted before
    they are used.

    Raises PartoptError where the plan cannot run, another rank is lost, or stages disagree on what
    crosses a cut.
    """
    check_run(plan, microbatches, context)
    if schedule(plan.schedule).asynchronous and clip is not None:
        raise PartoptError(
            f"{plan.schedule}: an asynchronous schedule has no gradients of the whole model at "
            "once, to clip them",
            "use a schedule with a flush: `schedule=1f1b`",
            code="conflicting-options",
        )
    if tied:
        check_tied(plan, [each.ranks for each in tied])
    orders = order(plan.schedule, layout_of(plan, microbatches))
    actions = actions_of(orders, context.rank)
    held = [s for s, stage in enumerate(plan.stages) if context.rank in stage.ranks]
    stages = {s: stage_of(s) for s in held}
    check_cuts(stages, context)
    parameters = {s: stage.parameters for s, stage in stages.items()}
    updates = Updates(plan, orders, context, parameters, optimizer_of, clip, tied, shares)
    channel = open_channel(context, orders)
    record = RankRecord(context.rank, context.host, steps, len(actions))
    delivery = Delivery(stages, actions, channel, record, context.device, ahead)
    try:
        run = _Run(plan, stages, actions, int(orders.microbatch.max()) + 1, delivery, updates)
        run.run(context, barrier)
    finally:
        delivery.sends.close()
    context.progress.note(OUTSIDE)
    return record


def check_run(plan: Plan, microbatches: int | None, context: Context) -> None:
    """Raise PartoptError where ranks are too few, or `microbatches` do not fit the schedule."""
    needed = plan.world_size
    if context.ranks < needed:
        raise PartoptError(
            f"the plan needs {needed} ranks, the run has {context.ranks}",
            f"start {needed} processes",
            code="too-few-ranks",
        )
    if schedule(plan.schedule).asynchronous != (microbatches is not None):
        raise PartoptError(
            f"{plan.schedule}: `microbatches` is for asynchronous schedules, which need it",
            "give it for pipedream and pipedream-2bw, and leave it out otherwise",
            code="conflicting-options",
        )


def check_tied(plan: Plan, holders: Sequence[Sequence[int]]) -> None:
    """Raise PartoptError where stages that hold one parameter do not step it together.

    `holders` are the ranks that hold each.
    """
    entry = schedule(plan.schedule)
    if not entry.steps_in_backwards:
        return
    hint = "plan with `tied=together`, or with `schedule=pipedream-2bw` or `schedule=1f1b`"
    if plan.shard != "none":
        raise PartoptError(
            f"{plan.schedule}: a tied parameter that several stages hold is of another version "
            f"than others, and replicas step it apart: not with `shard={plan.shard}`",
            hint,
            code="cannot-run",
        )
    for ranks in holders:
        replicas = {each.replicas for each in plan.stages if set(ranks).intersection(each.ranks)}
        if len(replicas) > 1:
            counts = " and ".join(map(str, sorted(replicas)))
            raise PartoptError(
                f"{plan.schedule}: stages with {counts} replicas hold one tied parameter, and each "
                "of them updates it after a microbatch on each of its replicas: there is no one "
                "round whose gradients could be added up",
                hint,
                code="cannot-run",
            )


def begin_step(step: int, record: RankRecord, context: Context, barrier: bool) -> None:
    """Begin a step, with `barrier` and in the first one together with the other ranks."""
    if barrier or step == 0:
        context.progress.note(MEETING)
        context.barrier()
    record.started_ns[step] = time.perf_counter_ns()


class _Run:
    """The actions of one rank, step after step."""

    def __init__(
        self,
        plan: Plan,
        stages: dict[int, Stage],
        actions: list[Action],
        microbatches: int,
        delivery: Delivery,
        updates: Updates,
    ) -> None:
        self.plan, self.stages, self.actions = plan, stages, actions
        self.microbatches, self.delivery, self.updates = microbatches, delivery, updates
        # an asynchronous stage that blocks exchanges its gradients before it sends them on
        self.blocking = plan.engine.allreduce == "blocking" and plan.microbatches is None
        self.held_back: tuple[Action, list[Tensor]] | None = None
        self.step = 0

    def run(self, context: Context, barrier: bool) -> None:
        """Run all steps."""
        self.context, record = context, self.delivery.record
        for step in range(record.steps):
            begin_step(step, record, context, barrier)
            self.step = step
            self.updates.begin_step(step * self.microbatches)
            for action in self.actions:
                self._run_action(action)
            context.progress.note(EXCHANGING)
            self.updates.finish_exchanges()
            context.progress.note(SENDING)
            self.delivery.sends.drain()

    def _run_action(self, action: Action) -> None:
        step, place, kind = self.step, action.place, action.kind
        progress, record = self.context.progress, self.delivery.record
        waits = EXCHANGING if kind == U else RECEIVING
        progress.act(step, kind, action.stage, action.microbatch, waits)
        if kind == F:  # before its input has come, and in no time of the action
            self.stages[action.stage].prepare(step * self.microbatches + action.microbatch)
        came_ns = time.perf_counter_ns()
        received = self.delivery.receive(step, action)
        if kind == U:
            self.updates.prepare(action.stage)
        progress.note(EXCHANGING if kind == A else COMPUTING)
        begin_ns = time.perf_counter_ns()
        self._compute(action, received)
        record.begin[step, place], record.end[step, place] = begin_ns, time.perf_counter_ns()
        record.waited[step, place] += begin_ns - came_ns
        self.delivery.post_next_receive(action)
        if self.plan.waits and action.sends and not action.sends.is_local:
            self._wait_for_sends(place)

    def _wait_for_sends(self, place: int) -> None:
        """Wait until what was sent is gone; the next action is charged for it."""
        self.context.progress.note(SENDING)
        began_ns = time.perf_counter_ns()
        self.delivery.sends.drain()
        if place + 1 < len(self.actions):
            waited = self.delivery.record.waited
            waited[self.step, place + 1] += time.perf_counter_ns() - began_ns

    def _compute(self, action: Action, received: list[Tensor]) -> None:
        kind, s = action.kind, action.stage
        stage, versions = self.stages[s], self.updates.versions.get(s)
        number = self.step * self.microbatches + action.microbatch
        if kind in (B, W) and self._is_exchanged_after(action):
            self.updates.begin_last_backward(s)
        if kind == F:
            if versions:
                versions.use_for_forward(number)
            self._send(action, stage.forward(number, received))
        elif kind == B:
            if versions:
                versions.use_for_backward(number)
            found = stage.backward(number, received)
            self.updates.end_gradients(s)
            self.updates.end_backward(s, action.microbatch, number)
            self._send(action, found)
        elif kind == I:
            self._send(action, stage.backward_input(number, received))
        elif kind == W:
            stage.backward_weight(number)
            self.updates.end_gradients(s)
        elif kind == R:
            stage.recompute(number)
        elif kind == A:
            self._exchange(action)
        else:
            self.updates.step(s)

    def _send(self, action: Action, tensors: list[Tensor]) -> None:
        if self.blocking and action.kind == B and self._is_exchanged_after(action):
            self.held_back = action, tensors
        else:
            self.delivery.send(self.step, action, tensors)

    def _is_exchanged_after(self, action: Action) -> bool:
        """Whether the exchange of its stage's gradients comes next."""
        after = self.actions[action.place + 1 : action.place + 2]
        return any(each.kind == A and each.stage == action.stage for each in after)

    def _exchange(self, action: Action) -> None:
        step, place, exchanged = self.step, action.place, self.delivery.record.exchanged

        def note_done(when_ns: int) -> None:
            exchanged[step, place] = when_ns

        self.updates.begin_exchange(action.stage, action.microbatch, note_done)
        if self.held_back is not None:
            self.updates.finish_exchange(action.stage)
            self.delivery.send(step, *self.held_back)
            self.held_back = None
