"""ColossalAI's `HybridParallelPlugin`, the one that takes recomputation per stage."""

from __future__ import annotations

from collections.abc import Sequence

from partopt.documents.plan import Plan
from partopt.exporters.blocks import Part
from partopt.exporters.faithful import rank_order
from partopt.exporters.inference import blocks_of_stages
from partopt.exporters.target import BLOCKS, Target, Text, arguments_text


def write(plan: Plan, parts: Sequence[Part], stem: str) -> Text:
    """A file with the arguments of the plugin."""
    counts = blocks_of_stages(plan, parts)
    own = (plan.microbatches or 1) // plan.stages[0].replicas
    arguments: dict[str, object] = {
        "tp_size": plan.topology.group_ranks,
        "pp_size": len(plan.stages),
        "pp_style": "1f1b",
        "num_microbatches": own,
        "microbatch_size": plan.microbatch_size,
        "zero_stage": 1 if plan.memory_rules.shard == "optimizer" else 0,
        "dp_outside": "stages" not in rank_order(plan),
        "num_layers_per_stage": counts,
    }
    text = arguments_text(plan.profile.name, "HybridParallelPlugin", arguments)
    notes = ["HybridParallelPlugin(**ARGUMENTS, precision=..)"]
    if any(stage.recompute for stage in plan.stages):
        kept = [n if s.recompute else 0 for n, s in zip(counts, plan.stages, strict=True)]
        text += f"CHECKPOINTS = dict(num_ckpt_layers_per_stage={kept!r})\n"
        notes.append("gradient_checkpoint_config=PipelineGradientCheckpointConfig(**CHECKPOINTS)")
        notes.append("it counts once the model's own gradient_checkpointing_enable() is called")
    return Text(text, notes=notes)


def _faults(plan: Plan) -> list[str]:
    """Batches that its schedule does not take."""
    if plan.microbatches is None:
        return []
    own, S = plan.microbatches // plan.stages[0].replicas, len(plan.stages)
    return [f"{own} microbatches of a pipeline are fewer than its {S} stages"] if own < S else []


TARGET = Target(
    name="colossalai",
    summary="ColossalAI: arguments of HybridParallelPlugin, recomputation per stage",
    tried="ColossalAI 0.5.0",
    write=write,
    suffix=".py",
    schedules={"1f1b": "1f1b"},
    cuts=BLOCKS,
    replicas="equal",
    recompute="each",
    recomputes="blocks",
    shards=("none", "optimizer"),
    least_stages=2,
    groups=True,
    faults=_faults,
)
