"""torchtitan: a configuration module with the modules of every stage, and the order as CSV."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import structs

from partopt.configurations.program import Expression
from partopt.configurations.settings import Settings
from partopt.documents.engine import OF_TORCH, Engine, Layout
from partopt.documents.plan import Plan
from partopt.documents.stage import Shard
from partopt.documents.transformer import (
    Format,
    Kept,
    Loss,
    Modelled,
    Passes,
    Practice,
    Transformer,
)
from partopt.errors import PartoptError, unknown
from partopt.importers.hugging_face import (
    like_shipped,
    load_transformer,
    named_transformer,
    read_transformer,
    write_config,
)
from partopt.options import AUTO
from partopt.schedules import schedule
from partopt.schedules.placement import LOOPED, STRAIGHT
from partopt.trainers.parts import BLOCK, EMBEDDING, FURTHER, HEAD, NORM, Part, count_blocks
from partopt.trainers.reading import (
    check_count,
    check_stages,
    find_value,
    malformed,
    read_literal,
)
from partopt.trainers.sources import Sources
from partopt.trainers.torch import SYNCHRONOUS, csv_faults, csv_of
from partopt.trainers.trainer import (
    PARTS,
    Asked,
    Lever,
    Says,
    Stated,
    Text,
    Trainer,
    batch_of,
    pipeline_size,
    plain,
)

_FIELD = "module_fqns_per_model_part"
_EXAMPLE = "tok_embeddings,layers.0 layers.1,norm,lm_head"
_FURTHER_TOKENS = "the model predicts further tokens, which its pipelines do not"
_NAMES = {EMBEDDING: "tok_embeddings", NORM: "norm", HEAD: "lm_head"}
# `output` is what older versions call the head
_PARTS = {name: kind for kind, name in _NAMES.items()} | {"output": HEAD}
_BLOCK = re.compile(r"layers\.([0-9]{1,9})")
_NAMED_ORDERS = {"1f1b": "1F1B", "gpipe": "GPipe"}  # orders that have a name there
_SCHEDULES = {name: order for order, name in _NAMED_ORDERS.items()} | {
    "Interleaved1F1B": "interleaved",
    "InterleavedZeroBubble": "interleaved-zb",
    "ZBVZeroBubble": "zbv",
    "DualPipeV": "dualpipev",
}
# schedules of torch by their places: with a CSV the name still decides these
_PLACES = {STRAIGHT: "1F1B", LOOPED: "Interleaved1F1B"}

_MODULE = '''"""{name}: its pipeline, for {tried}.

torchrun --nproc-per-node N -m torchtitan.train --module {stem} --config planned
"""

{imports}{base}{stages}

def planned():
    """The base configuration with the plan's pipeline."""
    config = base()
    blocks = len(config.model_spec.model.layers)
    if blocks != {blocks}:
        raise ValueError(f"the model has {{blocks}} blocks, the plan is for {blocks}")
{settings}    if hasattr(config.training, "max_context_length"):  # after 0.3.0 a batch is in tokens
{tokens}    else:
{samples}    return config
'''
_SMALLEST = """# the configuration of the model, in place of that of torchtitan's smallest Llama
from torchtitan.models.llama3.config_registry import llama3_debugmodel as base
"""
# those of its models that partopt has, too: module, flavor, configuration
_FLAVORS = {
    **{
        f"llama3-{size}": ("llama3", size.upper(), f"llama3_{size}")
        for size in ("8b", "70b", "405b")
    },
    **{
        f"qwen3-{size}": ("qwen3", size.upper(), f"qwen3_{re.sub('[.-]', '_', size)}")
        for size in ("0.6b", "1.7b", "14b", "30b-a3b", "32b")
    },
    "deepseek-v3": ("deepseek_v3", "671B", "deepseek_v3_671b"),
    **{
        f"qwen3.5-{size}": ("qwen3_5", size.upper(), f"qwen35_{size.replace('-', '_')}")
        for size in ("27b", "35b-a3b", "122b-a10b", "397b-a17b")
    },
    **{f"gpt-oss-{size}": ("gpt_oss", size, f"gpt_oss_{size}") for size in ("20b", "120b")},
}
_CONVERTERS: dict[Format, str] = {
    "fp8": "Float8LinearConverter",
    "mxfp8": "MXFP8LinearConverter",
    "nvfp4": "NVFP4LinearConverter",
}
_TOKENS = ("num_tokens_per_microbatch_per_dp_rank", "num_tokens_per_train_step")
_KERNELS = {"cudnn": "cuDNN's kernel", "torch": "torch's flash attention"}
# what says which model it is
_NAMING = ("import.base", "hf_assets_path", "config", "tokenizer_path", "job.description")
# fields of the parts of a layout
_DEGREES = {
    part: f"{name}_parallel_degree"
    for part, name in {"tp": "tensor", "cp": "context", "ep": "expert", "pp": "pipeline"}.items()
}
# what makes activations again, and how much
_CHECKPOINTING = {"none": "", "selective": "SelectiveAC", "full": "FullAC"}
_OF_CHECKPOINTING = "torchtitan.distributed.activation_checkpoint"
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
    M, about = plan.microbatches or 1, plan.transformer
    order = _NAMED_ORDERS.get(plan.schedule)
    named = order is not None and M // d >= P  # its 1F1B needs them
    again = _CHECKPOINTING[plan.layout.recomputation.granularity]
    imports = [] if named else ["from pathlib import Path\n"]
    if again:
        imports.append(f"from {_OF_CHECKPOINTING} import {again}\n")
    base, model, converter, notes = _base(about or None)
    imports += [converter] * bool(converter)
    alone = P == 1 and len(plan.stages) == 1
    lines, pipeline = [model] * bool(model), dict[str, object]()
    if not alone:
        pipeline = {
            "module_fqns_per_model_part": Expression("STAGES"),
            "pipeline_parallel_schedule": order
            or _PLACES.get(schedule(plan.schedule).shape, "ZBVZeroBubble"),
            "pipeline_parallel_schedule_csv": None if named else Expression(_CSV.format(stem=stem)),
        }
        lines.append("config.training.disable_cuda_graphs = True  # pipelines need it")
    lines.append(f"config.activation_checkpoint = {f'{again}.Config()' if again else None}")
    lines += _compiled(about) if about else []
    if about and about.practice.host_shards:
        lines.append("config.training.enable_cpu_offload = True")
        notes.append("OMP_NUM_THREADS: torchrun's 1 steps on one core; give a rank its share")
    lines.append("parallelism = config.parallelism")
    fields = _parallelism(plan, pipeline)
    lines += [f"parallelism.{name} = {_quoted(value)}" for name, value in fields.items()]
    stages = "\n".join(f"    {_modules(parts[stage.start : stage.stop])}," for stage in plan.stages)
    tokens, samples = _batch_lines(plan)
    main = _MODULE.format(
        name=plain(plan.profile.name),
        stem=stem,
        imports="\n".join([*imports, ""]) if imports else "",
        base=base,
        stages="" if alone else f"\nSTAGES = [\n{stages}\n]\n",
        blocks=count_blocks(parts),
        settings="".join(f"    {line}\n" for line in lines),
        tokens=tokens,
        samples=samples,
        tried=TORCHTITAN.tried,
    )
    return Text(main, {} if named else {".csv": csv_of(plan)}, notes)


def _parallelism(plan: Plan, pipeline: Mapping[str, object]) -> dict[str, object]:
    """The fields of `config.parallelism`, those of a pipeline among them."""
    layout, d, shares = plan.layout, plan.stages[0].replicas, plan.shard != "none"
    return {
        **{_DEGREES[part]: getattr(layout, part) or 1 for part in ("tp", "cp")},
        **({_DEGREES["ep"]: layout.ep} if (layout.ep or 1) > 1 else {}),
        _DEGREES["pp"]: pipeline_size(plan),
        **pipeline,
        "data_parallel_replicate_degree": 1 if shares else d,
        "data_parallel_shard_degree": d if shares else 1,
        "fsdp_reshard_after_forward": "always" if plan.shard == "parameters" else "never",
    }


def _batch_lines(plan: Plan) -> list[str]:
    """Lines that say the batch in tokens, as after 0.3.0, and those that say it in samples."""
    about, size, batch = plan.transformer, plan.microbatch_size, batch_of(plan)
    piped, microbatches = len(plan.stages) > 1, (plan.microbatches or 1) // plan.stages[0].replicas
    context = about.sequence if about else "config.training.max_context_length"
    tokens = [
        *[f"training.max_context_length = {context}"] * bool(about),
        f"training.num_tokens_per_microbatch_per_dp_rank = {size} * {context}",
        f"training.num_tokens_per_train_step = {batch} * {context}",
        *[f"parallelism.num_pp_microbatches = {microbatches}"] * piped,
    ]
    samples = [
        *[f"training.seq_len = {context}"] * bool(about),
        # without a pipeline a microbatch is a step of accumulation
        f"training.local_batch_size = {microbatches * size if piped else size}",
        f"training.global_batch_size = {batch}",
        *[f"parallelism.pipeline_parallel_microbatch_size = {size}"] * piped,
    ]
    return ["".join(f"        config.{line}\n" for line in lines) for lines in (tokens, samples)]


def _faults(plan: Plan) -> list[str]:
    """What its schedules and models do not run, and what its context parallel ranks share."""
    shares = (plan.layout.cp or 1) > 1 and plan.shard == "none"
    faults = [*csv_faults(plan), *["context parallel ranks share parameters (`shard`)"] * shares]
    model = plan.transformer.model if plan.transformer else None  # models/deepseek_v3/MTP.md
    if model and model.further:
        faults.append(_FURTHER_TOKENS)
    elif model and not (model.name in _FLAVORS and _is_shipped(model)):
        several = model.latent or model.sinks or model.recurrence or len({*model.kinds()}) > 1
        faults += ["it has no model of such blocks"] * bool(several)
    return faults


def _quoted(value: object) -> str:
    if isinstance(value, Expression) or not isinstance(value, str):
        return str(value)
    return f'"{value}"'


def _base(about: Modelled | None) -> tuple[str, str, str, list[str]]:
    """The import of the base, the line that sets the model, an import it needs, and notes."""
    notes = ["names of modules are those of torchtitan's own models; put yours in as `base`"]
    if not about:
        return _SMALLEST, "", "", notes
    name, found = _CONVERTERS.get(about.format), _FLAVORS.get(about.model.name)
    converter = f"from torchtitan.components.quantization import {name}\n" if name else ""
    if not found or not _is_shipped(about.model):
        config = f"\nMODEL = {write_config(about.model)}\n"
        if name:
            config += f"CONVERTERS = [{name}.Config()]\n"
            notes.append("make its model with CONVERTERS, without which it trains in bfloat16")
        return f"{_SMALLEST}{config}", "", converter, notes
    family, flavor, function = found
    base = f"from torchtitan.models.{family} import model_registry\n"
    base += f"from torchtitan.models.{family}.config_registry import {function} as base\n"
    given = f'"{flavor}"'
    if name:
        given += f", converters=[{name}.Config()]"
    kernel = _KERNELS.get(about.practice.attention, about.practice.attention)
    notes = [
        "yours to add: data, a tokenizer, learning rate, checkpoints",
        f"its models attend by FlexAttention; the plan counts {kernel}",
    ]
    return base, f"config.model_spec = model_registry({given})", converter, notes


def _is_shipped(model: Transformer) -> bool:
    """Whether it is the one of its name, as far as it says; its own predict no further tokens."""
    shipped = structs.replace(load_transformer(model.name), further=0)
    return structs.replace(shipped, numerics=model.numerics and shipped.numerics) == model


def _compiled(about: Modelled) -> list[str]:
    """The lines that say what is compiled."""
    practice, asynchronous = about.practice, about.practice.tp_overlap == "async"
    loss = practice.loss != EAGER_LOSS
    if practice.compiled and not loss:
        components = ["model"]
    else:
        components = ["model", "loss"] if practice.compiled else ["loss"]
    return [
        f"config.compile.components = {components}",
        f"config.compile.enable_async_tensor_parallel = {asynchronous and practice.compiled}",
        f"config.compile.enable = {practice.compiled or loss}",
    ]


def _modules(parts: Sequence[Part]) -> str:
    """The modules of a stage: `["tok_embeddings", "layers.0"]`; PartoptError for further tokens."""
    if any(part.kind == FURTHER for part in parts):
        what = f"torchtitan cannot say this plan: {_FURTHER_TOKENS}"
        hint = "say otherwise what these layers are: `map=NAME=head`; megatron has them"
        raise PartoptError(what, hint, code="target-cannot-say", target="torchtitan")
    names = dict.fromkeys(
        f"layers.{part.number}" if part.kind == BLOCK else _NAMES[part.kind] for part in parts
    )
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"


def _read(settings: Settings, asked: Asked) -> Stated:
    """The modules of every stage, beside a profile; or a training, in Python, TOML or a command."""
    text, said = settings.text, _read_layout(settings)
    if not asked.layers:
        return _read_training(settings, asked.devices, said)
    value: object = read_literal(text) or find_value(settings, _FIELD) or text.split()
    stages = [[_part(name) for name in names] for names in _stages(value)]
    _check(stages, list(dict.fromkeys(asked.parts)))
    cuts = [asked.parts.index(stage[0]) for stage in stages[1:]]
    batch = settings.number("global_batch_size")
    return Stated(cuts=cuts, layout=_beside_profile(settings, said), batch=batch)


def _read_layout(settings: Settings) -> Layout:
    """What is said of a layout beside its stages and what replicas share, None where nothing is."""
    degrees: dict[str, Any] = {part: settings.number(name) for part, name in _DEGREES.items()}
    return Layout(
        **degrees,
        microbatch=settings.number("pipeline_parallel_microbatch_size"),
        recompute=_recompute(settings),
    )


def _beside_profile(settings: Settings, said: Layout) -> Layout:
    """What a text says of a layout whose model is a profile, which has other ways by default."""
    named = str(settings.known("pipeline_parallel_schedule"))
    sharded = (settings.number("data_parallel_shard_degree") or 1) > 1
    gathers = settings.known("fsdp_reshard_after_forward") == "always"
    in_file = settings.value("pipeline_parallel_schedule_csv") not in (None, "")
    return structs.replace(
        said,
        recompute="always" if said.recompute == "always" else None,
        shard=("parameters" if gathers else "gradients") if sharded else None,
        # an order in a file has no name: a person gives it
        schedule=AUTO if in_file else _SCHEDULES.get(named),
    )


def _read_training(settings: Settings, devices: int, said: Layout) -> Stated:
    """All of a transformer's training."""
    t, c, p = said.tp or 1, said.cp or 1, said.pp or 1
    replicas = max(1, devices // (t * c * p))
    model = _model(settings)
    sequence = _read_number(settings, ("seq_len", "training.max_context_length"), 2048)
    size, batch = _batch(settings, said, replicas, sequence)
    settings.check()
    assert model
    blocks = _blocks(settings, model)
    schedule_name = str(settings.find("pipeline_parallel_schedule") or "1F1B")
    named = _SCHEDULES.get(schedule_name, schedule_name)
    if p > 1 and named not in ("1f1b", "interleaved"):
        what = "is counted as 1F1B, of as many stages"
        settings.notes.append(f"pipeline_parallel_schedule: {schedule_name} {what}")
    chunks = len(blocks) // p if blocks else 1
    if blocks is None and p > 1 and named != "1f1b":
        layers = settings.count("pipeline_parallel_layers_per_stage", default=0)
        chunks = -(-(model.blocks + 2) // (p * layers)) if layers else 2
    return Stated(
        model=model,
        sequence=sequence,
        batch=batch,
        format=_format(settings),
        layout=structs.replace(
            said,
            tp=t,
            cp=c,
            ep=said.ep or 1,
            pp=p,
            chunks=max(1, chunks),
            microbatch=size,
            shard=_shard(settings, p, replicas if c == 1 else c * replicas),
        ),
        facts=_facts(settings),
        blocks=blocks,
        notes=settings.notes,
    )


def _read_number(settings: Settings, names: Sequence[str], usual: int) -> int:
    """The number of one of the names, or what every version has by default, which a note tells."""
    if all(settings.value(name) is None for name in names):
        settings.notes.append(f"{names[0]}: {usual:,}, torchtitan's default")
    return settings.count(*names, default=usual) or usual


def _batch(settings: Settings, said: Layout, replicas: int, sequence: int) -> tuple[int, int]:
    """Samples of a microbatch and of an iteration, in samples or, after 0.3.0, in tokens."""
    names = "pipeline_parallel_microbatch_size", "global_batch_size"
    asked, stated = map(settings.replaced.get, names)
    if isinstance(asked, int) and isinstance(stated, int):
        return asked, stated
    stated, piped = settings.find(names[1]), (said.pp or 1) > 1
    if any(map(settings.states, _TOKENS)):
        tokens = _read_number(settings, _TOKENS[:1], 16384)
        size, step = max(1, tokens // sequence), settings.find(_TOKENS[1])
        if tokens % sequence:
            settings.notes.append(f"{_TOKENS[0]}: {tokens:,} are counted as {size} of {sequence:,}")
        local = size * (settings.count("num_pp_microbatches", default=1) or 1 if piped else 1)
        stated = step // sequence if stated is None and isinstance(step, int) else stated
    else:
        local = _read_number(settings, ("local_batch_size", "training.batch_size"), 8)
        size = said.microbatch or 1 if piped else local
    return size, stated if isinstance(stated, int) and stated > 0 else local * replicas


def _blocks(settings: Settings, model: Transformer) -> list[int] | None:
    """The blocks of every stage, by their modules or by those that stages begin with."""
    parts = settings.find(_FIELD)
    if isinstance(parts, list) and parts:
        return [sum(map(bool, map(_BLOCK.fullmatch, names))) for names in _stages(parts)]
    names = settings.words("pipeline_parallel_split_points")
    found = [int(match[1]) for match in map(_BLOCK.fullmatch, names) if match]
    bounds = [0, *found, model.blocks]
    return [stop - start for start, stop in itertools.pairwise(bounds)] if found else None


def _model(settings: Settings) -> Transformer | None:
    """The model that a configuration names; a fault where it is none that is known."""
    config = settings.find("MODEL")
    if isinstance(config, dict):
        stated = read_transformer(json.dumps(config).encode(), "MODEL", "model")
        return like_shipped(stated) or stated
    module = re.search(r"models\.(\w+)", str(settings.known("import.model_registry")))
    family = settings.find("model.name", "module") or (module[1] if module else None)
    flavor = settings.find("model.flavor", "model_registry")
    size = re.sub(r"_(flex|varlen)(_attn)?$", "", str(flavor or "").lower())  # kernels
    names = [f"{family or 'llama3'}-{size}"] * bool(size)
    names += [str(settings.known(name)) for name in _NAMING]
    for name in names:
        model = named_transformer(name)
        if model and (not size or size in _sizes(model.name)):
            return structs.replace(model, further=0)
    what = f"the model is {names[0] if names else 'not named'}, none that partopt has"
    hint = "name it: `arguments=hf_assets_path=llama3-8b`, or another of models/"
    if size:  # which comes before other names
        flag = "model_registry" if settings.has("model_registry") else "model.flavor"
        hint = f"name one of models/: `arguments={flag}=8B`; or plan its config.json"
    settings.refuse(what, hint, "missing-setting")
    return None


def _sizes(name: str) -> tuple[str, ...]:
    """What a flavor of a model may be called, in small letters."""
    flavor = _FLAVORS[name][1].lower() if name in _FLAVORS else ""
    return flavor, name.partition("-")[2], name.rpartition("-")[2]


def _format(settings: Settings) -> Format:
    stated = {
        name: value for name, value in settings.values.items() if not name.startswith("import.")
    }
    said = " ".join([*stated, *map(str, stated.values())])
    for form, converter in _CONVERTERS.items():
        if converter in said:
            return form
    converters = str(settings.find("model.converters") or "")
    return "mxfp8" if "mx" in converters else "fp8" if "float8" in converters else "bfloat16"


def _recompute(settings: Settings) -> Any:
    """What the policy of activation checkpointing makes again; none where there is none."""
    names = ("activation_checkpoint.mode", "activation_checkpoint")
    stated = [str(settings.find(name)) for name in names if settings.states(name)]
    said = stated[0] if stated else "selective"
    if "FullAC" in said or said == "full":
        return "always"
    if said not in ("None", "none", "False"):
        if "MemoryBudget" in said or said == "memory_budget":
            settings.notes.append("activation_checkpoint: a memory budget is counted as selective")
        every = settings.known("selective_ac_option") or 2  # before 0.3.0
        older = said == "selective" and (settings.form == "document" or bool(stated))
        if older and every != "op":
            settings.notes.append(
                f"selective_ac_option: {every}, every so many blocks, is counted as op"
            )
        return "selective"
    return "never"


def _shard(settings: Settings, p: int, sharers: int) -> Shard:
    """What ranks with the same parameters share: those, or gradients if they are gathered once.

    They are replicas and context parallel ranks, which share them in any case; a rank alone is
    treated as if it shared them, too.
    """
    copies = settings.count("data_parallel_replicate_degree", default=1) or 1
    if copies == sharers > 1:
        return "none"
    if copies > 1:
        settings.notes.append(f"shards in {copies} copies are counted as shards over all replicas")
    policy = settings.find("fsdp_reshard_after_forward") or "default"
    return "gradients" if policy == "never" or (policy == "default" and p > 1) else "parameters"


def _facts(settings: Settings) -> dict[str, str]:
    on = settings.find("compile.enable", "training.compile") is True
    components = settings.find("compile.components") or ["model", "loss"]
    model = on and "model" in str(components)
    found = {"compile": "yes"} if model else {}
    if model != (on and "loss" in str(components)):
        found["loss"] = "eager" if model else "compiled"
    if settings.has("enable_cpu_offload"):
        found["cpu-offload"] = "yes"
    asynchronous = settings.has("enable_async_tensor_parallel")
    return found | ({"async-tp": "yes"} if asynchronous and model else {})


def _stages(value: object) -> list[list[str]]:
    """The names of the modules of every stage."""
    if isinstance(value, list) and all(isinstance(stage, str) for stage in value):
        value = [[name for name in stage.split(",") if name] for stage in value]
    if not (
        isinstance(value, list)
        and value
        and all(isinstance(stage, list | tuple) for stage in value)
        and all(isinstance(name, str) for stage in value for name in stage)
    ):
        raise malformed(f"{_FIELD} is not a list of the modules of each stage", _EXAMPLE)
    return [list(stage) for stage in value]


def _part(name: str) -> Part:
    """What a module is."""
    block = _BLOCK.fullmatch(name)
    if block is None and name not in _PARTS:
        raise unknown(
            f"{name}: no module of torchtitan's models, which would leave it out in silence",
            name,
            [*_PARTS, "layers.0"],
            code="malformed-layout",
        )
    return Part(BLOCK, int(block[1])) if block else Part(_PARTS[name])


def _check(stages: Sequence[Sequence[Part]], there: Sequence[Part]) -> None:
    """Raise PartoptError unless the stages have the parts of the model, each once and in order."""
    check_stages([len(stage) for stage in stages], "modules", sum(map(len, stages)))
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
CHUNKED_LOSS = Loss(passes=20, held=4 / 8)  # head and loss of eight parts of the tokens in turn
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
# compiled, a chain is one kernel
COMPILED: dict[str, Any] = {
    "passes": Passes(norms=(6, 12), queries=(4, 4)),
    "kept": Kept(rotary=0, grouped=4, gated=8, narrower=0),
    "kept_selective": Kept(hidden=2, rotary=0, keys=2, gated=2, narrower=0),
    "loss": COMPILED_LOSS,
    "compiled": True,
}


def _words(plan: Plan, settings: Settings) -> list[dict[str, object]]:
    """The keys of TOML that say a layout, which are fields and flags, too."""
    layout, about, size = plan.layout, plan.transformer, plan.microbatch_size
    piped, again = (layout.pp or 1) > 1, layout.recomputation.granularity
    microbatches = (plan.microbatches or 1) // plan.stages[0].replicas if piped else 1
    if any(map(settings.states, _TOKENS)):
        tokens = [size, batch_of(plan)]
        batch: dict[str, object] = {
            f"training.{name}": count * (about.sequence if about else 1)
            for name, count in zip(_TOKENS, tokens, strict=True)
        }
        batch["parallelism.num_pp_microbatches"] = microbatches if piped else None
    else:
        older = settings.states("training.batch_size")
        batch = {f"training.{'batch_size' if older else 'local_batch_size'}": microbatches * size}
        batch["training.global_batch_size"] = batch_of(plan)
        batch["parallelism.pipeline_parallel_microbatch_size"] = size if piped else None
    policy: dict[str, object] = {"activation_checkpoint.mode": again}
    if settings.form == "program":
        name = f"{_CHECKPOINTING[again]}.Config()" if again != "none" else "None"
        policy = {"activation_checkpoint": Expression(name, _OF_CHECKPOINTING)}
    orders, per_stage = {order: name for name, order in _SCHEDULES.items()}, None
    if about and len(plan.stages) > 2 * pipeline_size(plan):  # two are the default
        per_stage = -(-(about.model.blocks + 2) // len(plan.stages))
    stages: dict[str, object] = {
        "parallelism.pipeline_parallel_degree": pipeline_size(plan),
        "parallelism.pipeline_parallel_schedule": orders.get(plan.schedule) if piped else None,
        "parallelism.pipeline_parallel_layers_per_stage": per_stage,
        **dict.fromkeys((_FIELD, "pipeline_parallel_split_points")),
    }
    parallelism = _parallelism(plan, {})
    if plan.shard != "none" and settings.value("data_parallel_shard_degree") in (None, -1):
        del parallelism["data_parallel_shard_degree"]  # which is all that are left
    compiled = "training.compile" if settings.states("training.compile") else "compile.enable"
    asynchronous = bool(about and about.practice.tp_overlap == "async")
    return [
        batch,
        policy,
        stages,
        *({f"parallelism.{name}": parallelism[name]} for name in parallelism if "pipe" not in name),
        {"parallelism.enable_async_tensor_parallel": asynchronous},
        {"training.enable_cpu_offload": bool(about and about.practice.host_shards)},
        {compiled: bool(about and about.practice.compiled)},
    ]


TORCHTITAN = Trainer(
    name="torchtitan",
    summary="torchtitan: a configuration module, and the order as CSV",
    tried="torchtitan 0.3.0, and its main at b5bcd76c",
    schedules=SYNCHRONOUS | _NAMED_ORDERS,
    says=Says(
        cuts=PARTS,
        orders=("stages",),
        degrees={
            "tp": "divides the attention heads and those of keys and values",
            "cp": "half a rank's sequence: twice it divides the sequence",
            "ep": "divides the experts",
        },
        ties=False,
        spreads_recurrences=False,  # models/qwen3_5/parallelize.py
        least_stages=2,
        formats=("bfloat16", "fp8", "mxfp8", "nvfp4"),
    ),
    engine=Engine(
        waits=("1f1b",),
        in_turn=OF_TORCH.in_turn,
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
        flat_shards=False,
        conversion=4,
    ),
    choices={
        "compile": {"no": EAGER, "yes": COMPILED},
        "attention": {name: {"attention": name} for name in ("cudnn", "torch")},
        "cpu-offload": {"no": {"host_shards": False}, "yes": {"host_shards": True}},
        "async-tp": {"no": {"tp_overlap": "none"}, "yes": {"tp_overlap": "async"}},
        "loss": {
            "eager": {"loss": EAGER_LOSS},
            "compiled": {"loss": COMPILED_LOSS},
            "chunked": {"loss": CHUNKED_LOSS},
        },
    },
    levers=(
        Lever((("compile", "yes"),), "--compile.enable", verified=True),
        Lever(
            (("compile", "yes"), ("async-tp", "yes")),
            "--parallelism.enable_async_tensor_parallel",
            needs="tp",
            verified=True,
        ),
        # which torchao compiles; of mxfp8 no two published runs say it
        Lever((("compile", "yes"), ("dtype", "mxfp8")), "--dtype mxfp8", changes_numbers=True),
        Lever(
            (("compile", "yes"), ("dtype", "fp8")),
            "--dtype fp8",
            changes_numbers=True,
            verified=True,
        ),
        Lever((("cpu-offload", "yes"),), "--training.enable_cpu_offload", frees=True),
    ),
    sources=Sources("torch", "torchtitan"),
    write=_write,
    suffix=".py",
    faults=_faults,
    read=_read,
    words=_words,
    reads="torchtitan: a configuration module, TOML or command; or module_fqns_per_model_part",
    example=_EXAMPLE,
)
