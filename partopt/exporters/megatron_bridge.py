"""Megatron Bridge: the layout as fields of its configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from partopt.documents.plan import Plan
from partopt.exporters import megatron
from partopt.exporters.blocks import Part, count_blocks
from partopt.exporters.faithful import rank_order
from partopt.exporters.target import Text, plain


def write(plan: Plan, parts: Sequence[Part], stem: str) -> Text:
    """A function that sets the fields of a configuration, whatever its recipe set."""
    P, shared = megatron.pipeline_size(plan), plan.memory_rules.shard == "optimizer"
    recompute = plan.stages[0].recompute
    fields = {
        "model.tensor_model_parallel_size": plan.topology.group_ranks,
        "model.context_parallel_size": 1,
        "model.pipeline_model_parallel_size": P,
        "model.virtual_pipeline_model_parallel_size": _chunks(plan, P),
        "model.pipeline_model_parallel_layout": megatron.layout(plan, parts),
        "model.recompute_granularity": "full" if recompute else None,
        "model.recompute_method": "uniform" if recompute else None,
        "model.recompute_num_layers": 1 if recompute else None,
        "train.micro_batch_size": plan.microbatch_size,
        "train.global_batch_size": plan.microbatch_size * (plan.microbatches or 1),
        "ddp.use_distributed_optimizer": shared,
        "optimizer.use_distributed_optimizer": shared,
        "dist.use_tp_pp_dp_mapping": "stages" not in rank_order(plan),
    }
    body = "\n".join(f"    config.{name} = {value!r}" for name, value in fields.items())
    about = f"{plain(plan.profile.name)} on {megatron.devices_text(plan)}"
    return Text(
        f'"""{about}: its pipeline, for Megatron Bridge."""\n\n\n'
        f'def use_plan(config):\n    """Set the pipeline of a configuration whose model has '
        f'{count_blocks(parts)} layers."""\n{body}\n    return config\n',
        notes=["call it on the configuration of a recipe before it trains"],
    )


def _chunks(plan: Plan, P: int) -> int | None:
    """The stages of each device, None for one."""
    chunks = len(plan.stages) // P
    return chunks if chunks > 1 else None


TARGET = dataclasses.replace(
    megatron.TARGET,
    name="megatron-bridge",
    summary="Megatron Bridge: a function that sets the fields of a configuration",
    tried=f"{megatron.TRIED}; Megatron Bridge 0.3.1, its fields",
    write=write,
    suffix=".py",
)
