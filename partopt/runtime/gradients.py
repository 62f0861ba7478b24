"""Gradients added up over the replicas of a stage, in buckets, beside the backward that makes them.

As torch's DistributedDataParallel does it (Li et al., VLDB 2020): a bucket is exchanged when all of
its gradients are there, and the buckets of every replica in one order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from partopt.errors import PartoptError
from partopt.runtime.context import lost_connections


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """The gradient of a parameter, zeros where no backward has reached it."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


class Sum:
    """Gradients of `parameters` on their way to be added up over a group.

    They are taken from the parameters, bucket by bucket, until `finish` puts their sums there.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: Any, bucket_bytes: float) -> None:
        self.buckets = list(buckets_of(parameters, bucket_bytes))
        self.group = group
        self.begun: list[tuple[Tensor, Any]] = []  # of the first buckets: what is sent, its work
        self._done: Callable[[int], None] | None = None
        self._ended_ns: list[int] = []  # of buckets, noted by other threads
        self._made: set[int] = set()  # parameters, by id
        self._handles: list[Any] = []

    def watch(self) -> None:
        """Begin each bucket when the backward that comes now has made its gradients."""
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._note_made)  # type: ignore[no-untyped-call]
            for bucket in self.buckets
            for parameter in bucket
        ]

    def begin_rest(self, done: Callable[[int], None]) -> None:
        """Begin the buckets that are left; `done` gets the time at which the last was exchanged."""
        for handle in self._handles:
            handle.remove()
        while len(self.begun) < len(self.buckets):
            self._begin_next()
        self._done = done
        self._tell_done()

    def finish(self) -> None:
        """Wait for the sums, and give them to the parameters as their gradients."""
        for bucket, (whole, work) in zip(self.buckets, self.begun, strict=True):
            with lost_connections():
                work.wait()
            sizes = [parameter.numel() for parameter in bucket]
            for parameter, summed in zip(bucket, torch.split(whole, sizes), strict=True):
                parameter.grad = summed.view_as(parameter)
        if len(self._ended_ns) < len(self.buckets) and self._done is not None:
            self._done(time.perf_counter_ns())  # the last note is on its way in another thread

    def _note_made(self, parameter: Tensor) -> None:
        """Begin the buckets that are next, where all of their gradients are there."""
        if id(parameter) in self._made:
            raise PartoptError(
                "a parameter gets its gradient in several parts of one backward, as reentrant "
                "checkpoints make it: buckets of gradients cannot be exchanged beside that",
                "plan with `allreduce=blocking`",
                code="cannot-run",
            )
        self._made.add(id(parameter))
        while len(self.begun) < len(self.buckets):
            if not self._made.issuperset(map(id, self.buckets[len(self.begun)])):
                break
            self._begin_next()

    def _begin_next(self) -> None:
        bucket = self.buckets[len(self.begun)]
        whole = torch.cat([gradient_of(parameter).reshape(-1) for parameter in bucket])
        for parameter in bucket:
            parameter.grad = None
        with lost_connections():
            work: Any = dist.all_reduce(whole, group=self.group, async_op=True)
        self.begun.append((whole, work))
        work.get_future().add_done_callback(self._note_ended)

    def _note_ended(self, _: object) -> None:
        self._ended_ns.append(time.perf_counter_ns())
        self._tell_done()

    def _tell_done(self) -> None:
        if self._done is not None and len(self._ended_ns) == len(self.buckets) > 0:
            self._done(max(self._ended_ns))


def buckets_of(
    parameters: Sequence[nn.Parameter], bucket_bytes: float
) -> Iterator[list[nn.Parameter]]:
    """Parameters of one number format, the last first, up to so many bytes at once or one alone.

    A backward makes gradients in about that order.
    """
    backwards = list(reversed(parameters))
    by_format = sorted(backwards, key=lambda parameter: str(parameter.dtype))
    bucket: list[nn.Parameter] = []
    size_bytes = 0
    for parameter in by_format:
        is_full = size_bytes + parameter.nbytes > bucket_bytes
        if bucket and (is_full or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket, size_bytes = [], 0
        bucket.append(parameter)
        size_bytes += parameter.nbytes
    if bucket:
        yield bucket
