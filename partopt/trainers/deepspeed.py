"""DeepSpeed: a `PipelineModule` with the plan's bounds, and fields of its configuration."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence

from msgspec.structs import replace

from partopt.configurations.settings import Settings
from partopt.documents.engine import Engine, Layout
from partopt.documents.plan import Plan
from partopt.documents.transformer import Loss, Modelled, Practice
from partopt.importers.hugging_face import like_shipped, read_transformer, write_config
from partopt.trainers.megatron_arguments import read_training
from partopt.trainers.megatron_model import SCORES
from partopt.trainers.megatron_names import SYNONYMS
from partopt.trainers.parts import Part
from partopt.trainers.reading import check_stages, malformed, read_numbers
from partopt.trainers.sources import Sources
from partopt.trainers.trainer import (
    Asked,
    Lever,
    Says,
    Stated,
    Text,
    Trainer,
    plain,
    rank_order,
)

_EXAMPLE = "0,5,8,11,14"

# what DeepSpeed's configuration says of parameters in 16 bits, without which they are float32; and
# of operations under autocast (runtime/torch_autocast.py)
_FORMATS = {
    "bfloat16": '    "bf16": {"enabled": True},\n',
    "float16": '    "fp16": {"enabled": True},\n',
}
_AUTOCAST = '    "torch_autocast": {{"enabled": True, "dtype": "{}"}},\n'

_MODULE = '''"""{name}: its pipeline, for DeepSpeed.

PlannedPipeline(layers, loss_fn=...) takes the plan's {layers} layers in their order:
{names}
"""

from deepspeed import checkpointing
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import ProcessTopology

{model}BOUNDS = {bounds}  # stage s has the layers from BOUNDS[s] up to BOUNDS[s + 1]
CONFIG = {{
    "train_micro_batch_size_per_gpu": {size},
    "gradient_accumulation_steps": {accumulation},
    "zero_optimization": {{"stage": {zero}}},
{format}}}


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


def _write(plan: Plan, parts: Sequence[Part], stem: str) -> Text:
    """A Python module with the class and `CONFIG`, which goes into `ds_config`."""
    d, stages = plan.stages[0].replicas, len(plan.stages)
    about = plan.transformer
    axes = {"pipe": stages, "data": d}
    if "stages" not in rank_order(plan):
        axes = {"data": d, "pipe": stages}
    if (plan.layout.tp or 1) > 1:
        axes["model"] = plan.layout.tp or 1
    names = [
        f"  {s}: {plain(stage.modules[0])} .. {plain(stage.modules[-1])}"
        for s, stage in enumerate(plan.stages)
    ]
    flows = [flow for flow in plan.communication if flow.kind == "tied"]
    tied = dict.fromkeys(plain(name) for flow in flows for name in flow.parameters)
    # layers that are recomputed together, the whole of a stage; 0 for none
    interval = max(len(stage.layers) for stage in plan.stages) if plan.stages[0].recompute else 0
    notes = []
    if tied:
        notes.append(f"{', '.join(tied)}: stages share it, so its layers go in as TiedLayerSpec")
    if about:
        # Megatron-DeepSpeed's way: every block is made again by itself
        interval = int(plan.layout.recomputation.granularity != "none")
        notes.append(
            f"yours to add: the layers of MODEL, over {plan.layout.tp or 1} tensor parallel ranks; "
            "data, a tokenizer, optimizer, checkpoints"
        )
    return Text(
        _MODULE.format(
            name=plain(plan.profile.name),
            model=_model(about) if about else "",
            layers=plan.stages[-1].stop,
            names="\n".join(names),
            bounds=[stage.start for stage in plan.stages] + [plan.stages[-1].stop],
            size=plan.microbatch_size,
            accumulation=(plan.microbatches or 1) // d,
            zero=int(plan.shard == "optimizer"),
            format=_FORMATS.get(plan.profile.dtype, "")
            + (_AUTOCAST.format(plan.profile.autocast) if plan.profile.autocast else ""),
            stages=stages,
            axes=list(axes),
            dims=list(axes.values()),
            interval=interval,
        ),
        notes=notes,
    )


def _model(about: Modelled) -> str:
    """What a transformer's layers are, in the words of a config.json, and how it attends."""
    flash = about.practice.scores is None
    return (
        f"MODEL = {write_config(about.model)}\n"
        f"SEQUENCE = {about.sequence}\n"
        f"FLASH_ATTENTION = {flash}  # in place of kernels that write the scores\n"
    )


def _words(plan: Plan, settings: Settings) -> list[dict[str, object]]:
    """The flags of Megatron-DeepSpeed that say a layout."""
    settings.synonyms = SYNONYMS
    layout, about = plan.layout, plan.transformer
    again = layout.recomputation.granularity != "none"
    ends = about.practice.ends if about else "stage"
    older = settings.states("checkpoint_activations")
    zero = "zero_optimization.stage" if settings.states("zero_optimization.stage") else "zero_stage"
    return [
        {"tensor_model_parallel_size": layout.tp},
        {"no_pipeline_parallel": None, "pipeline_model_parallel_size": layout.pp},
        {"micro_batch_size": layout.microbatch},
        {
            "checkpoint_activations": (again and older) or None,
            "recompute_activations": None,
            "recompute_granularity": "full" if again and not older else None,
            "recompute_method": "uniform" if again and not older else None,
            "recompute_num_layers": None,
        },
        {zero: int(layout.shard == "optimizer")},
        {"use_flash_attn_v2": bool(about and about.practice.scores is None)},
        {"partition_method": "type:transformer|embedding" if ends == "blocks" else None},
    ]


def _read(settings: Settings, asked: Asked) -> Stated:
    """Stage s has the layers from bound s up to bound s + 1, beside a profile; or a training."""
    if not asked.layers:
        return _read_training(settings, asked.devices)
    bounds = read_numbers(settings, "BOUNDS", _EXAMPLE)
    if len(bounds) < 2 or bounds[0] != 0 or bounds != sorted(bounds):
        said = ",".join(map(str, bounds))
        what = f"{said}: not bounds, which rise from 0 to the number of layers"
        raise malformed(what, _EXAMPLE)
    counts = [stop - start for start, stop in itertools.pairwise(bounds)]
    check_stages(counts, "layers", len(asked.layers))
    steps = settings.number("gradient_accumulation_steps")
    return Stated(cuts=bounds[1:-1], layout=_read_layout(settings), microbatches=steps)


def _read_layout(settings: Settings) -> Layout:
    """What a module that is written here says of a layout; what it does not say is None."""
    names, sizes = settings.find("axes"), _numbers(settings, "dims")
    axes = dict(zip(map(str, names), sizes, strict=False)) if isinstance(names, list) else {}
    return Layout(
        tp=axes.get("model"),
        pp=axes.get("pipe"),
        dp=axes.get("data"),
        microbatch=settings.number("train_micro_batch_size_per_gpu"),
        recompute="always" if settings.has("activation_checkpoint_interval") else None,
        shard="optimizer" if settings.find("zero_optimization.stage") == 1 else None,
    )


def _read_training(settings: Settings, devices: int) -> Stated:
    """All of a transformer's training: what is written here, or a script of Megatron-DeepSpeed."""
    config = settings.find("MODEL")
    if not isinstance(config, dict):
        found = read_training(settings, devices, "deepspeed")
        # without this option there is a pipeline, even of one stage
        alone = settings.has("no_pipeline_parallel")
        return dataclasses.replace(found, layout=replace(found.layout, pp=1)) if alone else found
    model = read_transformer(json.dumps(config).encode(), "MODEL", "model")
    bounds, stated = _numbers(settings, "BOUNDS"), _read_layout(settings)
    size = stated.microbatch or settings.count("train_micro_batch_size_per_gpu") or 1
    steps = settings.count("gradient_accumulation_steps") or 1
    sequence = settings.count("SEQUENCE") or 1
    settings.check()
    blocks = None
    if bounds:
        inside = [min(max(bound - 1, 0), model.blocks) for bound in bounds]
        blocks = [stop - start for start, stop in itertools.pairwise(inside)]
    return Stated(
        model=like_shipped(model) or model,
        sequence=sequence,
        batch=size * steps * (stated.dp or 1),
        format="float16" if settings.has("fp16.enabled") else "bfloat16",
        layout=replace(
            stated,
            tp=stated.tp or 1,
            pp=stated.pp or 1,
            recompute=stated.recompute or "never",
            shard=stated.shard or "none",
        ),
        facts={"attention": "flash" if settings.has("FLASH_ATTENTION") else "scores"},
        blocks=blocks,
    )


def _numbers(settings: Settings, name: str) -> list[int]:
    """The whole numbers of a list; none where there is no list, a fault where it has others."""
    value = settings.find(name)
    if not isinstance(value, list):
        return []
    if not all(type(number) is int for number in value):
        what = f"{name}: {value!r} are not whole numbers"
        settings.refuse(what, "give numbers", "invalid-value", path=name)
        return []
    return value


DEEPSPEED = Trainer(
    name="deepspeed",
    summary="DeepSpeed: a PipelineModule with the plan's bounds, and ds_config's fields",
    tried="DeepSpeed 0.19.8",
    schedules={"1f1b": "TrainSchedule"},
    says=Says(
        degrees={"tp": "as the layers are made: it has none of its own"},
        formats=("bfloat16", "float16"),
    ),
    engine=Engine(
        waits=("1f1b",),
        messages="split",
        allreduce="blocking",
        recompute=("none", "blocks", "stage"),
        shard=("none", "optimizer"),
    ),
    practice=Practice(
        loss=Loss(passes=52, held=6),
        attention="flash2",
        scores=SCORES,
        sequence_parallel=False,
        sums="autograd",
        keeps_outputs=True,
        buffer_bytes=6e9,
    ),
    choices={
        "attention": {
            "scores": {"scores": SCORES},
            "flash": {"scores": None},
        },
        "ends": {name: {"ends": name} for name in ("stage", "blocks")},
    },
    levers=(Lever((("attention", "flash"),), "--use-flash-attn-v2", verified=True),),
    sources=Sources("deepspeed"),
    write=_write,
    suffix=".py",
    read=_read,
    words=_words,
    reads="DeepSpeed: a script of Megatron-DeepSpeed; or bounds of the stages, from 0 to the "
    "number of layers",
    example=_EXAMPLE,
)
