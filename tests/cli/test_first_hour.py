"""What a new user types first, and what the answer says to do."""

import shlex

import pytest
from msgspec.structs import replace

from partopt.documents import Note
from tests.forked import run_forked
from tests.helpers import uniform_profile
from tests.profiler.helpers import needs_transformers

DECODER = """
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM


def build():
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=3, vocab_size=64)
    heads = dict(num_attention_heads=2, num_key_value_heads=1)
    return Qwen2ForCausalLM(Qwen2Config(**sizes, **heads))


def example_inputs(batch_size):
    ids = torch.randint(64, [batch_size, 8])
    return {"input_ids": ids, "labels": ids}
"""


@needs_transformers
@pytest.mark.slow
def test_a_decoder_as_transformers_has_it_by_default_trains_by_its_plan(partopt, tmp_path):
    model, profile, plan = tmp_path / "net.py", tmp_path / "net.json", tmp_path / "plan.json"
    model.write_text(DECODER)
    measured = partopt("profile", model, "--microbatch", 1, "--steps", 1, "-o", profile)
    assert measured.code == 0, measured.err
    [following] = [line for line in measured.err.splitlines() if line.startswith("next:")]
    assert following.split() == ["next:", "partopt", "plan", str(profile), "--topology", "cpu-2"]
    planned = partopt(*following.split()[2:], "--layout", "pp=2", "-o", plan)
    assert planned.code == 0, planned.err
    done = run_forked("partopt", ["run", str(plan), str(model), "--steps", "1", "--check"])
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "lacks"),
    [
        ("", "--for, --global-batch, --sequence"),
        ("--for torchtitan --sequence 8192", "--global-batch"),
        ("--servers 1-2 --for megatron", "--global-batch, --sequence"),
    ],
)
def test_all_that_a_transformer_lacks_is_said_with_a_whole_command(partopt, given, lacks):
    words = ["plan", "llama3-8b", "--topology", "dgx-h100", *given.split()]
    refused = partopt(*words)
    assert (refused.code, refused.err.count("error:")) == (2, 1)
    assert f"llama3-8b: a transformer's configuration also needs {lacks}\n" in refused.err
    whole = shlex.split(refused.err.partition("such as: partopt ")[2])
    assert {*words} <= {*whole}
    assert partopt(*whole).code == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "topology"),
    [
        ("llama3-70b", "dgx-h100"),
        ("gpt-oss-120b", "dgx-h100"),
        ("qwen3-30b-a3b", "gb200-nvl72"),
        ("llama2-7b", "v100-nvlink"),  # without bfloat16
    ],
)
def test_the_whole_command_has_servers_on_which_the_model_fits(partopt, model, topology):
    refused = partopt("plan", model, "--topology", topology)
    assert partopt(*shlex.split(refused.err.partition("such as: partopt ")[2])).code == 0


@pytest.mark.slow
def test_comparing_a_transformer_says_what_does(partopt):
    refused = partopt("compare", "llama3-8b", "--topology", "dgx-h100", "--for", "torchtitan")
    assert refused.code == 2
    assert "llama3-8b: a transformer's configuration, and planners cut profiles" in refused.err
    whole = shlex.split(refused.err.partition("best: partopt ")[2])
    done = partopt(*whole)
    assert "for torchtitan" in shlex.join(whole) and done.code == 0
    assert "FIRST" in done.out and "BESIDE" in done.out


def test_a_fact_that_needs_another_names_it_as_it_is_typed(partopt):
    options = "--topology dgx-h100 --for torchtitan --global-batch 64 --sequence 4096"
    done = partopt("plan", "llama3-8b", *options.split(), "--with", "async-tp=yes")
    assert done.err == (
        "error: --with async-tp=yes: only compiled products are split\n"
        "hint:  add --with compile=yes\n"
    )


def test_warnings_of_a_profile_are_said_by_show_alone(partopt, tmp_path):
    texts = ["microbatch 1: it shakes", "microbatch 2: it shakes", "it is hot"]
    notes = [Note(code="shaken", text=text) for text in texts]
    path = tmp_path / "net.json"
    replace(uniform_profile(4), notes=notes).save(str(path))
    shown = partopt("show", path)
    warnings = "warning: microbatch 1: it shakes (and 1 alike)\nwarning: it is hot\n"
    assert shown.err.startswith(warnings)
    for verb in ("plan", "compare"):
        done = partopt(verb, path, "--topology", "v100-pcie")
        assert f"note:    the profile has 3 warnings: partopt show {path}\n" in done.err
        assert "it shakes" not in done.err
