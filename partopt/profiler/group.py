"""A group of ranks that runs one model together: one planning device.

The model's build makes it parallel over the group: tensor, sequence or context parallelism, by
hand or by DTensor. Of ranks that `torchrun` started every one takes the same steps on the same
inputs; the times are rank 0's, the memory the largest of the ranks, the bytes at cuts those of one
rank.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from partopt.errors import PartoptError
from partopt.profiler.device import is_out_of_memory
from partopt.profiler.operations import Operation, Watch
from partopt.profiler.tensors import Inputs, tensors_in

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
SEED = 0
SETTLING_S = 0.01
LOOK_S = 0.5  # between looks at whether another rank has no memory left
END_S = 30.0  # until this rank ends where it still waits for that one
_FULL = "partopt/out_of_memory"  # in the store: the size at which a rank had no memory left

# parallelism over data, by the class of a module or by the name of a dimension of its mesh
_DATA_MODULES = {
    "FSDPModule": "FSDP gathers parameters for each microbatch, which a pipeline does not",
    "FullyShardedDataParallel": "FSDP gathers parameters for each microbatch, which a pipeline "
    "does not",
    "DistributedDataParallel": "DDP exchanges gradients in each backward, a pipeline once a batch",
}
_DATA_DIMENSIONS = ("dp", "ddp", "data", "fsdp", "hsdp", "replicate", "shard", "ep", "expert")


@dataclass
class RankGroup:
    """The ranks that measure together; of one rank, nothing is exchanged.

    `size` is the microbatch size that is measured. `ended` says that a rank ran out of memory: what
    the ranks exchange from then on is undefined.
    """

    rank: int = 0
    ranks: int = 1
    size: int = 0
    ended: bool = False
    store: Any = None

    @property
    def exchanges(self) -> bool:
        """Whether there are others to ask."""
        return self.ranks > 1

    def agree(self, value: Any) -> Any:
        """The value of rank 0."""
        held = [value]
        if self.exchanges:
            dist.broadcast_object_list(held, src=0)
        return held[0]

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in their order."""
        held = [value] * self.ranks
        if self.exchanges:
            dist.all_gather_object(held, value)
        return held

    def seed(self) -> None:
        """Draw the same random numbers on every rank from here on; alone, those that come."""
        if self.ranks > 1:
            torch.manual_seed(SEED)
            np.random.seed(SEED)
            random.seed(SEED)

    def let_threads_finish(self) -> None:
        """Let the threads of the collectives that are done give back what they hold."""
        if self.exchanges:
            time.sleep(SETTLING_S)

    def is_out_of_memory(self, error: Exception) -> bool:
        """Whether `error` says that a rank has no memory left.

        The rank that ran out tells the others, which wait for it in a collective: it ends, and they
        get the error of a broken connection, or of communicators that `watch` aborted.
        """
        full = is_out_of_memory(error)
        if self.exchanges and full:
            self.store.set(_FULL, str(self.size))
            self.ended = True
        return full or self.was_ended()

    def was_ended(self) -> bool:
        """Whether a rank ran out of memory at this size, or one before it."""
        if self.exchanges and not self.ended and self.store.check([_FULL]):
            self.ended = int(self.store.get(_FULL)) <= self.size
        return self.ended

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """In this context, end this rank soon after another has no memory left.

        Under NCCL a rank waits for one that ended as for one that is slow. Its communicators are
        aborted; where it waits all the same the process ends, and what `ProfileSettings.keep` was
        given is all that is left.
        """
        done = threading.Event()

        def look() -> None:
            while not done.wait(LOOK_S):
                if self.ended:  # this rank itself, or it knows
                    return
                if self.store.check([_FULL]):
                    break
            nccl = dist.is_initialized() and dist.get_backend() == "nccl"
            if nccl and not done.wait(LOOK_S):
                with contextlib.suppress(Exception):
                    distributed_c10d._abort_process_group()
            # it may hear of it by itself: gloo's connections break where a process ends
            if not (done.wait(END_S) or self.ended):
                text = "error: another rank of the group ran out of memory: this one ends, too"
                print(text, file=sys.stderr, flush=True)
                os._exit(1)

        watcher = threading.Thread(target=look, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()


@contextlib.contextmanager
def open_group(device: torch.device) -> Iterator[RankGroup]:
    """The group that `torchrun` started, or that is there already; else one rank.

    The process group is made where there is none, gloo on a CPU and nccl on CUDA, and ended with
    the context.
    """
    there = dist.is_available() and dist.is_initialized()
    started = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    if not there and not (started and int(os.environ["WORLD_SIZE"]) > 1):
        yield RankGroup()
        return
    if device.type == "cuda" and "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not there:
        dist.init_process_group(BACKENDS[device.type])
    store = distributed_c10d._get_default_store()
    group = RankGroup(dist.get_rank(), dist.get_world_size(), store=store)
    try:
        group.seed()
        with group.watch() if group.ranks > 1 else contextlib.nullcontext():
            yield group
        if not (there or group.ended):
            dist.barrier()  # a rank that ends early closes what the others still read
    finally:
        if not there and dist.is_initialized():
            dist.destroy_process_group()


def check_group(group: RankGroup, compiled: bool) -> None:
    """Raise PartoptError for options of measuring that do not go with a group."""
    if group.ranks > 1 and compiled:
        raise PartoptError(
            f"`compile`: does not go with a group of {group.ranks} ranks",
            "leave `compile` out: the layers of a group are measured as they are",
            code="conflicting-options",
            option="compile",
        )


def check_parallel(model: nn.Module, group: RankGroup) -> None:
    """Raise PartoptError where the ranks of a group have different data.

    Plans give stages replicas; within a group every rank works on the same samples.
    """
    for name, module in model.named_modules() if group.ranks > 1 else ():
        for cls in type(module).__mro__:
            if cls.__name__ in _DATA_MODULES:
                raise _not_in_a_group(f"{name or 'the model'}: {_DATA_MODULES[cls.__name__]}")
    for name, parameter in model.named_parameters() if group.ranks > 1 else ():
        mesh = getattr(parameter, "device_mesh", None)
        for dimension in getattr(mesh, "mesh_dim_names", None) or ():
            if dimension.split("_")[0] in _DATA_DIMENSIONS:
                what = f'{name}: lies on a mesh with the dimension "{dimension}", ranks with other'
                raise _not_in_a_group(f"{what} data")


def check_same_inputs(size: int, inputs: Inputs, group: RankGroup) -> None:
    """Raise PartoptError, on every rank, where the ranks have different samples.

    Experts over ranks with other data, made by hand, are known by that alone.
    """
    if group.ranks == 1:
        return
    ranks = group.gather([_digest(tensor) for tensor in tensors_in(inputs)])
    other = next((rank for rank, found in enumerate(ranks) if found != ranks[0]), None)
    if other is not None:
        raise PartoptError(
            f"example_inputs({size}) is not the same on rank {other} as on rank 0: in a group "
            "every rank works on the same samples",
            "give all ranks the same; under context parallelism take a rank's part of the "
            "sequence inside the model; what has other samples is a replica, and plans make those",
            code="data-parallel-group",
            rank=other,
        )


def _digest(tensor: Tensor) -> tuple[Any, ...]:
    """What tells tensors apart: of one that is cut over the ranks, and of a sparse one, no values.

    The random numbers of all ranks come from one seed.
    """
    plain = not is_traceable_wrapper_subclass(tensor) and tensor.layout is torch.strided
    data: Any = tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy() if plain else b""
    return tuple(tensor.shape), str(tensor.dtype), zlib.crc32(data)


class _Exchanges(Watch):
    """Sees whether the ranks exchange anything."""

    seen = False

    def after(self, call: Operation) -> None:
        """Note a collective."""
        self.seen = self.seen or "c10d" in call.func.namespace


@contextlib.contextmanager
def expect_collectives() -> Iterator[None]:
    """Raise PartoptError where a step in this context exchanges nothing between the ranks."""
    exchanges = _Exchanges()
    with exchanges:
        yield
    if not exchanges.seen:
        raise PartoptError(
            "the ranks of the group exchange nothing in a step: each runs the whole model",
            "make it parallel in build, or measure it on one device, without torchrun",
            code="not-parallel",
        )


def _not_in_a_group(what: str) -> PartoptError:
    return PartoptError(
        what,
        "measure a group of tensor, sequence or context parallelism alone: plans replicate its "
        "stages",
        code="data-parallel-group",
    )
