"""Megatron-LM and Megatron Bridge: Megatron Core's `PipelineParallelLayerLayout`.

A layout has a segment for a stage, `|` between them: `E` is the embedding, `t` a block, `L` the
final norm, the head and the loss, `m` a block that predicts a further token. `t*4` and `(tt|)*29`
repeat, commas mean nothing; Bridge's may be a list of lists of names. With P devices segment i is
virtual stage v of device p, i = v P + p, as plans number stages.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import shlex
from collections.abc import Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from partopt.configurations.program import Expression
from partopt.configurations.settings import Settings
from partopt.documents.engine import Engine, Layout
from partopt.documents.plan import Plan
from partopt.documents.transformer import ADAPTED, Practice
from partopt.errors import PartoptError
from partopt.trainers.megatron_arguments import (
    FUSED_EXPERTS,
    read_layout,
    read_recomputation,
    read_training,
)
from partopt.trainers.megatron_mixers import (
    PATTERN,
    read_pattern,
    unsaid_sizes,
    write_pattern,
)
from partopt.trainers.megatron_model import (
    BUCKET_ITEM,
    FUSED,
    MAIN_GRADIENTS,
    MAIN_PARAMETERS,
    OFFLOAD,
    PLAIN,
    SCORES,
    STATES,
    fsdp_arguments,
    model_arguments,
)
from partopt.trainers.megatron_names import FIELDS, NEMO, OPPOSITES, SYNONYMS
from partopt.trainers.parts import (
    BLOCK,
    EMBEDDING,
    FURTHER,
    HEAD,
    NORM,
    Part,
    count_blocks,
    find_parts,
    missing_kinds,
)
from partopt.trainers.read_back import offloaded_modules
from partopt.trainers.reading import check_count, find_value, malformed, read_literal
from partopt.trainers.sources import Sources
from partopt.trainers.trainer import (
    HEADS,
    Asked,
    Lever,
    Says,
    Stated,
    Text,
    Trainer,
    batch_of,
    pipeline_size,
    plain,
    rank_order,
)
from partopt.transformer.offloading import TOGETHER

_LAYOUT = "pipeline_model_parallel_layout"
_EXAMPLE = "Et*4|t*3|t*3|t*2L"
_BARE = re.compile(r"[A-Za-z0-9|(),*]+")
# what is repeated: first groups, then letters
_REPEATED = re.compile(r"\(([^()]+)\)\*([0-9]{1,9})"), re.compile(r"(.)\*([0-9]{1,9})")
_LETTERS = {"embedding": "E", "decoder": "t", "loss": "L", "mtp": "m"}  # of names in lists
_FEW = 3  # equal segments that are written out
_SHOWN = 60  # letters of a layout in a message
# of Transformer Engine from 2.10 on
_KEEPS_WEIGHTS = "export NVTE_CPU_OFFLOAD_V1=1  # else weights go to the host, too"
_MOST = 1_000_000  # letters of a layout that is written out
_CHUNKS, _VIRTUAL = "virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank"
_PER_STAGE = "num_layers_per_virtual_pipeline_stage"
# arguments that say how blocks are shared out beside the pipeline's layout, and what is made again
_OTHER_CUTS = (
    *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    "num_layer_list",
)
_ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
# settings of versions, and of others, that do not have the pipeline's layout
_OLDER = (
    *("checkpoint_activations", "activations_checkpoint_method", "DDP_impl", "num_layer_list"),
    *("activations_checkpoint_granularity", "attention_head_type", "use_lf_gate"),
)
_OTHERS_AGAIN = ("recompute_activations", "checkpoint_activations")

# P   devices of a pipeline


def _faults(plan: Plan) -> list[str]:
    """What its interleaved schedule does not run, and modules that it does not make again."""
    P, microbatches = pipeline_size(plan), (plan.microbatches or 0) // plan.stages[0].replicas
    if about := plan.transformer or None:  # core/transformer/transformer_config.py, __post_init__
        modules, model = {*(plan.layout.modules or "").split("+")}, about.model
        grouped = model.experts and about.format != "float16"
        part = about.practice.graphs in ("router", "attention") and _recomputation(plan)["method"]
        lacks = {
            "mla_up_proj without latent attention": not model.latent and {"mla_up_proj"},
            "moe_act without grouped experts": not grouped and {"moe_act"},
            "blocks that graphs hold parts of": part and {""},
            "moe_act or layernorm in fp8": about.format == "fp8" and {"moe_act", "layernorm"},
        }
        faults = [what for what, names in lacks.items() if names and modules & names]
        if faults:
            return [f"it does not recompute {what}" for what in faults]
        if about.practice.images:
            return ["a tower is not written: `images=no` has the text alone"]
        if not grouped and (TOGETHER | {FUSED_EXPERTS}) & {*_offload(plan)}:
            return ["it does not offload what experts save that are not grouped"]
        if unsaid := unsaid_sizes(model):
            return [f"it has no {unsaid}"]
    if plan.schedule != "interleaved":
        return []
    if P == 1:
        return ["its stages are all on one device"]
    if microbatches % P:
        return [f"{microbatches} microbatches of a pipeline are not a multiple of its {P} devices"]
    return []


def _pattern(plan: Plan, parts: Sequence[Part]) -> str | None:
    """The letters of blocks that are half of others, with the stages; None where none are."""
    counts = [count_blocks(parts[stage.start : stage.stop]) for stage in plan.stages]
    return write_pattern(plan.transformer.model, counts) if plan.transformer else None


def _layout(plan: Plan, parts: Sequence[Part]) -> str:
    """The stages in the grammar of Megatron Core: `Et*4|t*3|t*3|t*2L`."""
    segments = []
    for stage in plan.stages:
        of_stage = parts[stage.start : stage.stop]
        kinds, blocks = {part.kind for part in of_stage}, count_blocks(of_stage)
        middle = {0: "", 1: "t"}.get(blocks, f"t*{blocks}")
        further = plan.transformer.model.further if plan.transformer and FURTHER in kinds else 0
        end = "m" * further + "L" * (HEAD in kinds)
        segments.append("E" * (EMBEDDING in kinds) + middle + end)
    runs = [(segment, len(list(run))) for segment, run in itertools.groupby(segments[:-1])]
    several = (f"({segment}|)*{n}" if n > _FEW else f"{segment}|" * n for segment, n in runs)
    return "".join(several) + segments[-1]


def _devices(plan: Plan) -> str:
    used = len({rank for stage in plan.stages for rank in stage.ranks})
    return f"{used * plan.topology.group_ranks} devices of {plain(plan.topology.name)}"


def _recomputation(plan: Plan) -> dict[str, Any]:
    """Granularity, method and number of layers: the first ones of a stage, or one by one all."""
    again = plan.layout.recomputation
    if again.is_whole:
        method, layers = ("uniform", 1) if again.blocks is None else ("block", again.blocks)
        return {"granularity": "full", "method": method, "num_layers": layers}
    granularity = None if again.granularity == "none" else again.granularity
    found = {"granularity": granularity, "method": None, "num_layers": None}
    return found | ({"modules": [*again.modules]} if again.modules else {})


def _offload(plan: Plan) -> list[str]:
    """Modules that save in the host's memory; those of experts are one where these are fused."""
    names, about = offloaded_modules(plan), plan.transformer
    if about and about.practice.fused_experts:
        names = list(dict.fromkeys(FUSED_EXPERTS if name in TOGETHER else name for name in names))
    return names


def _arguments(plan: Plan, parts: Sequence[Part]) -> dict[str, Any]:
    """All that the trainer is told, by the names of its arguments."""
    layout, about = plan.layout, plan.transformer
    overlaps, shared = plan.engine.allreduce == "overlap", plan.shard != "none"
    overlaps = overlaps or layout.shares_gradients  # by itself
    muon = about.practice.muon if about else False  # which by its name shares its state
    waits = plan.schedule == "interleaved" and "interleaved" in plan.engine.waits
    usual = not about or plan.engine.bucket_bytes == MEGATRON.engine.bucket_bytes
    pattern, cut = _pattern(plan, parts), len(plan.stages) > 1
    return {
        **model_arguments(plan),
        "tensor_model_parallel_size": layout.tp or 1,
        "context_parallel_size": layout.cp or 1,
        "expert_model_parallel_size": layout.ep,
        "pipeline_model_parallel_size": pipeline_size(plan),
        # of a transformer, a stage alone has none
        _LAYOUT: None if pattern else _layout(plan, parts) if cut or not about else None,
        PATTERN: pattern,
        "micro_batch_size": plan.microbatch_size,
        "global_batch_size": batch_of(plan),
        **{f"recompute_{name}": value for name, value in _recomputation(plan).items()},
        "fine_grained_activation_offloading": bool(_offload(plan)) if about else None,
        "offload_modules": _offload(plan) or None,
        "use_distributed_optimizer": shared and not muon,
        "optimizer": ("dist_muon" if shared else "muon") if muon else None,
        "overlap_grad_reduce": overlaps,
        "overlap_param_gather": overlaps and shared if about else None,
        "ddp_bucket_size": None if usual else plan.engine.bucket_bytes // BUCKET_ITEM,
        "no_overlap_p2p_communication": waits,
        "use_tp_pp_dp_mapping": "stages" not in rank_order(plan),
        "use_megatron_fsdp": layout.shares_gradients if about else None,
        **(fsdp_arguments(plan) if layout.shares_gradients else {}),
    }


def _notes(plan: Plan) -> list[str]:
    """What has to be known of a host that steps some of the optimizer."""
    if not plan.transformer or not plan.transformer.practice.optimizer_offload:
        return []
    return ["hosts step the optimizer: OMP_NUM_THREADS, which torchrun sets to 1, says how fast"]


def _write_arguments(plan: Plan, parts: Sequence[Part], stem: str) -> Text:
    """A shell array of arguments, to be sourced by the script that starts the training."""
    given = _arguments(plan, parts)
    if plan.stages[0].replicas == 1 and not plan.transformer:
        given["overlap_grad_reduce"] = False
    words = list[str]()
    for name, value in given.items():
        none = value == "none" and name != "position_embedding_type"  # which has another default
        unsaid = value is None or value is False or none or name in _OF_FIELDS
        if unsaid or (name in _ALONE and value == 1):
            continue
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        said = shlex.join(value) if isinstance(value, list) else shlex.quote(text)
        flag = f"--{name.replace('_', '-')}"
        words.append(flag if value is True else f"{flag} {said}")
    lines = "\n".join(f"    {word}" for word in words)
    head = f"# {plain(plan.profile.name)}: --num-layers {count_blocks(parts)}, on {_devices(plan)}."
    notes = ['source it in the script that starts the training, and add "${PARTOPT_ARGS[@]}"']
    notes += _notes(plan)
    if plan.transformer:
        size = plan.transformer.model.vocabulary
        notes.append(
            f"yours to add: data, a tokenizer of {size:,} words, learning rate, checkpoints"
        )
        if plan.layout.shares_gradients:
            head += "\nunset CUDA_DEVICE_MAX_CONNECTIONS  # with 1 FSDP does not start"
            notes += ["without CUDA_DEVICE_MAX_CONNECTIONS=1 exchanges of tp may hide less"] * (
                (plan.layout.tp or 1) > 1
            )
        elif (plan.layout.tp or 1) * (plan.layout.cp or 1) > 1:
            head += "\nexport CUDA_DEVICE_MAX_CONNECTIONS=1  # tp and cp need it, before Blackwell"
        head += f"\n{_KEEPS_WEIGHTS}" * bool(_offload(plan))
    return Text(f"{head}\nPARTOPT_ARGS=(\n{lines}\n)\n", notes=notes)


# where the configuration of Bridge has an argument, if not in `model`
_PARTS = {
    "train": ("micro_batch_size", "global_batch_size"),
    "ddp": (
        *("overlap_grad_reduce", "overlap_param_gather", "use_distributed_optimizer"),
        *("ddp_bucket_size", "use_megatron_fsdp", "data_parallel_sharding_strategy"),
        "grad_reduce_in_bf16",
        *("fsdp_double_buffer", MAIN_GRADIENTS, MAIN_PARAMETERS),
    ),
    "optimizer": ("optimizer", "use_precision_aware_optimizer", *STATES[6.0], *OFFLOAD),
    "dist": ("use_tp_pp_dp_mapping",),
    "checkpoint": ("ckpt_format",),
    "rerun_state_machine": ("no_check_for_nan_in_loss_and_grad",),
}
_PART_OF = {name: part for part, names in _PARTS.items() for name in names}
_RECIPES = {
    "bfloat16": "bf16_mixed",
    "float16": "fp16_mixed",
    "fp8": "bf16_with_fp8_delayed_scaling_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
    "nvfp4": "bf16_with_nvfp4_mixed",
}
_TYPES = {"bf16": Expression("torch.bfloat16"), "fp16": Expression("torch.float16")}
_TYPES["fp32"] = Expression("torch.float32")
_OF_SCRIPTS = (
    *("group_query_attention", "max_position_embeddings", "no_overlap_p2p_communication"),
    *("squared_relu", "spec"),  # activations and blocks are functions there
    "accumulate_allreduce_grads_in_fp32",
    # the recipe of a format says it
    *("bf16", "fp16", "fp8_format", "fp8_recipe", "fp4_format", "fp8_param_gather"),
)
_OF_FIELDS = ("beta_fast", "beta_slow", "original_max_position_embeddings")
# what is said to be none, whatever a recipe has
_NONE = (
    *("recompute_granularity", "recompute_method", "recompute_num_layers", "q_lora_rank"),
    *("mtp_num_layers", "window_size", "window_attn_skip_freq", "moe_expert_capacity_factor"),
)
_ALONE = ("context_parallel_size", "expert_model_parallel_size", "rotary_percent")  # 1 by default


def _fields(plan: Plan, parts: Sequence[Part]) -> dict[str, Any]:
    """The fields of Bridge's configuration, whatever its recipe set."""
    about, chunks = plan.transformer, len(plan.stages) // pipeline_size(plan)
    fields: dict[str, Any] = {}
    for name, value in _arguments(plan, parts).items():
        if value is None and name in _NONE:
            fields[f"model.{name}"] = None
        elif name not in _OF_SCRIPTS and value is not None:
            field = f"{_PART_OF.get(name, 'model')}.{(FIELDS | OPPOSITES).get(name, name)}"
            formats = name in STATES[6.0] or name.endswith("_dtype")
            fields[field] = not value if name in OPPOSITES else _TYPES[value] if formats else value
    if about:
        fields["mixed_precision"] = _RECIPES[about.format]
        fields["dataset.seq_length"] = about.sequence
    if plan.schedule == "interleaved" and "interleaved" in plan.engine.waits:
        fields["model.overlap_p2p_comm"] = False
    fields[f"model.{_CHUNKS}"] = chunks if chunks > 1 else None
    fields["optimizer.use_distributed_optimizer"] = fields["ddp.use_distributed_optimizer"]
    return fields


def _write_fields(plan: Plan, parts: Sequence[Part], stem: str) -> Text:
    """A function that sets the fields of Bridge's configuration."""
    about, fields = plan.transformer, _fields(plan, parts)
    imports, practice = "", about and about.practice
    if any(value in _TYPES.values() for value in fields.values()):
        imports = "\n\nimport torch"
    if practice and practice.adapters:
        imports += "\n\nfrom megatron.bridge.peft.lora import LoRA"
        fields["peft"] = Expression(_adapters(practice))
    body = "\n".join(f"    config.{name} = {value!r}" for name, value in fields.items())
    notes = ["call it on the configuration of a recipe before it trains", *_notes(plan)]
    if about:
        notes.append("of the recipe are left: activation function, data, tokenizer, learning rate")
        notes += [_KEEPS_WEIGHTS] * bool(_offload(plan))
    name, blocks = plain(plan.profile.name), count_blocks(parts)
    return Text(
        f'"""{name} on {_devices(plan)}: its pipeline, for Megatron Bridge."""{imports}\n\n\n'
        'def use_plan(config):\n    """Set the pipeline of a configuration whose model has '
        f'{blocks} layers."""\n{body}\n    return config\n',
        notes=notes,
    )


def _adapters(practice: Practice) -> str:
    """Bridge's adapters; of their dropout it is known alone whether there is some."""
    names = [f"linear_{name}" for name in practice.adapted.split("+")]
    dropout = 0.1 if practice.adapter_dropout else 0.0
    return f"LoRA(target_modules={names!r}, dim={practice.adapters}, dropout={dropout})"


def _say_stages(plan: Plan, parts: Sequence[Part], settings: Settings) -> dict[str, object]:
    """What says the blocks of stages: nothing where Megatron shares them out so by itself.

    Else those of the ends, or a list where the text has one, and the pipeline's layout for stages
    that these cannot say. Texts of older versions lack that.
    """
    if pattern := _pattern(plan, parts):
        path = f"model.{PATTERN}" if plan.trainer == "megatron-bridge" else PATTERN
        return {path: pattern}
    counts = [count_blocks(parts[stage.start : stage.stop]) for stage in plan.stages]
    further = plan.transformer and plan.transformer.model.further
    fields, middle = plan.trainer == "megatron-bridge", {*counts[1:-1]}
    layout = f"model.{_LAYOUT}" if fields else _LAYOUT
    if len({*counts}) == 1 and not further:
        return {layout: None}
    if not further and len(plan.stages) == pipeline_size(plan):
        if settings.states("num_layer_list"):
            return {layout: None, "num_layer_list": ",".join(map(str, counts))}
        if len(middle) < 2:
            names = [f"model.{name}" for name in _OTHER_CUTS[:2]] if fields else _ENDS
            pairs = zip(names, (counts[0], counts[-1]), strict=True)
            return {layout: None} | {name: n for name, n in pairs if n not in middle}
    if any(map(settings.states, _OLDER)):
        settings.lacks = frozenset({layout})
    return {layout: _layout(plan, parts)}


def _words(plan: Plan, settings: Settings) -> list[dict[str, object]]:
    """Arguments of Megatron-LM, fields of Bridge, or keys of NeMo, as the text has these."""
    settings.synonyms = SYNONYMS
    parts = find_parts([name for stage in plan.stages for name in stage.modules])
    P = pipeline_size(plan)
    chunks, blocks = len(plan.stages) // P, plan.transformer.model.blocks if plan.transformer else 0
    nemo = settings.states("optim.name")
    fields = plan.trainer == "megatron-bridge"
    given = _fields(plan, parts) if fields else _arguments(plan, parts)
    said = {name.rpartition(".")[2]: (name, value) for name, value in given.items()}
    stages = _say_stages(plan, parts, settings)
    is_even = not any(stages.values())
    cuts: dict[str, object] = {said["pipeline_model_parallel_size"][0]: P}
    cuts |= dict.fromkeys(_OTHER_CUTS) | stages
    if settings.states("noop_layers"):  # which fill up stages
        cuts |= {"noop_layers": None, "num_layers": blocks}
    virtual = f"model.{_CHUNKS}" if fields else _VIRTUAL
    by_blocks = settings.states(_PER_STAGE) or (
        virtual == _VIRTUAL and not settings.states(virtual)
    )
    cuts |= {_PER_STAGE: None, virtual: None}
    if is_even and chunks > 1:
        cuts |= {_PER_STAGE: blocks // len(plan.stages)} if by_blocks else {virtual: chunks}
    again: dict[str, object] = dict.fromkeys(_OTHERS_AGAIN)
    rest = list[dict[str, object]]()
    for name, (path, value) in said.items():
        path = NEMO.get(name, path) if nemo else path
        if name.startswith("recompute_"):
            again[path] = value
        elif nemo and name == "use_distributed_optimizer":
            rest.append({path: "distributed_fused_adam" if value else "fused_adam"})
        elif name not in (_LAYOUT, PATTERN, _CHUNKS, "pipeline_model_parallel_size", "vocab_size"):
            rest.append({path: value})
    if settings.form == "script" and (plan.layout.tp or 1) * (plan.layout.cp or 1) > 1:
        rest.append({"CUDA_DEVICE_MAX_CONNECTIONS": 1})
    return [cuts, again, *rest]


def read_arguments(settings: Settings, asked: Asked, trainer: str) -> Stated:
    """What texts of `trainer` say, with the stages of the pipeline's layout."""
    if asked.layers:
        text = settings.text.strip()
        value = text if _BARE.fullmatch(text) else read_literal(text)
        segments = _segments(find_value(settings, _LAYOUT) if value is None else value)
        layout, batch = _beside_profile(settings), settings.number("global_batch_size")
        return Stated(cuts=_cuts(segments, asked.parts), layout=layout, batch=batch)
    # or of a function that sets it, as `set_deepseek_v3_pipeline_model_parallel_layout`
    names = (path.rpartition(".")[2] for path in settings.values if "import." not in path)
    setters = [name for name in names if re.fullmatch(rf"(?!set_)\w+_{_LAYOUT}", name)]
    found = settings.find(_LAYOUT, *setters[::-1])
    stages = _segments(found) if found else read_pattern(settings).stages or None
    return read_training(settings, asked.devices, trainer, stages)


def _cuts(segments: Sequence[str], parts: Sequence[Part]) -> list[int]:
    """The first layer of every segment but the first."""
    _check(segments, parts)
    head = next(i for i, part in enumerate(parts) if part.kind in (NORM, HEAD))  # one there
    there = count_blocks(parts)
    before = itertools.accumulate(segment.count("t") for segment in segments[:-1])
    return [head if blocks == there else parts.index(Part(BLOCK, blocks)) for blocks in before]


def _beside_profile(settings: Settings) -> Layout:
    """What a text says of a layout whose model is a profile, which has other ways by default."""
    settings.synonyms = SYNONYMS
    said, again = read_layout(settings), read_recomputation(settings, 1, _MOST)
    shard = said.shard if said.shard == "optimizer" else None
    return replace(said, shard=shard, recompute=None if again in ("never", "selective") else again)


def _segments(value: object) -> list[str]:
    """The letters of every stage, with what is repeated written out."""
    if isinstance(value, list) and all(isinstance(row, list) for row in value):
        rows = [[str(name).strip().lower() for name in row] for row in value]
        return ["".join(_LETTERS.get(name, f"<{name}>") for name in row) for row in rows]
    if not isinstance(value, str):
        said = f"{_LAYOUT} is {value!r}" if value is not None else f"no layout, and no {_LAYOUT}"
        raise malformed(said, _EXAMPLE)
    written = value.strip("'\"").replace(",", "")
    for repeated in _REPEATED:
        letters = sum(len(what) * int(times) for what, times in repeated.findall(written))
        if letters > _MOST:
            raise PartoptError(
                f"{value[:_SHOWN]!r}: more than {_MOST:,} letters",
                "check what is repeated",
                code="malformed-layout",
            )
        written = repeated.sub(lambda match: match[1] * int(match[2]), written)
    return written.split("|")


def _check(segments: Sequence[str], parts: Sequence[Part]) -> None:
    """Raise PartoptError unless the segments are those of a model whose layers are `parts`."""
    letters = "".join(segments)
    if "" in segments:
        raise PartoptError(
            f"segment {segments.index('')} is empty: Megatron runs a stage without layers, partopt "
            "has none",
            "leave the segment out, or move layers to it",
            code="empty-stage",
        )
    if "m" in letters:
        raise PartoptError(
            "`m`: layers of multi-token prediction are in no profile",
            "leave them out, and count their time with the head: they stand before it",
            code="unsupported-layout",
        )
    if unknown := re.sub(r"[EtL]", "", letters):
        raise PartoptError(
            f"unknown: {unknown[:_SHOWN]}",
            "E is the embedding, t a block, L the head with the loss; (tt|)*29 is repeated",
            code="malformed-layout",
        )
    if not re.fullmatch(r"Et*L", letters):
        raise malformed("a layout begins with its one E, and ends with its one L", _EXAMPLE)
    for kind in missing_kinds(parts):
        hint = f"say which layers it is: `map=NAME={kind}`"
        raise PartoptError(f"the profile has no {kind}", hint, code="other-layers")
    check_count(letters.count("t"), "blocks", count_blocks(parts))


_SHARES = tuple(f"{share / 100:g}" for share in range(101))  # as many as a fraction is written in

# whose defaults are Megatron's, but for the cuts, which the layout that is exported says
PRACTICE = Practice(loss=PLAIN, attention="cudnn", ends="fewer", tp_overlap="backward")

# modules whose products are worth more than their copies; norms and activations are made again
_OFFLOADS = {
    "no": "",
    "experts": "expert_fc1+moe_act",
    "attention": "qkv_linear+core_attn+attn_proj",
}
_OFFLOADS["all"] = f"{_OFFLOADS['attention']}+{_OFFLOADS['experts']}"

# its `--moe-enable-deepep` is deprecated; it needs several expert parallel ranks
_FLEX = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend {}"
_LINKED = 8  # devices of a server that DeepEP's kernels reach: its NUM_MAX_NVL_PEERS

MEGATRON = Trainer(
    name="megatron",
    summary="Megatron-LM: a shell array of arguments, with the pipeline's layout",
    tried="Megatron Core 0.16.1, and Megatron-LM at d98e8a64",
    schedules={"1f1b": "1F1B", "interleaved": "interleaved 1F1B"},
    says=Says(
        cuts=HEADS,
        recomputed="first",
        degrees={
            "tp": "divides the attention heads; the groups of keys and values, or they divide it",
            "cp": "half a rank's sequence: twice it divides the sequence",
            "ep": "divides the experts",
            "etp": "divides the width of an expert",
        },
        repeats_keys=True,
    ),
    # with --bf16, and --overlap-grad-reduce as it is written
    engine=Engine(
        waits=("1f1b",),
        gradients="float32",
        bucket_bytes=160_000_000,
        recompute=("none", "selective", "blocks"),
        shard=("none", "optimizer"),
    ),
    practice=PRACTICE,
    choices={
        "loss": {"plain": {"loss": PLAIN}, "fused": {"loss": FUSED}},
        "ends": {name: {"ends": name} for name in ("stage", "blocks", "fewer", "free")},
        "sequence-parallel": {
            "no": {"sequence_parallel": False},
            "yes": {"sequence_parallel": True},
        },
        "tp-overlap": {"no": {"tp_overlap": "backward"}, "yes": {"tp_overlap": "buffers"}},
        "exchange": {name: {"dispatch": name} for name in ("alltoall", "deepep", "hybridep")},
        "exchange-overlap": {"no": {"dispatch_overlap": False}, "yes": {"dispatch_overlap": True}},
        "graphs": {name: {"graphs": name} for name in ("none", "router", "attention", "full")},
        "routing": {name: {"routing": name} for name in ("real", "balanced", "capacity")},
        "fused-experts": {"no": {"fused_experts": False}, "yes": {"fused_experts": True}},
        "fp8-parameters": {"no": {"fp8_parameters": False}, "yes": {"fp8_parameters": True}},
        "muon": {"no": {"muon": False}, "yes": {"muon": True}},
        "fsdp": {"no": {"fsdp": False}, "yes": {"fsdp": True}},
        "documents": {"no": {"documents": 0}},
        "optimizer-offload": {share: {"optimizer_offload": float(share)} for share in _SHARES},
        "offload-overlap": {"no": {"offload_overlap": False}, "yes": {"offload_overlap": True}},
        "offload": {name: {"offload": modules} for name, modules in _OFFLOADS.items()},
        "attention": {
            **{name: {"attention": name} for name in ("cudnn", "cudnn-2025")},
            "scores": {"scores": SCORES},
        },
    },
    levers=(
        Lever(
            (("sequence-parallel", "yes"), ("tp-overlap", "yes")), "--tp-comm-overlap", needs="tp"
        ),
        Lever((("loss", "fused"),), "--cross-entropy-loss-fusion"),
        Lever((("exchange", "hybridep"),), _FLEX.format("hybridep"), needs="ep", beyond=_LINKED),
        Lever((("exchange", "deepep"),), _FLEX.format("deepep"), needs="ep"),
        Lever((("ends", "free"),), "ends=free", verified=True),
        Lever(
            (("gradients", "parameters"),),
            "--grad-reduce-in-bf16",
            changes_numbers=True,
        ),
        Lever((("graphs", "none"), ("fsdp", "yes")), "--use-megatron-fsdp", frees=True),
        Lever((("dtype", "mxfp8"),), "--dtype mxfp8", changes_numbers=True, verified=True),
        Lever((("dtype", "fp8"),), "--dtype fp8", changes_numbers=True, verified=True),
        Lever((("optimizer_bytes", "8"),), "--use-precision-aware-optimizer", changes_numbers=True),
        Lever(
            (("offload-overlap", "yes"), ("optimizer-offload", "1")),
            "--optimizer-cpu-offload {}",
            verified=True,
            frees=True,
            values=_SHARES[1:],
        ),
        Lever(
            (("offload", "all"),),
            "--fine-grained-activation-offloading ({})",
            frees=True,
            values=("experts", "all"),
        ),
    ),
    sources=Sources("megatron"),
    write=_write_arguments,
    suffix=".sh",
    faults=_faults,
    read=partial(read_arguments, trainer="megatron"),
    words=_words,
    reads="Megatron-LM: a script or YAML of its arguments, or the layout of its pipeline",
    example=_EXAMPLE,
)
# what recipes set that is not usual here (Megatron Bridge at 067f987d, recipes/*/h100 and
# perf_recipes/*/h100), of facts that seconds are known of
_OVERLAPS, _NARROW = {"tp-overlap": "yes"}, {"gradients": "parameters"}
_QWEN = [f"qwen3-{size}" for size in ("0.6b", "1.7b", "4b", "8b", "14b", "32b")]
_EXPERTS = ("deepseek-v3", "gpt-oss-120b", "qwen3-30b-a3b", "qwen3-235b-a22b")
_FLAGS = {
    "--use-megatron-fsdp": "ddp.use_megatron_fsdp",
    "--tp-comm-overlap": "model.tp_comm_overlap",
    **{
        _FLEX.format(name): f"model.moe_flex_dispatcher_backend={name}"
        for name in ("hybridep", "deepep")
    },
    "--grad-reduce-in-bf16": "ddp.grad_reduce_in_fp32=False",
    "--use-precision-aware-optimizer": "optimizer.use_precision_aware_optimizer",
    "--optimizer-cpu-offload {}": "optimizer.optimizer_offload_fraction={}",
    "--fine-grained-activation-offloading ({})": "model.fine_grained_activation_offloading ({})",
}
RECIPES: dict[str, dict[str, dict[str, str]]] = {
    "benchmark": {
        "llama3-8b": _NARROW,
        **dict.fromkeys(("llama3-70b", "llama3-405b"), _OVERLAPS | _NARROW),
        **dict.fromkeys(_EXPERTS, _NARROW),
    },
    "canonical": {
        "llama2-7b": {"loss": "plain"},
        "llama3-8b": {},
        **dict.fromkeys(("llama3-70b", "llama3-405b"), _OVERLAPS),
        "gpt3-175b": _OVERLAPS | _NARROW | {"loss": "plain"},
        **{name: {"sequence-parallel": "no"} for name in _QWEN},
    },
}
BRIDGE = dataclasses.replace(
    MEGATRON,
    name="megatron-bridge",
    summary="Megatron Bridge: a function that sets the fields of a configuration",
    tried="Megatron Core 0.16.1; Megatron Bridge 0.3.1, its fields",
    sources=Sources("megatron", "megatron-bridge"),
    practice=replace(PRACTICE, loss=FUSED),
    choices={
        **MEGATRON.choices,
        "lora": {str(rank): {"adapters": rank} for rank in range(1025)},
        "lora-targets": {
            "all": {"adapted": "+".join(ADAPTED)},
            **{name: {"adapted": name} for name in ADAPTED},
        },
        "lora-dropout": {"no": {"adapter_dropout": False}, "yes": {"adapter_dropout": True}},
        "images": {"no": {"images": 0}},
        "tower": {"frozen": {"tower_trained": False}, "trained": {"tower_trained": True}},
    },
    levers=[lever._replace(flag=_FLAGS.get(lever.flag, lever.flag)) for lever in MEGATRON.levers],
    recipes=RECIPES,
    write=_write_fields,
    suffix=".py",
    read=partial(read_arguments, trainer="megatron-bridge"),
    reads="Megatron Bridge, NeMo: a recipe or YAML, or pipeline_model_parallel_layout",
    example='[["embedding", "decoder"], ["decoder", "loss"]]',
)
