"""Whether a trainer can say a plan: every reason why not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from partopt.documents.plan import Plan
from partopt.schedules import schedule
from partopt.schedules.placement import STRAIGHT
from partopt.trainers.parts import BLOCK, EMBEDDING, FURTHER, HEAD, NORM, Part, missing_kinds
from partopt.trainers.trainer import ANYWHERE, BLOCKS, HEADS, Cuts, Trainer, rank_order

# M   microbatches of an iteration
# d   pipelines side by side, the replicas of every stage


def find_faults(plan: Plan, trainer: Trainer, parts: Sequence[Part]) -> Iterator[str]:
    """What `trainer` cannot say of `plan`, in words; nothing where it can say all of it."""
    says = trainer.says
    yield from _schedule(plan, trainer)
    yield from _replicas(plan, trainer)
    yield from _recomputation(plan, trainer)
    if len(plan.stages) < says.least_stages and not plan.transformer:
        yield f"it has one stage, and a pipeline has {says.least_stages} or more"
    if plan.topology.group_ranks > 1 and "tp" not in says.degrees:
        yield f"each device is a group of {plan.topology.group_ranks} ranks"
    for name in ("cp", "ep", "etp"):
        if (getattr(plan.layout, name) or 1) > 1 and name not in says.degrees:
            yield f"it has {name} {getattr(plan.layout, name)}"
    model = plan.transformer.model if plan.transformer else None
    spread = model and model.recurrence and (plan.layout.cp or 1) > 1
    if spread and not says.spreads_recurrences:
        yield "its recurrences have no context parallelism"
    by_fact = plan.transformer and "fsdp" in trainer.choices and len(plan.stages) == 1
    if plan.shard not in trainer.engine.shard and not (by_fact and plan.layout.shares_gradients):
        yield f"replicas hold shares of their {plan.shard} (`shard`)"
    if not says.ties:
        flows = [flow for flow in plan.communication if flow.kind == "tied"]
        names = dict.fromkeys(name for flow in flows for name in flow.parameters)
        if names:
            yield f"stages part layers that share {', '.join(names)} (`tied=together`)"
    if says.cuts != ANYWHERE:
        yield from _cuts(plan, says.cuts, parts)
    yield from trainer.faults(plan)


def may_begin(parts: Sequence[Part], cuts: Cuts) -> list[int]:
    """The layers, of those that are `parts`, with which a stage may begin; layer 0 always may."""
    if cuts == ANYWHERE:
        return list(range(len(parts)))
    last = max((part.number for part in parts), default=0)

    def whole(part: Part) -> Part:
        """What a trainer keeps together with `part`: the part that stands for it."""
        if cuts == BLOCKS and part.kind != BLOCK:
            return Part(BLOCK, 0 if part.kind == EMBEDDING else last)
        return Part(behind) if cuts == HEADS and part.kind == NORM else part

    behind = FURTHER if Part(FURTHER) in parts else HEAD
    wholes = [whole(part) for part in parts]
    return [i for i, part in enumerate(wholes) if i == 0 or part != wholes[i - 1]]


def _schedule(plan: Plan, trainer: Trainer) -> Iterator[str]:
    if trainer.schedules is None:
        return
    entry = schedule(plan.schedule)
    if plan.schedule not in trainer.schedules:
        why = ", which never flushes" if entry.asynchronous else ""
        yield f"the schedule is {plan.schedule}{why}; it runs {', '.join(trainer.schedules)}"
    elif not entry.takes_warmup and entry.shape == STRAIGHT:
        replicas = [stage.replicas for stage in plan.stages]
        usual = [
            entry.counts(s, replicas, plan.microbatches).warmup for s in range(len(plan.stages))
        ]
        if [stage.warmup for stage in plan.stages] != usual:
            yield f"its warm-up is not that of {plan.schedule}"


def _recomputation(plan: Plan, trainer: Trainer) -> Iterator[str]:
    able, how = trainer.says.recomputed, plan.layout.recompute
    alike = "`recompute=always` or `never`"
    if how != "never" and trainer.engine.recompute == ("none",):
        yield "stages recompute activations (`recompute=never`)"
    elif how in ("never", "always") or trainer.schedules is None:
        return
    elif len({stage.recompute for stage in plan.stages}) > 1 and able != "each":
        yield f"some stages recompute activations and some do not ({alike})"
    elif able == "all" or not trainer.engine.recomputes_blocks:
        if any(stage.first_again is not None for stage in plan.stages):
            yield f"stages recompute some of their blocks ({alike})"
    elif how == "auto" and able == "first":
        yield "stages recompute unequal numbers of blocks (`recompute=4`)"


def _replicas(plan: Plan, trainer: Trainer) -> Iterator[str]:
    says, counts = trainer.says, {stage.replicas for stage in plan.stages}
    if says.replicas == "any":
        return
    if len(counts) > 1:
        yield f"stages have unequal replicas, {plan.shape}"
        return
    if says.replicas == "one" and counts != {1}:
        yield f"stages have {plan.stages[0].replicas} replicas (`replication=none`)"
        return
    M, d = plan.microbatches, plan.stages[0].replicas
    if trainer.schedules is not None and M is not None and M % d:
        yield f"{M} microbatches are not a multiple of {d} replicas"
    if plan.copies > 1:
        yield "each device holds stages of two copies of the model"
    elif says.orders and not set(rank_order(plan)) & set(says.orders):
        used = {rank for stage in plan.stages for rank in stage.ranks}
        idle = [rank for rank in range(max(used)) if rank not in used]
        wanted = " or ".join(f"a {order.removesuffix('s')}" for order in says.orders)
        if idle:
            yield f"rank {idle[0]} is idle, and others behind it are not"
        else:
            yield f"its ranks are not numbered so that those of {wanted} follow each other"


def _cuts(plan: Plan, cuts: Cuts, parts: Sequence[Part]) -> Iterator[str]:
    yield from (f"the model has no {kind} (`map`)" for kind in missing_kinds(parts))
    may = set(may_begin(parts, cuts))
    for s, stage in enumerate(plan.stages):
        if stage.start not in may:
            before, part = parts[stage.start - 1], parts[stage.start]
            where = f"inside {part}" if before == part else f"between {before} and {part}"
            yield f"stage {s} begins with {stage.modules[0]}, {where}"
