"""What programs, documents and scripts set, by path."""

from __future__ import annotations

import json
import time
from contextlib import suppress

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from partopt.configurations.settings import read_settings
from partopt.errors import PartoptError

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


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("A='--n 3 --b x'\nB=\"--path /d $A\"\n", {"n": 3, "b": "x", "path": "/d"}),
        ("A='--n 3'\nrun $A --b\n", {"n": 3, "b": True}),
        ("N=4\nM=$((N * 2))\n", {"N": 4, "M": 8}),
        ("A='--n 3 --m 4'\ntrain --x 1 --y 2 --z 3\n", {"n": None, "x": 1, "z": 3}),
    ],
)
def test_flags_of_variables_count_where_no_command_has_some(script, found):
    read = read_settings(f"#!/bin/bash\n{script}")
    assert {name: read.find(name) for name in found} == found


def test_what_is_not_known_is_noted_once():
    found = read_settings("#!/bin/bash\ntrain --n $N --m 2 --k 3")
    assert [found.count("n", default=1), found.find("n"), found.has("n")] == [1, None, True]
    assert len(found.faults) == 1


def test_a_reference_that_grows_is_not_known():
    text = "a: xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx\n"
    text += "".join(
        f"a{n}: ${{a{n - 1 if n else ''}}}${{a{n - 1 if n else ''}}}\n" for n in range(9)
    )
    found = read_settings(text)
    assert found.find("a8") is None and found.find("a1") == "x" * 43 * 4


def test_what_a_document_works_out_is_computed_or_not_known():
    text = (
        "model:\n  size: 4\n  ffn: ${multiply:4, ${.size}}\n  sum: ${sum:${model.size}, -1}\n"
        "  inner:\n    up: ${..size}\n    down: ${int_div:${model.ffn},${inner.none}}\n"
        "  path: a/${N}/b\n  user: ${NAME:root}\n  mine: ${N}\n  self: ${model.self}\n  todo: ???\n"
        "  eps: 1.e-5\n  host: ${oc.env:HOST,here}\n  none: null\n"
    )
    found = read_settings(text, {"N": "7"})
    expected = {
        "ffn": 16, "sum": 3, "up": 4, "user": "root", "mine": 7, "path": "a/7/b", "eps": 1e-5,
        "host": "here", "none": None,
    }  # fmt: skip
    assert {name: found.find(name) for name in expected} == expected and not found.faults
    for name in ("down", "self", "todo"):
        assert found.find(name) is None
    assert [fault.code for fault in found.faults] == ["unknown-variable"] * 3
    assert read_settings(text).find("mine") is None


def test_keys_that_are_flags_are_those_of_a_script():
    text = "ENV:\n  A: 1\nARGS:\n  --num-layers: 94\n  --bf16: true\n  --tp-size: ${TP}\n"
    text += "  --x: false\n"
    found = read_settings(text, {"TP": "4"})
    assert found.form == "script" and found.show("num_layers") == "--num-layers"
    assert [found.find(name) for name in ("num_layers", "bf16", "tp_size")] == [94, True, 4]
    assert not found.has("x")


def test_json_may_have_comments_and_commas_before_what_closes():
    text = '{\n  // of 7B\n  "a": 1, /* so */\n  "b": {"c": "x // y, }", },\n}\n'
    found = read_settings(text)
    assert (found.find("a"), found.find("c")) == (1, "x // y, }")
    script = f"cat > c.json <<EOF\n{text}EOF\ntrain --config c.json --x 1 --y 2"
    assert read_settings(script).find("b.c") == "x // y, }"


@pytest.mark.parametrize(
    ("text", "unread"),
    [
        ("extends: [base.yaml]\na: 1\n", ["base.yaml"]),
        ("defaults:\n  - _self_\n  - model: llama\na: 1\n", ["model/llama"]),
        (
            "m:\n  config: trainer.yaml\n  model: llama_70B.yaml\n  a: 1\n",
            ["trainer.yaml", "llama_70B.yaml"],
        ),
        ("#!/bin/bash\nsource args.sh\ntrain --b 1 --c 2 --d 3\n", ["args.sh"]),
        ("#!/bin/bash\necho {} > b.json\nt --config a.json --my-config b.json --d 3\n", ["a.json"]),
    ],
)
def test_what_is_in_other_files_is_named(text, unread):
    found = read_settings(text)
    assert found.unread == unread and found.count("num_layers") is None
    assert found.faults[0].message.endswith(
        f"does not say it; {', '.join(unread)} may, which is not read"
    )


def test_what_a_script_leaves_empty():
    text = "#!/bin/bash\ntrain --bf16 $EXTRA --tp $TP --x 1 $MORE --y 2 \\\n $OTHER"
    found = read_settings(text)
    assert found.has("bf16") and (found.find("x"), found.find("y")) == (1, 2) and not found.faults
    assert found.count("tp") is None and "depends on TP" in found.faults[0].message
    assert read_settings(text, {"TP": "8", "EXTRA": "", "x": ""}).find("tp") == 8
    assert read_settings(text, {"x": ""}).find("x") is None


def test_zero_is_no_count_but_where_it_is_the_default():
    found = read_settings("train --a 0 --b 0 --c 1_000")
    assert found.count("a", default=0) == 0 and found.count("c") == 1000 and not found.faults
    assert found.count("b", default=1) == 1
    assert found.faults[0].message == "--b: '0' is not a positive number"


def test_variables_are_shown_as_they_are_and_flags_as_flags():
    found = read_settings("export MAX_CONNECTIONS=1\ntrain --a-b 1 --c 2 --d 3\n")
    assert (found.show("MAX_CONNECTIONS"), found.show("a_b")) == ("MAX_CONNECTIONS", "--a-b")


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
    with suppress(PartoptError):
        read_settings(text)


RECIPES = """
import torch
from lib import Config70B, Model, Part, base_recipe, common, precision, with_batch

SIZES = dict(seq_length=4096, kind="x")
GB = 8 * 64


def part(tp: int = 2, pp: int = 4, *, wide: bool = False):
    strategy = Part(tensor=tp, pipeline=pp, kind=torch.bfloat16)
    if wide:
        strategy.tensor = tp * 8
    elif tp == 3:
        raise ValueError(tp)
    return Part(strategy=strategy, nodes=pp if tp in (2, 4) else None)


def small(nodes=1, fast=False):
    recipe = Model(model=Config70B(), part=part(4, wide=fast), data=dict(**SIZES, global_batch=GB))
    if fast:
        recipe.part.strategy.tensor = 99
    for layer in range(2):
        recipe.layers = layer + 1
    return recipe


def large():
    recipe = small(nodes=3)
    recipe.part.strategy.pipeline += 4
    recipe.data["global_batch"] = recipe.part.strategy.pipeline * 2
    recipe.part.nodes = None if recipe.part.strategy.pipeline < 3 else 5
    return recipe


def imported():
    recipe = base_recipe()
    recipe.precision = precision("bf16")
    recipe.batch = 3
    common(recipe)
    return with_batch(recipe, 768)
"""


def test_a_recipe_that_calls_another_changes_its_result():
    small = read_settings(RECIPES, function="small")
    names = ("tensor", "pipeline", "part.nodes", "global_batch", "seq_length", "layers", "kind")
    assert [small.find(name) for name in names] == [4, 4, 4, 512, 4096, 2, "x"]
    assert small.find("strategy.kind") == "bfloat16" and small.value("model") == "Config70B"
    large = read_settings(RECIPES, function="large")
    assert [large.find(name) for name in names[:4]] == [4, 8, 5, 16] and not large.unread
    with pytest.raises(PartoptError, match="2 functions make configurations: large, imported"):
        read_settings(RECIPES)
    assert read_settings(RECIPES, {"tp": "2", "fast": "true"}, "small").find("tensor") == 99


def test_a_part_of_what_is_imported_has_a_name_of_its_own():
    text = (
        "from lib import base\ndef f():\n  c = base()\n  p = c.part\n  p.tp = 2\n  c.part.pp = 4\n"
        "  if hasattr(c, 'x'):\n    c.a = 1\n  else:\n    c.b = 2\n  n = c.other\n  return c\n"
    )
    found = read_settings(text)
    assert [found.find(name) for name in ("part.tp", "part.pp", "a", "b")] == [2, 4, 1, 2]
    assert found.find("n") is None and "depends on c.other" in found.faults[0].message


def test_what_imported_functions_set_is_named():
    found = read_settings(RECIPES, function="imported")
    assert found.unread == ["base_recipe", "common"] and found.find("batch") == 768
    assert found.find("precision.precision") == "bf16"


def test_what_a_loop_of_a_program_changes_is_not_known():
    text = (
        "tp = 1\nfor i in unknown():\n    tp = tp * 2\npp = 1\nwhile pp < 8:\n    pp *= 2\nx = 3\n"
    )
    found = read_settings(text)
    assert found.find("x") == 3 and found.find("tp") is None and found.find("pp") is None


def _nested(first: str, whole: str, part: str) -> str:
    """A document of 10^9 values, each line of the one before."""
    lines = [f"a0: &a0 {first}"]
    for i in range(9):
        parts = ", ".join(part.format(i, i, k) for k in range(10))
        lines.append(f"a{i + 1}: &a{i + 1} {whole.format(parts)}")
    return "\n".join(lines)


HOSTILE = {
    "lists": _nested("x", "[{}]", "*a{}"),
    "maps": _nested("{x: 1}", "{{{}}}", "k{2}: *a{0}"),
    "merged": _nested("{x: 1}", "{{<<: [{}]}}", "*a{}"),
    "deep": "[" * 90_000,
    "deep maps": '{"a":' * 30_000,
    "deep blocks": "- " * 90_000,
    "long": "a: 1\n" * 2_000_000,
    "parts of a key": ".".join("a" * 90_000) + " = 1",
    "terms": "a = " + "1+" * 90_000 + "1",
    "parentheses": "a = " + "(" * 90_000,
    "calls": "".join(f"def f{i}():\n  f{i + 1}(); f{i + 1}()\n" for i in range(30)),
    "a range": f"for a in range({'9' * 30}):\n x = 1\n",
    "loops": "for a in range(999):\n for b in range(999):\n  for c in range(999):\n   x = 1\n",
    "lists of lists": "a = [1]\n" + "a = [a, a, a, a, a, a, a, a]\n" * 12,
    "objects": "a = C(x=1)\n" + "a = C(p=a, q=a, r=a, s=a)\n" * 14,
    "numbers": "a = 'x' * 10**9\nb = [0] * 10**12\nc = 10 ** 10 ** 10\nd = 9**9**9\n",
    "itself": "a = C()\na.a = a\nb = [a]\na.b = b\nb.c = a\n",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_texts_are_read_or_refused_soon(name):
    began = time.process_time()
    with suppress(PartoptError):
        read_settings(HOSTILE[name]).find("a")
    assert time.process_time() - began < 5


def test_a_file_refers_to_itself_by_the_place_that_it_has_in_a_whole():
    text = "model:\n  hidden: 64\n  ffn: ${training.model.hidden}\n  heads: ${other.hidden.x}\n"
    settings = read_settings(text)
    assert settings.find("ffn") == 64 and settings.find("heads") is None
