r"""Executes a plan: every rank runs its row of the order that the simulator runs, on its stages.

One engine for all schedules. What a schedule is lies in its order; what is added here are messages
between ranks (`messages`), and sums of gradients and optimizer steps (`updates`). A step of 1F1B on
two ranks, the second stage with a replica beside it:

    rank 0   F0 F1       B0 F2       B1          B2   U
               \  \     /     \     /           /
    rank 1      F0 B0      F1 B1      F2 B2 A .. U

For every action a rank posts the receives that are due (`postings`), waits for its input, computes
on its stage (`stage`), sends the result, and notes when all that was. A begins the sum of gradients
over replicas, beside what comes next; U waits for it and steps the optimizer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from partopt.documents.actions import A, B, F, I, R, U, W
from partopt.documents.plan import Plan
from partopt.errors import PartoptError
from partopt.replay.stage import RunnableStage
from partopt.runtime.actions import Action, RankRecord, actions_of
from partopt.runtime.clock import clock_of
from partopt.runtime.completions import completions_of
from partopt.runtime.context import (
    COMPUTING,
    EXCHANGING,
    MEETING,
    OUTSIDE,
    RECEIVING,
    SENDING,
    Context,
)
from partopt.runtime.messages import Channel, Messages, check_cuts
from partopt.runtime.postings import GradientExchange, waits_in_exchanges
from partopt.runtime.updates import OptimizerOf, Tied, Updates, check_tied
from partopt.schedules import order, schedule
from partopt.schedules.placement import placement_of


def execute(
    plan: Plan,
    stage_of: Callable[[int], RunnableStage],
    *,
    context: Context,
    steps: int = 1,
    microbatches: int | None = None,
    optimizer_of: OptimizerOf | None = None,
    tied: Sequence[Tied] = (),
) -> RankRecord:
    """Execute `plan` on all ranks of `context`, which all call this; the record of this one.

    `stage_of(s)` is stage s on this rank, called once for every one that it holds. A step is an
    iteration; of an asynchronous plan it passes `microbatches` through, from an empty pipeline to
    an empty one, and a last round that is not whole changes no weights. Stages see microbatches
    numbered on from step to step. `optimizer_of(s, parameters)` makes the optimizer of stage s;
    without it the gradients of the last step stay. Gradients are added up over microbatches,
    replicas and holders of `tied` parameters: a loss that is a mean is divided by the stage. All
    ranks begin a step together, as the simulated one does.

    Raises PartoptError where the plan cannot run, another rank is lost, or stages disagree on what
    crosses a cut.
    """
    run = RankRun(plan, stage_of, context, steps, microbatches, optimizer_of, tied)
    channel = Channel(context, plan, run.order)
    with run.begin():
        given = context.device, run.clock, run.completions
        loop = _Loop(run, Messages(run.stages, run.actions, channel, run.record, *given))
        for step in range(steps):
            run.begin_step(step)
            for action in run.actions:
                loop.run_action(step, action)
            loop.begin_due(step, len(run.actions))
            context.progress.note(EXCHANGING)
            run.updates.finish_exchanges()
            context.progress.note(SENDING)
            run.end_step()
    context.progress.note(OUTSIDE)
    return run.record


class RankRun:
    """What an engine has on one rank: the arguments of `execute`, and what follows from them.

    `microbatches` is the number that pass through in a step.
    """

    def __init__(
        self,
        plan: Plan,
        stage_of: Callable[[int], RunnableStage],
        context: Context,
        steps: int,
        microbatches: int | None,
        optimizer_of: OptimizerOf | None,
        tied: Sequence[Tied],
    ) -> None:
        if context.ranks < plan.world_size:
            raise PartoptError(
                f"the plan needs {plan.world_size} ranks, the run has {context.ranks}",
                f"start {plan.world_size} processes",
                code="too-few-ranks",
            )
        if schedule(plan.schedule).asynchronous != (microbatches is not None):
            raise PartoptError(
                f"{plan.schedule}: `microbatches` is for asynchronous schedules, which need it",
                "give it for pipedream and pipedream-2bw, and leave it out otherwise",
                code="conflicting-options",
            )
        check_tied(plan, [parameter.name for parameter in tied])
        self.plan, self.context = plan, context
        self.order = order(plan.schedule, placement_of(plan, microbatches))
        self.microbatches = int(self.order.microbatch.max()) + 1
        self.actions = actions_of(self.order, context.rank)
        self.stages = {
            s: stage_of(s) for s, stage in enumerate(plan.stages) if context.rank in stage.ranks
        }
        check_cuts(self.stages, context)
        parameters = {s: stage.parameters for s, stage in self.stages.items()}
        self.clock = clock_of(context)
        self.completions = completions_of(context, self.clock)
        self.updates = Updates(plan, self.order, context, parameters, optimizer_of, tied)
        self.record = RankRecord(context.rank, context.host, steps, len(self.actions))

    @contextlib.contextmanager
    def begin(self) -> Iterator[None]:
        """The context of the steps, for which all groups are made."""
        try:
            self.context.connect()
            yield
        finally:
            self.completions.close()

    def begin_step(self, step: int) -> None:
        """Begin a step together with the other ranks."""
        self.context.progress.note(MEETING)
        self.context.barrier()
        self.record.started_ns[step] = self.clock.begin_step()
        self.updates.begin_step(step * self.microbatches)

    def end_step(self) -> None:
        """Wait until everything is sent, exchanged and in the record."""
        self.clock.end_step()
        self.completions.drain()

    def begin_exchange(self, step: int, action: Action) -> None:
        """Begin to exchange gradients, and note in the record when that ends."""
        works, line = self.updates.begin_exchange(action.stage), ("exchange", action.stage)
        self.completions.watch(works, self.record.exchanged, (step, action.place), line)


class _Loop:
    """The actions of one rank, one after the other."""

    def __init__(self, run: RankRun, messages: Messages) -> None:
        self.run, self.messages = run, messages
        self.blocks = waits_in_exchanges(run.plan)
        self.held_back: tuple[Action, list[Tensor]] | None = None
        early = messages.channel.postings or []
        self.early = {
            posting.what for posting in early if isinstance(posting.what, GradientExchange)
        }
        self.taken: dict[GradientExchange, Action] = {}  # of those, whose gradients are taken

    def begin_due(self, step: int, place: int, behind: bool = False) -> None:
        """Begin what is due before an action, or `behind` it and before its send."""
        now = 2 * (step * (len(self.run.actions) + 1) + place) + behind
        due = self.messages.due
        while due and due[0].place <= now:
            what = due.popleft().what
            if isinstance(what, GradientExchange):
                self.run.begin_exchange(step, self.taken.pop(what))
            else:
                self.messages.post(what)

    def run_action(self, step: int, action: Action) -> None:
        """Wait for what an action needs of other ranks, run it, and send what it made."""
        run, place, kind, s = self.run, action.place, action.kind, action.stage
        number = step * run.microbatches + action.microbatch
        progress, record, clock = run.context.progress, run.record, run.clock
        waits = EXCHANGING if kind == U else RECEIVING
        progress.act(step, kind, s, action.microbatch, waits)
        self.begin_due(step, place)
        if kind == F:  # before its input has come, and in no time of the action
            run.stages[s].prepare(number)
        received = self.messages.receive(step, action)
        if kind == U:
            run.updates.prepare(s)
        progress.note(EXCHANGING if kind == A else COMPUTING)
        clock.note(record.begin, (step, place))
        if kind == A:
            run.updates.take_gradients(s, action.microbatch)
            if (exchange := GradientExchange(s, action.microbatch)) in self.early:
                self.taken[exchange] = action
            else:
                run.begin_exchange(step, action)
            if self.held_back is not None:
                run.updates.finish_exchange(s)
                self.begin_due(step, place, behind=True)
                self.messages.send(step, *self.held_back)
                self.held_back = None
        else:
            made = self._compute(action, number, received)
            self.begin_due(step, place, behind=True)
            if self.blocks and kind == B and self._exchange_after(action):
                self.held_back = action, made
            else:
                self.messages.send(step, action, made)
        clock.note(record.end, (step, place))
        if run.plan.waits and action.message_out:
            progress.note(SENDING)
            # two ranks that send to one another would wait for ever
            self.begin_due(step, place + 1)
            run.completions.wait_for_sends()

    def _compute(self, action: Action, number: int, received: list[Tensor]) -> list[Tensor]:
        """What the action makes for another stage, of the microbatch known as `number`."""
        kind, s, updates = action.kind, action.stage, self.run.updates
        stage, versions = self.run.stages[s], updates.versions.get(s)
        exchange = self._exchange_after(action)
        if kind in (B, W) and exchange and exchange not in self.early:
            updates.begin_last_backward(s)
        if kind == F:
            if versions:
                versions.use_for_forward(number)
            return stage.forward(number, received)
        if kind == B:
            if versions:
                versions.use_for_backward(number)
            found = stage.backward(number, received)
            updates.end_backward(s, action.microbatch, number)
            return found
        if kind == I:
            return stage.backward_input(number, received)
        if kind == W:
            stage.backward_weight(number)
        elif kind == R:
            stage.recompute(number)
        else:
            updates.step(s)
        return []

    def _exchange_after(self, action: Action) -> GradientExchange | None:
        """The exchange of its stage's gradients, if that comes next."""
        for following in self.run.actions[action.place + 1 : action.place + 2]:
            if following.kind == A and following.stage == action.stage:
                return GradientExchange(following.stage, following.microbatch)
        return None
