"""Megatron-LM's arguments (Megatron Core's `PipelineParallelLayerLayout`).

The layout has a segment for each stage: `E` the embedding, `t` a block, `L` the final norm, the
head and the loss. Segment i is virtual stage `v * P + p`, as the plan's stages are numbered.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from partopt.documents.plan import Plan
from partopt.exporters.blocks import BLOCK, EMBEDDING, Part, count_blocks
from partopt.exporters.faithful import rank_order
from partopt.exporters.target import HEADS, Target, Text, plain

TRIED = "Megatron Core 0.16.1"
SCHEDULES = {"1f1b": "1F1B", "interleaved": "interleaved 1F1B"}

# P   devices of a pipeline
# d   pipelines side by side


def layout(plan: Plan, parts: Sequence[Part]) -> str:
    """The stages in the grammar of Megatron Core: `Et*4|t*3|t*3|t*2L`."""
    return "|".join(_segment(parts[stage.start : stage.stop]) for stage in plan.stages)


def _segment(parts: Sequence[Part]) -> str:
    blocks = count_blocks(parts)
    text = "E" if any(part.kind == EMBEDDING for part in parts) else ""
    text += {0: "", 1: "t"}.get(blocks, f"t*{blocks}")
    return text + ("L" if any(part.kind not in (BLOCK, EMBEDDING) for part in parts) else "")


def pipeline_size(plan: Plan) -> int:
    """P, the devices of each pipeline."""
    return len({tuple(stage.ranks) for stage in plan.stages})


def faults(plan: Plan) -> list[str]:
    """What its interleaved schedule does not run."""
    if plan.schedule != "interleaved":
        return []
    P, M = pipeline_size(plan), plan.microbatches or 0
    own = M // plan.stages[0].replicas
    if P == 1:
        return ["its stages are all on one device"]
    if own % P:
        return [f"{own} microbatches of a pipeline are not a multiple of its {P} devices"]
    return []


def write(plan: Plan, parts: Sequence[Part], stem: str) -> Text:
    """A shell array of arguments, to be sourced by the script that starts the training."""
    words = [
        f"--tensor-model-parallel-size {plan.topology.group_ranks}",
        f"--pipeline-model-parallel-size {pipeline_size(plan)}",
        f"--pipeline-model-parallel-layout '{layout(plan, parts)}'",
        f"--micro-batch-size {plan.microbatch_size}",
        f"--global-batch-size {plan.microbatch_size * (plan.microbatches or 1)}",
    ]
    if plan.stages[0].recompute:
        words += ["--recompute-granularity full", "--recompute-method uniform"]
        words += ["--recompute-num-layers 1"]
    if plan.memory_rules.shard == "optimizer":
        words.append("--use-distributed-optimizer")
    if "stages" not in rank_order(plan):
        words.append("--use-tp-pp-dp-mapping")
    lines = "\n".join(f"    {word}" for word in words)
    name, blocks = plain(plan.profile.name), count_blocks(parts)
    main = f"# {name}: --num-layers {blocks}, on {devices_text(plan)}.\n"
    main += f"PARTOPT_ARGS=(\n{lines}\n)\n"
    return Text(
        main,
        notes=['source it in the script that starts the training, and add "${PARTOPT_ARGS[@]}"'],
    )


def devices_text(plan: Plan) -> str:
    """The devices and what the plan was made for."""
    used = len(set(itertools.chain.from_iterable(stage.ranks for stage in plan.stages)))
    return f"{used * plan.topology.group_ranks} devices of {plain(plan.topology.name)}"


TARGET = Target(
    name="megatron",
    summary="Megatron-LM: a shell array of arguments, with the pipeline's layout",
    tried=TRIED,
    write=write,
    suffix=".sh",
    schedules=SCHEDULES,
    cuts=HEADS,
    replicas="equal",
    recompute="all",
    recomputes="blocks",
    shards=("none", "optimizer"),
    groups=True,
    faults=faults,
)
