"""Configurations: known sizes, every shipped model, and what is refused by name."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from partopt.documents.files import find_shipped, shipped_names
from partopt.documents.transformer import Numerics, Transformer
from partopt.errors import PartoptError
from partopt.transformer import config
from partopt.transformer.config import load_transformer, read_transformer, write_config
from tests.transformer.helpers import EXPERTS, GPT

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
# billions, as their authors count them
SIZES = {
    "gpt3-175b": 174.6,
    "gpt3-6.7b": 6.66,
    "llama2-7b": 6.738,
    "llama2-70b": 68.98,
    "llama3-8b": 8.030,
    "llama3-70b": 70.554,
    "llama3-405b": 405.85,
    "mixtral-8x7b": 46.70,
    "mixtral-8x22b": 140.6,
    "qwen3-0.6b": 0.596,
    "qwen3-32b": 32.76,
    "qwen3-30b-a3b": 30.53,
    "qwen3-235b-a22b": 235.1,
    "bert-large": 0.335,
}


def read(**changes) -> Transformer:
    return read_transformer(json.dumps(LLAMA | changes).encode(), "config.json", "mine")


@pytest.mark.parametrize("name", SIZES)
def test_parameters_are_as_many_as_their_authors_say(name):
    assert load_transformer(name).parameters / 1e9 == pytest.approx(SIZES[name], rel=0.01)


@pytest.mark.parametrize("name", shipped_names("models"))
def test_every_shipped_model_loads_and_has_a_source(name):
    made = load_transformer(name)
    assert made.name == name
    assert json.loads(Path(find_shipped(name, "models")).read_text())["source"]


def test_a_file_and_its_folder_are_the_same_model(tmp_path):
    folder = tmp_path / "llama-mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert load_transformer(folder) == load_transformer(folder / "config.json")
    assert load_transformer(folder).name == "llama-mine"


def test_what_a_kind_says_without_saying_it():
    made = read(tie_word_embeddings=True, head_dim=64)
    assert (made.gated, made.rotary, made.dropout, made.tied) == (True, True, False, True)
    assert (made.q, made.kv) == (2048, 512)
    bert = load_transformer("bert-base")
    assert (bert.causal, bert.dropout, bert.gated, bert.tied) == (False, True, False, True)
    assert load_transformer("gpt3-175b").ffn == 4 * 12288
    assert read(sliding_window=1024).window == 1024
    assert read(sliding_window=1024, use_sliding_window=False).window == 0


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama3-8b", Numerics(epsilon=1e-5, rotary_base=500_000, rotary_scaling=LLAMA3)),
        ("llama2-70b", Numerics(epsilon=1e-5)),
        ("mixtral-8x7b", Numerics(epsilon=1e-5, rotary_base=1e6)),
        ("qwen3-30b-a3b", Numerics(epsilon=1e-6, rotary_base=1e6, query_key_norms=True)),
        ("gpt3-175b", Numerics(norm="layer", epsilon=1e-5, activation="gelu", bias="all")),
    ],
)
def test_what_no_time_depends_on_is_the_published_model_s(name, expected):
    assert load_transformer(name).numerics == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Numerics(epsilon=1e-6)),  # as LlamaConfig has it
        ({"rms_norm_eps": 1e-5, "rope_theta": 2e4}, Numerics(epsilon=1e-5, rotary_base=2e4)),
        ({"rope_scaling": None, "hidden_act": "swish"}, Numerics(epsilon=1e-6)),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            Numerics(epsilon=1e-6, rotary_scaling={"rope_type": "linear", "factor": 2.0}),
        ),
        (
            {"rope_parameters": {"rope_theta": 5e5, **LLAMA3}},  # since transformers 5
            Numerics(epsilon=1e-6, rotary_base=5e5, rotary_scaling=LLAMA3),
        ),
        (
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
            Numerics(epsilon=1e-6, rotary_base=5e5),
        ),
        ({"partial_rotary_factor": 0.5}, Numerics(epsilon=1e-6, rotary_share=0.5)),
        ({"attention_bias": True}, Numerics(epsilon=1e-6, bias="attention")),
        ({"attention_bias": True, "mlp_bias": True}, Numerics(epsilon=1e-6, bias="all")),
        ({"attention_bias": False}, Numerics(epsilon=1e-6)),
        ({"model_type": "qwen2"}, Numerics(epsilon=1e-6, bias="queries")),
        (
            {"model_type": "gpt_neox", "rotary_pct": 1.0, "rotary_emb_base": 1e5},
            Numerics(
                norm="layer",
                epsilon=1e-5,
                activation="gelu",
                bias="all",
                rotary_base=1e5,
                besides="gpt_neox's two residuals",
            ),
        ),
        (
            {"model_type": "bert", "rope_theta": 2e4, "hidden_act": "gelu_new"},
            Numerics(
                norm="layer",
                epsilon=1e-12,
                activation="gelu",
                bias="all",
                besides="bert's norms behind",
            ),
        ),
    ],
)
def test_what_no_time_depends_on_is_read_and_written(changes, expected):
    made = read(**changes)
    assert made.numerics == expected
    assert read_transformer(json.dumps(write_config(made)).encode(), "it", "mine") == made


@pytest.mark.parametrize("kind", config._KINDS)
def test_every_kind_is_read_and_written(kind):
    experts = {"num_experts": 60, "num_local_experts": 60, "num_experts_per_tok": 4}
    made = read(
        model_type=kind,
        moe_intermediate_size=1408,
        **experts,
        n_layer=32,
        n_embd=4096,
        n_head=32,
        hidden_act="gelu",
        activation_function="silu",
    )
    assert made.numerics.activation == ("silu" if kind == "gpt2" else "gelu")
    assert read_transformer(json.dumps(write_config(made)).encode(), "it", "mine") == made


@pytest.mark.parametrize(
    "changes",
    [{"rms_norm_eps": 0}, {"rope_theta": "much"}, {"rope_scaling": {"factor": [["x"]]}}],
)
def test_wrong_norms_and_positions_are_told(changes):
    with pytest.raises(PartoptError, match="norms, biases or positions: ") as refused:
        read(**changes)
    assert refused.value.code == "invalid-value"


def test_a_model_of_which_only_the_shape_is_known_is_written_without_the_rest():
    bare = replace(read(), numerics=None)
    raw = write_config(bare)
    assert not raw.keys() & {"rms_norm_eps", "rope_theta", "rope_scaling"}


def test_experts_share_a_feed_forward_where_it_says_so():
    own = {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}
    made = read(model_type="qwen2_moe", shared_expert_intermediate_size=5632, **own)
    assert (made.experts, made.experts_per_token, made.expert_ffn, made.ffn) == (60, 4, 1408, 5632)
    assert read(model_type="qwen3_moe", **own).ffn == 0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "kv_lora_rank: attention over"),
        ({"model_type": "deepseek_v3", "first_k_dense_replace": 3}, "first_k_dense_replace: the"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, "mlp_only_layers: some blocks"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "decoder_sparse_step: some"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "is_encoder_decoder: an encoder"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: blocks of"),
        ({"model_type": "llava", "text_config": LLAMA}, "text_config: a model of several parts"),
        ({"model_type": "mamba"}, "model_type: mamba is not known"),
    ],
)
def test_what_it_cannot_say_is_refused_by_name(changes, named):
    with pytest.raises(PartoptError) as refused:
        read(**changes)
    assert f"config.json: {named}" in refused.value.message
    assert refused.value.code == "unsupported-model"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": None}, "hidden_size: missing"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers: expected a whole number"),
        ({"num_key_value_heads": 5}, "kv_heads: 5 does not divide the 32 heads"),
        ({"num_hidden_layers": 0}, "blocks: expected a whole number >= 1"),
        ({"intermediate_size": 0}, "ffn: 0 where there are no experts"),
    ],
)
def test_wrong_numbers_are_at_their_place(changes, named):
    with pytest.raises(PartoptError) as refused:
        read(**changes)
    assert named in refused.value.message


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"hidden_size": 4}'])
def test_what_is_no_configuration_is_refused(content):
    with pytest.raises(PartoptError):
        read_transformer(content, "config.json", "mine")


def test_operations_of_a_token_are_six_a_parameter_and_attention():
    s = 2048
    block = 4 * 1024**2 + 2 * 1024 * 4096 + 2 * 1024
    whole = 4 * block + 32_000 * 1024
    assert GPT.active_parameters == whole
    assert GPT.flops(s) == 6 * whole * s + 12 * s * s * 1024 * 4
    taken = 2 * 3 * 1024 * 512
    assert EXPERTS.active_parameters == 4 * (EXPERTS.dense_parameters + taken) + 32_000 * 1024


def test_scores_are_half_of_the_square_or_those_in_the_window():
    assert GPT.scores(2048) == 2048**2 / 2
    assert replace(GPT, causal=False).scores(2048) == 2048**2
    assert replace(GPT, window=512).scores(2048) == 512 * 2048 - 512**2 / 2
    assert replace(GPT, window=4096).scores(2048) == GPT.scores(2048)
