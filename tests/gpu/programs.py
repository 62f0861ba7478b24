"""What every rank of a run asks of its device and of NCCL, in order: the engines as they are.

Each rank runs alone, in this process: what it receives is made of ones, what it sends goes nowhere.
Whom it meets, in which group and in which order, depends on no value.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from partopt.documents.actions import KINDS
from partopt.documents.plan import Plan
from partopt.runtime import engine as own_engine
from partopt.runtime import postings
from partopt.runtime.actions import actions_of
from partopt.runtime.context import Context, Progress
from partopt.runtime.messages import Channel
from partopt.runtime.postings import Posting
from partopt.runtime.torch_engine import TorchRun, TorchStage
from partopt.runtime.updates import Sum, Updates
from partopt.schedules.order import Order
from tests.gpu.device import FakeDevice, installed
from tests.runtime import stages
from tests.runtime.cases import Case, Engine, run_case

COMPUTE, SEND, RECEIVE, COLLECTIVE, WAIT, MEET, SYNCHRONIZE = (
    "compute",
    "send",
    "receive",
    "collective",
    "wait",
    "meet",
    "synchronize",
)
COMPUTE_STREAM = 0


class Step(NamedTuple):
    """A step of a program: a call of the host.

    `number` is that of a work: of the one that it begins or waits for. `stream` is the current one.
    `group` are the ranks and the name of a communicator; of a message `peer` is the other rank, and
    `what` says which it is, of compute the action.
    """

    kind: str
    number: int = -1
    group: tuple[tuple[int, ...], str] = ((), "")
    peer: int = -1
    what: str = ""
    stream: int = COMPUTE_STREAM


class _Noted(FakeDevice):
    """A device that notes where the host waits for all of it."""

    def __init__(self, program: list[Step]) -> None:
        super().__init__()
        self.program = program

    def synchronize(self, *_: Any) -> None:
        self.program.append(Step(SYNCHRONIZE))

    @property
    def place(self) -> int:
        """The number of the stream that is current."""
        return self.streams.index(self.current)


class _Work:
    def __init__(self, device: _Noted, number: int) -> None:
        self.device, self.number = device, number

    def wait(self) -> bool:
        self.device.program.append(Step(WAIT, self.number, stream=self.device.place))
        return True

    def is_completed(self) -> bool:
        return True


def posted_ahead(actions: int) -> Callable[[Plan, Order], dict[int, list[Posting]]]:
    """What rules out nothing: receives as many actions before their use, in no common sequence."""

    in_sequence = postings.postings_of

    def postings_of(plan: Plan, order: Order) -> dict[int, list[Posting]]:
        found = {}
        for rank, own in in_sequence(plan, order).items():
            uses = {each.message_in: each.place for each in actions_of(order, rank)}
            found[rank] = sorted(
                each._replace(place=2 * max(0, uses[each.what] - actions))
                for each in own
                if each.what in uses  # else an exchange
            )
        return found

    return postings_of


def program_of(case: Case, rank: int, engine: Engine) -> list[Step]:
    """The program of a rank in a case of `tests.runtime.cases`, on an engine.

    A message goes over the communicator of its group, which is bound to its device.
    """
    program: list[Step] = []
    store = FakeStore()
    dist.init_process_group("fake", store=store, rank=rank, world_size=case.plan.world_size)
    try:
        with installed(_Noted(program)) as device, _noted(program, device):
            cpu = torch.device("cpu")
            context = Context(rank, case.plan.world_size, cpu, Progress(), backend="nccl")
            run_case(case, context, engine)
    finally:
        dist.destroy_process_group()
    return program


@contextlib.contextmanager
def _noted(program: list[Step], device: _Noted) -> Iterator[None]:
    numbers, groups = itertools.count(), itertools.count()
    names: dict[Any, str] = {}  # of groups, by themselves
    labels: dict[int, tuple[str, Tensor]] = {}  # of messages, by the identity of their tensors

    def begin(kind: str, group: tuple[tuple[int, ...], str], peer: int = -1, what: str = "") -> Any:
        program.append(Step(kind, next(numbers), group, peer, what, device.place))
        return _Work(device, program[-1].number)

    def message(kind: str, tensor: Tensor, peer: int | None, group: Any, place: int | None) -> Any:
        ranks = tuple(dist.get_process_group_ranks(group))
        other = ranks[place] if peer is None else peer  # type: ignore[index]
        return begin(kind, (ranks, names[group]), other, labels.pop(id(tensor), ("byte",))[0])

    def isend(tensor, dst=None, group=None, tag=0, group_dst=None):
        return message(SEND, tensor, dst, group, group_dst)

    def irecv(tensor, src=None, group=None, tag=0, group_src=None):
        tensor.fill_(1)
        return message(RECEIVE, tensor, src, group, group_src)

    def collective(name, tensor, *_, group=None, async_op=False, **__):
        group = dist.group.WORLD if group is None else group
        ranks = tuple(dist.get_process_group_ranks(group))
        label = labels.pop(id(tensor), (f"{name} {tensor.numel()}",))[0]
        work = begin(COLLECTIVE, (ranks, names.get(group, "")), what=label)
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

    timed = TorchRun.time_action

    @contextlib.contextmanager
    def timed_action(self, kind, s, m=0):
        with timed(self, kind, s, m):
            yield
        program.append(Step(COMPUTE, what=f"{s}{KINDS[kind]}{m}"))

    def labelled(transfer):
        def begin_labelled(self, message, route):
            labels[id(message)] = f"{KINDS[route.kind]}{route.stage}.{route.microbatch}", message
            return transfer(self, message, route)

        return begin_labelled

    def labelled_batch(kind, operations, to):
        def made(self, m):
            found = operations(self, m)
            for part, each in enumerate(found):
                labels[id(each.tensor)] = f"{kind}{self.stage_index + to}.{m}.{part}", each.tensor
            return found

        return made

    summing, take_next = Updates._sum, Sum._take_next

    def sum_of(self, s, group):
        made = summing(self, s, group)
        made.stage = s
        return made

    def take_bucket(self):
        number, cat = len(self.taken), torch.cat

        def cat_labelled(tensors):
            whole = cat(tensors)
            labels[id(whole)] = f"stage {self.stage} bucket {number}", whole
            return whole

        with mock.patch.object(torch, "cat", cat_labelled):
            take_next(self)

    replaced = {
        "isend": isend,
        "irecv": irecv,
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
            (TorchRun, "time_action", timed_action),
            (Channel, "send", labelled(Channel.send)),
            (Channel, "receive", labelled(Channel.receive)),
            (TorchStage, "get_fwd_send_ops", labelled_batch("F", TorchStage.get_fwd_send_ops, 0)),
            (TorchStage, "get_bwd_send_ops", labelled_batch("B", TorchStage.get_bwd_send_ops, 0)),
            (TorchStage, "get_fwd_recv_ops", labelled_batch("F", TorchStage.get_fwd_recv_ops, -1)),
            (TorchStage, "get_bwd_recv_ops", labelled_batch("B", TorchStage.get_bwd_recv_ops, 1)),
            (Updates, "_sum", sum_of),
            (Sum, "_take_next", take_bucket),
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
