"""What the ranks of a group exchange, in seconds on links that are not there; and such a group.

All are rings (Patarasuk and Yuan, 2009; Thakur, Rabenseifner and Gropp, 2005): an all-reduce is a
reduce-scatter and an all-gather, so that each of these, and what else passes once around the ring,
takes half of it.

The ranks are pretended: this process is rank 0, and torch's fake process group lets every
collective return at once. A model whose build makes it parallel over the group finds as many ranks
as it asks for; a model of transformers that does not is cut as its class says
(`base_model_tp_plan`), by transformers itself.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup, distributed_c10d

from partopt import documents
from partopt.documents.profile import Count
from partopt.documents.topology import Topology, group_levels
from partopt.errors import PartoptError
from partopt.profiler.group import RankGroup, check_parallel
from partopt.profiler.memory import is_out_of_memory
from partopt.profiler.operations import Operation, storages_in
from partopt.profiler.source import describe
from partopt.profiler.tensors import local_tensors

# operators by how they begin without underscores; what is not here passes nothing, or what a rank
# sends, which is counted where it is received
_TWICE_AROUND = "allreduce"
_ONCE_AROUND = (
    "allgather",
    "reducescatter",
    "alltoall",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
)
_BETWEEN_TWO = "recv"


@dataclass(frozen=True)
class Interconnect:
    """The links of a topology, of which a group of consecutive ranks uses the innermost."""

    topology: Topology

    @classmethod
    def of(
        cls, group: int, topology: str | os.PathLike[str] | Topology | None
    ) -> Interconnect | None:
        """The links of a group of so many ranks; None for one rank.

        Raises PartoptError for a number that does not divide the topology, and for one of the two
        without the other.
        """
        documents.check_option("group", group, Count, "8 ranks are a server of eight devices")
        if (group > 1) != (topology is not None):
            option, what, missing = (
                ("group", "its ranks exchange over the links of a topology", "topology")
                if group > 1
                else ("topology", "says over which links a group of ranks exchanges", "group")
            )
            raise PartoptError(
                f"`{option}`: {what}, and there is no `{missing}`",
                f"give `{missing}` too, or leave `{option}` out",
                code="unpaired-option",
                option=option,
            )
        if topology is None:
            return None
        loaded = topology if isinstance(topology, Topology) else Topology.load(topology)
        group_levels(loaded.levels, group)
        return cls(loaded)

    def seconds(self, call: Operation) -> float:
        """Seconds of one call of a collective operator.

        The bytes are those of the whole: of an all-gather what every rank has in the end.
        """
        # import numba, for groups alone
        from partopt.cost.collectives import allreduce_s
        from partopt.cost.links import transfer_s

        name = str(call.func._schema.name).rpartition("::")[2].replace("_", "")
        values = [*call.arguments, *call.options.values(), call.result]
        whole = max(sum(each.nbytes for each in storages_in(value)) for value in values)
        if name.startswith(_BETWEEN_TWO):
            return transfer_s(whole, 1, self.topology)
        if not name.startswith((_TWICE_AROUND, *_ONCE_AROUND)):
            return 0.0
        twice_s = allreduce_s(whole, range(_members(call)), self.topology)
        return twice_s if name.startswith(_TWICE_AROUND) else twice_s / 2


def is_collective(call: Operation) -> bool:
    """Whether an operation exchanges something between ranks."""
    return "c10d" in call.func.namespace


def _members(call: Operation) -> int:
    """The number of ranks that take part."""
    name = call.argument("group_name")
    if isinstance(name, str):
        resolve: Any = vars(distributed_c10d)["_resolve_process_group"]
        return int(resolve(name).size())
    return int(ProcessGroup.unbox(call.argument("process_group")).size())


@dataclass
class PretendedGroup(RankGroup):
    """Ranks of which this one is there alone: all hold what it holds."""

    def agree(self, value: Any) -> Any:
        """The value."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """The value, once for each rank."""
        return [value] * self.ranks

    def settle(self) -> None:
        """Nothing: no thread holds anything."""

    def is_out_of_memory(self, error: Exception) -> bool:
        """Whether `error` says that this process has no memory left."""
        return is_out_of_memory(error)


@contextlib.contextmanager
def open_pretended_group(ranks: int) -> Iterator[RankGroup]:
    """The context in which this process is rank 0 of `ranks`; of one rank, nothing changes."""
    if ranks == 1:
        yield RankGroup()
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized() or "RANK" in os.environ:
        raise PartoptError(
            f"`group={ranks}`: this process is in a group of ranks already",
            "estimate in one process, without torchrun",
            code="conflicting-options",
            option="group",
        )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield PretendedGroup(0, ranks)
    finally:
        dist.destroy_process_group()


def make_parallel(model: nn.Module, group: RankGroup) -> None:
    """Cut a model of transformers as its class says, unless its build has done so.

    Raises PartoptError where it cannot be cut so, or its ranks have data of their own.
    """
    if group.ranks == 1:
        return
    check_parallel(model, group)
    plan_of: Any = getattr(model, "_resolve_parallel_plans", None)
    cut = any(each is not local_tensors(each)[0] for each in model.parameters())
    if plan_of is None or cut:
        return
    config: Any = model.config
    text = config.get_text_config()
    for name in ("num_key_value_heads", "num_attention_heads"):
        heads = getattr(text, name, None)
        if isinstance(heads, int) and heads % group.ranks:
            raise PartoptError(
                f"{heads} heads do not divide among {group.ranks} ranks: `{name}` of "
                f"{type(text).__name__}",
                "choose a number of ranks that divides them",
                code="unfit-group",
                ranks=group.ranks,
            )
    try:
        from torch.distributed.device_mesh import init_device_mesh
        from transformers.distributed.configuration_utils import DistributedConfig
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        plan = plan_of(DistributedConfig(tp_size=group.ranks))[0]
        mesh = init_device_mesh("cpu", (group.ranks,), mesh_dim_names=("tp",))
        apply_tensor_parallelism(model, mesh, plan)
    except Exception as error:
        raise PartoptError(
            f"transformers cannot cut {type(model).__name__} for {group.ranks} ranks: it "
            f"{describe(error)}",
            "make it parallel in build, by DTensor or by hand",
            code="not-parallel",
        ) from error
