"""Plans of small transformers for trainers to read, and what the layers of each stage are."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from partopt import Job, solve
from partopt.cost.pricing import under
from partopt.documents.plan import Plan
from partopt.documents.profile import Profile
from partopt.documents.topology import Topology
from partopt.trainers import TRAINERS
from tests.helpers import flat
from tests.trainers.models import BLOCKS, transformer

CUTS = [6, 9, 12]  # 4-3-3-2 blocks

# options of `planned`: two stages on each device, two replicas of each stage
LOOPS = {"cuts": [4, 6, 8, 10, 12, 13, 14], "cluster": flat(4), "schedule": "interleaved"}
PAIRS = {"replicas": [2, 2, 2, 2], "microbatches": 16}


def planned(
    cuts: list[int] = CUTS,
    profile: Profile | None = None,
    cluster: Topology | None = None,
    **options: Any,
) -> Plan:
    """The plan with stages that begin with layer 0 and at `cuts`, with the usual warm-up.

    By default it is of twelve blocks under 1F1B with eight microbatches, each stage on a device.
    """
    replicas = options.get("replicas") or [1] * (len(cuts) + 1)
    asked = {"schedule": "1f1b", "cuts": cuts, "replicas": replicas} | options
    if asked["schedule"] not in ("pipedream", "pipedream-2bw"):
        asked.setdefault("microbatches", 8)
    on = cluster or flat(sum(replicas))
    return under(solve(Job(profile or transformer(name="gpt"), on, **asked)).plan)


def planned_for(to: str, **options: Any) -> Plan:
    """The plan of `planned` as the engine of the trainer `to` runs it."""
    own = {"trainer": to, "engine": TRAINERS[to].engine, "block_bounds": list(range(2, BLOCKS + 3))}
    return planned(**own | options)


def on_ranks(plan: Plan, ranks: list[list[int]]) -> Plan:
    """The plan with its stages on these ranks."""
    stages = [replace(stage, ranks=own) for stage, own in zip(plan.stages, ranks, strict=True)]
    return replace(plan, stages=stages)


def recomputing(plan: Plan, *numbers: int) -> Plan:
    """The plan in which the stages of these numbers recompute, all where none is given."""
    chosen = numbers or range(len(plan.stages))
    stages = [replace(stage, recompute=s in chosen) for s, stage in enumerate(plan.stages)]
    how = "auto" if len(chosen) < len(stages) else "always"
    return replace(plan, stages=stages).with_layout(recompute=how)


def contents(plan: Plan) -> list[list[str]]:
    """What each stage holds, its layers in words of its own: `embedding`, `2`, `norm`, `head`.

    Layers are those of `names`; the two of the embedding are one.
    """
    kinds = {"wte": "embedding", "wpe": "embedding", "ln_f": "norm", "lm_head": "head"}
    return [
        list(dict.fromkeys(kinds.get(name) or name.removeprefix("h.") for name in stage.modules))
        for stage in plan.stages
    ]
