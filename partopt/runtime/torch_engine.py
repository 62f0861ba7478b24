"""Executes a plan on torch's pipeline runtime, where it can run the plan's schedule.

torch executes the order with its messages, written as its CSV, and calls the stages. What it lacks
stays the project's: sums of gradients over replicas, tied parameters and optimizer steps
(`updates`).
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from partopt.documents.actions import KINDS, A, B, F, I, R, U, W
from partopt.documents.plan import Plan
from partopt.errors import PartoptError
from partopt.replay.stage import Crossing, RunnableStage, check_made, with_gradient
from partopt.runtime.actions import Action, RankRecord, Route, actions_of
from partopt.runtime.context import (
    COMPUTING,
    EXCHANGING,
    OUTSIDE,
    RECEIVING,
    Context,
    lost_connections,
)
from partopt.runtime.engine import RankRun
from partopt.runtime.messages import direction_groups
from partopt.runtime.postings import Posting, cached_postings
from partopt.runtime.updates import OptimizerOf, Tied
from partopt.schedules import order, schedule
from partopt.schedules.placement import placement_of
from partopt.schedules.torch_csv import pipelines, to_csv

# d   pipelines side by side, the replicas of every stage; pipeline k gets the microbatches g with
#     g mod d = k
# m   number of a microbatch in its pipeline: microbatch first + m d of all

# crosses a cut where nothing has a gradient, for others wait: without it ranks would run ahead
TOKEN = Crossing((1,), torch.float32, True)


def can_say(plan: Plan) -> str | None:
    """Why torch's pipeline runtime cannot run `plan`; None where it can."""
    if schedule(plan.schedule).asynchronous:
        return f"{plan.schedule} never flushes, and torch runs one iteration after the other"
    if "output_grads" not in inspect.signature(PipelineStage).parameters:
        return f"torch {torch.__version__} cannot be told which tensors have no gradient"
    placement = placement_of(plan)
    try:
        orders = order(plan.schedule, placement)
        to_csv(orders, placement)
    except PartoptError as error:
        return error.message
    if (orders.kind == R).any():
        return f"{plan.schedule} recomputes while it waits, and torch has no action for that"
    return None


def execute_on_torch(
    plan: Plan,
    stage_of: Callable[[int], RunnableStage],
    *,
    context: Context,
    steps: int = 1,
    microbatches: int | None = None,
    optimizer_of: OptimizerOf | None = None,
    tied: Sequence[Tied] = (),
) -> RankRecord:
    """Execute `plan` on all ranks of `context` with torch's runtime; the record of this one.

    Everything is as `partopt.runtime.engine.execute` says, but for messages. torch sends every
    tensor of a cut for itself, waits for sends at the end of a step alone, whatever the plan's
    `waits` are, and has a buffer for every microbatch of an iteration. `microbatches` are for
    asynchronous schedules, which torch cannot run.

    In the record `received` is when the action began, `send_posted` when torch was about to post a
    send, and `sent` when the sends of the step had ended: all are bounds. Waits are gaps between
    actions.

    Raises PartoptError where `can_say` has a reason against the plan, and where `execute` does.
    """
    if reason := can_say(plan):
        raise PartoptError(
            f"torch's pipeline runtime cannot run the plan: {reason}",
            "run it on partopt's own engine",
            code="torch-cannot-run",
        )
    run = TorchRun(plan, stage_of, context, steps, microbatches, optimizer_of, tied)
    with run.begin():
        run.make_runtime()
        for step in range(steps):
            run.begin_step(step)
            run.run_step(step)
            run.end_step()
    context.progress.note(OUTSIDE)
    return run.record


class TorchRun(RankRun):
    """The part of one rank in a plan: torch's stages and runtime, and the times of its actions."""

    def __init__(self, *arguments: Any) -> None:
        """The arguments are those of a `RankRun`."""
        super().__init__(*arguments)
        placement = placement_of(self.plan)
        ranks = pipelines(placement)
        self.d, self.step = len(ranks), 0
        self.by_microbatch: dict[tuple[int, int, int], Action] = {
            (_whole(action.kind), action.stage, action.microbatch // self.d): action
            for action in self.actions
        }
        # every rank makes all groups, in one order
        groups = [self.context.group(members, "pipeline") for members in ranks]
        postings = cached_postings(self.plan, self.order, self.context)
        self.directions: dict[tuple[int, int], Any] = {}
        if self.context.backend == "nccl":  # one for all would be one stream for all
            self.directions = direction_groups(self.context, postings)
        self.k = next((k for k, members in enumerate(ranks) if self.context.rank in members), None)
        if self.k is not None:
            self.torch_stages = [TorchStage(self, s, groups[self.k]) for s in self.stages]
            rows = (self._cells(rank, postings.get(rank, [])) for rank in sorted(ranks[self.k]))
            self.text = "".join(",".join(row) + "\n" for row in rows)

    def _cells(self, rank: int, postings: Sequence[Posting]) -> list[str]:
        """A rank's actions and messages as torch writes them: 1RECV_F0, 1F0, 1SEND_F0."""
        cells: list[tuple[int, str]] = []
        for place, route in postings:
            if isinstance(route, Route):
                what = f"RECV_{KINDS[route.kind]}{route.microbatch // self.d}"
                cells.append((place, f"{route.receiver}{what}"))
        for action in actions_of(self.order, rank):
            kind, m, place = KINDS[action.kind], action.microbatch // self.d, 2 * action.place
            if action.kind != U:
                what = "REDUCE_GRAD" if action.kind == A else f"{kind}{m}"
                cells.append((place, f"{action.stage}{what}"))
            if sent := action.message_out:
                cells.append((place + 1, f"{action.stage}SEND_{KINDS[sent.kind]}{m}"))
        return [cell for _, cell in sorted(cells, key=lambda cell: cell[0])]  # receives first

    def make_runtime(self) -> None:
        """Make torch's runtime, which may send messages."""
        if self.k is not None:
            self.runtime = Runtime(self.torch_stages, self.microbatches // self.d, self.text)

    def run_step(self, step: int) -> None:
        """Run the step: the actions that torch runs, then the updates."""
        self.step = step
        if self.k is None:
            return
        for stage in self.torch_stages:
            stage.first = step * self.microbatches + self.k
        with lost_connections(), _without_log():
            self.runtime.step(return_outputs=False)
        messages = [action.place for action in self.actions if action.message_out]
        self.clock.note(self.record.sent[step], messages)
        for action in self.actions:
            if action.kind == U:
                self.context.progress.act(step, U, action.stage, 0, EXCHANGING)
                self.updates.prepare(action.stage)
                with self.time_action(U, action.stage):
                    self.updates.step(action.stage)
        self.updates.finish_exchanges()

    @contextlib.contextmanager
    def time_action(self, kind: int, s: int, m: int = 0) -> Iterator[None]:
        """The context of an action: when it begins and ends, by when it had its message."""
        action, record = self.by_microbatch[_whole(kind), s, m], self.record
        state = EXCHANGING if kind == A else COMPUTING
        self.context.progress.act(self.step, action.kind, s, action.microbatch, state)
        stamp, place = self.clock.now(), (self.step, action.place)
        self.clock.note(record.begin, place, stamp)
        if action.message_in:
            self.clock.note(record.received, place, stamp)
        yield
        self.clock.note(record.end, place)
        self.context.progress.note(RECEIVING)

    def direct(self, operations: Sequence[dist.P2POp]) -> list[dist.P2POp]:
        """The messages, in the groups of their directions where there are some."""
        rank = self.context.rank
        for message in operations:
            pair = (rank, message.peer) if message.op == dist.isend else (message.peer, rank)
            if group := self.directions.get(pair):
                message.group, message.group_peer = group, dist.get_group_rank(group, message.peer)
        return list(operations)

    def note_send(self, kind: int, s: int, m: int) -> None:
        """Note that what an action made is about to be sent."""
        place = self.by_microbatch[kind, s, m].place
        self.clock.note(self.record.send_posted, (self.step, place))

    def exchange(self, s: int) -> None:
        """Begin to exchange the gradients of a stage, where it has replicas or something tied."""
        if action := self.by_microbatch.get((A, s, 0)):
            with self.time_action(A, s):
                self.updates.take_gradients(s, action.microbatch)
                self.begin_exchange(self.step, action)


def _whole(kind: int) -> int:
    """The kind under which an action is known: a backward of inputs is where a whole one is."""
    return B if kind == I else kind


class Runtime(_PipelineScheduleRuntime):
    """torch's runtime for stages that compute their loss and its gradients.

    It runs `microbatches` through the pipeline, in the order that the CSV `text` spells, with
    its messages.
    """

    def __init__(self, stages: Sequence[TorchStage], microbatches: int, text: str) -> None:
        super().__init__(  # type: ignore[no-untyped-call]
            list(stages),
            microbatches,
            loss_fn=lambda *_: None,  # it tells torch that there are backwards
            scale_grads=False,
        )
        with tempfile.TemporaryFile("w") as file:  # no name is left where this process is killed
            file.write(text)
            file.seek(0)
            self._load_csv(f"/dev/fd/{file.fileno()}", format="compute_comms")
        with lost_connections():
            self._initialize_stages((), {})  # or the first step would make the buffers

    def _maybe_compute_loss(self, *_: Any) -> None:
        return None

    def _maybe_get_loss(self, *_: Any) -> None:
        return None


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


class TorchStage(PipelineStage):
    """Stage `s` of a run: torch moves its tensors, of static shape, and the stage computes.

    What crosses a cut without a gradient is sent forward alone. Between two stages of a rank torch
    hands tensors over as they are. `first` changes from step to step.
    """

    def __init__(self, run: TorchRun, s: int, group: Any) -> None:
        self.run, self.stage, self.first = run, run.stages[s], 0
        S = len(run.plan.stages)
        self.before = _with_token(self.stage.receives) if s > 0 else []
        self.behind = _with_token(self.stage.sends) if s < S - 1 else []
        super().__init__(
            nn.Module(),  # torch asks it whether it is sharded, and calls nothing
            s,
            S,
            run.context.device,
            input_args=_examples(self.before),
            output_args=_examples(self.behind),
            input_grads=_gradients(self.before),
            output_grads=_gradients(self.behind),
            group=group,
        )

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> tuple[Tensor, ...]:
        """Run the forward of microbatch m = `fwd_chunk_id`."""
        s, m = self.stage_index, fwd_chunk_id
        is_local = not self.is_first and self._is_same_rank(s - 1)
        received = _take(self.args_recv_info[m], self.stage.receives, is_local)
        self.stage.prepare(self._number(m))  # in no time of the action
        with self.run.time_action(F, s, m):
            made = self.stage.forward(self._number(m), received)
        sent = tuple(self._outgoing(made, self.stage.sends, self.behind))
        if not self.is_last and not self._is_same_rank(s + 1):
            self.fwd_cache[m] = sent, []
        return sent

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Run the backward of microbatch m = `bwd_chunk_id`, of the inputs alone unless full."""
        s, m = self.stage_index, bwd_chunk_id
        infos = [info for info in self.grad_recv_info[m] if info.tensor_meta is not None]
        is_local = not self.is_last and self._is_same_rank(s + 1)
        gradients = _take(infos, with_gradient(self.stage.sends), is_local)
        run = self.stage.backward if full_backward else self.stage.backward_input
        with self.run.time_action(B, s, m):
            found = run(self._number(m), gradients)
        expected, every = with_gradient(self.stage.receives), with_gradient(self.before)
        graded = iter(self._outgoing(found, expected, every))
        self.bwd_cache[m] = tuple(
            next(graded) if crossing.gradient else None for crossing in self.before
        )

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the backward of the weights alone of microbatch m = `bwd_chunk_id`."""
        with self.run.time_action(W, self.stage_index, bwd_chunk_id):
            self.stage.backward_weight(self._number(bwd_chunk_id))

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Begin to exchange the gradients of the stage, whose last backward has ended."""
        self.run.exchange(self.stage_index)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """The sends of a forward, which are posted next; torch keeps the tensors with them."""
        operations = self.run.direct(super().get_fwd_send_ops(fwd_chunk_id))
        del self.fwd_cache[fwd_chunk_id]
        self.run.note_send(F, self.stage_index, fwd_chunk_id)
        return operations

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The sends of a backward, which are posted next."""
        operations = self.run.direct(super().get_bwd_send_ops(bwd_chunk_id))
        self.run.note_send(B, self.stage_index, bwd_chunk_id)
        return operations

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """The receives of a forward."""
        return self.run.direct(super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The receives of a backward."""
        return self.run.direct(super().get_bwd_recv_ops(bwd_chunk_id))

    def _outgoing(
        self, tensors: Sequence[Tensor], expected: Sequence[Crossing], every: Sequence[Crossing]
    ) -> list[Tensor]:
        """The tensors as torch sends them, and the token where `every` has one more.

        Raises PartoptError where they are not as `expected` says: the receiver's buffers are.
        """
        check_made(self.stage_index, tensors, expected)
        sent = [tensor.detach().to(self.device).contiguous() for tensor in tensors]
        if len(every) > len(expected):
            sent.append(torch.zeros(TOKEN.shape, dtype=TOKEN.dtype, device=self.device))
        return sent

    def _number(self, m: int) -> int:
        return self.first + m * self.run.d


def _with_token(crossings: Sequence[Crossing]) -> list[Crossing]:
    """What crosses a cut, with something in it that has a gradient."""
    return [*crossings, *([] if with_gradient(crossings) else [TOKEN])]


def _examples(crossings: Sequence[Crossing]) -> tuple[Tensor, ...]:
    """Tensors without memory, as the ones that cross."""
    return tuple(
        torch.empty(crossing.shape, dtype=crossing.dtype, device="meta") for crossing in crossings
    )


def _gradients(crossings: Sequence[Crossing]) -> tuple[Tensor | None, ...]:
    """The same of their gradients, None where there is none."""
    pairs = zip(crossings, _examples(crossings), strict=True)
    return tuple(example if crossing.gradient else None for crossing, example in pairs)


def _take(infos: Sequence[Any], crossings: Sequence[Crossing], is_local: bool) -> list[Tensor]:
    """The tensors that came; local ones are let go of, which torch would keep until the next step.

    Received ones count their changes (`.data`), so that a stage may change one in place.
    """
    pairs = list(zip(infos, crossings, strict=False))  # a token is nobody's
    if is_local:
        taken = [info.buffer for info, _ in pairs]
        for info in infos:
            info.buffer = None
    else:
        taken = [info.buffer.data for info, _ in pairs]
    return [
        tensor.cpu() if crossing.on_host else tensor
        for tensor, (_, crossing) in zip(taken, pairs, strict=True)
    ]
