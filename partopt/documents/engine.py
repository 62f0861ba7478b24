"""How a trainer runs a plan: what its engine does, and the layout that its configuration says."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from partopt import documents
from partopt.documents.profile import Bytes, Count
from partopt.documents.stage import Buffers, Gradients, Shard, Stage
from partopt.errors import PartoptError, did_you_mean

# what of a block is made again by name, as Megatron calls it
MODULES = ("core_attn", "mla_up_proj", "layernorm", "mlp", "moe_act", "moe", "shared_experts")
_ANY = f"({'|'.join(MODULES)})"
# what is made again for the backward, and what is kept for it: nothing; attention's scores; blocks
# one by one, each keeps its input; whole stages, each keeps its input
Recomputation = Literal["none", "selective", "blocks", "stage"]
Recompute = Literal["never", "always", "auto"]  # whether stages do, and which
Messages = Literal["packed", "split"]
AllReduce = Literal["overlap", "blocking"]
_INSIDE = ("tp", "cp", "ep", "etp", "recompute", "modules")  # parts inside the layers of a profile
OF_SCHEDULES = ("waits", "in_turn")  # facts of an engine that name schedules
# those that the layout of a transformer says, whatever its trainer does
OF_LAYOUTS = ("optimizer_bytes", "gathered_bytes", "on_host")
STATE = 12  # bytes of an optimizer's state for a parameter: a float32 copy and two moments


class Engine(documents.StrictStruct, frozen=True, kw_only=True):
    """What the engine of a trainer does.

    `waits` are the schedules under which devices wait for their messages; under others these
    overlap with compute. `in_turn` are those whose joined forwards and backwards it runs one after
    the other. `messages` says whether the tensors of a cut are one message or one each,
    `gradients` the number format in which gradients are kept and exchanged, `allreduce` whether
    replicas exchange them beside the last backward, in buckets of `bucket_bytes`, or behind it.
    `buffers` says which microbatches have receive buffers: `one` where what is received is what its
    stage keeps, and a gradient is gone with its backward. `recompute` and `shard` are the ways in
    which it saves memory. `optimizer_bytes` of state are kept for each parameter, `reserve_bytes`
    of a device are for what is not the model's; where they are None `partopt.cost.memory` says how
    many. `gathered_bytes` of each parameter are gathered where replicas share parameters; unset,
    all that it has. Shares may be `on_host`, in none of a device's memory. With `whole_sums` every
    replica has all sums of gradients where it holds a share of the state alone.
    """

    waits: tuple[str, ...] = ()
    in_turn: tuple[str, ...] = ()
    messages: Messages = "packed"
    gradients: Gradients = "parameters"
    allreduce: AllReduce = "overlap"
    bucket_bytes: Count = 25 * 2**20
    buffers: Buffers = "flight"
    recompute: tuple[Recomputation, ...] = ("none",)
    shard: tuple[Shard, ...] = ("none",)
    optimizer_bytes: Annotated[float, msgspec.Meta(ge=0)] | None = None
    reserve_bytes: Bytes | None = None
    gathered_bytes: Annotated[float, msgspec.Meta(gt=0)] | msgspec.UnsetType = msgspec.UNSET
    on_host: bool | msgspec.UnsetType = msgspec.UNSET
    whole_sums: bool | msgspec.UnsetType = msgspec.UNSET

    def find_differences(self, other: Engine, schedule: str, shard: Shard) -> list[str]:
        """The facts that plans of a schedule and share rest on, others in another engine."""
        names = ["messages", "gradients", "allreduce", "buffers", "optimizer_bytes"]
        names += ["gathered_bytes", "on_host"] + (["whole_sums"] if shard != "none" else [])
        names += ["bucket_bytes"] if self.allreduce == other.allreduce == "overlap" else []
        found = [name for name in names if getattr(self, name) != getattr(other, name)]
        of_schedules = [
            name
            for name in OF_SCHEDULES
            if (schedule in getattr(self, name)) != (schedule in getattr(other, name))
        ]
        return of_schedules + found

    @property
    def of_layouts(self) -> Engine:
        """The same where blocks keep what they receive, as a transformer's do."""
        return msgspec.structs.replace(self, buffers="one") if self.buffers == "flight" else self

    @property
    def recomputes_blocks(self) -> bool:
        """Whether stages that recompute do so layer by layer, each of which keeps its input.

        They do so within the backward under every schedule.
        """
        return "blocks" in self.recompute and "stage" not in self.recompute


# the engines that execute plans by `partopt run`; plans are for its own where no trainer is named
PARTOPT, TORCH = "partopt", "torch"
_JOINING = ("dualpipe", "dualpipev")
OWN = Engine(
    in_turn=_JOINING, recompute=("none", "stage"), shard=("none", "optimizer"), whole_sums=True
)
OF_TORCH = Engine(
    in_turn=_JOINING,
    messages="split",
    allreduce="blocking",
    buffers="all",
    recompute=("none", "stage"),
    shard=("none", "optimizer"),
    whole_sums=True,
)


class BlockRecomputation(NamedTuple):
    """What of a block is made again: nothing, some of it, or "always" all.

    "selective" is what the trainer means by it, or these `modules`. A stage may make only its first
    so many `blocks` again. "auto" is anything else.
    """

    way: Literal["never", "selective", "always", "auto"]
    blocks: int | None = None
    modules: tuple[str, ...] = ()

    @property
    def granularity(self) -> Literal["none", "selective", "full"]:
        """Nothing, parts of blocks or whole blocks, as Megatron and those after it call them."""
        return "full" if self.is_whole else "none" if self.way == "never" else "selective"

    @property
    def is_whole(self) -> bool:
        """Whether whole blocks are made again."""
        return self.way in ("always", "auto")


@lru_cache(maxsize=4096)  # searches ask it of every layout, again and again
def _recomputation_of(
    recompute: Recompute | Literal["selective"] | int | None, modules: str | None
) -> BlockRecomputation:
    made = tuple(modules.split("+")) if modules else ()
    if isinstance(recompute, int):
        return BlockRecomputation("always", recompute, made)
    return BlockRecomputation(recompute or "never", None, made)


class Layout(documents.StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    """How a model lies on devices, as trainers say it; None where nothing says it.

    Degrees are `tp` of tensors, `cp` of context, `ep` of experts and `etp` of the tensors of one,
    `pp` devices of a pipeline with `chunks` stages each, and `dp` pipelines side by side, None
    where stages have unequal replicas. `microbatch` is its samples. `recompute` is of all stages: a
    number is of the blocks that each makes again, the first; "selective" is what its trainer means
    by it, or `modules` of a block joined by +, "auto" anything else.
    """

    tp: Count | None = None
    cp: Count | None = None
    ep: Count | None = None
    etp: Count | None = None
    pp: Count | None = None
    chunks: Count | None = None
    dp: Count | None = None
    microbatch: Count | None = None
    recompute: Recompute | Literal["selective"] | Count | None = None
    modules: Annotated[str, msgspec.Meta(pattern=rf"^{_ANY}(\+{_ANY})*$")] | None = None
    shard: Shard | None = None
    schedule: str | None = None

    @property
    def recomputation(self) -> BlockRecomputation:
        """What of a block is made again: nothing where the layout does not say it."""
        return _recomputation_of(self.recompute, self.modules)

    @property
    def shares_gradients(self) -> bool:
        """Whether replicas hold shares of gradients, alone or with those of parameters."""
        return self.shard in ("gradients", "parameters")

    @property
    def scatters_early(self) -> bool:
        """Whether every backward scatters its gradients: they are in shares, without a pipeline."""
        return self.shares_gradients and (self.pp or 1) == 1

    def with_inside(self, inside: Layout) -> Layout:
        """The layout with what is inside the layers of its profile: degrees, recomputation."""
        parts = {name: getattr(inside, name) for name in _INSIDE}
        return msgspec.structs.replace(self, **parts)

    def inside_text(self) -> str:
        """What is inside the layers of a profile, and the microbatch, as `parse` reads it."""
        names = (*_INSIDE, "microbatch")
        return ",".join(f"{name}={value}" for name in names if (value := getattr(self, name)))

    @classmethod
    def parse(cls, text: str) -> Layout:
        """The layout of `pp=4,chunks=2,microbatch=1`.

        Raises PartoptError for unknown and repeated parts, and for values of other types.
        """
        found: dict[str, Any] = {}
        for part in text.split(","):
            key, equals, value = (word.strip() for word in part.partition("="))
            unknown, bare = key not in cls.__struct_fields__, not equals or not value
            if unknown or bare or key in found:
                what = "no part of a layout" if unknown else "each part once, with a value"
                hint = (
                    did_you_mean(key, cls.__struct_fields__) if unknown else "write pp=4,chunks=2"
                )
                raise PartoptError(
                    f"`layout={part}`: {what}", hint, code="invalid-option", option="layout"
                )
            found[key] = int(value) if value.isdecimal() else value
        layout = cls(**found)
        documents.refuse(layout.faults(), "`layout`")
        return layout

    @classmethod
    def of(cls, stages: Sequence[Stage], copies: int, **fields: Any) -> Layout:
        """The layout of a plan's stages, of which devices may run `copies`; `fields` are the rest.

        Those are `tp`, `microbatch`, `shard` and `schedule`.
        """
        pp, replicas = len({tuple(stage.ranks) for stage in stages}), {s.replicas for s in stages}
        again = [stage for stage in stages if stage.recompute]
        partly = {stage.blocks_again for stage in again if stage.first_again is not None}
        most = max((stage.blocks_again for stage in again), default=0)
        recompute: Recompute | int = "auto"
        if len(again) == len(stages) and partly <= {most}:
            recompute = most if partly else "always"
        return cls(
            pp=pp,
            chunks=len(stages) // pp,
            dp=replicas.pop() // copies if len(replicas) == 1 else None,
            recompute=recompute if again else "never",
            **fields,
        )
