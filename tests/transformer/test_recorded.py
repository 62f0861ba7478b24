"""The closed form of layouts of shipped models, figure by figure: what it was is what it is.

`tests/golden/transformers.jsonl` holds, a line a case, the seconds and bytes by part that were
computed when it was written. Whoever changes a formula on purpose runs `pytest tests/transformer
--update`, which writes the lines that differ, reads them, and says why.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

import partopt as po
from benchmarks import published_rows
from partopt.documents.transformer import Calibration, MeasuredBlock, Scores
from partopt.job import Job
from partopt.search.layout_questions import fill_layout, training_for
from partopt.transformer.as_profile import profile_of
from partopt.transformer.iteration import Degrees, estimate, once_s, settle_cut, stage_counts
from tests.golden.records import record_test
from tests.helpers import ROOT

FIGURES = ROOT / "tests/golden/transformers.jsonl"
# trainer, model, cluster and servers, samples of an iteration, their tokens, format, layout; facts
CASES = [
    "megatron llama3-70b dgx-h100 4 64 4096 bfloat16 tp=4,pp=4,chunks=2,dp=2,shard=optimizer",
    "megatron llama3-70b dgx-h100 8 64 4096 fp8 tp=4,pp=8,dp=2 ends=free tp-overlap=yes",
    "megatron llama3-8b dgx-h100 2 32 8192 bfloat16 tp=2,cp=2,pp=2,dp=2,recompute=always",
    "megatron llama3-8b dgx-h100 1 16 8192 bfloat16 pp=4,dp=2,recompute=3,microbatch=2",
    "megatron gpt3-1.3b dgx-a100 1 64 2048 float16 tp=2,pp=2,dp=2,shard=optimizer",
    "megatron gpt3-6.7b dgx-a100 2 64 2048 bfloat16 tp=8,dp=2,microbatch=4 sequence-parallel=no",
    "megatron gpt3-13b dgx-a100 2 32 2048 bfloat16 tp=4,pp=4,dp=1 loss=fused ends=blocks",
    "megatron qwen3-0.6b dgx-h100 1 32 4096 bfloat16 pp=2,tp=2,dp=2,shard=optimizer",
    "megatron qwen3-0.6b dgx-h100 1 32 4096 bfloat16 dp=8,microbatch=2 allreduce=overlap",
    "megatron mixtral-8x7b dgx-h100 4 128 4096 bfloat16 tp=2,ep=8,pp=2,dp=8,shard=optimizer",
    "megatron mixtral-8x7b dgx-h100 2 32 4096 fp8 ep=4,pp=2,dp=8 exchange=deepep",
    "megatron llama3-8b dgx-h100 2 16 4096 bfloat16 cp=16,dp=1,recompute=always",
    "megatron llama3-8b dgx-h100 2 16 2048 bfloat16 tp=4,cp=2,dp=2 tp-overlap=yes",
    "megatron mixtral-8x22b dgx-h100 4 64 4096 bfloat16 ep=8,tp=4,dp=8 exchange=deepep",
    "megatron gpt3-6.7b dgx-h100 1 64 2048 fp8 tp=2,dp=4",
    "megatron qwen3-30b-a3b dgx-h100 2 32 4096 bfloat16 ep=16,dp=16 exchange-overlap=yes",
    "megatron qwen3-235b-a22b gb200-nvl72 2 144 4096 mxfp8 tp=2,ep=8,pp=9,cp=2,dp=4",
    "megatron deepseek-v3 gb200-nvl72 16 2304 4096 mxfp8 ep=32,pp=4,chunks=4,dp=288,"
    "recompute=selective,modules=mla_up_proj,shard=optimizer exchange=hybridep graphs=attention",
    "megatron kimi-k2 dgx-h100 64 1024 4096 fp8 tp=2,ep=64,pp=8,dp=32,recompute=selective,"
    "modules=mla_up_proj+mlp,shard=optimizer exchange=deepep muon=yes routing=balanced",
    "megatron glm-4.5-air dgx-b200 8 256 8192 bfloat16 ep=8,pp=2,dp=32 exchange-overlap=no",
    "megatron gpt-oss-20b dgx-b200 1 64 8192 bfloat16 ep=8,dp=8,etp=1 routing=capacity",
    "megatron llama4-maverick dgx-h200 16 256 16384 fp8 tp=4,ep=8,etp=2,pp=4,dp=8,recompute=2",
    "megatron deepseek-v3 dgx-h100 32 256 4096 fp8 ep=64,pp=4,dp=64 ends=16-15-15-15m"
    " fused-experts=yes",
    "torchtitan deepseek-v3 dgx-h100 64 512 4096 bfloat16 tp=1,ep=64,dp=512,shard=parameters",
    "megatron llama3-405b gb200-nvl72 1 72 8192 nvfp4 tp=4,pp=18,dp=1 waits=1f1b,interleaved",
    "megatron gpt3-175b dgx-a100 8 64 2048 bfloat16 tp=8,pp=8,chunks=3,dp=1,recompute=selective",
    "torchtitan llama3-8b dgx-h100 1 8 8192 bfloat16 dp=8,shard=parameters,recompute=selective",
    "torchtitan llama3-8b dgx-h100 2 64 8192 fp8 tp=2,dp=8,shard=parameters compile=yes",
    "torchtitan llama3-8b dgx-h100 2 64 8192 bfloat16 cp=2,dp=8,shard=gradients"
    " compile=yes async-tp=yes",
    "torchtitan llama3-70b dgx-h100 8 64 8192 bfloat16 tp=8,pp=2,dp=4,recompute=always",
    "torchtitan llama3-70b dgx-h100 4 32 4096 fp8 tp=8,dp=4,recompute=always"
    " compile=yes async-tp=yes",
    "torchtitan llama3-405b dgx-h100 64 64 8192 bfloat16 tp=8,pp=8,chunks=2,dp=8 compile=yes",
    "torchtitan llama3-8b dgx-h100 4 64 2048 bfloat16 tp=4,dp=8,recompute=selective"
    " compile=yes async-tp=yes",
    "torchtitan gpt3-13b dgx-a100 4 32 2048 bfloat16 tp=2,dp=16,recompute=selective compile=yes",
    "torchtitan llama3-8b dgx-h100 1 32 4096 bfloat16 dp=8,microbatch=2 compile=yes",
    "torchtitan qwen3-30b-a3b dgx-h100 2 32 4096 bfloat16 tp=2,ep=8,dp=8,recompute=selective",
    "torchtitan qwen3-30b-a3b dgx-h100 2 32 4096 bfloat16 ep=8,dp=16,shard=parameters",
    "torchtitan qwen3-8b dgx-h100 2 32 4096 bfloat16 pp=2,dp=8,shard=none attention=torch",
    "deepspeed llama2-13b dgx-a100 2 32 4096 bfloat16 pp=4,tp=2,dp=2,shard=optimizer",
    "deepspeed gpt3-2.7b dgx-a100 1 32 2048 float16 pp=2,dp=4,recompute=always",
    "deepspeed gpt3-2.7b dgx-a100 1 32 2048 bfloat16 tp=2,pp=2,dp=2,recompute=always",
    "deepspeed llama2-7b dgx-a100 1 16 2048 bfloat16 tp=4,dp=2 attention=flash gradients=float32",
    "megatron llama3-8b dgx-h100 1 32 4096 bfloat16 tp=2,pp=2,dp=2,microbatch=2 measured",
    "megatron qwen3-30b-a3b dgx-h100 1 32 4096 bfloat16 tp=2,ep=4,dp=4,recompute=always measured",
    "megatron llama3-8b dgx-h100 1 32 4096 bfloat16 tp=2,cp=2,dp=2 measured",
    "megatron llama3-8b dgx-h100 1 32 4096 bfloat16 tp=2,dp=4,microbatch=8 alone",
    "megatron mixtral-8x7b dgx-a100 4 32 4096 bfloat16 tp=2,ep=2,dp=16 scaling",
    "megatron gpt3-13b dgx-a100 8 64 2048 bfloat16 tp=2,pp=4,dp=8,microbatch=2 scaling",
    "megatron llama2-7b dgx-a100 2 64 2048 bfloat16 tp=4,dp=4,recompute=selective scaling",
    "megatron llama2-7b dgx-a100 2 64 2048 bfloat16 pp=2,dp=8,recompute=always scaling",
    "megatron mixtral-8x7b dgx-h100 2 64 2048 bfloat16 tp=8,dp=2",
    "torchtitan gpt3-6.7b dgx-a100 4 64 2048 bfloat16 dp=32,shard=parameters foundry",
    "torchtitan llama2-7b dgx-h100 2 64 4096 fp8 tp=4,dp=4,recompute=always foundry",
    "torchtitan llama2-7b dgx-h100 2 64 4096 bfloat16 pp=2,dp=8,shard=gradients foundry",
]


def measured(ranks: int) -> Calibration:
    """A block on so many ranks, at two sizes of microbatch, of which one kept what is known."""
    blocks = [
        MeasuredBlock(microbatch_size=1, forward_s=4e-3, backward_s=9e-3, kept_bytes=6 * 10**8),
        MeasuredBlock(microbatch_size=4, forward_s=13e-3, backward_s=31e-3),
    ]
    return Calibration(name="block", sha256="0" * 64, ranks=ranks, blocks=blocks)


# what else may be of a training: times that were measured, or how a trainer without a file runs
FOUNDRY = replace(published_rows.FOUNDRY, stops_early=True, shards="server", tp_overlap="async")
SCORES = Scores(forward=9, backward=11, kept=5, work=4)
SCALING = replace(published_rows.SCALING, scores=SCORES, sequence_parallel=False)
WORDS = {
    "measured": {"calibration": [measured(2)]},
    "alone": {"calibration": [measured(1)]},
    "scaling": {"practice": SCALING},
    "foundry": {"practice": FOUNDRY},
}


def figures_of(case: str) -> dict[str, object]:
    """The parts of the closed form, and what a profile has of the first block and the ends."""
    trainer, model, cluster, servers, batch, tokens, form, layout, *facts = case.split()
    asked = Job(
        model=po.find_transformer(model),
        topology=po.Topology.load(cluster, int(servers)),
        trainer=trainer,
        global_batch=int(batch),
        sequence=int(tokens),
        dtype=form,
        layout=po.Layout.parse(layout),
        facts=dict(fact.split("=") for fact in facts if fact not in WORDS),
    )
    changes = [WORDS[fact] for fact in facts if fact in WORDS]
    work = dataclasses.replace(training_for(asked), **dict(*changes))
    full = fill_layout(asked, work)
    work = settle_cut(work, full, int(batch))
    found, profile = estimate(work, full, int(batch)), profile_of(work, full, int(batch))
    [measured] = profile.measurements
    layers = [
        {"parameters": layer.parameter_bytes, **msgspec.to_builtins(own)}
        for layer, own in zip(profile.layers, measured.layers, strict=True)
    ]
    return {
        "seconds": found.parts,
        "memory": found.memory,
        "once_s": once_s(work, full, int(batch)),
        "optimizer_s": measured.optimizer_s,
        "stages": stage_counts(work, Degrees.of(work, full, int(batch))),
        "stashes": [group.bytes for group in measured.stash_groups[:: len(layers) // 4]],
        "layers": [layers[place] for place in (0, 1, -3, -2, -1)],
        "profile": [profile.dtype, profile.model.arguments["layout"]],
        "group": msgspec.to_builtins(profile.group),
        "tensor": msgspec.to_builtins(measured.tensors[-1]),
    }


def rounded(node):
    """The figures with eight digits."""
    if isinstance(node, Mapping):
        return {key: rounded(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [rounded(value) for value in node]
    return float(f"{node:.8g}") if isinstance(node, float) else node


test_figures_are_what_they_were = record_test(
    FIGURES, CASES, lambda case: rounded(figures_of(case))
)
