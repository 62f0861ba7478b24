"""NCCL's rules for real processes over gloo, each with a device on paper: a rehearsal of a run.

The first message on a group holds the hosts of both its ranks until the other has come, as that of
NCCL does. A message and a sum take their time on the devices: they begin when all their ranks'
devices have come to them, and hold the stream that waits for them, not the host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from partopt.runtime.context import Context
from partopt.runtime.processes import run_local
from tests.gpu.device import FakeDevice, PaperTime, installed

LATENCY_S, BYTES_PER_S = 20e-6, 20e9
_TIMES = 1000  # tag of the time that goes beside a message


class _Work:
    """A message or a sum on its way: what gloo moves, and the time of each rank's device."""

    def __init__(self, device: FakeDevice, size: int, works: list[Any], time: Tensor) -> None:
        self.device, self.works, self.time = device, works, time
        self.came_s = device.current.end_s = max(device.current.end_s, device.host.now_s())
        self.takes_s = LATENCY_S + size / BYTES_PER_S

    def end_s(self) -> float:
        while self.works:  # each once: gloo would wait for another
            self.works.pop().wait()
        return max(self.came_s, float(self.time)) + self.takes_s

    def wait(self, *_: Any) -> bool:
        self.device.current.wait_until(self.end_s())
        return True


@contextlib.contextmanager
def rules(device: FakeDevice) -> Iterator[None]:
    """The context in which gloo keeps to NCCL's rules, on this device."""
    used: set[Any] = set()
    begun: list[_Work] = []  # gloo drops what nobody keeps
    plain = {name: getattr(dist, name) for name in ("isend", "irecv", "all_reduce")}

    def time_now() -> Tensor:
        now_s = max(device.current.end_s, device.host.now_s())
        return torch.tensor([now_s], dtype=torch.float64)

    def message(
        name: str,
        tensor: Tensor,
        peer: int | None = None,
        group: Any = None,
        tag: int = 0,
        **place: Any,
    ) -> _Work:
        if group is not None and group not in used:
            used.add(group)
            dist.barrier(group=group)
        if peer is None:  # as a keyword, or its number in the group
            number = place.get("group_dst", place.get("group_src"))
            named = place.get("dst", place.get("src"))
            peer = dist.get_global_rank(group, number) if named is None else named
        time = time_now() if name == "isend" else torch.zeros(1, dtype=torch.float64)
        begin = functools.partial(plain[name], group=group)
        works = [begin(tensor, peer, tag=tag), begin(time, peer, tag=_TIMES + tag)]
        begun.append(_Work(device, tensor.nbytes, works, time))
        return begun[-1]

    def all_reduce(tensor: Tensor, *given: Any, group: Any = None, async_op: bool = False) -> Any:
        used.add(group)
        time = time_now()
        works = [
            plain["all_reduce"](tensor, *given, group=group, async_op=True),
            plain["all_reduce"](time, dist.ReduceOp.MAX, group=group, async_op=True),
        ]
        work = _Work(device, tensor.nbytes, works, time)
        return work if async_op else work.wait() and None

    replaced = {
        "isend": functools.partial(message, "isend"),
        "irecv": functools.partial(message, "irecv"),
        "all_reduce": all_reduce,
    }
    with contextlib.ExitStack() as stack:
        for name, value in replaced.items():
            for module in (dist, distributed_c10d):
                stack.enter_context(mock.patch.object(module, name, value))
        yield


@dataclasses.dataclass(frozen=True)
class Rehearsed:
    """What a rank runs, with a device on paper and under NCCL's rules; it can be sent to one.

    The hosts have the system's time, or one `on_paper`, in which they take none.
    """

    main: Callable[[Context], Any]
    on_paper: bool = False

    def __call__(self, context: Context) -> Any:
        device = FakeDevice(PaperTime() if self.on_paper else None)
        with installed(device), rules(device):
            return self.main(dataclasses.replace(context, backend="nccl"))


def rehearse(
    main: Callable[[Context], Any], ranks: int, wait_s: float = 60.0, on_paper: bool = False
) -> list[Any]:
    """Run `main` on so many ranks, as `run_local` does."""
    return run_local(ranks, Rehearsed(main, on_paper), wait_s=wait_s, start="fork")
