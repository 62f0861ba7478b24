"""What a plan predicts beside its simulation: what memory costs it, and how long ports are taken.

What memory costs is found by simulating the plan again without what it does in order to fit.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import UNSET
from msgspec.structs import replace

from partopt.cost.collectives import allreduce_over
from partopt.cost.pricing import under
from partopt.documents.plan import HeldBack, Plan, PortTime
from partopt.documents.stage import stages_text
from partopt.errors import PartoptError
from partopt.schedules import SCHEDULES, schedule
from partopt.schedules.placement import STRAIGHT
from partopt.simulator.execution import execute, first_microbatches

NOTICED = 0.05  # of the time: smaller shares are within measurement error
MOST_ACTIONS = 300_000  # of an execution that is repeated with changes
_ENDLESS = 1e18  # bytes/s of links that take no time


def complete_prediction(plan: Plan) -> Plan:
    """The simulated plan, predicting what memory costs it, and what all-reduces take of ports."""
    held, ports = held_back(plan) or UNSET, [*_allreduce_ports(plan)]
    predicted = replace(plan.predicted, held_back=held, allreduce_ports=ports)
    return replace(plan, predicted=predicted)


def _allreduce_ports(plan: Plan) -> Iterator[PortTime]:
    """Seconds of a microbatch for which the all-reduce of every stage takes ports of a level."""
    for s, stage in enumerate(plan.stages):
        size = stage.trained_bytes / (plan.microbatches or stage.replicas)
        for k, slope in allreduce_over(stage.ranks, plan.topology).slopes.items():
            level = plan.topology.levels[k - 1].name
            yield PortTime(stage=s, level=level, seconds=slope * size)


def held_back(plan: Plan) -> HeldBack | None:
    """What memory costs the plan, where nothing else costs more.

    Memory holds a plan back where stages have fewer microbatches in flight than their schedule
    says, or recompute activations because they may. The plan is simulated without that, on links
    that take no time, and with equal stages: what is lifted costs what the plan is slower than
    that. None also where the plan is too long to simulate so often.
    """
    lifted, texts = _without_limit(plan)
    actions = 2 * len(plan.stages) * (plan.microbatches or first_microbatches(plan))
    if not texts or actions > MOST_ACTIONS:
        return None
    try:
        now_s, then_s = execute(plan).period_s, execute(lifted).period_s
        others = [execute(lighter).period_s for lighter in _without_others(plan)]
    except PartoptError:  # the schedule cannot run it so
        return None
    slower = now_s / then_s - 1 if then_s > 0 else 0.0
    if slower <= NOTICED or then_s > min(others):
        return None
    return HeldBack(slower=slower, text=f"{' and '.join(texts)}, to fit: {slower:.0%} slower")


def _without_limit(plan: Plan) -> tuple[Plan, list[str]]:
    """The plan as it would be with more memory, and in words what it has in place of that."""
    lifted, texts = plan, []
    entry, limit = SCHEDULES.get(plan.schedule), plan.memory_limit_bytes
    if entry is None or limit is None:
        return plan, []
    replicas = [stage.replicas for stage in plan.stages]
    if entry.shape == STRAIGHT and entry.takes_warmup:
        usual = [entry.counts(s, replicas, plan.microbatches).held for s in range(len(replicas))]
        held = [stage.in_flight for stage in plan.stages]
        short = [s for s in range(len(usual)) if usual[s] > held[s]]
        deeper = [max(pair) - 1 for pair in zip(usual, held, strict=True)]
        roomy = under(plan, warmups=deeper)
        if short and roomy.peak_memory_bytes > limit:
            s = max(short, key=lambda s: plan.stages[s].memory.total_bytes)  # the fullest one
            lifted = roomy
            texts = [f"{held[s]} in flight on stage {s} in place of {usual[s]}"]
    again = [s for s, stage in enumerate(plan.stages) if stage.recompute]
    if again and plan.request.recompute == "auto":
        texts.append(f"recomputation of {stages_text(again)}")
        stages = list(lifted.stages)
        for s in again:
            once_s = max(0.0, stages[s].compute_s - stages[s].again_s)
            stages[s] = replace(stages[s], recompute=False, compute_s=once_s, again_s=0.0)
        lifted = replace(lifted, stages=stages)
    return lifted, texts


def _without_others(plan: Plan) -> Iterator[Plan]:
    """The plan on links that take no time, and with stages that take equally long."""
    topology, warmups = plan.topology, [stage.warmup for stage in plan.stages]
    levels = [
        replace(level, bandwidth_bytes_per_s=_ENDLESS, latency_s=0.0)
        for level in topology.cluster.levels
    ]
    free = replace(topology.cluster, levels=levels)
    free = free.in_groups(topology.group_ranks, topology.group_copies)
    takes_warmup = schedule(plan.schedule).takes_warmup
    yield under(plan, topology=free, warmups=warmups if takes_warmup else None)
    mean_s = sum(stage.compute_s for stage in plan.stages) / len(plan.stages_by_rank())
    stages = []
    for stage in plan.stages:
        share = mean_s * stage.replicas / stage.compute_s if stage.compute_s else 1.0
        names = ("compute_s", "forward_s", "backward_s", "again_s", "backward_weight_s")
        stages.append(replace(stage, **{name: share * getattr(stage, name) for name in names}))
    yield replace(plan, stages=stages)
