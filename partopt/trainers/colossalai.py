"""ColossalAI's `HybridParallelPlugin`, the one that takes recomputation per stage."""

from __future__ import annotations

from collections.abc import Sequence

from partopt.configurations.settings import Settings
from partopt.documents.engine import Engine, Layout, Recompute
from partopt.documents.plan import Plan
from partopt.trainers.parts import Part, count_blocks
from partopt.trainers.reading import cuts_of_blocks, read_numbers
from partopt.trainers.sources import Sources
from partopt.trainers.trainer import (
    BLOCKS,
    Asked,
    Says,
    Stated,
    Text,
    Trainer,
    arguments_text,
    rank_order,
)

_EXAMPLE = "[4, 3, 3, 2]"


def _write(plan: Plan, parts: Sequence[Part], stem: str) -> Text:
    """A file with the arguments of the plugin."""
    counts = [count_blocks(parts[stage.start : stage.stop]) for stage in plan.stages]
    arguments: dict[str, object] = {
        "tp_size": plan.topology.group_ranks,
        "pp_size": len(plan.stages),
        "pp_style": "1f1b",
        "num_microbatches": (plan.microbatches or 1) // plan.stages[0].replicas,
        "microbatch_size": plan.microbatch_size,
        "zero_stage": 1 if plan.shard == "optimizer" else 0,
        "dp_outside": "stages" not in rank_order(plan),
        "num_layers_per_stage": counts,
    }
    text = arguments_text(plan.profile.name, "HybridParallelPlugin", arguments)
    notes = ["HybridParallelPlugin(**ARGUMENTS, precision=..)"]
    if any(stage.recompute for stage in plan.stages):
        again = [
            0 if not stage.recompute else n if stage.recomputes_whole else stage.blocks_again
            for n, stage in zip(counts, plan.stages, strict=True)
        ]
        text += f"CHECKPOINTS = dict(num_ckpt_layers_per_stage={again!r})\n"
        notes.append("gradient_checkpoint_config=PipelineGradientCheckpointConfig(**CHECKPOINTS)")
        notes.append("it counts once the model's own gradient_checkpointing_enable() is called")
    return Text(text, notes=notes)


def _faults(plan: Plan) -> list[str]:
    """Batches that its schedule does not take."""
    if plan.microbatches is None:
        return []
    M, S = plan.microbatches // plan.stages[0].replicas, len(plan.stages)
    return [f"{M} microbatches of a pipeline are fewer than its {S} stages"] if M < S else []


def _said_again(again: object, counts: Sequence[int]) -> Recompute | int | None:
    """What a layout says of stages with so many blocks, of which these are made again."""
    if not isinstance(again, list) or len(again) != len(counts):
        return None
    most = max(again)
    if again == [min(most, count) for count in counts]:
        return "never" if most == 0 else "always" if again == counts else int(most)
    return "auto"


def _read(settings: Settings, asked: Asked) -> Stated:
    """`num_layers_per_stage` has the blocks of every stage."""
    counts = read_numbers(settings, "num_layers_per_stage", _EXAMPLE)
    layout = Layout(
        tp=settings.number("tp_size"),
        pp=settings.number("pp_size"),
        microbatch=settings.number("microbatch_size"),
        recompute=_said_again(settings.known("num_ckpt_layers_per_stage"), counts),
        shard="optimizer" if settings.number("zero_stage") == 1 else None,
    )
    cuts, microbatches = cuts_of_blocks(counts, asked.parts), settings.number("num_microbatches")
    return Stated(cuts=cuts, layout=layout, microbatches=microbatches)


COLOSSALAI = Trainer(
    name="colossalai",
    summary="ColossalAI: arguments of HybridParallelPlugin, recomputation per stage",
    tried="ColossalAI 0.5.0",
    schedules={"1f1b": "1f1b"},
    says=Says(
        cuts=BLOCKS,
        recomputed="each",
        degrees={"tp": "divides the attention heads"},
        least_stages=2,
    ),
    engine=Engine(
        waits=("1f1b",),
        messages="split",
        allreduce="blocking",
        recompute=("none", "blocks"),
        shard=("none", "optimizer"),
    ),
    sources=Sources("colossalai"),
    write=_write,
    suffix=".py",
    faults=_faults,
    read=_read,
    reads="ColossalAI: num_layers_per_stage, the blocks of each stage",
    example=_EXAMPLE,
)
