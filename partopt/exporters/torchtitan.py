"""torchtitan: a configuration module with the modules of each stage, and the order as CSV."""

from __future__ import annotations

from collections.abc import Sequence

from partopt.documents.plan import Plan
from partopt.errors import PartoptError
from partopt.exporters.blocks import BLOCK, EMBEDDING, HEAD, NORM, Part, count_blocks
from partopt.exporters.target import PARTS, Target, Text, plain
from partopt.exporters.torch_csv import SYNCHRONOUS, csv_faults, csv_of
from partopt.schedules import schedule
from partopt.schedules.layout import LOOPED, STRAIGHT

_NAMES = {EMBEDDING: "tok_embeddings", NORM: "norm", HEAD: "lm_head"}
_OWN = {"1f1b": "1F1B", "gpipe": "GPipe"}  # orders that have a name there

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
    parallelism.context_parallel_degree = 1
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


def write(plan: Plan, parts: Sequence[Part], stem: str) -> Text:
    """The module, and a CSV beside it where torch has no name for the order."""
    if not stem.isidentifier():
        raise PartoptError(
            f"{stem}: not the name of a Python module, which torchtitan imports",
            "call the file planned.py",
            code="invalid-option",
            option="output",
        )
    P, d = len({tuple(stage.ranks) for stage in plan.stages}), plan.stages[0].replicas
    M, size = plan.microbatches or 1, plan.microbatch_size
    shares = plan.memory_rules.shard != "none"
    named = plan.schedule in _OWN and M // d >= P  # its 1F1B needs them
    imports = "" if named else "from pathlib import Path\n\n"
    if plan.stages[0].recompute:
        imports += "from torchtitan.distributed.activation_checkpoint import FullAC\n\n"
    main = _MODULE.format(
        name=plain(plan.profile.name),
        stem=stem,
        imports=imports,
        stages="\n".join(
            f"    {_modules(parts[stage.start : stage.stop])}," for stage in plan.stages
        ),
        blocks=count_blocks(parts),
        local=M // d * size,
        batch=M * size,
        tensor=plan.topology.group_ranks,
        checkpoint="FullAC.Config()" if plan.stages[0].recompute else "None",
        P=P,
        schedule=_OWN.get(plan.schedule) or _placement(plan),
        csv="None" if named else _CSV.format(stem=stem),
        size=size,
        replicate=1 if shares else d,
        shard=d if shares else 1,
        reshard="always" if plan.memory_rules.shard == "parameters" else "never",
    )
    note = "names of modules are those of torchtitan's own models; put yours in as `base`"
    return Text(main, {} if named else {".csv": csv_of(plan)}, [note])


def _modules(parts: Sequence[Part]) -> str:
    """The modules of a stage: `["tok_embeddings", "layers.0"]`."""
    names = dict.fromkeys(
        f"layers.{part.number}" if part.kind == BLOCK else _NAMES[part.kind] for part in parts
    )
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"


def _placement(plan: Plan) -> str:
    """A schedule of torch with the same places: with a CSV its name still decides these."""
    shape = schedule(plan.schedule).shape
    return {STRAIGHT: "1F1B", LOOPED: "Interleaved1F1B"}.get(shape, "ZBVZeroBubble")


TARGET = Target(
    name="torchtitan",
    summary="torchtitan: a configuration module, and the order as CSV",
    tried="torchtitan 0.3.0",
    write=write,
    suffix=".py",
    schedules=SYNCHRONOUS,
    cuts=PARTS,
    replicas="equal",
    recompute="all",
    recomputes="blocks",
    shards=("none", "gradients", "parameters"),
    ranks=("stages",),
    ties=False,
    least_stages=2,
    groups=True,
    faults=csv_faults,
)
