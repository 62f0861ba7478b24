"""torchtitan: a configuration module with the modules of each stage, and the order as CSV."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

from partopt.documents.engine import Engine, Layout
from partopt.documents.plan import Plan
from partopt.documents.transformer import Kept, Loss, Passes, Practice
from partopt.errors import PartoptError, did_you_mean
from partopt.options import AUTO
from partopt.schedules import schedule
from partopt.schedules.layout import LOOPED, STRAIGHT
from partopt.trainers.parts import BLOCK, EMBEDDING, HEAD, NORM, Part, count_blocks
from partopt.trainers.reading import (
    check_count,
    check_stages,
    find_count,
    find_stated,
    find_value,
    malformed,
    read_literal,
    states,
)
from partopt.trainers.torch import SYNCHRONOUS, TORCH, csv_faults, csv_of
from partopt.trainers.trainer import (
    PARTS,
    Reading,
    Says,
    Text,
    Trainer,
    batch_of,
    pipeline_size,
    plain,
)

_FIELD = "module_fqns_per_model_part"
_EXAMPLE = "tok_embeddings,layers.0 layers.1,norm,lm_head"
_NAMES = {EMBEDDING: "tok_embeddings", NORM: "norm", HEAD: "lm_head"}
# `output` is what older versions call the head
_PARTS = {name: kind for kind, name in _NAMES.items()} | {"output": HEAD}
_BLOCK = re.compile(r"layers\.([0-9]{1,9})")
_OWN = {"1f1b": "1F1B", "gpipe": "GPipe"}  # orders that have a name there
_SCHEDULES = {name: own for own, name in _OWN.items()} | {
    "Interleaved1F1B": "interleaved",
    "InterleavedZeroBubble": "interleaved-zb",
    "ZBVZeroBubble": "zbv",
    "DualPipeV": "dualpipev",
}
# schedules of torch by their places: with a CSV the name still decides these
_PLACES = {STRAIGHT: "1F1B", LOOPED: "Interleaved1F1B"}

_MODULE = '''"""{name}: its pipeline, for torchtitan.

torchrun --nproc-per-node N -m torchtitan.train --module {stem} --config planned
"""

{imports}# the configuration of the model, in place of that of torchtitan's smallest Llama
from torchtitan.models.llama3.config_registry import llama3_debugmodel as base

STAGES = [
{stages}
]


def planned():
    """The base configuration with the plan's pipeline."""
    config = base()
    blocks = len(config.model_spec.model.layers)
    if blocks != {blocks}:
        raise ValueError(f"the model has {{blocks}} blocks, the plan is for {blocks}")
    config.training.disable_cuda_graphs = True  # pipelines need it
    config.training.local_batch_size = {local}
    config.training.global_batch_size = {batch}
    config.activation_checkpoint = {checkpoint}
    parallelism = config.parallelism
    parallelism.tensor_parallel_degree = {tensor}
    parallelism.context_parallel_degree = {context}
    parallelism.pipeline_parallel_degree = {P}
    parallelism.module_fqns_per_model_part = STAGES
    parallelism.pipeline_parallel_schedule = "{schedule}"
    parallelism.pipeline_parallel_schedule_csv = {csv}
    parallelism.pipeline_parallel_microbatch_size = {size}
    parallelism.data_parallel_replicate_degree = {replicate}
    parallelism.data_parallel_shard_degree = {shard}
    parallelism.fsdp_reshard_after_forward = "{reshard}"
    return config
'''
_CSV = 'str(Path(__file__).with_name("{stem}.csv"))'


def _write(plan: Plan, parts: Sequence[Part], stem: str) -> Text:
    """The module, and a CSV beside it where torch has no name for the order."""
    if not stem.isidentifier():
        raise PartoptError(
            f"{stem}: not the name of a Python module, which torchtitan imports",
            "call the file planned.py",
            code="invalid-option",
            option="output",
        )
    P, d = pipeline_size(plan), plan.stages[0].replicas
    M, size = plan.microbatches or 1, plan.microbatch_size
    shares = plan.shard != "none"
    own = _OWN.get(plan.schedule)
    named = own is not None and M // d >= P  # its 1F1B needs them
    imports = "" if named else "from pathlib import Path\n\n"
    again = "FullAC" if plan.stages[0].recompute else ""
    if plan.transformer:
        again = {"never": "", "selective": "SelectiveAC"}.get(str(plan.layout.recompute), "FullAC")
    if again:
        imports += f"from torchtitan.distributed.activation_checkpoint import {again}\n\n"
    main = _MODULE.format(
        name=plain(plan.profile.name),
        stem=stem,
        imports=imports,
        stages="\n".join(
            f"    {_modules(parts[stage.start : stage.stop])}," for stage in plan.stages
        ),
        blocks=count_blocks(parts),
        local=M // d * size,
        batch=batch_of(plan),
        tensor=plan.layout.tp or 1,
        context=plan.layout.cp or 1,
        checkpoint=f"{again}.Config()" if again else "None",
        P=P,
        schedule=own or _PLACES.get(schedule(plan.schedule).shape, "ZBVZeroBubble"),
        csv="None" if named else _CSV.format(stem=stem),
        size=size,
        replicate=1 if shares else d,
        shard=d if shares else 1,
        reshard="always" if plan.shard == "parameters" else "never",
    )
    note = "names of modules are those of torchtitan's own models; put yours in as `base`"
    return Text(main, {} if named else {".csv": csv_of(plan)}, [note])


def _modules(parts: Sequence[Part]) -> str:
    """The modules of a stage: `["tok_embeddings", "layers.0"]`."""
    names = dict.fromkeys(
        f"layers.{part.number}" if part.kind == BLOCK else _NAMES[part.kind] for part in parts
    )
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"


def _read(text: str, layers: Sequence[str], parts: Sequence[Part]) -> Reading:
    """The cuts before the first module of every stage but the first."""
    stages = [[_part(name) for name in names] for names in _stages(text)]
    _check(stages, list(dict.fromkeys(parts)))
    cuts = [parts.index(own[0]) for own in stages[1:]]
    return Reading(cuts, _read_rest(text), find_count(text, "global_batch_size"))


def _read_rest(text: str) -> Layout:
    """What a configuration says beside the stages; commands give its fields as words."""
    named = _SCHEDULES.get(str(find_stated(text, "pipeline_parallel_schedule")))
    sharded = (find_count(text, "data_parallel_shard_degree") or 1) > 1
    gathers = find_stated(text, "fsdp_reshard_after_forward") == "always"
    return Layout(
        tp=find_count(text, "tensor_parallel_degree"),
        pp=find_count(text, "pipeline_parallel_degree"),
        microbatch=find_count(text, "pipeline_parallel_microbatch_size"),
        recompute="always" if re.search(r"activation_checkpoint\w*\s*=\s*FullAC", text) else None,
        shard=("parameters" if gathers else "gradients") if sharded else None,
        # an order in a file has no name: a person gives it
        schedule=AUTO if states(text, "pipeline_parallel_schedule_csv") else named,
    )


def _stages(text: str) -> list[list[str]]:
    """The names of the modules of each stage."""
    value: object = read_literal(text) or find_value(text, _FIELD) or text.split()
    if isinstance(value, list) and all(isinstance(own, str) for own in value):
        value = [[name for name in own.split(",") if name] for own in value]
    if not (
        isinstance(value, list)
        and value
        and all(isinstance(own, list | tuple) for own in value)
        and all(isinstance(name, str) for own in value for name in own)
    ):
        raise malformed(f"{_FIELD} is not a list of the modules of each stage", _EXAMPLE)
    return [list(own) for own in value]


def _part(name: str) -> Part:
    """What a module is."""
    block = _BLOCK.fullmatch(name)
    if block is None and name not in _PARTS:
        raise PartoptError(
            f"{name}: no module of torchtitan's models, which would leave it out in silence",
            f"{did_you_mean(name, [*_PARTS, 'layers.0'])}",
            code="malformed-layout",
            name=name,
        )
    return Part(BLOCK, int(block[1])) if block else Part(_PARTS[name])


def _check(stages: Sequence[Sequence[Part]], there: Sequence[Part]) -> None:
    """Raise PartoptError unless the stages have the parts of the model, each once and in order."""
    check_stages([len(own) for own in stages], "modules", sum(map(len, stages)))
    said = list(itertools.chain(*stages))
    check_count(count_blocks(said), "blocks", count_blocks(there))
    for part in dict.fromkeys([*said, *there]):
        if part not in there:
            raise PartoptError(
                f"the layout has a {part}, the profile none",
                f"say which layers it is: `map=NAME={part.kind}`",
                code="other-layers",
            )
        if part not in said:
            raise PartoptError(
                f"the layout has no {part}, which torchtitan would leave out in silence",
                "add it to a stage",
                code="other-layers",
            )
    for part, expected in zip(said, [*there, None], strict=False):
        if part != expected:
            raise PartoptError(
                f"{part} stands where {expected or 'the end'} is expected",
                "name each module once, in the order of the model",
                code="parts-out-of-order",
            )


# the cast to float32, its largest, sums, probabilities, gradient, casts back
EAGER_LOSS, COMPILED_LOSS = Loss(passes=40, held=12), Loss(passes=20, held=4)
# a kernel an operation: a norm, rotary in complex float32, silu and product
EAGER: dict[str, Any] = {
    "passes": Passes(
        residuals=(12, 24), rotary=(20, 20), queries=(4, 4), keys=(4, 4), gated=(10, 18)
    ),
    "kept": Kept(rotary=0, grouped=4, gated=8, narrower=0),
    "kept_selective": Kept(hidden=4, rotary=0, keys=2, gated=2, narrower=0),
    "loss": EAGER_LOSS,
    "compiled": False,
}
# compiled, each chain is one kernel
COMPILED: dict[str, Any] = {
    "passes": Passes(norms=(6, 12), queries=(4, 4)),
    "kept": Kept(rotary=0, grouped=4, gated=8, narrower=0),
    "kept_selective": Kept(hidden=2, rotary=0, keys=2, gated=2, narrower=0),
    "loss": COMPILED_LOSS,
    "compiled": True,
}

TORCHTITAN = Trainer(
    name="torchtitan",
    summary="torchtitan: a configuration module, and the order as CSV",
    tried="torchtitan 0.3.0",
    schedules=SYNCHRONOUS | _OWN,
    says=Says(
        cuts=PARTS,
        orders=("stages",),
        degrees={
            "tp": "divides the attention heads and those of keys and values",
            "cp": "half a rank's sequence: twice it divides the sequence",
            "ep": "divides the experts",
        },
        ties=False,
        least_stages=2,
    ),
    engine=Engine(
        waits=("1f1b",),
        messages="split",
        gradients="float32",
        allreduce="blocking",
        buffers="all",
        recompute=("none", "selective", "blocks"),
        shard=("none", "gradients", "parameters"),
    ),
    practice=Practice(
        **EAGER,
        attention="cudnn",
        joined_queries=False,
        joined_gate=False,
        regathers=False,
        sums="autograd",
        ends="blocks",
        selective="operations",
        shard_copies=(4, 6),
        conversion=4,
    ),
    choices={
        "compile": {"no": EAGER, "yes": COMPILED},
        "attention": {name: {"attention": name} for name in ("cudnn", "torch")},
        "async-tp": {"no": {"tp_overlap": "none"}, "yes": {"tp_overlap": "async"}},
        "loss": {"eager": {"loss": EAGER_LOSS}, "compiled": {"loss": COMPILED_LOSS}},
    },
    sources=TORCH.sources
    | {
        "schedules": "distributed/pipeline_parallel.py, _build_pipeline_schedule: torch's by name, "
        "or a CSV",
        "cuts": "distributed/pipeline_parallel.py: module_fqns_per_model_part",
        "degrees": "distributed/parallel_dims.py",
        "orders": "distributed/parallel_dims.py, build_mesh: pp is the outermost",
        "waits": "torch 2.13, Schedule1F1B: waits for each send and receive; the runtime, which "
        "runs the others, where they are needed",
        "gradients": "config/configs.py: mixed_precision_reduce is float32",
        "allreduce": "torch 2.13, pipelining/stage.py: gradients of FSDP are reduced when a "
        "stage's last backward has ended",
        "recompute": "distributed/activation_checkpoint.py: SelectiveAC, FullAC, of every block",
        "shard": "distributed/fsdp.py: fully_shard; fsdp_reshard_after_forward",
        "optimizer_bytes": "components/optimizer/optimizer.py: AdamW of float32 parameters",
        "passes": "models/common: RMSNorm, rotary in complex float32 (20), silu and product (4 + "
        "6; 6 + 12), each operation a kernel; with --compile each chain is one, counted",
        "kept": "the tensors that autograd saves of these operations, counted",
        "loss": "components/loss.py: cross_entropy of logits cast to float32; counted",
        "compiled": "config/job_config.py: compile.enable is off",
        "attention": "models/common/attention.py, ScaledDotProductAttentionWrapper: cuDNN's before "
        "torch's flash attention",
        "joined_queries": "models/common/attention.py: wq, wk, wv",
        "joined_gate": "models/common/feed_forward.py: w1, w3",
        "regathers": "distributed/tensor_parallel: DTensor keeps what was gathered",
        "sums": "autograd, where parameters are not in shares",
        "ends": "distributed/pipeline_parallel.py: pipeline_parallel_first_stage_less_layers and "
        "pipeline_parallel_last_stage_less_layers, a block each",
        "selective": "distributed/activation_checkpoint.py: per-op, every second product is kept",
        "kept_selective": "the same: the input, q, v, attention's output, the gate",
        "stops_early": "distributed/activation_checkpoint.py: early_stop, which is off",
        "shard_copies": "torch, distributed/fsdp/_fully_shard/_fsdp_collectives.py: what is "
        "gathered is copied out forward and backward (4 each), gradients are copied in",
        "conversion": "torchao, float8: compiled, the maximum is taken where a tensor is made",
    },
    write=_write,
    suffix=".py",
    faults=csv_faults,
    read=_read,
    reads="torchtitan: module_fqns_per_model_part, or a configuration module that has it",
    example=_EXAMPLE,
)
