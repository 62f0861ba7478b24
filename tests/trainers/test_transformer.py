"""A transformer's layout as a plan: the simulator agrees with the closed form, and takes the plan
as any other.
"""

import dataclasses

import msgspec
import pytest

from partopt.documents.engine import Layout
from partopt.documents.plan import Plan
from partopt.documents.topology import Topology
from partopt.errors import PartoptError
from partopt.search.verify import verify
from partopt.trainers import export_plan
from partopt.trainers.transformer import Laying, choose, compare_layout, lay
from partopt.transformer.as_profile import profile_again
from partopt.transformer.config import load_transformer
from partopt.transformer.iteration import estimate

# model, servers of 8 H100, trainer, batch, sequence, layout
CASES = [
    ("llama3-70b", 4, "megatron", 512, 4096, "tp=8,pp=4,chunks=5"),
    ("llama3-70b", 4, "megatron", 512, 4096, "tp=4,pp=8,recompute=always"),
    ("llama3-70b", 4, "megatron", 512, 4096, "tp=4,pp=4,cp=2,recompute=selective"),
    ("llama3-70b", 4, "megatron", 512, 4096, "tp=8,pp=2,recompute=10"),
    ("llama3-70b", 4, "megatron-bridge", 128, 8192, "tp=8,pp=4"),
    ("llama3-8b", 4, "megatron", 512, 4096, ""),
    ("llama3-8b", 4, "megatron", 512, 8192, "tp=2,shard=none"),
    ("llama3-8b", 4, "torchtitan", 64, 8192, "recompute=selective"),
    ("llama3-70b", 4, "torchtitan", 64, 8192, "tp=8,recompute=always"),
    ("llama3-70b", 4, "torchtitan", 64, 8192, "tp=8,pp=2,recompute=always"),
    ("gpt3-175b", 8, "deepspeed", 256, 2048, "tp=8,pp=8,recompute=always"),
    ("mixtral-8x7b", 4, "megatron", 512, 4096, "ep=8,pp=4"),
    ("llama3-405b", 64, "megatron", 512, 8192, "tp=8,pp=16,recompute=always"),
    ("bert-large", 1, "megatron", 512, 512, ""),
    # replicas of several context parallel ranks, on one server and over some
    ("llama3-8b", 8, "megatron", 64, 8192, "cp=8"),
    ("llama3-8b", 8, "megatron", 64, 4096, "cp=4,tp=2,shard=none"),
    ("llama3-70b", 8, "torchtitan", 64, 8192, "cp=2,tp=4,recompute=always"),
    ("llama3-405b", 32, "torchtitan", 512, 8192, "cp=2,tp=8,microbatch=2"),
    # a pipeline of unequal stages, which gathers and scatters once
    ("llama3-70b", 16, "torchtitan", 256, 8192, "tp=4,cp=4,pp=2"),
    ("llama3-70b", 16, "torchtitan", 256, 8192, "tp=2,pp=64,recompute=selective"),
    ("mixtral-8x7b", 8, "megatron", 512, 4096, "ep=4,tp=2,pp=2"),
    # chunks of unequal stages, the ends with fewer blocks
    ("llama3-405b", 64, "megatron", 512, 8192, "tp=8,pp=16,chunks=4,cp=2"),
    ("qwen3-32b", 8, "megatron", 512, 4096, "tp=2,pp=2,chunks=3,microbatch=2"),
]


def laying(model, servers, trainer, batch, sequence, layout, **options):
    return Laying(
        model=load_transformer(model),
        topology=Topology.load("dgx-h100", servers),
        trainer=trainer,
        global_batch=batch,
        sequence=sequence,
        layout=Layout.parse(layout) if layout else Layout(),
        facts=options.pop("facts", {}),
        **options,
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[2]}-{case[5]}")
def test_the_simulation_takes_as_long_as_the_closed_form_says(case):
    laid = lay(laying(*case))
    assert laid.plan.predicted.iteration_s == pytest.approx(laid.estimate.seconds, rel=0.02)
    needs = laid.plan.peak_memory_bytes + laid.plan.reserve.size_bytes
    assert needs == pytest.approx(laid.estimate.memory_bytes, rel=0.01)


@pytest.mark.parametrize("layout", ["tp=8,microbatch=2", "tp=4,cp=2,recompute=always"])
def test_shards_of_fp8_are_gathered_in_a_byte(layout):
    case = "llama3-70b", 16, "torchtitan", 128, 2048, layout
    laid = lay(laying(*case, format="fp8"))
    assert laid.plan.engine.gathered_bytes == 1
    assert laid.plan.predicted.iteration_s == pytest.approx(laid.estimate.seconds, rel=0.02)


@pytest.mark.parametrize("case", CASES[::4], ids=lambda case: case[5])
def test_the_plan_is_made_again_from_what_it_says(case):
    plan = lay(laying(*case)).plan
    read = Plan.parse(msgspec.json.encode(plan))
    assert read == plan
    profile = profile_again(read)
    assert profile is not None
    assert verify(read, profile).ok


def test_the_profile_has_the_models_operations_and_parameters():
    asked = laying(*CASES[0])
    profile, model = lay(asked).profile, asked.model
    layers = profile.measurements[0].layers
    flops = 3 * 8 * sum(layer.forward_flops for layer in layers)
    assert flops == pytest.approx(model.flops(4096), rel=1e-6)
    held = sum(layer.parameter_bytes for layer in profile.layers)
    assert held == pytest.approx(2 * model.parameters / 8, rel=1e-6)
    kinds = [layer.type for layer in profile.layers]
    assert kinds == ["Embedding", *["Block"] * 80, "Norm", "Head"]


def test_a_model_whose_ends_are_tied_has_them_once():
    asked = laying("bert-large", 1, "megatron", 512, 512, "")
    assert lay(asked).profile.parameter_bytes() == pytest.approx(2 * asked.model.parameters)


def test_blocks_that_are_not_made_again_are_not_slower():
    times = [
        lay(laying("llama3-8b", 1, "megatron", 64, 4096, f"tp=4,pp=2,recompute={again}")).plan
        for again in ("never", 4, 8, "always")
    ]
    seconds = [plan.predicted.iteration_s for plan in times]
    assert seconds == sorted(seconds) and seconds[0] < seconds[1] < seconds[3]
    memory = [plan.peak_memory_bytes for plan in times]
    assert memory == sorted(memory, reverse=True)


def test_a_fact_of_the_trainer_replaces_its_default():
    case = "llama3-8b", 1, "megatron", 64, 4096, "tp=2"
    plain, fused = (lay(laying(*case, facts=facts)) for facts in ({}, {"loss": "fused"}))
    assert fused.estimate.seconds < plain.estimate.seconds
    assert plain.plan.transformer.practice != fused.plan.transformer.practice


def test_memory_is_less_than_the_name_says_unless_it_is_given():
    case = "llama3-8b", 1, "megatron", 64, 4096, "tp=2"
    assert laying(*case).limit_bytes == 76 * 10**9
    assert laying(*case, memory="70 GB").limit_bytes == 70 * 10**9
    assert not lay(laying(*case, memory="30 GB")).plan.fits


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": "tp=3"}, "tp x cp x pp x dp are 30 devices"),
        ({"trainer": "torchtitan", "layout": "recompute=3"}, "all blocks again or none"),
        ({"layout": "tp=8", "batch": 511}, "511 samples"),
        ({"trainer": "vllm"}, "how vllm runs a transformer is not known"),
        ({"facts": {"los": "fused"}}, "no fact `los` of megatron"),
        ({"facts": {"loss": "blue"}}, "unknown loss"),
        ({"layout": "tp=8,pp=4,chunks=30"}, "stages of 80 blocks"),
        ({"trainer": "deepspeed", "layout": "pp=4,chunks=2"}, "deepspeed does not interleave"),
    ],
)
def test_what_cannot_be_run_is_refused(changes, message):
    given = {"trainer": "megatron", "batch": 512, "layout": "tp=8,pp=4", "facts": {}} | changes
    asked = laying(
        "llama3-70b",
        4,
        given["trainer"],
        given["batch"],
        4096,
        given["layout"],
        facts=given["facts"],
    )
    with pytest.raises(PartoptError, match=message):
        lay(asked)


def exported(to, *case):
    return export_plan(lay(laying(*case)).plan, to, stem="planned").main


def test_megatron_is_told_the_model_the_degrees_and_what_is_made_again():
    text = exported(
        "megatron", "llama3-70b", 4, "megatron", 512, 4096, "tp=4,cp=2,pp=4,recompute=selective"
    )
    for words in (
        "--num-layers 80",
        "--ffn-hidden-size 28672",
        "--num-query-groups 8",
        "--seq-length 4096",
        "--tensor-model-parallel-size 4",
        "--context-parallel-size 2",
        "--sequence-parallel",
        "--recompute-granularity selective",
        "--use-distributed-optimizer",
    ):
        assert f"    {words}\n" in text
    assert "--num-experts" not in text and "--recompute-method" not in text
    experts = exported("megatron", "mixtral-8x7b", 4, "megatron", 512, 4096, "ep=8,pp=4")
    assert "    --expert-model-parallel-size 8\n" in experts
    assert "    --num-experts 8\n    --moe-router-topk 2\n" in experts


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("gpt3-1.3b", ["--attention-dropout 0.1", "--hidden-dropout 0.1", "--kv-channels 128"]),
        ("gpt3-1.3b", ["--normalization LayerNorm", "--position-embedding-type learned_absolute"]),
        ("llama3-8b", ["--attention-dropout 0.0", "--hidden-dropout 0.0", "--kv-channels 128"]),
        ("llama3-8b", ["--normalization RMSNorm", "--position-embedding-type rope"]),
    ],
)
def test_megatron_is_told_the_kind_of_the_model(model, words):
    """Of GPT-3 as Brown et al. (2020, section 2.1) have GPT-2's blocks, of Llama 3 as its paper."""
    text = exported("megatron", model, 1, "megatron", 512, 512, "")
    assert [word for word in words if f"    {word}\n" not in text] == []


def test_torchtitan_is_told_the_context_and_what_is_made_again():
    case = "llama3-70b", 4, "torchtitan", 64, 8192
    text = exported("torchtitan", *case, "tp=8,cp=2,pp=2,recompute=selective")
    assert "tensor_parallel_degree = 8\n" in text and "context_parallel_degree = 2\n" in text
    assert "activation_checkpoint = SelectiveAC.Config()\n" in text


def test_a_trainer_without_a_degree_refuses_it():
    with pytest.raises(PartoptError, match="it has cp 2"):
        exported("deepspeed", "llama3-70b", 4, "deepspeed", 64, 2048, "tp=8,cp=2,pp=2")


def free(layout="", model="llama3-8b", **options):
    return laying(model, 1, options.pop("trainer", "megatron"), 64, 4096, layout, **options)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["megatron", "torchtitan"])
@pytest.mark.parametrize("narrower", ["tp=2", "pp=2,chunks=2", "recompute=always", "cp=2", "dp=2"])
def test_what_is_freer_is_not_slower(trainer, narrower):
    best, narrow = (choose(free(layout, trainer=trainer)).best for layout in ("", narrower))
    assert best.plan.fits and narrow.plan.fits
    assert best.seconds <= narrow.seconds * (1 + 1e-9)
    stated = Layout.parse(narrower)
    for name in Layout.__struct_fields__:
        assert getattr(stated, name) in (None, getattr(narrow.plan.layout, name))


def test_blocks_that_are_cut_freely_are_shown_where_that_is_faster():
    asked = laying("llama3-70b", 4, "megatron", 512, 4096, "tp=4,pp=8,chunks=5")
    told = []
    best = choose(asked, lambda *own: told.append(own)).best
    assert told[0] == ("estimating layouts", 0, 1)
    assert told[1:] == [("simulating layouts", n, 4) for n in range(len(told) - 1)] != []
    freely = lay(dataclasses.replace(asked, facts={"ends": "free"}))
    assert best.plan.transformer.freely_s == freely.seconds < best.seconds
    even = choose(dataclasses.replace(asked, facts={"ends": "stage"})).best
    assert even.seconds == best.seconds and not even.plan.transformer.freely_s


def test_where_little_is_missing_few_blocks_are_made_again():
    chosen = choose(free("tp=2,cp=1,pp=1,microbatch=2", memory="60 GB"))
    again = chosen.best.plan.layout.recompute
    assert isinstance(again, int) and chosen.best.plan.fits
    fewer = lay(free(f"tp=2,cp=1,pp=1,microbatch=2,recompute={again - 1}", memory="60 GB"))
    assert not fewer.plan.fits
    assert any(own.layout.recompute == "never" for own in chosen.found.lacking)


def check_others(laid, asked):
    """What stands beside a plan is what each layout takes by itself."""
    about, limit = laid.plan.transformer, asked.limit_bytes
    assert len({own.layout for own in about.beside} | {about.layout}) == 1 + len(about.beside)
    for own in about.beside:
        found = estimate(laid.training, own.layout, asked.global_batch)
        assert own.memory_bytes == round(found.memory_bytes)
        assert own.fits == (found.memory_bytes <= limit)
        assert own.fits or own.iteration_s < laid.seconds
        alone = lay(dataclasses.replace(asked, layout=own.layout)).seconds
        assert own.iteration_s == (alone if own.simulated else found.seconds)
        more = {
            name: found.parts.get(name, 0.0) - laid.estimate.parts.get(name, 0.0)
            for name in found.parts | laid.estimate.parts
        }
        most = max if found.seconds >= laid.estimate.seconds else min
        assert own.part_s == more[own.part] == most(more.values())


def test_others_stand_beside_a_plan_and_the_best_beside_a_layout_of_today():
    asked = free("pp=1", memory="60 GB")
    best = choose(asked).best
    assert {own.fits for own in best.plan.transformer.beside} == {True, False}
    check_others(best, asked)
    asked = free("tp=4,pp=2,recompute=always", memory="60 GB")
    compared = compare_layout(asked)
    first, *others = compared.yours.plan.transformer.beside
    assert first.layout == compared.chosen.best.plan.layout
    assert first.iteration_s == compared.chosen.best.seconds
    assert first.iteration_s <= min(own.iteration_s for own in others if own.fits)
    assert first.part_s < 0
    check_others(compared.yours, asked)


def test_a_trainer_that_does_not_interleave_gets_no_chunks():
    chosen = choose(laying("gpt3-175b", 8, "deepspeed", 128, 2048, "pp=8"))
    assert {own.layout.chunks for own in chosen.found.fitting + chosen.found.lacking} == {1}


def test_where_nothing_fits_the_layout_that_needs_least_is_told():
    told = []
    chosen = choose(free(memory="10 GB"), lambda *own: told.append(own))
    assert told == [("estimating layouts", 0, 1)]
    assert not chosen.best.plan.fits and not chosen.found.fitting
    assert chosen.best.estimate.layout == chosen.found.least.layout


@pytest.mark.slow
def test_of_experts_small_microbatches_come_first():
    asked = laying("qwen3-30b-a3b", 4, "megatron", 512, 4096, "tp=1,cp=1,pp=4")
    best = choose(asked).best.plan.layout
    assert best.microbatch <= 2 and best.recompute != "always"
    fixed = choose(
        laying("qwen3-30b-a3b", 4, "megatron", 512, 4096, "tp=1,cp=1,pp=4,microbatch=4")
    ).best.plan
    assert fixed.layout.microbatch == 4


def test_no_layout_is_told_with_what_would_be_one():
    with pytest.raises(PartoptError, match="tp x cp x pp x dp are 6 devices"):
        choose(free("tp=3,pp=2"))
