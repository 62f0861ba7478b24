"""Megatron-LM and Megatron Bridge: Megatron Core's `PipelineParallelLayerLayout`.

A layout has a segment for each stage, `|` between them: `E` is the embedding, `t` a block, `L` the
final norm, the head and the loss. `t*4` and `(tt|)*29` repeat, commas mean nothing; Bridge's may be
a list of lists of names. With P devices segment i is virtual stage v of device p, i = v P + p, as
plans number stages.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from msgspec.structs import replace

from partopt.documents.engine import Engine, Layout, Recompute
from partopt.documents.plan import Plan
from partopt.documents.transformer import Loss, Practice
from partopt.errors import PartoptError
from partopt.trainers.parts import BLOCK, EMBEDDING, HEAD, NORM, Part, count_blocks
from partopt.trainers.reading import (
    check_count,
    find_count,
    find_stated,
    find_value,
    has_flag,
    malformed,
    read_literal,
)
from partopt.trainers.trainer import (
    HEADS,
    Reading,
    Says,
    Text,
    Trainer,
    batch_of,
    pipeline_size,
    plain,
    rank_order,
)

_LAYOUT = "pipeline_model_parallel_layout"
_EXAMPLE = "Et*4|t*3|t*3|t*2L"
_BARE = re.compile(r"[A-Za-z0-9|(),*]+")
# what is repeated: first groups, then letters
_REPEATED = re.compile(r"\(([^()]+)\)\*([0-9]{1,9})"), re.compile(r"(.)\*([0-9]{1,9})")
_LETTERS = {"embedding": "E", "decoder": "t", "loss": "L", "mtp": "m"}  # of names in lists
_SHOWN = 60  # letters of a layout in a message
_MOST = 1_000_000  # letters of a layout that is written out

# P   devices of a pipeline


def _faults(plan: Plan) -> list[str]:
    """What its interleaved schedule does not run."""
    P, own = pipeline_size(plan), (plan.microbatches or 0) // plan.stages[0].replicas
    if plan.schedule != "interleaved":
        return []
    if P == 1:
        return ["its stages are all on one device"]
    if own % P:
        return [f"{own} microbatches of a pipeline are not a multiple of its {P} devices"]
    return []


def _layout(plan: Plan, parts: Sequence[Part]) -> str:
    """The stages in the grammar of Megatron Core: `Et*4|t*3|t*3|t*2L`."""
    segments = []
    for stage in plan.stages:
        own = parts[stage.start : stage.stop]
        kinds, blocks = {part.kind for part in own}, count_blocks(own)
        middle = {0: "", 1: "t"}.get(blocks, f"t*{blocks}")
        end = "L" * bool(kinds - {BLOCK, EMBEDDING})
        segments.append("E" * (EMBEDDING in kinds) + middle + end)
    return "|".join(segments)


def _devices(plan: Plan) -> str:
    used = len({rank for stage in plan.stages for rank in stage.ranks})
    return f"{used * plan.topology.group_ranks} devices of {plain(plan.topology.name)}"


def _recomputation(plan: Plan) -> dict[str, str | int | None]:
    """Granularity, method and number of layers: the first ones of each stage, or one by one all."""
    own = plan.layout.recompute
    if own in ("never", "selective"):
        granularity = own if own == "selective" else None
        return {"granularity": granularity, "method": None, "num_layers": None}
    method, layers = ("block", own) if isinstance(own, int) else ("uniform", 1)
    return {"granularity": "full", "method": method, "num_layers": layers}


def _write_arguments(plan: Plan, parts: Sequence[Part], stem: str) -> Text:
    """A shell array of arguments, to be sourced by the script that starts the training."""
    words = [
        *_model_words(plan),
        *_degree_words(plan),
        f"--pipeline-model-parallel-size {pipeline_size(plan)}",
        f"--pipeline-model-parallel-layout '{_layout(plan, parts)}'",
        f"--micro-batch-size {plan.microbatch_size}",
        f"--global-batch-size {batch_of(plan)}",
    ]
    for name, value in _recomputation(plan).items():
        words += [f"--recompute-{name.replace('_', '-')} {value}"] * (value is not None)
    if plan.shard == "optimizer":
        words.append("--use-distributed-optimizer")
    if plan.engine.allreduce == "overlap" and plan.stages[0].replicas > 1:
        words.append("--overlap-grad-reduce")
    if "stages" not in rank_order(plan):
        words.append("--use-tp-pp-dp-mapping")
    lines = "\n".join(f"    {word}" for word in words)
    head = f"# {plain(plan.profile.name)}: --num-layers {count_blocks(parts)}, on {_devices(plan)}."
    notes = ['source it in the script that starts the training, and add "${PARTOPT_ARGS[@]}"']
    if plan.transformer:
        size = plan.transformer.model.vocabulary
        notes.append(
            f"yours to add: data, a tokenizer of {size:,} words, learning rate, checkpoints"
        )
    return Text(f"{head}\nPARTOPT_ARGS=(\n{lines}\n)\n", notes=notes)


def _degree_words(plan: Plan) -> list[str]:
    """The degrees beside the pipeline, those of 1 left out but for that of tensors."""
    own, about = plan.layout, plan.transformer
    words = [f"--tensor-model-parallel-size {own.tp or 1}"]
    words += [f"--context-parallel-size {own.cp}"] * ((own.cp or 1) > 1)
    words += [f"--expert-model-parallel-size {own.ep}"] * ((own.ep or 1) > 1)
    if about and about.practice.sequence_parallel and (own.tp or 1) > 1:
        words.append("--sequence-parallel")
    return words


def _model_words(plan: Plan) -> list[str]:
    """The shape of a transformer, and what its trainer is told beside the layout."""
    about = plan.transformer
    if not about:
        return []
    model, practice = about.model, about.practice
    sizes = {
        "num-layers": model.blocks,
        "hidden-size": model.hidden,
        "ffn-hidden-size": model.ffn or model.expert_ffn,
        "num-attention-heads": model.heads,
        "kv-channels": model.head_size,
        "seq-length": about.sequence,
        "max-position-embeddings": about.sequence,
        "normalization": "RMSNorm" if model.gated else "LayerNorm",
        "position-embedding-type": "rope" if model.rotary else "learned_absolute",
        "attention-dropout": 0.1 if model.dropout else 0.0,
        "hidden-dropout": 0.1 if model.dropout else 0.0,
    }
    words = [f"--{name} {value}" for name, value in sizes.items()]
    if model.kv_heads != model.heads:
        words += ["--group-query-attention", f"--num-query-groups {model.kv_heads}"]
    if model.experts:
        words += [
            f"--num-experts {model.experts}",
            f"--moe-router-topk {model.experts_per_token}",
            f"--moe-ffn-hidden-size {model.expert_ffn}",
            "--moe-grouped-gemm",
            "--moe-token-dispatcher-type alltoall",
        ]
    flags = {
        "swiglu": model.gated,
        "disable-bias-linear": model.gated,
        "untie-embeddings-and-output-weights": not model.tied,
        "bf16": about.format != "float16",
        "fp16": about.format == "float16",
        "fp8-format hybrid": about.format == "fp8",
        "cross-entropy-loss-fusion": practice.loss == FUSED,
        "tp-comm-overlap": practice.tp_overlap != "none",
    }
    return words + [f"--{name}" for name, given in flags.items() if given]


def _write_fields(plan: Plan, parts: Sequence[Part], stem: str) -> Text:
    """A function that sets the fields of Bridge's configuration, whatever its recipe set."""
    P, shared = pipeline_size(plan), plan.shard == "optimizer"
    chunks = len(plan.stages) // P
    fields = {
        "model.tensor_model_parallel_size": plan.layout.tp or 1,
        "model.context_parallel_size": plan.layout.cp or 1,
        **({"model.expert_model_parallel_size": plan.layout.ep} if plan.layout.ep else {}),
        "model.pipeline_model_parallel_size": P,
        "model.virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
        f"model.{_LAYOUT}": _layout(plan, parts),
        **{f"model.recompute_{name}": value for name, value in _recomputation(plan).items()},
        "train.micro_batch_size": plan.microbatch_size,
        "train.global_batch_size": batch_of(plan),
        "ddp.overlap_grad_reduce": plan.engine.allreduce == "overlap",
        "ddp.use_distributed_optimizer": shared,
        "optimizer.use_distributed_optimizer": shared,
        "dist.use_tp_pp_dp_mapping": "stages" not in rank_order(plan),
    }
    body = "\n".join(f"    config.{name} = {value!r}" for name, value in fields.items())
    return Text(
        f'"""{plain(plan.profile.name)} on {_devices(plan)}: its pipeline, for Megatron Bridge."""'
        '\n\n\ndef use_plan(config):\n    """Set the pipeline of a configuration whose model has '
        f'{count_blocks(parts)} layers."""\n{body}\n    return config\n',
        notes=["call it on the configuration of a recipe before it trains"],
    )


def _read(text: str, layers: Sequence[str], parts: Sequence[Part]) -> Reading:
    """The cuts before the first layer of every segment but the first, and what else is said."""
    own, layout, batch = text.strip(), Layout(), None
    value: object = own
    if not _BARE.fullmatch(own):
        value = read_literal(own)
        value = find_value(text, _LAYOUT) if value is None else value
        layout, batch = _read_rest(text), find_count(text, "global_batch_size")
    segments, blocks = _segments(value), 0
    _check(segments, parts)
    head = next(i for i, part in enumerate(parts) if part.kind in (NORM, HEAD))  # one there
    cuts: list[int] = []
    for segment in segments[:-1]:
        blocks += segment.count("t")
        last = blocks == count_blocks(parts)
        cuts.append(head if last else parts.index(Part(BLOCK, blocks)))
    return Reading(cuts, layout, batch)


def _read_rest(text: str) -> Layout:
    """What a script or a program says beside the segments."""
    shared = has_flag(text, "use-distributed-optimizer")
    stated = find_stated(text, "use_distributed_optimizer")
    recompute: Recompute | int | None = None
    if find_stated(text, "recompute_granularity") == "full":
        blocks = find_stated(text, "recompute_method") == "block"
        recompute = find_count(text, "recompute_num_layers") if blocks else "always"
    return Layout(
        tp=find_count(text, "tensor_model_parallel_size"),
        pp=find_count(text, "pipeline_model_parallel_size"),
        microbatch=find_count(text, "micro_batch_size"),
        recompute=recompute,
        shard="optimizer" if shared or stated is True else None,
    )


def _segments(value: object) -> list[str]:
    """The letters of each stage, with what is repeated written out."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        value = value[0]  # the word of a script
    if isinstance(value, list) and all(isinstance(row, list) for row in value):
        rows = [[str(name).strip().lower() for name in row] for row in value]
        return ["".join(_LETTERS.get(name, f"<{name}>") for name in row) for row in rows]
    if not isinstance(value, str):
        said = f"{_LAYOUT} is {value!r}" if value is not None else f"no layout, and no {_LAYOUT}"
        raise malformed(said, _EXAMPLE)
    written = value.replace(",", "")
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
            stage=segments.index(""),
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
    for kind in (EMBEDDING, HEAD):
        if kind not in {part.kind for part in parts}:
            raise PartoptError(
                f"the profile has no {kind}",
                f"say which layers it is: `map=NAME={kind}`",
                code="other-layers",
                kind=kind,
            )
    check_count(letters.count("t"), "blocks", count_blocks(parts))


PLAIN, FUSED = Loss(passes=52, held=6), Loss(passes=12, held=4)
PRACTICE = Practice(loss=PLAIN, attention="cudnn")  # whose defaults are Megatron's

MEGATRON = Trainer(
    name="megatron",
    summary="Megatron-LM: a shell array of arguments, with the pipeline's layout",
    tried="Megatron Core 0.16.1",
    schedules={"1f1b": "1F1B", "interleaved": "interleaved 1F1B"},
    says=Says(
        cuts=HEADS,
        recomputed="first",
        degrees={
            "tp": "divides the attention heads; the groups of keys and values, or they divide it",
            "cp": "half a rank's sequence: twice it divides the sequence",
            "ep": "divides the experts",
        },
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
        "ends": {name: {"ends": name} for name in ("stage", "blocks", "free")},
        "tp-overlap": {"no": {"tp_overlap": "none"}, "yes": {"tp_overlap": "buffers"}},
        "exchange": {"all": {"dispatch": "rows"}, "copies": {"dispatch": "copies"}},
        "exchange-overlap": {"no": {"dispatch_overlap": False}, "yes": {"dispatch_overlap": True}},
    },
    sources={
        "schedules": "core/pipeline_parallel/schedules.py, get_pp_rank_microbatches: P - 1 - p "
        "forwards first; interleaved 2 (P - 1 - p) + (v - 1) P",
        "cuts": "core/transformer/pipeline_parallel_layer_layout.py: embedding, decoder, loss",
        "degrees": "core/transformer/transformer_config.py; Megatron-LM, training/arguments.py",
        "orders": "core/parallel_state.py: tp-cp-ep-dp-pp, or --use-tp-pp-dp-mapping",
        "waits": "core/pipeline_parallel/schedules.py: 1F1B refuses overlap_p2p_comm, which "
        "Megatron-LM, training/arguments.py, has by default where stages interleave",
        "messages": "core/pipeline_parallel/p2p_communication.py: one tensor of hidden states",
        "gradients": "Megatron-LM, training/arguments.py, validate_args: --bf16 accumulates and "
        "reduces in float32, unless --grad-reduce-in-bf16",
        "allreduce": "core/distributed/distributed_data_parallel_config.py: overlap_grad_reduce",
        "bucket_bytes": "core/distributed/distributed_data_parallel.py: 40 million parameters, "
        "from 40 replicas on 1 million for each",
        "buffers": "core/pipeline_parallel/p2p_communication.py: torch.empty for each message",
        "recompute": "core/transformer/transformer_block.py, _checkpointed_forward: the first "
        "recompute_num_layers of each stage, or all one by one",
        "shard": "core/optimizer/distrib_optimizer.py: --use-distributed-optimizer",
        "optimizer_bytes": "core/optimizer/optimizer.py, Float16OptimizerWithFloat16Params: a "
        "float32 copy beside the moments, as partopt counts it",
        "passes": "core/fusions: norms read and write once (4; 6), bias, dropout and residual are "
        "one kernel (7; 5 for the mask beside 6 for the sum), rotary and SwiGLU likewise; counted",
        "kept": "Korthikanti et al., 2022, table 2; for others the same list, counted: inputs of "
        "norms and products, q, k, v, turned q, attention's output, gate, up, their product, masks",
        "loss": "core/tensor_parallel/cross_entropy.py: a cast, a maximum, a difference, an "
        "exponential, a sum, a quotient, a product, a cast back; counted. With "
        "--cross-entropy-loss-fusion one kernel forward and one backward",
        "attention": "Transformer Engine, attention/dot_product_attention/utils.py: on Hopper and "
        "Blackwell cuDNN's before FlashAttention-2",
        "joined_queries": "core/transformer/attention.py: linear_qkv",
        "joined_gate": "core/transformer/mlp.py: linear_fc1 is twice as wide where gated",
        "sequence_parallel": "Megatron-LM, training/arguments.py: --sequence-parallel, which "
        "experts need, and the examples have",
        "regathers": "core/tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncComm: "
        "backward gathers the input again",
        "tp_overlap": "Megatron-LM, training/arguments.py: --tp-comm-overlap is off",
        "sums": "core/tensor_parallel/layers.py: gradient_accumulation_fusion, on by default",
        "exchange": "core/distributed/param_and_grad_buffer.py: reduce_scatter or all_reduce",
        "sends": "core/pipeline_parallel/p2p_communication.py: a rank's part of the sequence",
        "ends": "core/transformer/transformer_block.py, get_num_layers_to_build: blocks evenly; "
        "--account-for-embedding-in-pipeline-split and -loss- count as a block each",
        "selective": "core/transformer/attention.py, _checkpointed_attention_forward: core_attn",
        "stops_early": "core/tensor_parallel/random.py, CheckpointFunction: all of a block",
        "conversion": "Transformer Engine, DelayedScaling: read for the maximum (2), read again, "
        "written with its transpose (4); counted",
        "dispatch": "Megatron-LM, training/arguments.py: --moe-token-dispatcher-type alltoall",
        "dispatch_overlap": "the same: --overlap-moe-expert-parallel-comm is off",
        "buffer_bytes": "CUDA's context, buffers of NCCL, a workspace of cuBLAS; assumed",
    },
    write=_write_arguments,
    suffix=".sh",
    faults=_faults,
    read=_read,
    reads="Megatron-LM: the layout of its pipeline, or a script that has it",
    example=_EXAMPLE,
)
BRIDGE = dataclasses.replace(
    MEGATRON,
    name="megatron-bridge",
    summary="Megatron Bridge: a function that sets the fields of a configuration",
    tried="Megatron Core 0.16.1; Megatron Bridge 0.3.1, its fields",
    sources=MEGATRON.sources
    | {
        "waits": "Megatron Bridge, training/comm_overlap.py: overlap_p2p_comm with chunks alone",
        "gradients": "Megatron Bridge, training/mixed_precision.py, bf16_mixed",
        "allreduce": "Megatron Bridge, recipes/common.py: overlap_grad_reduce",
        "loss": "Megatron Bridge, models/gpt_provider.py: cross_entropy_loss_fusion is on",
    },
    practice=replace(PRACTICE, loss=FUSED),
    write=_write_fields,
    suffix=".py",
    reads="Megatron Bridge, NeMo: pipeline_model_parallel_layout, text or lists",
    example='[["embedding", "decoder"], ["decoder", "loss"]]',
)
