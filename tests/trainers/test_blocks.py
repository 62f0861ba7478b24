"""Which layers are embedding, blocks, norm and head: by their names, and by a person's rules."""

import re

import pytest

from partopt import PartoptError, Profile, export_plan
from partopt.trainers.parts import describe, find_parts
from tests.trainers.models import names
from tests.trainers.plans import planned

SHIPPED = {
    "gpt2-small.cpu.float32": [
        "transformer.wte, transformer.wpe, transformer.drop -> embedding",
        "transformer.h.0 .. transformer.h.11 -> blocks 0-11",
        "transformer.ln_f -> norm",
        "lm_head -> head",
    ],
    "llama-7b.h100-estimated.bfloat16": [
        "model.embed_tokens, model.rotary_emb -> embedding",
        "model.layers.0 .. model.layers.31 -> blocks 0-31",
        "model.norm -> norm",
        "lm_head -> head",
    ],
    "bert-base.cpu.float32": [
        "bert.embeddings -> embedding",
        "bert.encoder.layer.0 .. bert.encoder.layer.11 -> blocks 0-11",
        "cls -> head",
    ],
    "vit-g.h100-estimated.bfloat16": [
        "conv_proj, encoder.dropout -> embedding",
        "encoder.layers.encoder_layer_0 .. encoder.layers.encoder_layer_39 -> blocks 0-39",
        "encoder.ln -> norm",
        "heads.head -> head",
    ],
}


def layers(name: str) -> list[str]:
    return [layer.name for layer in Profile.load(name).layers]


def told(own: list[str], *rules: str) -> list[str]:
    return [str(part) for part in find_parts(own, rules)]


def refused(own: list[str], *rules: str) -> PartoptError:
    with pytest.raises(PartoptError) as raised:
        find_parts(own, rules)
    return raised.value


@pytest.mark.parametrize("name", SHIPPED)
def test_names_of_shipped_models(name):
    own = layers(name)
    assert list(describe(own, find_parts(own))) == SHIPPED[name]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "t5-11b.h100-estimated.bfloat16",
            "the model has several series of blocks: encoder.block.*, decoder.block.*",
        ),
        (
            "resnet50.cpu.float32",
            "the model has several series of blocks: layer1.*, layer2.*, layer3.*, layer4.*",
        ),
        (
            "vgg16.v100-published.float32",
            "the model has no series of blocks, layers whose names differ in a number",
        ),
    ],
)
def test_models_that_are_not_one_series_of_blocks(name, message):
    error = refused(layers(name))
    assert (error.code, error.message) == ("no-blocks", message)


def test_the_rules_of_the_hint_make_the_longest_series_the_blocks():
    own = ["x_embedder", "t_embedder.0", "t_embedder.2", *(f"blocks.{n}" for n in range(4))]
    own += ["final.0", "final.1"]
    rules = re.findall("`map=([^`]*)`", refused(own).hint)
    assert rules == ["t_embedder.*=embedding", "final.*=head"]
    expected = ["embedding"] * 3 + [f"block {n}" for n in range(4)] + ["head"] * 2
    assert told(own, *rules) == expected


def test_a_decoder_is_no_head_unless_a_person_says_so():
    own = ["encoder.embed", "encoder.block.0", "encoder.block.1", "decoder.block.0"]
    own += ["decoder.block.1", "lm_head"]
    assert refused(own, "encoder.block.*=block").code == "no-blocks"
    assert told(own, "decoder.*=head") == ["embedding", "block 0", "block 1"] + ["head"] * 3


def test_blocks_in_parts_count_from_the_least_number():
    own = ["embed", "h.1.attn", "h.1.mlp", "h.2.attn", "h.2.mlp", "h.3", "out"]
    blocks = ["block 0", "block 0", "block 1", "block 1", "block 2"]
    assert told(own) == ["embedding", *blocks, "head"]


def test_rules_go_before_names_and_later_ones_before_earlier():
    own = ["embed", "h.0", "h.1", "final", "score"]
    assert told(own)[3:] == ["head", "head"]
    assert told(own, "final=norm")[3:] == ["norm", "head"]
    assert told(own, "final=head", "f*=norm")[3:] == ["norm", "head"]
    assert told(["embed", "h.0", "h.1", "h.2", "score"], "h.2=norm")[2:4] == ["block 1", "norm"]


def test_a_single_layer_is_a_block_where_a_rule_says_so():
    own = ["embed", "layer.0", "out"]
    assert refused(own).code == "no-blocks"
    assert told(own, "layer.*=block") == ["embedding", "block 0", "head"]


@pytest.mark.parametrize(
    ("rule", "code", "hint"),
    [
        ("h.*", "invalid-option", "write GLOB=KIND"),
        ("=block", "invalid-option", "write GLOB=KIND"),
        ("h.*=bloc", "invalid-option", 'did you mean "block"?'),
        ("h.*=", "invalid-option", "write GLOB=KIND"),
        ("", "invalid-option", "write GLOB=KIND"),
        ("lnf=norm", "no-such-layer", 'did you mean "ln_f"?'),
    ],
)
def test_rules_that_cannot_be_meant(rule, code, hint):
    error = refused(names(), rule)
    assert (error.code, error.fields["option"]) == (code, "map")
    assert error.message.startswith(f"`map={rule}`: ")
    assert hint in error.hint


@pytest.mark.parametrize(
    ("own", "rules", "message"),
    [
        (["embed", "h.1", "h.0", "out"], (), "h.1 (block 1) comes behind embed (embedding)"),
        (["embed", "h.0", "h.2", "out"], (), "h.2 (block 2) comes behind h.0 (block 0)"),
        (["h.0", "drop", "h.1"], (), "h.1 (block 1) comes behind drop (head)"),
        (
            ["embed", "h.0", "h.1", "out"],
            ("out=embedding",),
            "out (embedding) comes behind h.1 (block 1)",
        ),
        (["embed", "h.0", "h.1", "out", "ln"], (), "ln (norm) comes behind out (head)"),
    ],
)
def test_parts_in_another_order_than_that_of_a_model(own, rules, message):
    error = refused(own, *rules)
    assert (error.code, error.message) == ("parts-out-of-order", message)


def test_rules_reach_the_export_and_are_refused_where_nothing_is_named():
    plan = planned([6, 9, 14])
    kept = export_plan(plan, "megatron", rules=["lm_head=head"]).main
    assert "'Et*4|t*3|t*5|L'" in kept
    with pytest.raises(PartoptError) as raised:
        export_plan(plan, "torch-csv", rules=["lm_head=head"])
    assert (raised.value.code, raised.value.fields["option"]) == ("unused-option", "map")


def test_a_layer_without_a_number_cannot_be_a_block():
    with pytest.raises(PartoptError, match="`map`: lm_head is no block"):
        find_parts(layers("llama-7b.h100-estimated.bfloat16"), ["lm_head=block"])
