"""Blocks of gated deltas, state spaces, sparse attention: what they hold, take, and are refused."""

import csv
import dataclasses
import json

import pytest
from msgspec.structs import replace

from benchmarks.published_errors import STATES
from benchmarks.published_rows import USUAL, model_of, training_of
from partopt.documents.engine import Layout
from partopt.documents.transformer import Indexer, Kind, Latent, Recurrence
from partopt.errors import PartoptError
from partopt.importers.hugging_face import load_transformer, read_transformer, write_config
from partopt.transformer.block import Shape
from partopt.transformer.faults import find_faults
from partopt.transformer.iteration import estimate
from partopt.transformer.operations import model_flops, scores
from tests.profiler.zoo_language import transformers_model
from tests.transformer.helpers import EXPERTS, LLAMA, seconds, size, training

STATE = Recurrence(rule="states", heads=16, head_size=64, groups=8, keys=128, chunk=128)
DELTA = Recurrence(rule="delta", heads=16, head_size=64, groups=8, keys=64, chunk=64)
HYBRID = replace(
    EXPERTS, name="hybrid", blocks=8, ffn=3584, recurrence=STATE, pattern="M*ME-M*E", shared_ffn=512
)
GATED = replace(EXPERTS, name="gated", recurrence=DELTA, full_period=4, output_gated=True)
SPARSE = replace(
    EXPERTS,
    name="sparse",
    kv_heads=8,
    head_size=96,
    latent=Latent(queries=384, keys=256, rotary=32, values=64),
    indexer=Indexer(heads=4, head_size=64, taken=256),
)

# what is left out of every count: gates of shared experts, norms of heads, that of the head
LEFT_OUT = ("shared_expert_gate.", "self_attn.q_norm.", "self_attn.k_norm.", "correction_bias")
OUTSIDE = ("model.norm.weight", "model.norm_f.weight")


def torch_parameters(kind, raw):
    """How many parameters the modules of transformers have, on no device."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers_model(f"{kind}ForCausalLM", f"{kind}Config", **raw)
    named = dict(model.named_parameters()).items()
    return sum(
        p.numel() for n, p in named if n not in OUTSIDE and not any(w in n for w in LEFT_OUT)
    )


CLASSES = {
    "qwen3_next": "Qwen3Next",
    "nemotron_h": "NemotronH",
    "deepseek_v32": "DeepseekV32",
    "glm_moe_dsa": "GlmMoeDsa",
}
WORDS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3-next-80b-a3b", {"num_hidden_layers": 8}),
        ("qwen3-next-80b-a3b", {"num_hidden_layers": 5, "linear_num_key_heads": 8, "head_dim": 64}),
        ("nemotron-3-nano-30b-a3b", {"hybrid_override_pattern": "MEM*E"}),
        ("nemotron-h-56b", {"hybrid_override_pattern": "M-*-M", "n_groups": 4, "conv_kernel": 3}),
        ("deepseek-v3.2", {"num_hidden_layers": 4}),
        ("glm-5", {"num_hidden_layers": 5, "index_head_dim": 64, "index_n_heads": 16}),
    ],
)
def test_parameters_are_those_of_the_modules_of_transformers(name, changes):
    raw = write_config(load_transformer(name)) | changes | {"vocab_size": 1024}
    if pattern := raw.pop("hybrid_override_pattern", None):
        raw["num_hidden_layers"] = len(pattern)
        raw["layers_block_type"] = [WORDS[letter] for letter in pattern]
    ours = read_transformer(json.dumps(raw).encode(), "config.json", "mine").parameters
    kind = CLASSES[raw.pop("model_type")]
    if "layers_block_type" in raw:
        del raw["num_hidden_layers"]
    assert ours == torch_parameters(kind, raw)


# billions on cards, and their shares; those of two digits are as near as these say
CARDS = {
    "qwen3-next-80b-a3b": (80, 0.005),
    "qwen3.5-27b": (27, 0.005),
    "qwen3.5-35b-a3b": (35, 0.01),
    "qwen3.5-122b-a10b": (122, 0.005),
    "qwen3.5-397b-a17b": (397, 0.005),
    "nemotron-3-nano-30b-a3b": (31.6, 0.005),
    "nemotron-3-super-120b-a12b": (120.6, 0.005),
    "nemotron-3-ultra-550b-a55b": (550, 0.005),
    "nemotron-h-56b": (56, 0.01),
    "deepseek-v3.2": (671, 0.005),
    "glm-5": (744, 0.005),
}


@pytest.mark.parametrize("name", CARDS)
def test_parameters_are_as_many_as_cards_say(name):
    billions, share = CARDS[name]
    assert load_transformer(name).parameters / 1e9 == pytest.approx(billions, rel=share)


def test_kinds_are_in_their_places():
    names = [kind.name for kind in load_transformer("qwen3-next-80b-a3b").kinds()]
    assert names == [*["gated delta experts"] * 3, "experts"] * 12
    kinds = load_transformer("nemotron-3-nano-30b-a3b").kinds()
    assert [kind.name for kind in kinds[:7]] == [
        *["state space", "only experts"] * 2,
        *["state space", "attention", "only experts"],
    ]
    assert {kind.halves for kind in kinds} == {1}
    assert {kind.name for kind in load_transformer("nemotron-h-56b").kinds()} == {
        *("state space", "attention", "only dense")
    }
    shared = replace(SPARSE, blocks=9, indexer=replace(SPARSE.indexer, period=4, first=2))
    names = ["indexed", "indexed", "sparse", "sparse", "sparse", "indexed", *["sparse"] * 3]
    assert [kind.mixer for kind in shared.kinds()] == names  # as GLM-5.2's indexer_types
    assert load_transformer("nemotron-3-super-120b-a12b").further_kinds == [
        Kind("attention", "none"),
        Kind("none", "experts"),
    ]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"pattern": "M*ME"}, "pattern: M\\*ME is not of 8 blocks that the model has"),
        ({"pattern": "G*GE-G*E"}, "pattern: G\\*GE-G\\*E is not of 8 blocks"),
        ({"recurrence": None}, "pattern: M\\*ME-M\\*E is not of 8 blocks"),
        ({"further": 1, "further_pattern": "G"}, "further_pattern: G has kinds that no block is"),
        ({"ffn": 0}, "ffn: 0 where there are no experts"),
    ],
)
def test_blocks_that_a_model_has_not_are_told(changes, named):
    with pytest.raises(PartoptError, match=named):
        raise next(iter(replace(HYBRID, **changes).faults()))


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("deepseek-v3.2", {"v_head_dim": 0}, "v_head_dim: Expected `int` >= 1"),
        ("glm-5", {"index_topk_freq": 0}, "index_topk_freq, index_skip_topk_offset: Expected"),
        ("glm-5", {"indexer_types": ["full"]}, "indexer_types: blocks with an indexer are in no"),
        ("nemotron-h-56b", {"chunk_size": 0}, "chunk_size: Expected `int` >= 1"),
        (
            "nemotron-h-56b",
            {"hybrid_override_pattern": None, "layers_block_type": 7},
            "pattern: missing",
        ),
        ("nemotron-h-56b", {"hybrid_override_pattern": "M?"}, "blocks of other kinds: ?"),
    ],
)
def test_wrong_sizes_are_told(name, changes, named):
    raw = write_config(load_transformer(name)) | changes
    with pytest.raises(PartoptError) as refused:
        read_transformer(json.dumps(raw).encode(), "config.json", "mine")
    assert named in refused.value.message


def test_halves_apart_are_what_a_block_of_both_is():
    """A block has the seconds and bytes of its halves."""
    model = replace(LLAMA, ffn=3584)
    apart = replace(model, blocks=8, pattern="*-" * 4)
    whole, halves = training(model), training(apart)
    for shape in (Shape(), Shape(b=2, t=2), Shape(t=4, recompute="always")):
        both = [halves.block(shape, kind) for kind in apart.kinds()[:2]]
        block = whole.block(shape)
        for name in ("forward_s", "backward_s", "whole_bytes"):
            assert getattr(block, name) == pytest.approx(sum(getattr(b, name) for b in both))
    assert apart.parameters == model.parameters
    assert model_flops(apart, 2048) == pytest.approx(model_flops(model, 2048))


@pytest.mark.parametrize("model", [HYBRID, GATED], ids=lambda model: model.name)
def test_a_recurrence_takes_as_long_for_a_token_of_any_sequence(model):
    kind = next(kind for kind in model.kinds() if kind.is_recurrent)
    short, long = (training(model, sequence=s) for s in (2048, 8192))
    one, four = (work.block(Shape(), kind).parts["recurrence"] for work in (short, long))
    assert four == pytest.approx([4 * seconds for seconds in one])
    cut = short.block(Shape(t=2), kind).parts["recurrence"]
    assert cut == pytest.approx([seconds / 2 for seconds in one])
    assert sum(one) > 0
    assert "recurrence" not in short.block(Shape(), model.kinds()[-1]).parts


def test_bytes_of_a_state_space_are_its_product_s_and_what_follows():
    """In 16 bits: what goes in, gates to heads, what is read of the state, the last input."""
    work, kind = training(HYBRID), Kind("states", "none")
    joined, values = 2 * 1024 + 2 * 8 * 128 + 16, 1024
    assert work.saved_bytes(Shape(), kind) == 2048 * (4 * 1024 + 2 * joined + 4 * values)
    assert work.saved_bytes(Shape(recompute="always"), kind) == 2 * 2048 * 1024


def test_sparse_attention_needs_the_scores_that_are_taken():
    kind = SPARSE.kinds()[0]
    assert scores(SPARSE, 128, kind) == 128**2 / 2
    rows = [min(i + 1, 256) for i in range(4096)]
    assert scores(SPARSE, 4096, kind) == pytest.approx(sum(rows), rel=0.001)
    every = replace(SPARSE, indexer=None)
    dense, sparse = (
        training(model, sequence=65_536).block(Shape()).parts["attention"]
        for model in (every, SPARSE)
    )
    assert sum(sparse) < sum(dense)
    # one indexer for four blocks: the others have its parameters and its seconds less
    shared = replace(SPARSE, indexer=replace(SPARSE.indexer, period=4, first=1))
    made = SPARSE.block_parameters(kind) - SPARSE.block_parameters(Kind("sparse", kind.feed))
    assert made == 64 * (4 * 384 + 1024 + 2) + 4 * 1024
    assert SPARSE.parameters - shared.parameters == 3 * made
    assert seconds(training(shared)) < seconds(training(SPARSE))


def test_experts_work_in_a_width_of_their_own():
    narrow = replace(EXPERTS, expert_hidden=256)
    kind = narrow.kinds()[0]
    assert narrow.expert_parameters(kind) * 4 == EXPERTS.expert_parameters(kind)
    more = narrow.dense_parameters(kind) - EXPERTS.dense_parameters(kind)
    assert more == 2 * 1024 * 256
    fewer, usual = (training(model, dispatch="alltoall") for model in (narrow, EXPERTS))
    one, other = (work.experts(Shape(e=4)).exchange_s for work in (fewer, usual))
    assert one < other
    assert training(narrow).parameters(Shape(t=2), kind).dense - more == pytest.approx(
        EXPERTS.dense_parameters(kind) / 2
    )


def test_further_tokens_are_of_a_pattern():
    plain, more = (replace(HYBRID, further=n, further_pattern="*E" * n) for n in (0, 1))
    work, shape = training(more), Shape()
    blocks = [work.block(shape, kind) for kind in more.further_kinds]
    assert len(blocks) == 2
    assert sum(work.further_s(shape)) > sum(block.seconds for block in blocks) + blocks[0].head_s
    added = seconds(work) / seconds(training(plain)) - 1
    assert 0 < added < 0.5
    kept = sum(work.saved_bytes(shape, kind) for kind in more.further_kinds)
    assert size(work, recompute="never") - size(training(plain), recompute="never") > kept


@pytest.mark.parametrize(
    ("model", "layout", "what"),
    [
        (HYBRID, {"tp": 16}, "a recurrence of 16 heads, 8 of keys, is not cut in 16"),
        (GATED, {"tp": 2, "cp": 8}, "a recurrence of 16 heads is not shared out to 2 x 8"),
        (HYBRID, {"tp": 4, "cp": 8}, "a recurrence of 16 heads is not shared out to 4 x 8"),
    ],
)
def test_degrees_that_a_recurrence_does_not_divide_by_are_refused(model, layout, what):
    found = [fault.message for fault in find_faults(training(model), Layout(**layout), 64)]
    assert any(what in message for message in found), found
    assert not [
        message
        for fault in find_faults(training(HYBRID), Layout(tp=2, cp=2), 64)
        if "recurrence" in (message := fault.message)
    ]


def test_adapters_beside_a_recurrence_are_refused():
    for model in (HYBRID, GATED, SPARSE):
        with pytest.raises(PartoptError, match="adapters beside a recurrence or an indexer"):
            training(model, adapters=8)


def rows():
    with STATES.open(newline="") as file:
        return [USUAL | {k: v for k, v in row.items() if v} for row in csv.DictReader(file)]


# Tflop/s beside tokens/s that Megatron Bridge 26.08 states, docs/performance-summary.md
STATED = {
    "nemotron 3 Nano 26.08 GB300 8": (901e12, 39_936),
    "nemotron 3.5 Lightning 26.08 GB200 8": (807e12, 28_672),
    "nemotron 3 Super 26.08 GB300 8": (831e12, 9856),
    "nemotron 3 Ultra 26.08 GB300 8": (1281e12, 3552),
}


@pytest.mark.parametrize("name", STATED)
def test_operations_of_a_token_are_those_that_its_trainer_states(name):
    (row,) = (row for row in rows() if row["run"] == name)
    rate, tokens = STATED[name]
    flops, model = model_flops(model_of(row), 8192) / 8192, model_of(row)
    # Megatron-LM counts twice the hidden width of values, whatever there are (training/training.py)
    more, h = 2 * model.hidden - model.recurrence.values, model.hidden
    recurrent = sum(kind.is_recurrent for kind in model.kinds())
    flops += 3 * recurrent * more * (6 * h + 7 * model.recurrence.keys)
    assert flops == pytest.approx(rate / tokens, rel=0.03)


def test_a_memo_of_one_model_is_not_another_s():
    work = training_of(rows()[0])
    layout = Layout(tp=1, ep=8, dp=8, pp=1, microbatch=4, shard="optimizer")
    found = estimate(work, layout, 512).seconds
    other = dataclasses.replace(work, model=replace(work.model, pattern=work.model.pattern[::-1]))
    assert estimate(other, layout, 512).seconds == pytest.approx(found)
