"""Executes a plan on torch's own pipeline runtime, where it can run the plan's schedule.

torch executes the order, written as its CSV: it adds the messages, in its own order, and calls the
stages. What it lacks stays the project's: sums of gradients over replicas, tied parameters,
clipping and optimizer steps (`updates`).
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    BACKWARD_INPUT,
    FORWARD,
    FULL_BACKWARD,
    RECV_B,
    RECV_F,
    _Action,
    _PipelineScheduleRuntime,
)

from partopt.cost.plan import layout_of
from partopt.documents.plan import Plan
from partopt.errors import PartoptError
from partopt.runtime.context import OUTSIDE, Context, lost_connections
from partopt.runtime.delivery import check_cuts
from partopt.runtime.engine import begin_step, check_run
from partopt.runtime.gradients import Tied
from partopt.runtime.posting import AHEAD
from partopt.runtime.rank_record import RankRecord
from partopt.runtime.routes import actions_of
from partopt.runtime.shares import NO_SHARES, Shares, scatters
from partopt.runtime.stage import Stage
from partopt.runtime.torch_stage import TorchStage
from partopt.runtime.torch_times import ActionTimes, Awaited
from partopt.runtime.updates import OptimizerOf, Updates
from partopt.schedules import order, schedule
from partopt.schedules.order import A, B, F, Order, R, U
from partopt.schedules.torch_csv import pipelines, to_csv

# what each kind of receive is for
_USES = {RECV_F: (FORWARD,), RECV_B: (FULL_BACKWARD, BACKWARD_INPUT)}

# d   pipelines side by side, the replicas of every stage; pipeline k gets the microbatches g with
#     g mod d = k


def can_say(plan: Plan) -> str | None:
    """Why torch's pipeline runtime cannot run `plan`; None where it can."""
    if schedule(plan.schedule).asynchronous:
        return f"{plan.schedule} never flushes, and torch runs one iteration after the other"
    if "output_grads" not in inspect.signature(PipelineStage).parameters:
        return f"torch {torch.__version__} cannot be told which tensors have no gradient"
    if scatters(plan):
        return "gradients add up in shares after every backward, and torch adds up whole ones"
    layout = layout_of(plan)
    try:
        orders = order(plan.schedule, layout)
        to_csv(orders, layout)
    except PartoptError as error:
        return error.message
    if (orders.kind == R).any():
        return f"{plan.schedule} recomputes while it waits, and torch has no action for that"
    return None


def execute_on_torch(
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
    """Execute `plan` on all ranks of `context` with torch's runtime; the record of this one.

    Everything is as `partopt.runtime.engine.execute` says, but for messages: on GPUs torch posts
    receives where its own order has them, whatever `ahead` is. It waits for sends at the end of a
    step alone, whatever the plan's `comm` is, and has a buffer for every microbatch of an
    iteration.
    `microbatches` are for asynchronous schedules, which torch cannot run.

    In the record `send_posted` is when torch was about to post a send, and `sent` when the sends of
    the step had ended: both are bounds. `waited` has the wait for a message or for gradients; the
    times that torch takes between actions are in none.

    Raises PartoptError where `can_say` has a reason against the plan, and where `execute` does.
    """
    if reason := can_say(plan):
        raise PartoptError(
            f"torch's pipeline runtime cannot run the plan: {reason}",
            "run it on partopt's own engine",
            code="torch-cannot-run",
        )
    check_run(plan, microbatches, context)
    orders = order(plan.schedule, layout_of(plan))
    stages = {s: stage_of(s) for s, each in enumerate(plan.stages) if context.rank in each.ranks}
    check_cuts(stages, context)
    parameters = {s: stage.parameters for s, stage in stages.items()}
    updates = Updates(plan, orders, context, parameters, optimizer_of, clip, tied, shares)
    run = _Run(plan, orders, stages, context, steps, updates, ahead)
    for step in range(steps):
        begin_step(step, run.record, context, barrier)
        run.run_step(step)
    context.progress.note(OUTSIDE)
    return run.record


class _Run:
    """The part of one rank in a plan, step by step."""

    def __init__(
        self,
        plan: Plan,
        orders: Order,
        stages: dict[int, Stage],
        context: Context,
        steps: int,
        updates: Updates,
        ahead: int,
    ) -> None:
        actions = actions_of(orders, context.rank)
        self.record = RankRecord(context.rank, context.host, steps, len(actions))
        self.updates = updates
        self.stepped = [action.stage for action in actions if action.kind == U]
        layout = layout_of(plan)
        side_by_side = pipelines(layout)
        self.M, d = layout.microbatches, len(side_by_side)
        self.times = ActionTimes(self.record, context.progress, actions, d)
        # every rank makes all groups, in one order
        groups = [context.group(ranks, "pipeline") for ranks in side_by_side]
        self.k = next((k for k, own in enumerate(side_by_side) if context.rank in own), None)
        self.stages: list[TorchStage] = []
        if self.k is None:
            return
        self.stages = [
            TorchStage(
                stage,
                s,
                len(plan.stages),
                d,
                context.device,
                groups[self.k],
                self.times,
                self._exchange,
            )
            for s, stage in stages.items()
        ]
        text = _with_rows_by_rank(to_csv(orders, layout), side_by_side[self.k])
        self.runtime = Runtime(self.stages, self.M // d, text, self.times)
        if context.device.type == "cpu":  # NCCL keeps its messages in one order, and would wait
            self.runtime.post_ahead(ahead)

    def run_step(self, step: int) -> None:
        """Run the step: the actions that torch runs, then the updates."""
        self.times.step = step
        self.updates.begin_step()
        if self.k is None:
            return
        for stage in self.stages:
            stage.first = step * self.M + self.k
        with lost_connections(), _without_log():
            self.runtime.step(return_outputs=False)
        self.times.end_sends()
        for s in self.stepped:
            self.times.begin_wait(U, s)
            self.updates.prepare(s)
            self.times.begin(U, s)
            self.updates.step(s)
            self.times.end(U, s)
        self.updates.finish_exchanges()

    def _exchange(self, s: int) -> None:
        step, exchanged = self.times.step, self.record.exchanged
        place = self.times.place(A, s)
        if place is None:  # of one replica, and nothing tied
            return

        def note_done(when_ns: int) -> None:
            exchanged[step, place] = when_ns

        self.times.begin(A, s)
        self.updates.begin_exchange(s, 0, note_done)
        self.times.end(A, s)


class Runtime(_PipelineScheduleRuntime):
    """torch's runtime for stages that compute their own loss and its gradients.

    It runs `microbatches` through the pipeline, in the order that the CSV `text` spells.
    """

    def __init__(
        self, stages: Sequence[TorchStage], microbatches: int, text: str, times: ActionTimes
    ) -> None:
        super().__init__(  # type: ignore[no-untyped-call]
            list(stages), microbatches, loss_fn=_no_loss, scale_grads=False
        )
        self.fwd_recv_ops = Awaited(F, times)
        self.bwd_recv_ops = Awaited(B, times)
        with tempfile.TemporaryFile("w") as file:  # no name is left where this process is killed
            file.write(text)
            file.seek(0)
            self._load_csv(f"/dev/fd/{file.fileno()}", format="compute_only")
        with lost_connections():
            self._initialize_stages((), {})  # or the first step would make the buffers

    def post_ahead(self, ahead: int) -> None:
        """Post `ahead` receives before they are used, in their order, or more where torch does.

        torch posts some just before the action that needs them, as in GPipe, where every message
        would be waited for.
        """
        self.pipeline_order_with_comms = {
            rank: receives_ahead(actions, ahead)
            for rank, actions in self.pipeline_order_with_comms.items()
        }

    def _maybe_compute_loss(self, *_: Any) -> None:
        return None

    def _maybe_get_loss(self, *_: Any) -> None:
        return None


def receives_ahead(actions: Sequence[_Action], ahead: int) -> list[_Action]:
    """The actions of a rank in torch's order, at least `ahead` receives before their use.

    All else keeps its order, and so do the receives, which gloo matches with sends by it.
    """
    receives = [each for each in actions if each.computation_type in _USES]
    numbers = {
        (use, each.stage_index, each.microbatch_index): number
        for number, each in enumerate(receives)
        for use in _USES[each.computation_type]
    }
    found: list[_Action] = []
    posted = used = own = 0
    for action in actions:
        if action.computation_type in _USES:
            own += 1  # of those that torch would have posted
            continue
        keys = [
            (part.computation_type, part.stage_index, part.microbatch_index)
            for part in action.sub_actions or (action,)
        ]
        needs = [numbers[key] + 1 for key in keys if key in numbers]
        until = max(min(used + ahead, len(receives)), own, *needs)
        found += receives[posted:until]
        posted = max(posted, until)
        found.append(action)
        used += len(needs)
    return found


@contextlib.contextmanager
def _without_log() -> Iterator[None]:
    """The context in which torch does not log its whole schedule because an action fails."""
    logger = logging.getLogger(_PipelineScheduleRuntime.__module__)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _no_loss(*_: Any) -> Any:
    """What tells torch that there are backwards."""
    raise AssertionError("stages compute their own loss")


def _with_rows_by_rank(text: str, ranks: Sequence[int]) -> str:
    """The CSV with its rows in the order of rank, as a group has them; now they are of `ranks`."""
    rows = dict(zip(ranks, text.splitlines(keepends=True), strict=True))
    return "".join(rows[rank] for rank in sorted(rows))
