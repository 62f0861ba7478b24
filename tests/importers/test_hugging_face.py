"""Configurations: known sizes, every shipped model, and what is refused by name."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from partopt.documents.files import find_shipped, shipped_names
from partopt.documents.transformer import Numerics, Transformer
from partopt.errors import PartoptError
from partopt.importers import hugging_face as config
from partopt.importers.hugging_face import (
    load_transformer,
    named_transformer,
    read_transformer,
    write_config,
)

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
    "qwen2.5-0.5b": 0.49,
    "qwen2.5-1.5b": 1.54,
    "qwen2.5-3b": 3.09,
    "qwen2.5-7b": 7.61,
    "qwen2.5-14b": 14.7,
    "qwen2.5-32b": 32.5,
    "qwen2.5-72b": 72.7,
    "bert-large": 0.335,
    "deepseek-v3": 671,
    "kimi-k2": 1026,
    "moonlight-16b-a3b": 15.96,
    "glm-4.5": 355,
    "glm-4.5-air": 106,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
    "llama4-scout": 107.8,  # its text
    "llama4-maverick": 400.7,
}


def read(**changes) -> Transformer:
    return read_transformer(json.dumps(LLAMA | changes).encode(), "config.json", "mine")


@pytest.mark.parametrize("name", SIZES)
def test_parameters_are_as_many_as_their_authors_say(name):
    assert load_transformer(name).parameters / 1e9 == pytest.approx(SIZES[name], rel=0.01)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("deepseek-ai/DeepSeek-V3", "deepseek-v3"),
        ("deepseek-ai/DeepSeek-V3.2-Exp", "deepseek-v3.2"),
        ("zai-org/GLM-4.5-Air", "glm-4.5-air"),
        ("openai/gpt-oss-120b", "gpt-oss-120b"),
        ("moonshotai/Kimi-K2-Instruct", "kimi-k2"),
        ("meta-llama/Meta-Llama-3-8B", "llama3-8b"),
        ("meta-llama/Llama-3.1-405B-Instruct", "llama3-405b"),
        ("llama31_70b_pretrain_config", "llama3-70b"),
        ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
        ("qwen3_0_6b", "qwen3-0.6b"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"),
        ("gpt3_1.3b", "gpt3-1.3b"),
        ("meta-llama/Llama-3.2-1B", None),
        ("Qwen3-80B", None),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "qwen3-next-80b-a3b"),
        ("Qwen/Qwen3.5-35B-A3B", "qwen3.5-35b-a3b"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "nemotron-3-nano-30b-a3b"),
        ("nvidia/Nemotron-H-56B-Base-8K", "nemotron-h-56b"),
        ("zai-org/GLM-5-FP8", "glm-5"),
        ("Qwen/Qwen2-7B-Instruct", "qwen2.5-7b"),
        ("Qwen/Qwen2.5-VL-72B-Instruct", "qwen2.5-vl-72b"),
        ("Qwen/Qwen3-VL-30B-A3B-Instruct", "qwen3-vl-30b-a3b"),
        ("Qwen/Qwen3-Omni-30B-A3B-Instruct", "qwen3-30b-a3b"),
        ("OpenGVLab/InternVL3_5-30B-A3B", "qwen3-30b-a3b"),
        ("OpenGVLab/InternVL3-8B", None),
    ],
)
def test_models_are_found_by_their_published_names(text, name):
    found = named_transformer(text)
    assert (found and found.name) == name
    if found and name.startswith("llama3"):  # which Meta published twice
        assert bool(found.numerics.rotary_scaling) == ("Llama-3-" not in text)


@pytest.mark.parametrize("name", shipped_names("models"))
def test_every_shipped_model_loads_and_has_a_source(name):
    made = load_transformer(name)
    assert made.name == name
    assert json.loads(Path(find_shipped(name, "models")).read_text())["source"]


@pytest.mark.parametrize("part", ["text_config", "llm_config", "language_config"])
def test_of_a_model_of_several_parts_the_text_is_read(part):
    whole = {"model_type": "pictures", "vision_config": {"hidden_size": 1}, part: LLAMA}
    nested = {"model_type": "speech", "thinker_config": whole}
    tied = {"tie_word_embeddings": True} | whole
    for raw, like in ((whole, {}), (nested, {}), (tied, {"tie_word_embeddings": True})):
        made, text = read_transformer(json.dumps(raw).encode(), "config.json", "mine"), read(**like)
        assert made.numerics == replace(text.numerics, besides="parts beside its text")
        assert replace(made, numerics=text.numerics) == text


@pytest.mark.parametrize(
    ("kind", "like"),
    [("qwen2_5_vl", "qwen2"), ("qwen3_vl_text", "qwen3"), ("qwen3_vl_moe_text", "qwen3_moe")],
)
def test_the_text_of_a_model_of_pictures_is_of_the_kind_that_it_has_elsewhere(kind, like):
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    made, text = (read(model_type=name, **experts) for name in (kind, like))
    assert replace(made, numerics=text.numerics) == text


@pytest.mark.parametrize("size", ["8b", "32b", "30b-a3b", "235b-a22b", "4b"])
def test_models_of_text_and_pictures_have_blocks_of_models_of_text(size):
    pictures, text = load_transformer(f"qwen3-vl-{size}"), load_transformer(f"qwen3-{size}")
    assert replace(pictures, name=text.name, numerics=text.numerics, tower=None) == text


def test_infinity_is_read_as_python_writes_it():
    content = json.dumps(LLAMA | {"time_step_limit": [0.0, float("inf")]})
    assert "Infinity" in content
    assert read_transformer(content.encode(), "config.json", "mine") == read()


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
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = dict.fromkeys(names, 60) | {"num_experts_per_tok": 4, "n_shared_experts": 2}
    experts |= {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "sliding_window": 128}
    recurrence = config._RECURRENCES.get(config._KINDS[kind].recurrence, {})
    experts |= dict.fromkeys(recurrence.values(), 8)
    experts |= {"hybrid_override_pattern": "M*-E" * 8} if "chunk_size" in experts else {}
    if kind in config._INDEXED:
        experts |= {"index_topk": 64, "index_n_heads": 2, "index_head_dim": 32}
    made = read(
        model_type=kind,
        moe_intermediate_size=1408,
        **experts,
        n_layer=32,
        n_embd=4096,
        n_head=32,
        hidden_act="gelu",
        mlp_hidden_act="gelu",
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
    sizes = {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}
    made = read(model_type="qwen2_moe", shared_expert_intermediate_size=5632, **sizes)
    assert (made.experts, made.experts_per_token, made.expert_ffn) == (60, 4, 1408)
    assert (made.ffn, made.shared_ffn) == (0, 5632)
    assert read(model_type="qwen3_moe", **sizes).shared_ffn == 0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "deepseek_v4", "index_topk": 2048}, "index_topk: sparse attention"),
        ({"model_type": "kimi_linear", "linear_attn_config": {"x": 1}}, "linear_attn_config: blo"),
        ({"model_type": "qwen4", "full_attention_interval": 4}, "full_attention_interval: b"),
        ({"model_type": "llama", "hybrid_override_pattern": "M*"}, "hybrid_override_pattern"),
        ({"model_type": "jamba", "mamba_d_state": 16}, "mamba_d_state: blocks of other state sp"),
        ({"model_type": "minimax", "attn_type_list": [0, 1]}, "attn_type_list: blocks of linear"),
        ({"model_type": "gpt_oss2"}, "model_type: gpt_oss2 is not known"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "is_encoder_decoder: an encoder"),
        ({"model_type": "llava", "text_config": {"hidden_size": 64}}, "model_type: llava is not"),
        ({"model_type": "mamba"}, "model_type: mamba is not known"),
    ],
)
def test_what_it_cannot_say_is_refused_by_name(changes, named):
    with pytest.raises(PartoptError) as refused:
        read(**changes)
    assert f"config.json: {named}" in refused.value.message
    assert refused.value.code == "unsupported-model"


def test_another_version_of_a_kind_is_not_taken_for_it():
    with pytest.raises(PartoptError) as refused:
        read(model_type="gemma2")
    assert "did you mean" not in refused.value.hint
    assert "a model of just such blocks is read as one of llama, mistral, " in refused.value.hint


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


def test_kinds_of_blocks_are_in_their_places():
    names = [kind.name for kind in load_transformer("deepseek-v3").kinds()]
    assert names == ["dense"] * 3 + ["experts"] * 58
    kinds = load_transformer("llama4-maverick").kinds()
    assert [kind.experts for kind in kinds[:6]] == [False, True] * 3
    assert [kind.windowed for kind in kinds] == [True, True, True, False] * 12
    assert [kind.windowed for kind in load_transformer("gpt-oss-20b").kinds()] == [True, False] * 12
    assert {kind.name for kind in read(sliding_window=1024).kinds()} == {"windowed dense"}


MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "model_type": ""}


@pytest.mark.parametrize(
    ("changes", "dense"),
    [
        ({"mlp_only_layers": [0, 1]}, {0, 1}),
        ({"decoder_sparse_step": 2}, {*range(0, 32, 2)}),
        ({"mlp_only_layers": []}, set()),
    ],
)
def test_blocks_without_experts_are_the_first_or_in_a_period(changes, dense):
    made = read(**MOE | {"model_type": "qwen3_moe"} | changes)
    assert {i for i, kind in enumerate(made.kinds()) if not kind.experts} == dense
    assert made.ffn == (14336 if dense else 0)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (MOE | {"model_type": "qwen3_moe", "mlp_only_layers": [4]}, "mlp_only_layers: blocks wi"),
        ({"layer_types": ["linear_attention"] * 32, "sliding_window": 64}, "layer_types: blocks o"),
        ({"layer_types": ["full_attention", "mamba"] * 16}, "layer_types: blocks of other kinds"),
        (
            {"layer_types": ["full_attention", *["sliding_attention"] * 31], "sliding_window": 64},
            "layer_types: blocks that see all tokens are in no period",
        ),
    ],
)
def test_kinds_of_blocks_in_no_period_are_refused(changes, named):
    with pytest.raises(PartoptError, match=named) as refused:
        read(**changes)
    assert refused.value.code == "unsupported-model"


def test_experts_are_counted_by_either_name():
    names = MOE | {"model_type": "qwen3_moe"}
    newer = {**names, "num_local_experts": names["num_experts"], "num_experts": None}
    assert read(**newer) == read(**names)


def test_the_text_of_a_model_of_pictures_is_read():
    scout = json.loads(Path(find_shipped("llama4-scout", "models")).read_text())
    whole = {"model_type": "llama4", "text_config": scout, "vision_config": {"hidden_size": 1408}}
    made = read_transformer(json.dumps(whole).encode(), "config.json", "llama4-scout")
    text = load_transformer("llama4-scout")
    assert replace(made, numerics=text.numerics) == text
    assert made.numerics.besides == f"{text.numerics.besides}; parts beside its text"


def test_latent_attention_has_the_parameters_of_its_matrices():
    """As DeepSeek-V3's own code shapes them: five matrices and two norms."""
    made = load_transformer("deepseek-v3")
    attention = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    attention += 1536 + 512 + 2 * 7168
    dense, experts = made.kinds()[0], made.kinds()[-1]
    assert made.block_parameters(dense) == attention + 3 * 7168 * 18432
    shared = 3 * 7168 * 2048 + 7168 * 256
    assert made.dense_parameters(experts) == attention + shared
    assert made.expert_parameters(experts) == 256 * 3 * 7168 * 2048
