"""What every rank of a run asks of its device and of NCCL, in order: the engines as they are.

Each rank runs alone, in this process: what it receives is made of ones, what it sends goes nowhere.
Whom it meets, in which group and in which order, depends on no value.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from partopt.runtime import engine as own_engine
from partopt.runtime.completions import Completions
from partopt.runtime.context import Context, Progress
from partopt.runtime.torch_engine import TorchRun
from partopt.schedules.order import KINDS
from tests.gpu.device import FakeDevice, installed
from tests.runtime import stages
from tests.runtime.cases import Case, Engine, run_case

COMPUTE, SEND, RECEIVE, COLLECTIVE, WAIT, KEEP, DRAIN, MEET, SYNCHRONIZE = (
    "compute",
    "send",
    "receive",
    "collective",
    "wait",
    "keep",
    "drain",
    "meet",
    "synchronize",
)


class Step(NamedTuple):
    """A step of a program: a call of the host.

    `number` is that of a work: of the one that it begins, waits for, or keeps. `group` are the
    ranks and the name of a communicator; of a message `peer` is the other rank, `what` its bytes,
    and of compute the action.
    """

    kind: str
    number: int = -1
    group: tuple[tuple[int, ...], str] = ((), "")
    peer: int = -1
    what: str = ""


class _Work:
    def __init__(self, program: list[Step], number: int) -> None:
        self.program, self.number = program, number

    def wait(self) -> bool:
        self.program.append(Step(WAIT, self.number))
        return True

    def is_completed(self) -> bool:
        return True


class _Noted(FakeDevice):
    """A device that notes where the host waits for all of it."""

    def __init__(self, program: list[Step]) -> None:
        super().__init__()
        self.program = program

    def synchronize(self, *_: Any) -> None:
        self.program.append(Step(SYNCHRONIZE))


def program_of(case: Case, rank: int, engine: Engine, pairs: bool = True) -> list[Step]:
    """The program of a rank in a case of `tests.runtime.cases`, on an engine.

    A message without a group of its own goes over a communicator of its two ranks where NCCL makes
    `pairs`, as it does unless a group is bound to its device, or else over the whole group's.
    """
    program: list[Step] = []
    store = FakeStore()
    dist.init_process_group("fake", store=store, rank=rank, world_size=case.plan.world_size)
    try:
        with _noted(program, pairs), installed(_Noted(program)):
            cpu = torch.device("cpu")
            context = Context(rank, case.plan.world_size, cpu, Progress(), backend="nccl")
            run_case(case, context, engine)
    finally:
        dist.destroy_process_group()
    return program


@contextlib.contextmanager
def _noted(program: list[Step], pairs: bool) -> Iterator[None]:
    numbers, groups = itertools.count(), itertools.count()
    names: dict[Any, str] = {}  # of groups, by themselves

    def begin(kind: str, group: tuple[tuple[int, ...], str], peer: int = -1, what: str = "") -> Any:
        program.append(Step(kind, next(numbers), group, peer, what))
        return _Work(program, program[-1].number)

    def message(kind: str, tensor: Tensor, peer: int | None, group: Any, place: int | None) -> Any:
        ranks = tuple(dist.get_process_group_ranks(group))
        other = ranks[place] if peer is None else peer  # type: ignore[index]
        between = tuple(sorted((other, dist.get_rank()))) if pairs else ranks
        name = names[group] + " of a pair" * pairs
        return begin(kind, (between, name), other, str(tensor.numel() * tensor.itemsize))

    def isend(tensor, dst=None, group=None, tag=0, group_dst=None):
        return message(SEND, tensor, dst, group, group_dst)

    def irecv(tensor, src=None, group=None, tag=0, group_src=None):
        tensor.fill_(1)
        return message(RECEIVE, tensor, src, group, group_src)

    def batch(operations: Sequence[Any]) -> list[Any]:
        return [
            each.op(each.tensor, each.peer, each.group, each.tag)
            for each in sorted(operations, key=lambda each: each.op is isend)
        ]

    def collective(name, tensor, *_, group=None, async_op=False, **__):
        group = dist.group.WORLD if group is None else group
        ranks = tuple(dist.get_process_group_ranks(group))
        work = begin(COLLECTIVE, (ranks, names.get(group, "")), what=f"{name} {tensor.numel()}")
        return work if async_op else work.wait() and None

    new_group = dist.new_group

    def named_group(ranks: Sequence[int], **given: Any) -> Any:
        made = new_group(ranks, **given)
        names[made] = f"group {next(groups)}"  # the same on every rank: all make all, in one order
        return made

    def gather(values: list[Any], value: Any) -> None:
        program.append(Step(MEET))
        values[:] = [value] * len(values)

    computing = own_engine._Loop._compute

    def compute(self, action, number, received):
        made = computing(self, action, number, received)
        program.append(Step(COMPUTE, what=f"{action.stage}{KINDS[action.kind]}{number}"))
        return made

    timed = TorchRun.timed

    @contextlib.contextmanager
    def timed_action(self, kind, s, m=0):
        with timed(self, kind, s, m):
            yield
        program.append(Step(COMPUTE, what=f"{s}{KINDS[kind]}{m}"))

    keep, drain = Completions.keep, Completions.drain

    def kept(self, work, memory, note):
        program.append(Step(KEEP, work.number))
        keep(self, work, memory, note)

    def drained(self):
        program.append(Step(DRAIN))
        drain(self)

    replaced = {
        "isend": isend,
        "irecv": irecv,
        "batch_isend_irecv": batch,
        "all_reduce": functools.partial(collective, "all-reduce"),
        "broadcast": functools.partial(collective, "broadcast"),
        "barrier": lambda: program.append(Step(MEET)),
        "all_gather_object": gather,
        "new_group": named_group,
    }
    with contextlib.ExitStack() as stack:
        for name, value in replaced.items():
            for module in (dist, distributed_c10d):
                stack.enter_context(mock.patch.object(module, name, value))
        for owner, name, value in (
            (own_engine, "check_cuts", lambda *_: None),
            (own_engine._Loop, "_compute", compute),
            (TorchRun, "timed", timed_action),
            (Completions, "keep", kept),
            (Completions, "drain", drained),
            (stages.LinearStage, "_inputs", _inputs),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def _inputs(self: Any, microbatch: int, received: Sequence[Tensor]) -> list[Tensor]:
    """What a stage computes on, whatever the number says that it has received."""
    if self.s == 0:
        return [stages.sample(microbatch), torch.zeros(stages.BATCH, dtype=torch.float64)]
    activations, _, side = received
    return [activations.requires_grad_(), side.requires_grad_()]
