"""Megatron Bridge and NeMo: the layout as fields of their configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from partopt.documents.plan import Plan
from partopt.exporters import megatron
from partopt.exporters.blocks import Part
from partopt.exporters.faithful import rank_order
from partopt.exporters.target import Text, plain


def write(plan: Plan, parts: Sequence[Part], stem: str) -> Text:
    """A function that sets the fields of a configuration."""
    P = megatron.pipeline_size(plan)
    model: dict[str, object] = {
        "pipeline_model_parallel_size": P,
        "pipeline_model_parallel_layout": megatron.layout(plan, parts),
    }
    if len(plan.stages) > P:
        model["virtual_pipeline_model_parallel_size"] = len(plan.stages) // P
    if plan.stages[0].recompute:
        model |= {"recompute_granularity": "full", "recompute_method": "uniform"}
        model["recompute_num_layers"] = 1
    lines = [f"config.model.{name} = {value!r}" for name, value in model.items()]
    lines.append(f"config.train.micro_batch_size = {plan.microbatch_size}")
    batch = plan.microbatch_size * (plan.microbatches or 1)
    lines.append(f"config.train.global_batch_size = {batch}")
    if plan.memory_rules.shard == "optimizer":
        lines.append("config.ddp.use_distributed_optimizer = True")
    if "stages" not in rank_order(plan):
        lines.append("config.dist.use_tp_pp_dp_mapping = True")
    body = "\n".join(f"    {line}" for line in lines)
    about = f"{plain(plan.profile.name)} on {megatron.devices_text(plan)}"
    return Text(
        f'"""{about}: its pipeline, for Megatron Bridge."""\n\n\n'
        f'def use_plan(config):\n    """Set the pipeline of a configuration; '
        f'the model has {megatron.blocks_text(parts)}."""\n{body}\n    return config\n'
    )


TARGET = dataclasses.replace(
    megatron.TARGET,
    name="megatron-bridge",
    summary="Megatron Bridge, NeMo: a function that sets the fields of a configuration",
    tried=f"{megatron.TRIED} for the layout; the fields are not tried",
    write=write,
    suffix=".py",
)
