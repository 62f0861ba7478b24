"""DeepSpeed: a `PipelineModule` with the plan's bounds, and fields of its configuration."""

from __future__ import annotations

from collections.abc import Sequence

from partopt.documents.plan import Plan
from partopt.exporters.blocks import Part
from partopt.exporters.faithful import rank_order
from partopt.exporters.target import ANYWHERE, Target, Text, plain

_MODULE = '''"""{name}: its pipeline, for DeepSpeed.

PlannedPipeline(layers, loss_fn=...) takes the plan's {layers} layers in their order:
{names}
"""

from deepspeed import checkpointing
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import ProcessTopology

BOUNDS = {bounds}  # stage s has the layers from BOUNDS[s] up to BOUNDS[s + 1]
CONFIG = {{
    "train_micro_batch_size_per_gpu": {size},
    "gradient_accumulation_steps": {accumulation},
    "zero_optimization": {{"stage": {zero}}},
}}


class PlannedPipeline(PipelineModule):
    """A pipeline of {stages} stages, cut at BOUNDS."""

    def __init__(self, layers, **options):
        layers = list(layers)
        if len(layers) != BOUNDS[-1]:
            raise ValueError(f"{{len(layers)}} layers, the plan is for {{BOUNDS[-1]}}")
        super().__init__(
            layers,
            topology=ProcessTopology(axes={axes}, dims={dims}),
            activation_checkpoint_interval={interval},
            activation_checkpoint_func=checkpointing.non_reentrant_checkpoint,
            **options,
        )

    def _partition_layers(self, method=None):
        self.parts = list(BOUNDS)
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(self.parts[stage], self.parts[stage + 1])
'''


def write(plan: Plan, parts: Sequence[Part], stem: str) -> Text:
    """A Python module with the class and `CONFIG`, which goes into `ds_config`."""
    d, stages = plan.stages[0].replicas, len(plan.stages)
    axes = {"pipe": stages, "data": d}
    if "stages" not in rank_order(plan):
        axes = {"data": d, "pipe": stages}
    if plan.topology.group_ranks > 1:
        axes["model"] = plan.topology.group_ranks
    names = [
        f"  {s}: {plain(stage.modules[0])} .. {plain(stage.modules[-1])}"
        for s, stage in enumerate(plan.stages)
    ]
    return Text(
        _MODULE.format(
            name=plain(plan.profile.name),
            layers=plan.stages[-1].stop,
            names="\n".join(names),
            bounds=[stage.start for stage in plan.stages] + [plan.stages[-1].stop],
            size=plan.microbatch_size,
            accumulation=(plan.microbatches or 1) // d,
            zero=int(plan.memory_rules.shard == "optimizer"),
            stages=stages,
            axes=list(axes),
            dims=list(axes.values()),
            interval=_interval(plan),
        ),
        notes=["what several layers share goes in as TiedLayerSpec"],
    )


def _interval(plan: Plan) -> int:
    """Layers that are recomputed together, the whole of a stage; 0 for none."""
    return max(len(stage.layers) for stage in plan.stages) if plan.stages[0].recompute else 0


TARGET = Target(
    name="deepspeed",
    summary="DeepSpeed: a PipelineModule with the plan's bounds, and ds_config's fields",
    tried="DeepSpeed 0.19.8",
    write=write,
    suffix=".py",
    schedules={"1f1b": "TrainSchedule"},
    cuts=ANYWHERE,
    replicas="equal",
    recompute="all",
    shards=("none", "optimizer"),
    groups=True,
)
