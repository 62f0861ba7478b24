"""What programs, documents and scripts set, by path."""

from __future__ import annotations

import json

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from partopt.errors import PartoptError
from partopt.trainers.settings import read_settings

PROGRAM = '''
"""A configuration."""
import torch
from a import base, Part, registry

LONG = 16_384
STAGES = [["a", "b"], ["c"]]


def config(tp: int = 2):
    cfg = base()
    cfg.model = Bridge.from_hf("meta-llama/Llama-3-8B").to_provider(load=False)
    cfg.model.tp = tp * 2
    cfg.model.length = LONG
    cfg.model.dtype = torch.bfloat16
    cfg.model.stages = STAGES
    cfg.model.stages_of = unknown(3)
    cfg["train"]["size"] = 8
    cfg.train.other = OTHER
    cfg.part = Part(degree=4, inner=Part.Config(mode="full", again=None))
    cfg.converters = [Float8.Config(name="x")]
    return cfg
'''


def test_a_program_sets_what_it_assigns_and_passes():
    found = read_settings(PROGRAM)
    assert found.form == "program"
    expected = {
        "tp": 4,
        "model.length": 16384,
        "model.dtype": "bfloat16",
        "stages": [["a", "b"], ["c"]],
        "train.size": 8,
        "part.degree": 4,
        "part.inner.mode": "full",
        "from_hf": "meta-llama/Llama-3-8B",
        "model.load": False,
        "converters.name": "x",
    }
    assert {name: found.find(name) for name in expected} == expected
    assert found.states("again") and found.find("again") is None
    assert not found.states("other_name")
    assert not found.faults
    assert found.find("other") is None
    [fault] = found.faults
    assert fault.message == "other: depends on OTHER, which the text does not say"
    assert read_settings(PROGRAM, {"OTHER": "7"}).find("other") == 7


def test_the_function_of_several_is_named():
    text = "def a():\n    return C(x=1, y=2)\ndef b():\n    c = a()\n    c.x = 3\n    return c\n"
    assert [read_settings(text).find(name) for name in "xy"] == [3, 2]  # a is called by b
    text += "def d():\n    return C(x=5)\n"
    with pytest.raises(PartoptError, match="2 functions make configurations: b, d"):
        read_settings(text)
    assert read_settings(text, function="d").find("x") == 5
    with pytest.raises(PartoptError, match="no function e"):
        read_settings(text, function="e")


def test_branches_whose_condition_is_not_known_are_taken():
    text = "x = 1\nif y:\n    x = 2\nif x == 1:\n    z = 3\nif False:\n    x = 4\n"
    assert read_settings(text).find("x") == 2
    for test, expected in (("True", 3), ("fast", 3), ("False", 4), ("slow", 4), ("unknown", 4)):
        text = f"fast = True\nslow = False\nif {test}:\n    z = 3\nelse:\n    z = 4\n"
        assert read_settings(text).find("z") == expected


LEAVES = st.integers(0, 99) | st.booleans() | st.sampled_from(["full", "bf16", "a b"])
NAMES = st.sampled_from(["model", "train", "size", "tp", "pp"])
TREES = st.dictionaries(
    NAMES, st.dictionaries(NAMES, LEAVES, min_size=1, max_size=3), min_size=1, max_size=3
)


@settings(max_examples=50, deadline=None)
@given(TREES)
def test_documents_of_all_forms_say_the_same(tree):
    toml = "".join(
        f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in own.items())
        for name, own in tree.items()
    )
    python = "".join(
        f"c.{name}.{key} = {value!r}\n" for name, own in tree.items() for key, value in own.items()
    )
    for text in (json.dumps(tree), yaml.safe_dump(tree), toml, python):
        found = read_settings(text)
        for name, own in tree.items():
            for key, value in own.items():
                assert found.find(f"{name}.{key}") == value


def test_a_script_sets_the_words_of_flags_and_the_texts_that_it_writes():
    script = (
        'N=4\ncat > ds.json <<EOF\n{"zero": {"stage": $N}}\nEOF\n'
        "torchrun --nnodes 2 train.py --tp-size $N --bf16 --lr 1e-4 --path=$DATA --list 1 2"
    )
    found = read_settings(script)
    names = ("zero.stage", "nnodes", "tp_size", "bf16", "lr", "list")
    assert [found.find(name) for name in names] == [4, 2, 4, True, 1e-4, ["1", "2"]]
    assert found.show("tp_size") == "--tp-size"
    assert found.find("path") is None
    assert "depends on DATA" in found.faults[0].message


def test_what_a_document_works_out_is_not_known():
    found = read_settings("model:\n  size: 4\n  ffn: ${multiply:4, ${.size}}\n")
    assert found.find("size") == 4 and found.find("ffn") is None
    assert found.faults[0].hint == "give it: `arguments=ffn=VALUE`"


def test_arrays_alone_are_flags():
    assert read_settings("ARGS=(\n  --a 1\n  --b\n)\n").find("a") == 1


def test_counts_are_whole_and_what_is_missing_is_said_at_once():
    found = read_settings("train --a 3 --b x --c 1.5")
    assert found.count("a") == 3 and found.count("d", default=7) == 7
    for name in "bcde":
        assert found.count(name) is None
    messages = [fault.message for fault in found.faults]
    assert messages[0] == "--b: 'x' is not a whole number" and len(messages) == 4
    assert "--d: the configuration does not say it" in messages


def test_a_program_is_not_executed(tmp_path):
    witness = tmp_path / "executed"
    read_settings(f"open({str(witness)!r}, 'w')\nx = 1\n")
    assert not witness.exists()


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text):
    read_settings(text)
