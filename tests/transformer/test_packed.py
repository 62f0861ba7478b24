"""Samples that are packed of documents, which attend within themselves."""

import dataclasses
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partopt import Topology
from partopt.documents.engine import Layout
from partopt.documents.transformer import Scores
from partopt.importers.hugging_face import load_transformer
from partopt.trainers import TRAINERS
from partopt.transformer.as_profile import rates_of
from partopt.transformer.block import Shape, Training
from partopt.transformer.iteration import estimate
from partopt.transformer.operations import model_flops, scores
from tests.docs.documents import read, section
from tests.transformer.helpers import EXPERTS, GPT, KINDS, LLAMA, seconds, training

# Llama 3 70B fine-tuned on SQuAD in samples of 4,096 tokens, 32 an iteration, with Megatron Bridge
# 26.06 (docs/performance-summary-archive.md; layouts and adapters of perf_recipes/llama): what is
# trained, cluster, format, GPUs, tp, pp, chunks; tokens a second and GPU
RUNS = [
    ("all", "gb300-nvl72", "fp8", 32, 1, 2, 20, 4819),
    ("all", "gb300-nvl72", "mxfp8", 32, 1, 2, 20, 4312),
    ("all", "gb200-nvl72", "fp8", 32, 1, 8, 10, 3864),
    ("all", "gb200-nvl72", "mxfp8", 32, 1, 8, 10, 3593),
    ("all", "dgx-h100", "fp8", 32, 4, 4, 5, 1638),
    ("adapters", "gb300-nvl72", "fp8", 8, 1, 2, 20, 7481),
    ("adapters", "gb300-nvl72", "mxfp8", 8, 1, 2, 20, 7447),
    ("adapters", "gb200-nvl72", "fp8", 8, 1, 2, 20, 6206),
    ("adapters", "gb200-nvl72", "mxfp8", 8, 1, 4, 20, 5958),
    ("adapters", "dgx-h100", "fp8", 8, 2, 4, 20, 2643),
]


@given(
    st.sampled_from([GPT, LLAMA, EXPERTS, KINDS]),
    st.sampled_from([128, 512, 1024]),
    st.sampled_from([Shape(), Shape(b=2, t=2), Shape(t=2, c=2, recompute="always")]),
)
def test_documents_take_what_as_many_short_samples_do(model, document, shape):
    packed, work = training(model, documents=document), training(model)
    apart = dataclasses.replace(work, sequence=document)
    same = shape._replace(b=shape.b * work.sequence // document)
    for kind, block in packed.blocks(shape).items():
        other = apart.block(same, kind)
        assert block.seconds == pytest.approx(other.seconds)
        assert block.saved_bytes == pytest.approx(other.saved_bytes)
    many = work.sequence // document
    flops = model_flops(model, work.sequence, packed.document)
    assert flops == pytest.approx(many * model_flops(model, document))


@given(st.sampled_from([GPT, LLAMA, KINDS]), st.integers(1, 8000), st.integers(1, 8000))
def test_longer_documents_take_longer_up_to_the_sample(model, first, second):
    short, long = sorted([first, second])
    one, other = (seconds(training(model, documents=size)) for size in (short, long))
    assert one <= other * (1 + 1e-9) <= seconds(training(model)) * (1 + 2e-9)


def test_scores_of_a_packed_sample_are_those_that_its_documents_allow():
    sequence, document = 24, 6
    kind = GPT.kinds()[0]
    allowed = sum(i // document == j // document for i in range(sequence) for j in range(sequence))
    assert allowed / 2 == sequence / document * scores(GPT, document, kind)


def test_attention_that_writes_its_scores_writes_all_of_them():
    written = Scores(forward=5, backward=6, kept=2)
    assert seconds(training(scores=written, documents=128)) == seconds(training(scores=written))


def mean(found):
    """Of absolute errors."""
    return statistics.mean(map(abs, found))


def prediction(trains, cluster, format, gpus, tp, pp, chunks, documents):
    """Seconds of an iteration of one of the runs."""
    topology = Topology.load(cluster, gpus // 8 if cluster == "dgx-h100" else 1)
    facts = {"gradients": "parameters", "ends": "stage", "documents": documents}
    facts |= {"tp-overlap": "yes"} if tp > 1 else {}
    facts |= {"lora": "16", "lora-targets": "qkv"} if trains == "adapters" else {}
    practice, engine = TRAINERS["megatron-bridge"].run_with(facts)
    work = Training(
        model=load_transformer("llama3-70b"),
        sequence=4096,
        format=format,
        practice=practice,
        engine=engine,
        rates=rates_of(topology),
    )
    layout = Layout(tp=tp, pp=pp, chunks=chunks, dp=gpus // tp // pp, shard="optimizer")
    return estimate(work, layout, 32).seconds


def errors(trains, documents):
    """Of all runs in which as much is trained."""
    return [
        prediction(*run, documents) * run[3] * speed / (32 * 4096) - 1
        for *run, speed in RUNS
        if run[0] == trains
    ]


def test_published_runs_on_packed_samples_are_met_as_is_said():
    by_kind = {trains: errors(trains, 256) for trains in ("adapters", "all")}
    whole = [error for trains in by_kind for error in errors(trains, "no")]
    packed = [error for found in by_kind.values() for error in found]
    assert all(one + 0.05 < other for one, other in zip(packed, whole, strict=True))
    stated = " ".join(section(read("accuracy.md"), "Transformers in closed form").split())
    adapters, all_weights = (f"{100 * mean(found):.1f} %" for found in by_kind.values())
    assert f"{100 * mean(packed):.1f} % off in the mean" in stated
    assert f"adapters {adapters}, all weights {all_weights}" in stated
    assert f"as one document {100 * mean(whole):.1f} %" in stated


def test_the_page_says_how_far_runs_of_adapters_are_off():
    off = sorted(map(abs, errors("adapters", 256)))
    assert len(off) == 5
    assert (round(100 * off[0]), round(100 * off[-1])) == (2, 9)
