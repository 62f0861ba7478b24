"""Parsers of trainers as they are today read what is exported; checkouts of them are fetched.

`TRAINERS_AT_HEAD` is a folder with checkouts, called as their repositories are: CONTRIBUTING.md.
"""

import itertools
import json
import os
import random
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.exports import Case, drawn
from partopt import PartoptError, Plan, Topology, export_plan
from partopt.importers.hugging_face import load_transformer
from partopt.search import judging
from partopt.search.jobs import read_job
from partopt.trainers.megatron_model import LATENT
from partopt.trainers.read_back import offloaded_modules
from tests.trainers.models import plan_layout
from tests.trainers.own_code import installed
from tests.trainers.test_own_configurations import CASES, OWN

HEADS = Path(os.environ.get("TRAINERS_AT_HEAD") or "TRAINERS_AT_HEAD is not set")
HERE = Path(__file__).parent
DRAWN = 40


def needs_checkout(name: str, file: str, *packages: str) -> list[pytest.MarkDecorator]:
    missing = [package for package in packages if not installed(package)]
    there = (HEADS / name / file).exists()
    return [
        pytest.mark.slow,
        pytest.mark.skipif(not there, reason=f"{HEADS}: no checkout of {name} (CONTRIBUTING.md)"),
        pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}"),
    ]


def checks(case: Case) -> bool:
    """Whether Megatron-LM has what the case asks for, as far as it says so without a GPU.

    The narrower formats need Transformer Engine; facts that need each other are drawn apart.
    """
    asked, facts = case.asked, case.asked.facts
    formats = ("bfloat16", "float16", *(["fp8"] if not asked.model.experts else []))
    alone = facts.get("sequence-parallel") == "no" and facts.get("tp-overlap") == "yes"
    return asked.dtype in formats and not alone and facts.get("exchange-overlap") != "yes"


def plans(trainer: str, count: int = DRAWN) -> list[Plan]:
    """Plans for the trainer that it can be told, drawn as `benchmarks/exports.py` does."""
    rng, found = random.Random(0), list[Plan]()
    while len(found) < count:
        case = drawn(rng)
        if {case.asked.trainer, case.target} != {trainer} or not checks(case):
            continue
        try:
            plan = judging.plan_layout(case.asked)
            export_plan(plan, trainer, stem="planned")
        except PartoptError:
            continue
        found.append(plan)
    return found


def answers(program: str, *arguments: str, given: str = "") -> list[Any]:
    """What a program of this folder prints, a line for each that it is given."""
    done = subprocess.run(
        [sys.executable, str(HERE / program), *arguments],
        input=given,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def megatron() -> list[tuple[Plan, Any]]:
    """Plans, and the arguments that Megatron-LM makes of their exports."""
    own = [
        plan_layout("megatron", load_transformer(model), *case) for model, *case in CASES.values()
    ]
    every = [*own, *plans("megatron")]
    given = []
    for plan in every:
        text = export_plan(plan, "megatron").main
        words = shlex.split(text[text.index("(") + 1 : text.rindex(")")], comments=True)
        given.append((plan.topology.cluster.devices, words))
    folder = str(HEADS / "Megatron-LM")
    return list(
        zip(every, answers("megatron_at_head.py", folder, given=json.dumps(given)), strict=True)
    )


class TestMegatron:
    pytestmark = needs_checkout("Megatron-LM", "megatron/training/arguments.py", "megatron-core")

    def test_it_accepts_every_export(self, megatron):
        refused = [(plan.layout, said) for plan, said in megatron if isinstance(said, str)]
        assert not refused

    def test_it_has_the_layout_and_the_batch(self, megatron):
        for plan, said in megatron:
            own, about = plan.layout, plan.transformer
            degrees = ("tensor_model", "context", "pipeline_model", "expert_model")
            found = [said[f"{name}_parallel_size"] for name in degrees]
            assert found == [own.tp, own.cp, own.pp, own.ep]
            if about.model.experts:
                assert said["expert_tensor_parallel_size"] == (own.etp or 1)
            if own.modules:
                assert said["recompute_modules"] == str(own.modules.split("+"))
            names = offloaded_modules(plan)
            assert said["fine_grained_activation_offloading"] == bool(names)
            if names and not about.practice.fused_experts:
                assert said["offload_modules"] == str(names)
            graphs = about.practice.graphs == "none" or said["cuda_graph_impl"] != "none"
            assert graphs or (about.practice.graphs == "router" and not about.model.experts)
            assert (said["virtual_pipeline_model_parallel_size"] or 1) == own.chunks
            assert said["data_parallel_size"] == own.dp
            assert said["micro_batch_size"] == own.microbatch
            assert said["global_batch_size"] == plan.microbatch_size * plan.microbatches
            assert said["seq_length"] == about.sequence
            kinds = {"never": None, "selective": "selective"}
            assert said["recompute_granularity"] == kinds.get(own.recompute, "full")
            shares = said["use_distributed_optimizer"], said["use_layer_wise_distributed_optimizer"]
            assert any(shares) == (plan.shard != "none")
            fsdp = said["data_parallel_sharding_strategy"] if said["use_megatron_fsdp"] else None
            strategies = {"gradients": "optim_grads", "parameters": "optim_grads_params"}
            assert fsdp == strategies.get(plan.shard)
            narrow = plan.engine.gradients == "parameters"
            assert not fsdp or (said["megatron_fsdp_main_grads_dtype"] is None) == narrow
            assert (said["optimizer"] == "muon") == about.practice.muon
            overlaps = plan.engine.allreduce == "overlap" or plan.layout.shares_gradients
            assert said["overlap_grad_reduce"] == overlaps
            assert said["fp16"] == (about.format == "float16")
            assert bool(said["fp8"]) == (about.format == "fp8")

    def test_it_has_the_model(self, megatron):
        for plan, said in megatron:
            model = plan.transformer.model
            own = model.numerics
            assert said["num_layers"] == model.blocks
            assert said["hidden_size"] == model.hidden
            assert said["num_attention_heads"] == model.heads
            assert (said["num_query_groups"] or model.heads) == model.kv_heads
            latent = model.latent
            assert said["kv_channels"] == model.head_size - (latent.rotary if latent else 0)
            assert said["multi_latent_attention"] == bool(latent)
            if latent:
                ranks = [said[name] or 0 for name in LATENT]
                assert ranks == [latent.queries, latent.keys, latent.rotary, latent.values]
                assert said["qk_head_dim"] + latent.rotary == model.head_size
                scaling = own.rotary_scaling.get("factor", 1)
                assert said["rotary_scaling_factor"] == scaling
            assert said["ffn_hidden_size"] == (model.ffn or model.expert_ffn)
            blocks = [int(kind.experts) for kind in model.kinds()]
            if model.experts:
                assert said["moe_layer_freq"] == (1 if all(blocks) else str(blocks))
            assert (said["mtp_num_layers"] or 0) == model.further
            assert (said["softmax_type"] == "learnable") == model.sinks
            assert (said["window_attn_skip_freq"] or 0) == model.full_period
            assert (said["num_moe_experts"] or 0) == model.experts
            assert said["gated_linear_unit"] == model.gated
            assert said["hidden_dropout"] == said["attention_dropout"] == 0.1 * model.dropout
            assert said["untie_embeddings_and_output_weights"] != model.tied
            assert said["normalization"] == {"rms": "RMSNorm", "layer": "LayerNorm"}[own.norm]
            assert said["layernorm_epsilon"] == own.epsilon
            assert said["qk_layernorm"] == (own.query_key_norms or bool(latent))
            assert said["add_bias_linear"] == (own.bias == "all")
            assert said["add_qkv_bias"] == (own.bias in ("queries", "all"))
            if model.rotary:
                assert said["position_embedding_type"] == "rope"
                assert said["rotary_base"] == round(own.rotary_base)
                assert said["rotary_percent"] == own.rotary_share
                if said["use_rope_scaling"]:
                    assert said["rope_scaling_factor"] == own.rotary_scaling["factor"]
                assert said["use_rope_scaling"] == (own.rotary_scaling.get("rope_type") == "llama3")


@pytest.fixture(scope="module")
def torchtitan(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Plan, Any]]:
    """Plans, and the configurations that torchtitan makes of their exports."""
    folder = tmp_path_factory.mktemp("modules")
    layouts = ("tp=2,pp=2", "tp=8,recompute=always", "cp=2,recompute=selective", "pp=2,chunks=2")
    models = ("llama3-8b", "llama3-70b", "qwen3-14b", "qwen3-32b", "qwen3-30b-a3b")
    every = []
    for number, (model, layout) in enumerate(itertools.product(models, layouts)):
        facts = {"compile": "yes"} if number % 2 else {}
        try:
            plan = plan_layout("torchtitan", load_transformer(model), layout, "bfloat16", facts)
        except PartoptError:  # heads that tp does not divide
            continue
        stem = f"planned_{number}"
        export_plan(plan, "torchtitan", stem=stem).save(str(folder / f"{stem}.py"))
        every.append((plan, stem))
    assert len(every) > len(models)
    found = dict(answers("torchtitan_at_head.py", str(HEADS / "torchtitan"), str(folder)))
    return [(plan, found[stem]) for plan, stem in every]


class TestTorchtitan:
    pytestmark = needs_checkout("torchtitan", "torchtitan/config/manager.py", "torchtitan", "grain")

    def test_it_accepts_every_export(self, torchtitan):
        assert not [(plan.layout, said) for plan, said in torchtitan if isinstance(said, str)]

    def test_it_has_the_layout_and_the_batch(self, torchtitan):
        for plan, said in torchtitan:
            own, sequence = plan.layout, plan.transformer.sequence
            names = ("tensor", "context", "pipeline", "expert")
            found = [said[f"parallelism.{name}_parallel_degree"] for name in names]
            assert found == [own.tp, own.cp, own.pp, own.ep]
            assert said["training.max_context_length"] == sequence
            size = said["training.num_tokens_per_microbatch_per_dp_rank"]
            assert size == own.microbatch * sequence
            step = said["training.num_tokens_per_train_step"]
            assert step == plan.microbatch_size * plan.microbatches * sequence
            if own.pp > 1:
                local = said["parallelism.num_pp_microbatches"] * size
                assert local * own.dp == step
                assert len(said["stages"]) == own.pp * own.chunks
            kinds = {"never": "NoneType", "selective": "SelectiveAC"}
            assert said["again"] == kinds.get(own.recompute, "FullAC")
            assert said["compile"][0] == plan.transformer.practice.compiled

    @pytest.mark.parametrize("name", OWN)
    def test_its_own_configurations_are_read(self, name):
        """They are as those of 0.3.0, with their batches in tokens."""
        model, batch, again, tp = OWN[name]
        text = (HEADS / "torchtitan/torchtitan/models/llama3/config_registry.py").read_text()
        asked, notes = read_job("torchtitan", text, Topology.load("dgx-h100", 16), function=name)
        own = asked.layout
        assert (asked.model, asked.sequence) == (load_transformer(model), 8192)
        assert (own.microbatch, own.recompute, own.tp) == (batch, again, tp)
        assert asked.global_batch == batch * 128 // tp
        assert not notes

    def test_its_flavours_are_the_models(self, torchtitan):
        for plan, said in torchtitan:
            model = plan.transformer.model
            own = model.numerics
            assert (said["blocks"], said["model.dim"]) == (model.blocks, model.hidden)
            assert said["model.vocab_size"] == model.vocabulary
            assert said["norm.eps"] == own.epsilon
            assert said["rope.theta"] == own.rotary_base
            assert said["query_key_norms"] == own.query_key_norms
            scaling = {"llama3": "llama"}.get(own.rotary_scaling.get("rope_type"), "none")
            assert said["rope.scaling"] == scaling
            if scaling != "none":
                names = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
                assert said["rope.scaling_factor"] == own.rotary_scaling["factor"]
                for name in names:
                    assert said[f"rope.{name}"] == own.rotary_scaling[name]
