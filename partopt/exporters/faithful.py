"""Whether a trainer can say a plan: every reason why not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from partopt.documents.plan import Plan
from partopt.exporters.blocks import BLOCK, EMBEDDING, HEAD, NORM, Part
from partopt.exporters.target import ANYWHERE, BLOCKS, HEADS, Cuts, Ranks, Target
from partopt.schedules import schedule
from partopt.schedules.layout import STRAIGHT

# P   devices of a pipeline
# d   pipelines side by side, the replicas of every stage


def find_faults(plan: Plan, target: Target, parts: Sequence[Part]) -> Iterator[str]:
    """What `target` cannot say of `plan`, in words; nothing where it can say all of it."""
    yield from _schedule(plan, target)
    yield from _replicas(plan, target)
    yield from _recomputation(plan, target)
    if len(plan.stages) < target.least_stages:
        yield f"it has one stage, and a pipeline has {target.least_stages} or more"
    if plan.topology.group_ranks > 1 and not target.groups:
        yield f"each device is a group of {plan.topology.group_ranks} ranks"
    if plan.memory_rules.shard not in target.shards:
        yield f"replicas hold shares of their {plan.memory_rules.shard} (`shard`)"
    if not target.ties and (names := parted_ties(plan)):
        yield f"stages part layers that share {', '.join(names)} (`tied=together`)"
    if target.cuts != ANYWHERE:
        yield from _missing(parts)
        yield from _cuts(plan, target.cuts, parts)
    yield from target.faults(plan)


def may_begin(parts: Sequence[Part], cuts: Cuts) -> list[int]:
    """The layers, of those that are `parts`, with which a stage may begin; layer 0 always may."""
    if cuts == ANYWHERE:
        return list(range(len(parts)))
    last = max((part.number for part in parts), default=0)
    whole = [_whole(part, cuts, last) for part in parts]
    return [i for i, own in enumerate(whole) if i == 0 or own != whole[i - 1]]


def _whole(part: Part, cuts: Cuts, last: int) -> Part:
    """What a trainer keeps together with `part`: the part that stands for it."""
    if cuts == BLOCKS and part.kind != BLOCK:
        return Part(BLOCK, 0 if part.kind == EMBEDDING else last)
    return Part(HEAD) if cuts == HEADS and part.kind == NORM else part


def parted_ties(plan: Plan) -> list[str]:
    """The parameters that layers of several stages share."""
    named = (name for flow in plan.communication if flow.kind == "tied" for name in flow.parameters)
    return list(dict.fromkeys(named))


def _has_usual_warmup(plan: Plan) -> bool:
    """Whether stages do as many forwards first as the schedule does by itself."""
    entry = schedule(plan.schedule)
    if entry.shape != STRAIGHT:
        return True
    replicas = [stage.replicas for stage in plan.stages]
    return all(
        stage.warmup == entry.counts(s, replicas, plan.microbatches).warmup
        for s, stage in enumerate(plan.stages)
    )


def rank_order(plan: Plan) -> list[Ranks]:
    """The orders in which a mesh of devices has the plan's ranks, equal replicas of every stage.

    Next to each other are those of a stage, of a pipeline, or both where there is one of either.
    """
    held = list(dict.fromkeys(tuple(stage.ranks) for stage in plan.stages))
    P, d = len(held), plan.stages[0].replicas
    found: list[Ranks] = []
    if held == [tuple(range(p * d, p * d + d)) for p in range(P)]:
        found.append("stages")
    if held == [tuple(range(p, P * d, P)) for p in range(P)]:
        found.append("pipelines")
    return found


def _schedule(plan: Plan, target: Target) -> Iterator[str]:
    if target.schedules is None:
        return
    if plan.schedule in target.schedules:
        if not schedule(plan.schedule).takes_warmup and not _has_usual_warmup(plan):
            yield f"its warm-up is not that of {plan.schedule}"
        return
    why = ", which never flushes" if schedule(plan.schedule).asynchronous else ""
    yield f"the schedule is {plan.schedule}{why}; it runs {', '.join(target.schedules)}"


def _replicas(plan: Plan, target: Target) -> Iterator[str]:
    if target.replicas == "any":
        return
    counts = {stage.replicas for stage in plan.stages}
    if len(counts) > 1:
        yield f"stages have unequal replicas, {plan.shape}"
        return
    if target.replicas == "one" and counts != {1}:
        yield f"stages have {plan.stages[0].replicas} replicas (`replication=none`)"
        return
    M, d = plan.microbatches, plan.stages[0].replicas
    if target.schedules is not None and M is not None and M % d:
        yield f"{M} microbatches are not a multiple of {d} replicas"
    if plan.copies > 1:
        yield "each device holds stages of two copies of the model"
        return
    if target.ranks and not set(rank_order(plan)) & set(target.ranks):
        yield _disorder(plan, target.ranks)


def _disorder(plan: Plan, orders: Sequence[Ranks]) -> str:
    """Why the plan's ranks are in none of these orders."""
    used = {rank for stage in plan.stages for rank in stage.ranks}
    for rank in range(max(used)):
        if rank not in used:
            return f"rank {rank} is idle, and others behind it are not"
    names = {"stages": "a stage", "pipelines": "a pipeline"}
    wanted = " or ".join(names[order] for order in orders)
    return f"its ranks are not numbered so that those of {wanted} follow each other"


def _recomputation(plan: Plan, target: Target) -> Iterator[str]:
    recomputed = {stage.recompute for stage in plan.stages}
    if True in recomputed and target.recompute == "never":
        yield "stages recompute activations (`recompute=never`)"
    elif len(recomputed) > 1 and target.recompute == "all":
        yield "some stages recompute activations and some do not (`recompute=always` or `never`)"


def _missing(parts: Sequence[Part]) -> Iterator[str]:
    kinds = {part.kind for part in parts}
    for kind in (EMBEDDING, HEAD):
        if kind not in kinds:
            yield f"the model has no {kind} (`map`)"


def _cuts(plan: Plan, cuts: Cuts, parts: Sequence[Part]) -> Iterator[str]:
    may = set(may_begin(parts, cuts))
    for s, stage in enumerate(plan.stages):
        if stage.start not in may:
            before, part = parts[stage.start - 1], parts[stage.start]
            where = f"inside {part}" if before == part else f"between {before} and {part}"
            yield f"stage {s} begins with {stage.modules[0]}, {where}"
