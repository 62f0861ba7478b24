"""Towers of models of pictures, read from their configurations, against transformers and cards."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partopt.errors import PartoptError
from partopt.importers.hugging_face import load_transformer, read_transformer, write_config

# numbers of the weights that are published, or of their card
CARDS = {
    "qwen2.5-vl-3b": 3_754_622_976,
    "qwen2.5-vl-7b": 8_292_166_656,
    "qwen2.5-vl-32b": 33_452_718_336,
    "qwen2.5-vl-72b": 73_410_777_344,
    "qwen3-vl-2b": 2_127_532_032,
    "qwen3-vl-4b": 4_437_815_808,
    "qwen3-vl-8b": 8_767_123_696,
    "qwen3-vl-30b-a3b": 31.1e9,
    "qwen3-vl-32b": 33.4e9,
    "qwen3-vl-235b-a22b": 235.7e9,
}
TEXT = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
}
LARGE = {"num_hidden_layers": 24, "hidden_size": 1024, "intermediate_size": 4096, "patch_size": 14}
SO400M = {"num_hidden_layers": 27, "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 14}
QWEN2 = {"depth": 32, "embed_dim": 1280, "hidden_size": 4096, "mlp_ratio": 4, "patch_size": 14}
# weights of two dimensions and more that transformers 5.23 makes of a kind, and those behind them
MADE = [
    ("clip_vision_model", "llava", LARGE | {"image_size": 336}, 303_182_848, 4096 * (1024 + 4096)),
    ("siglip_vision_model", "paligemma", SO400M | {"image_size": 224}, 412_042_752, 4096 * 1152),
    (
        "internvl_vision",
        "internvl",
        LARGE | {"image_size": [448, 448], "patch_size": [14, 14]},
        303_642_624,
        4096 * (4 * 1024 + 4096),
    ),
    ("qwen2_vl", "qwen2_vl", QWEN2, 675_215_360, 5120 * (4096 - 3584)),
]


def tower_of(said, whole="llava", **more):
    given = {"model_type": whole, "text_config": TEXT, "vision_config": said, **more}
    return read_transformer(json.dumps(given).encode(), "x", "x").tower


@pytest.mark.parametrize("name", CARDS)
def test_a_model_has_as_many_parameters_as_its_card_says(name):
    model = load_transformer(name)
    assert model.tower
    assert model.parameters + model.tower.parameters == pytest.approx(CARDS[name], rel=0.005)
    again = read_transformer(json.dumps(write_config(model)).encode(), "x", name)
    assert again.tower == model.tower


@pytest.mark.parametrize(("kind", "whole", "said", "made", "behind"), MADE)
def test_a_tower_has_the_weights_that_transformers_makes(kind, whole, said, made, behind):
    more = {"downsample_ratio": 0.5} if whole == "internvl" else {}
    tower = tower_of({"model_type": kind, **said}, whole, **more)
    assert tower.parameters == pytest.approx(made + behind, rel=2e-5)  # classes have a position


def test_pictures_of_one_size_have_its_tokens_and_windows_are_seen():
    fixed = tower_of({"model_type": "clip_vision_model", **LARGE, "image_size": 336})
    assert fixed.picture == 576 == fixed.seen(10_000) == 2 * fixed.seen(288)
    windowed = load_transformer("qwen2.5-vl-7b").tower
    assert windowed.seen(1024) == (4 * 4096 + 28 * 64) / 32
    assert windowed.seen(16) == 64


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe_vision", "qwen3_omni_moe_vision_encoder"])
def test_later_ones_of_qwen_are_read_as_qwen3_vl_without_what_they_lack(kind):
    said = SO400M | {"patch_size": 16, "num_position_embeddings": 2304}
    like = tower_of({"model_type": "qwen3_vl", **said, "deepstack_visual_indexes": [8]})
    assert like.parameters - tower_of({"model_type": kind, **said}).parameters == 4608 * 8704


def test_what_reads_pictures_and_is_not_known_leaves_the_text_alone():
    assert tower_of({"model_type": "pixtral", **LARGE}) is None
    assert tower_of({}) is None
    assert tower_of({"model_type": 3, **LARGE}) is None


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
FIELDS = ("depth", "hidden_size", "intermediate_size", "patch_size", "spatial_merge_size")


@given(st.dictionaries(st.sampled_from(FIELDS), VALUES | st.lists(VALUES, max_size=2)))
def test_a_tower_of_other_values_is_refused_or_read(values):
    said = {"model_type": "qwen3_vl", "depth": 2, "hidden_size": 64, "intermediate_size": 128}
    try:
        tower = tower_of(said | values)
    except PartoptError as error:
        assert error.message.startswith("x: vision_config: ")
    else:
        assert tower.parameters > 0
