"""A stage as torch's pipeline runtime takes it: torch moves the tensors, the stage computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from partopt.runtime.stage import Crossing, Stage, check_made
from partopt.runtime.torch_times import ActionTimes
from partopt.schedules.order import B, F, I, W

# m   number of a microbatch in its pipeline, one of d side by side: microbatch first + m d of all

# crosses a cut where nothing has a gradient, for others wait: without it ranks would run ahead
TOKEN = Crossing((1,), torch.float32, True)


class TorchStage(PipelineStage):
    """Stage `s` of `S`, with tensors of static shape; `first` changes from step to step.

    What crosses a cut without a gradient is sent forward alone. Between two stages of a rank torch
    hands tensors over as they are. `exchange(s)` is called when the last backward of a step ended.
    """

    def __init__(
        self,
        stage: Stage,
        s: int,
        S: int,
        d: int,
        device: torch.device,
        group: Any,
        times: ActionTimes,
        exchange: Callable[[int], None],
    ) -> None:
        before = _with_token(stage.receives) if s > 0 else []
        behind = _with_token(stage.sends) if s < S - 1 else []
        super().__init__(
            nn.Module(),  # torch asks it whether it is sharded, and calls nothing
            s,
            S,
            device,
            input_args=_examples(before),
            output_args=_examples(behind),
            input_grads=_gradients(before),
            output_grads=_gradients(behind),
            group=group,
        )
        self.before, self.behind = before, behind
        self.stage, self.d, self.first = stage, d, 0
        self.times, self.exchange = times, exchange

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> tuple[Tensor, ...]:
        """Run the forward of microbatch m = `fwd_chunk_id`."""
        s, m = self.stage_index, fwd_chunk_id
        is_local = not self.is_first and self._is_same_rank(s - 1)
        received = _take(self.args_recv_info[m], is_local)[: len(self.stage.receives)]
        self.stage.prepare(self._number(m))  # in no time of the action
        self.times.begin(F, s, m)
        made = self.stage.forward(self._number(m), received)
        self.times.end(F, s, m)
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
        gradients = _take(infos, is_local)[: len(_graded(self.stage.sends))]
        run = self.stage.backward if full_backward else self.stage.backward_input
        kind = B if full_backward else I
        self.times.begin(kind, s, m)
        found = run(self._number(m), gradients)
        self.times.end(kind, s, m)
        graded = iter(self._outgoing(found, _graded(self.stage.receives), _graded(self.before)))
        self.bwd_cache[m] = tuple(
            next(graded) if crossing.gradient else None for crossing in self.before
        )

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the backward of the weights alone of microbatch m = `bwd_chunk_id`."""
        s, m = self.stage_index, bwd_chunk_id
        self.times.begin(W, s, m)
        self.stage.backward_weight(self._number(m))
        self.times.end(W, s, m)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Begin to exchange the gradients of the stage, whose last backward has ended."""
        self.exchange(self.stage_index)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """The sends of a forward, which are posted next; torch keeps the tensors with them."""
        operations = super().get_fwd_send_ops(fwd_chunk_id)
        del self.fwd_cache[fwd_chunk_id]
        self.times.note_send(F, self.stage_index, fwd_chunk_id)
        return operations

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The sends of a backward, which are posted next."""
        operations = super().get_bwd_send_ops(bwd_chunk_id)
        self.times.note_send(B, self.stage_index, bwd_chunk_id)
        return operations

    def _outgoing(
        self, tensors: Sequence[Tensor], own: Sequence[Crossing], every: Sequence[Crossing]
    ) -> list[Tensor]:
        """The tensors as torch sends them, and the token where `every` has one more than `own`.

        Raises PartoptError where they are not as `own` says: the receiver's buffers are.
        """
        check_made(self.stage_index, tensors, own)
        sent = [each.detach().contiguous() for each in tensors]
        if len(every) > len(own):
            sent.append(torch.zeros(TOKEN.shape, dtype=TOKEN.dtype, device=self.device))
        return sent

    def _number(self, m: int) -> int:
        return self.first + m * self.d


def _with_token(crossings: Sequence[Crossing]) -> list[Crossing]:
    """What crosses a cut, with something in it that has a gradient."""
    return [*crossings, *([] if _graded(crossings) else [TOKEN])]


def _graded(crossings: Sequence[Crossing]) -> list[Crossing]:
    return [each for each in crossings if each.gradient]


def _examples(crossings: Sequence[Crossing]) -> tuple[Tensor, ...]:
    """Tensors without memory, as the ones that cross."""
    return tuple(torch.empty(each.shape, dtype=each.dtype, device="meta") for each in crossings)


def _gradients(crossings: Sequence[Crossing]) -> tuple[Tensor | None, ...]:
    """The same of their gradients, None where there is none."""
    pairs = zip(crossings, _examples(crossings), strict=True)
    return tuple(example if crossing.gradient else None for crossing, example in pairs)


def _take(infos: Sequence[Any], is_local: bool) -> list[Tensor]:
    """The tensors that came; local ones are let go of, which torch would keep until the next step.

    Received ones count their own changes (`.data`), so that a stage may change one in place.
    """
    if not is_local:
        return [info.buffer.data for info in infos]
    taken = [info.buffer for info in infos]
    for info in infos:
        info.buffer = None
    return taken
