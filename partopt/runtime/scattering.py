"""Rows of tensors, a share for each replica of a stage, and sums that come in such shares."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from partopt.runtime.context import lost_connections
from partopt.runtime.parameters import gradient_of

# r   replicas of the stage
# k   which of them


def rows_of(tensor: Tensor, k: int, r: int) -> Tensor:
    """The rows of a tensor that replica k of r has, as `torch.chunk` shares them out.

    The last replicas may have none; a single number is the first one's.
    """
    if tensor.dim() == 0:
        return tensor if k == 0 else tensor.new_empty(0)
    size = -(-len(tensor) // r)
    return tensor[k * size : (k + 1) * size]


class Rows(NamedTuple):
    """The rows of a tensor that replica k of r has; by default all of them."""

    tensor: Tensor
    k: int = 0
    r: int = 1


def pack(tensors: Sequence[Tensor], size: int) -> Tensor:
    """Tensors one after the other in a flat one of so many elements, the last of them zeros."""
    packed = tensors[0].new_zeros(size)
    for place, each in zip(split_like(packed, tensors), tensors, strict=True):
        place.copy_(each)
    return packed


def split_like(packed: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """What lies in a flat tensor, shaped as each of `tensors`; it may be longer than they are."""
    sizes = [each.numel() for each in tensors]
    parts = torch.split(packed[: sum(sizes)], sizes)
    return [part.view(each.shape) for part, each in zip(parts, tensors, strict=True)]


def places_by_format(tensors: Sequence[Tensor], bytes_each: float = math.inf) -> list[list[int]]:
    """The places of tensors in parts of one number format, each full with so many bytes."""
    parts: list[list[int]] = []
    filling: dict[torch.dtype, tuple[list[int], float]] = {}
    for place, each in enumerate(tensors):
        part, size = filling.get(each.dtype, ([], 0.0))
        if not part:
            parts.append(part)
        part.append(place)
        size += each.nbytes
        filling[each.dtype] = (part, size) if size < bytes_each else ([], 0.0)
    return parts


class Scatter:
    """Gradients of `parameters` on their way to be added up over the replicas in a `group`.

    The parameters lose theirs; those of `aside` get them back in the end. This replica, the k-th,
    gets the sums of its rows `own`; what was begun `earlier` is finished first.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        own: Sequence[nn.Parameter],
        group: Any,
        done: Callable[[int], None] = lambda _: None,
        aside: Sequence[nn.Parameter] = (),
        earlier: Sequence[Scatter] = (),
    ) -> None:
        self.aside = [(parameter, gradient_of(parameter)) for parameter in aside]
        self.done, self.earlier = done, earlier
        self.parts: list[tuple[list[nn.Parameter], Tensor, Any]] = []
        for places in places_by_format(parameters):
            sums = _begin([parameters[i] for i in places], group)
            self.parts.append(([own[i] for i in places], *sums))
        for parameter in aside:
            parameter.grad = None
        self.left = len(self.parts)
        for _, _, work in self.parts:
            work.get_future().add_done_callback(self._note)

    @property
    def has_ended(self) -> bool:
        """Whether nothing is left to wait for."""
        return self.left == 0

    def _note(self, _future: object) -> None:
        self.left -= 1
        if self.left == 0:
            self.done(time.perf_counter_ns())

    def finish(self) -> None:
        """Wait for the sums, and add them to the gradients of the rows."""
        for each in self.earlier:
            each.finish()
        for own, mine, work in self.parts:
            with lost_connections():
                work.wait()
            for share, summed in zip(own, split_like(mine, own), strict=True):
                # a copy: the sums of all rows are in one memory where nothing is scattered
                share.grad = summed.clone() if share.grad is None else share.grad.add_(summed)
        for parameter, gradient in self.aside:
            parameter.grad = gradient
        # nothing was left to sum, or the last note is on its way in another thread
        if self.left or not self.parts:
            self.done(time.perf_counter_ns())


def _begin(parameters: Sequence[nn.Parameter], group: Any) -> tuple[Tensor, Any]:
    """Begin to add up gradients: where the sums of this replica's rows will be, and the work.

    gloo knows no reduce-scatter: what torch has under the name is an all-reduce, of which no end is
    told.
    """
    r, k = dist.get_world_size(group), dist.get_rank(group)
    packed = _pack_gradients(parameters, r)
    with lost_connections():
        if dist.get_backend(group) == "nccl":
            mine = torch.empty_like(packed[k])
            return mine, dist.reduce_scatter(mine, list(packed), group=group, async_op=True)
        return packed[k], dist.all_reduce(packed, group=group, async_op=True)


def _pack_gradients(parameters: Sequence[nn.Parameter], r: int) -> Tensor:
    """The rows of each replica one after the other, shape (r, the size of the largest share).

    Each gradient is dropped when it has been copied, so that next to none is there twice.
    """
    rows = [[rows_of(each.data, k, r) for each in parameters] for k in range(r)]
    packed = parameters[0].data.new_zeros(r, sum(each.numel() for each in rows[0]))
    places = [split_like(packed[k], rows[k]) for k in range(r)]
    for i, parameter in enumerate(parameters):
        for k in range(r):
            places[k][i].copy_(rows_of(gradient_of(parameter), k, r))
        parameter.grad = None
    return packed
