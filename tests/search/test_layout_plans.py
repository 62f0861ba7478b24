"""A transformer's layout as a plan: the simulator agrees with the closed form, and takes the plan
as any other.
"""

import random
from collections import Counter
from functools import cache

import msgspec
import pytest
from msgspec import structs

from benchmarks.questions import FAILURES, compare_layouts, find_unsaid
from partopt import verify
from partopt.documents.engine import Layout
from partopt.documents.plan import Plan, needed_bytes, seconds_of
from partopt.documents.topology import Topology
from partopt.errors import PartoptError
from partopt.importers.hugging_face import load_transformer
from partopt.job import Job
from partopt.report.transformer_text import layout_table, render
from partopt.search.judging import judge_layout, plan_layout
from partopt.search.layout_plans import (
    JUDGED,
    MOST_JUDGED,
    USUALLY,
    differing,
    search_layouts,
    simulate_layout,
)
from partopt.search.layout_questions import (
    choose_graphs,
    estimate_layouts,
    training_for,
    usual_facts,
)
from partopt.search.ranking import TIE, layout_complexity
from partopt.search.sizes import Sizes
from partopt.search.solve import solve
from partopt.trainers import export_plan
from partopt.transformer.as_profile import estimate_again, profile_again, training_of
from partopt.transformer.iteration import HOST_S, estimate, once_s, settle_cut
from partopt.transformer.operations import model_flops
from partopt.units import format_bytes, format_seconds

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
    # context parallel ranks share torchtitan's parameters, with no replicas beside them, too
    ("llama3-405b", 4, "torchtitan", 64, 1024, "tp=8,cp=4,recompute=always"),
    ("llama3-8b", 4, "torchtitan", 64, 8192, "tp=2,cp=2,shard=gradients,recompute=always"),
    # every chunk has its receive buffers
    ("llama3-8b", 4, "torchtitan", 64, 8192, "cp=4,pp=2,chunks=2,recompute=always"),
]


def job_of(model, servers, trainer, batch, sequence, layout, **options):
    return Job(
        model=load_transformer(model),
        topology=Topology.load("dgx-h100", servers),
        trainer=trainer,
        global_batch=batch,
        sequence=sequence,
        layout=Layout.parse(layout) if layout else Layout(),
        facts=options.pop("facts", {}),
        **options,
    )


def best_of(job):
    """The best layout, without what else helps, for which all are estimated again and again."""
    return search_layouts(job)[0]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[2]}-{case[5]}")
def test_the_simulation_takes_as_long_as_the_closed_form_says(case):
    plan = plan_layout(job_of(*case))
    assert plan.predicted.iteration_s == pytest.approx(plan.transformer.closed_s, rel=0.02)
    needs = plan.peak_memory_bytes + plan.reserve.size_bytes
    assert needs == pytest.approx(plan.transformer.closed_bytes, rel=0.01)


@pytest.mark.parametrize("layout", ["tp=8,microbatch=2", "tp=4,cp=2,recompute=always"])
def test_shards_of_fp8_are_gathered_in_a_byte(layout):
    case = "llama3-70b", 16, "torchtitan", 128, 2048, layout
    plan = plan_layout(job_of(*case, dtype="fp8"))
    assert plan.engine.gathered_bytes == 1
    assert plan.predicted.iteration_s == pytest.approx(plan.transformer.closed_s, rel=0.02)


@pytest.mark.parametrize("case", CASES[::4], ids=lambda case: case[5])
def test_the_plan_is_made_again_from_what_it_says(case):
    plan = plan_layout(job_of(*case))
    read = Plan.parse(msgspec.json.encode(plan))
    assert read == plan
    profile = profile_again(read)
    assert profile is not None
    assert verify(read, profile).ok


def test_the_profile_has_the_models_operations_and_parameters():
    asked = job_of(*CASES[0])
    profile, model = profile_again(plan_layout(asked)), asked.model
    layers = profile.measurements[0].layers
    flops = 3 * 8 * sum(layer.forward_flops for layer in layers)
    assert flops == pytest.approx(model_flops(model, 4096), rel=1e-6)
    held = sum(layer.parameter_bytes for layer in profile.layers)
    assert held == pytest.approx(2 * model.parameters / 8, rel=1e-6)
    kinds = [layer.type for layer in profile.layers]
    assert kinds == ["Embedding", *["Block"] * 80, "Norm", "Head"]


def test_a_model_whose_ends_are_tied_has_them_once():
    asked = job_of("bert-large", 1, "megatron", 512, 512, "")
    profile = profile_again(plan_layout(asked))
    assert profile.parameter_bytes() == pytest.approx(2 * asked.model.parameters)


def test_blocks_that_are_not_made_again_are_not_slower():
    times = [
        plan_layout(job_of("llama3-8b", 1, "megatron", 64, 4096, f"tp=4,pp=2,recompute={again}"))
        for again in ("never", 4, 8, "always")
    ]
    seconds = [plan.predicted.iteration_s for plan in times]
    assert seconds == sorted(seconds) and seconds[0] < seconds[1] < seconds[3]
    memory = [plan.peak_memory_bytes for plan in times]
    assert memory == sorted(memory, reverse=True)


def test_a_fact_of_the_trainer_replaces_its_default():
    case = "llama3-8b", 1, "megatron", 64, 4096, "tp=2"
    plain, fused = (plan_layout(job_of(*case, facts=facts)) for facts in ({}, {"loss": "fused"}))
    assert fused.transformer.closed_s < plain.transformer.closed_s
    assert plain.transformer.practice != fused.transformer.practice


def test_memory_is_less_than_the_name_says_unless_it_is_given():
    case = "llama3-8b", 1, "megatron", 64, 4096, "tp=2"
    assert job_of(*case).limit_bytes == 76 * 10**9
    assert job_of(*case, memory="70 GB").limit_bytes == 70 * 10**9
    assert not plan_layout(job_of(*case, memory="30 GB")).fits


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": "tp=3"}, "tp x cp x pp x dp are 30 devices"),
        ({"layout": "tp=8,pp=3"}, "tp=8,cp=1,pp=3,dp=1`: tp x cp"),
        ({"trainer": "torchtitan", "layout": "recompute=3"}, "all blocks again or none"),
        ({"layout": "tp=8", "batch": 511}, "511 samples"),
        ({"trainer": "vllm"}, "how vllm runs a transformer is not known"),
        ({"facts": {"los": "fused"}}, "no fact `los` of megatron"),
        ({"facts": {"loss": "blue"}}, "unknown loss"),
        ({"layout": "tp=8,pp=4,chunks=30"}, "stages of 80 blocks"),
        ({"trainer": "deepspeed", "layout": "pp=4,chunks=2"}, "chunks=2`: deepspeed has no such"),
        ({"trainer": "deepspeed", "layout": "cp=2"}, "cp=2`: deepspeed has no such part"),
        ({"trainer": "deepspeed", "layout": "ep=2"}, "ep=2`: deepspeed has no such part"),
        ({"trainer": "deepspeed", "layout": "tp=8,recompute=selective"}, "or nothing"),
        ({"trainer": "deepspeed", "layout": "tp=8,shard=parameters"}, "has none, optimizer"),
        ({"layout": "tp=8,shard=gradients", "facts": {"fsdp": "no"}}, "has none, optimizer"),
        ({"layout": "tp=8,pp=4,shard=parameters"}, "a view, which pipelines do not free"),
        ({"trainer": "torchtitan", "layout": "tp=8,pp=4,shard=parameters"}, "gather once"),
        ({"trainer": "torchtitan", "layout": "tp=8,shard=optimizer"}, "has none, gradients"),
        ({"layout": "tp=8,pp=4,schedule=gpipe"}, "planned under 1f1b and interleaved"),
        ({"trainer": "torchtitan", "layout": "schedule=zbv"}, "planned under 1f1b and interl"),
        ({"trainer": "deepspeed", "layout": "schedule=interleaved"}, "planned under 1f1b of"),
        ({"layout": "tp=8,pp=4,schedule=interleaved"}, "interleaved with chunks=1"),
        ({"layout": "tp=8,pp=4,chunks=5,schedule=1f1b"}, "1f1b with chunks=5"),
        ({"layout": "tp=1,pp=32", "facts": {"tp-overlap": "yes"}}, "tp-overlap needs tp > 1"),
        ({"trainer": "torchtitan", "facts": {"async-tp": "yes"}}, "add `compile=yes`|are split"),
        ({"facts": {"exchange-overlap": "yes"}}, "exchange-overlap needs ep > 1"),
    ],
)
def test_what_cannot_be_run_is_refused(changes, message):
    given = {"trainer": "megatron", "batch": 512, "layout": "tp=8,pp=4", "facts": {}} | changes
    asked = job_of(
        "llama3-70b",
        4,
        given["trainer"],
        given["batch"],
        4096,
        given["layout"],
        facts=given["facts"],
    )
    with pytest.raises(PartoptError, match=message):
        plan_layout(asked)


def test_deepspeed_has_a_flash_kernel_unless_it_is_told_or_a_v100_has_none():
    case = "llama3-8b", 2, "deepspeed", 64, 4096, "tp=2,pp=2"
    flash, scores = (
        plan_layout(job_of(*case, facts=facts)) for facts in ({}, {"attention": "scores"})
    )
    assert flash.transformer.practice.scores is None and scores.transformer.practice.scores
    assert seconds_of(flash) < seconds_of(scores)
    old = job_of(*case).with_(topology=Topology.load("v100-nvlink"), dtype="float16")
    assert usual_facts(old) == {}


@pytest.mark.parametrize(
    ("layout", "hint"),
    [
        ("tp=3", "tp divides the devices and the model: 1, 2, 4, 8"),  # of a server's 8
        ("tp=8,pp=3", "pp divides the devices and the model: 1, 2, 4, 8, 16, 32"),
        ("tp=8,cp=8", "use all devices"),
    ],
)
def test_a_degree_that_does_not_divide_the_devices_is_told_which_do(layout, hint):
    with pytest.raises(PartoptError) as refused:
        plan_layout(job_of("llama3-70b", 4, "megatron", 512, 4096, layout))
    assert refused.value.hint.startswith(hint)


def exported(to, *case):
    return export_plan(plan_layout(job_of(*case)), to, stem="planned").main


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


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["megatron", "megatron-bridge", "torchtitan", "deepspeed"])
@pytest.mark.parametrize("chunks", [1, 5])
def test_the_schedule_of_a_layout_is_kept(trainer, chunks):
    name, parts = "interleaved" if chunks > 1 else "1f1b", f"tp=8,pp=4,chunks={chunks}"
    if trainer == "deepspeed" and chunks > 1:
        return
    case = "llama3-70b", 4, trainer, 64, 4096
    for stated in (name, "auto"):
        assert plan_layout(job_of(*case, f"{parts},schedule={stated}")).schedule == name
    best = best_of(job_of(*case, f"tp=8,recompute=always,schedule={name}"))
    assert best.schedule == name and (best.layout.chunks > 1) == (chunks > 1)


def free(layout="", model="llama3-8b", **options):
    return job_of(model, 1, options.pop("trainer", "megatron"), 64, 4096, layout, **options)


@cache
def best_of_free(layout, trainer):
    return best_of(free(layout, trainer=trainer))


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["megatron", "torchtitan"])
@pytest.mark.parametrize("narrower", ["tp=2", "pp=2,chunks=2", "recompute=always", "cp=2", "dp=2"])
def test_what_is_freer_is_not_slower(trainer, narrower):
    best, narrow = (best_of_free(layout, trainer) for layout in ("", narrower))
    assert best.fits and narrow.fits
    assert seconds_of(best) <= seconds_of(narrow) * (1 + 1e-9)
    stated = Layout.parse(narrower)
    for name in Layout.__struct_fields__:
        assert getattr(stated, name) in (None, getattr(narrow.layout, name))


CUT = job_of("llama3-8b", 2, "megatron", 128, 8192, "tp=2,pp=8,microbatch=1")


@pytest.mark.slow
def test_progress_is_that_of_estimates_and_of_every_simulation():
    told = []
    solve(CUT, lambda *own: told.append(own))
    estimated = [done for what, done, of in told if (what, of) == ("estimating layouts", 100)]
    assert estimated[0] == 0 and estimated == sorted(estimated) and len(estimated) > 1
    told = told[len(estimated) :]
    of, done = told[0][2], len(told) - 1  # fewer where the others cannot be faster
    assert 1 < done <= of
    assert told[:-1] == [("simulating layouts", n, of) for n in range(done)]
    assert told[-1] == ("estimating what else helps", 0, 1)


@pytest.mark.slow
@pytest.mark.levers
def test_that_blocks_are_cut_freely_is_a_switch_where_that_is_faster():
    best, freely = solve(CUT).plan, best_of(CUT.with_(facts={"ends": "free"}))
    row = next(row for row in best.transformer.levers if row.facts == {"ends": "free"})
    assert row.iteration_s == pytest.approx(seconds_of(freely), rel=0.01)
    assert seconds_of(freely) < seconds_of(best)
    even = best_of(CUT.with_(facts={"ends": "stage"}))
    assert seconds_of(even) >= seconds_of(best)


def test_where_little_is_missing_few_blocks_are_made_again():
    asked = free("tp=2,cp=1,pp=1,microbatch=2", memory="60 GB")
    plan, found, _ = search_layouts(asked)
    again = plan.layout.recompute
    assert isinstance(again, int) and plan.fits
    fewer = plan_layout(free(f"tp=2,cp=1,pp=1,microbatch=2,recompute={again - 1}", memory="60 GB"))
    assert not fewer.fits
    assert any(candidate.layout.recompute == "never" for candidate in found.lacking)


TIED = [
    ("llama3-70b", 4, "megatron", 512, 4096, ""),
    ("llama3-8b", 2, "megatron", 128, 8192, ""),
    ("qwen3-30b-a3b", 2, "megatron", 256, 4096, ""),
    ("llama3-8b", 1, "torchtitan", 64, 8192, ""),
    ("gpt3-13b", 2, "deepspeed", 256, 2048, ""),
]


@pytest.mark.parametrize("case", TIED, ids=lambda case: f"{case[0]}-{case[2]}")
def test_of_layouts_as_fast_the_simplest_is_planned_and_the_fastest_beside_it(case):
    plan = best_of(job_of(*case))
    rows = [row for row in plan.transformer.beside if row.fits and row.simulated]
    fastest_s = min([seconds_of(plan), *(row.iteration_s for row in rows)])
    assert seconds_of(plan) * (1 - TIE) <= fastest_s
    for row in rows:
        if row.iteration_s * (1 - TIE) <= fastest_s:
            assert layout_complexity(plan.layout) <= layout_complexity(row.layout)
    words = " ".join(render(plan).split())
    assert ("the simplest is planned" in words) == (fastest_s < seconds_of(plan))
    assert "likely to fit" in words


def test_layouts_are_simple_in_the_order_of_what_they_ask_of_people():
    order = [
        "tp=1,pp=1,dp=8",
        "tp=8,pp=1,dp=1",
        "tp=4,cp=2,pp=1",
        "pp=1,dp=8,recompute=selective,modules=mlp",
        "pp=1,dp=8,recompute=selective,modules=mlp+core_attn",
        "pp=1,dp=8,recompute=2",
        "pp=1,dp=8,recompute=always",
        "pp=8",
        "tp=2,pp=4",
        "pp=8,recompute=always",
        "pp=8,chunks=2,schedule=interleaved",
        "pp=8,chunks=3,schedule=interleaved",
        "pp=8,chunks=3,schedule=interleaved,recompute=always",
    ]
    found = [layout_complexity(Layout.parse(text)) for text in order]
    assert found == sorted(found) and len({*found}) == len(found)


def test_the_fastest_stands_beside_a_simpler_one_that_differs_in_chunks_alone():
    plan = best_of(job_of(*TIED[2]))
    [row] = [
        one for one in plan.transformer.beside if one.fits and one.iteration_s < seconds_of(plan)
    ]
    assert (plan.layout.chunks, row.layout.chunks) == (4, 5)
    assert structs.replace(row.layout, chunks=4) == plan.layout


def check_others(plan, asked):
    """What stands beside a plan is what each layout takes by itself."""
    about, limit, to = plan.transformer, asked.limit_bytes, estimate_again(plan)
    work = training_of(plan, about)
    assert len({row.layout for row in about.beside} | {about.layout}) == 1 + len(about.beside)
    for row in about.beside:
        found = estimate(training_for(asked), row.layout, asked.global_batch)
        settled = settle_cut(training_for(asked), row.layout, asked.global_batch)
        as_cut = work.cut_by(settled.practice.ends)
        assert found.parts == estimate(as_cut, row.layout, asked.global_batch).parts
        assert row.memory_bytes == round(found.memory_bytes)
        assert row.fits == (found.memory_bytes <= limit)
        assert row.fits or row.iteration_s < seconds_of(plan)
        alone = seconds_of(plan_layout(asked.with_(layout=row.layout)))
        assert row.iteration_s == (alone if row.simulated else found.seconds)
        more = {
            name: found.parts.get(name, 0.0) - to.parts.get(name, 0.0)
            for name in found.parts | to.parts
        }
        most = max if found.seconds >= to.seconds else min
        assert row.part_s == more[row.part] == most(more.values())


@pytest.mark.parametrize("model", ["gpt3-125m", "llama3-8b"])
@pytest.mark.parametrize("layout", ["pp=1", "pp=4", "pp=8", "pp=4,chunks=3", "pp=2,cp=2,dp=2"])
def test_what_is_there_once_an_iteration_is_there_once(model, layout):
    """Nothing of the host's seconds is multiplied by stages, replicas or shares."""
    plan = plan_layout(job_of(model, 1, "megatron", 64, 2048, layout))
    steps = [stage.optimizer_s for stage in plan.stages if 0 in stage.ranks]
    once = once_s(training_of(plan, plan.transformer), plan.transformer.layout, 64)
    assert sum(steps) == pytest.approx(once, rel=1e-3)
    parts = estimate_again(plan).parts
    seen = sum(parts[name] for name in ("step", "replicas"))
    assert HOST_S < once < (HOST_S + seen) * (1 + 1e-9)


@pytest.mark.parametrize("form", ["mxfp8", "nvfp4"])
def test_a_scale_a_block_came_with_blackwell(form):
    for cluster, known in (("dgx-h100", False), ("gb200-nvl72", True)):
        asked = free("tp=8", dtype=form)
        asked = asked.with_(topology=Topology.load(cluster, 1), global_batch=72)
        if known:
            assert training_for(asked).format == form
        else:
            with pytest.raises(PartoptError, match=f"what {form} achieves on it is not known"):
                solve(asked)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "model", "cluster", "servers", "batch"),
    [
        ("torchtitan", "gpt3-13b", "dgx-a100", 2, 64),  # does not part what is tied
        ("torchtitan", "llama3-70b", "gb200-nvl72", 2, 1152),  # 144 is no power of two
        ("megatron", "gpt3-1.3b", "gb200-nvl72", 2, 96),
        ("deepspeed", "gpt3-6.7b", "dgx-a100", 1, 64),
        ("torchtitan", "llama3-8b", "dgx-h100", 1, 64),
    ],
)
def test_the_best_layout_can_be_laid_and_exported(trainer, model, cluster, servers, batch):
    asked = job_of(model, 1, trainer, batch, 2048, "")
    asked = asked.with_(topology=Topology.load(cluster, servers))
    best = best_of(asked)
    assert best.fits
    assert export_plan(best, trainer, stem="planned").main
    if trainer == "torchtitan" and asked.model.tied:
        assert best.layout.pp == 1
        with pytest.raises(PartoptError, match="keeps in one stage"):
            solve(asked.with_(layout=Layout(pp=2)))


@pytest.mark.parametrize(
    ("model", "layout", "facts"),
    [
        ("glm-4.5-air", "pp=4,ep=8,dp=8", {}),
        ("moonlight-16b-a3b", "tp=2,pp=4,ep=4,dp=4,recompute=always", {"exchange": "deepep"}),
        ("llama4-scout", "tp=4,ep=8,pp=2,dp=4", {"graphs": "full"}),
        ("glm-4.5-air", "pp=8,ep=4,dp=4,chunks=2", {"ends": "-".join(["3"] * 15 + ["1"])}),
    ],
)
def test_a_plan_of_several_kinds_is_simulated_as_it_is_computed(model, layout, facts):
    asked = job_of(model, 4, "megatron", 128, 4096, layout, facts=facts, memory="10 TB")
    plan = plan_layout(asked.with_(topology=Topology.load("dgx-b200", 4)))
    assert seconds_of(plan) == pytest.approx(plan.transformer.closed_s, rel=0.03)
    assert plan.peak_memory_bytes <= plan.transformer.closed_bytes * 1.01


@pytest.mark.slow
def test_what_is_left_out_by_rule_is_kept_and_said():
    facts = {"graphs": "none"}  # which large microbatches make up for
    asked = job_of("qwen3-30b-a3b", 1, "megatron", 1024, 2048, "", facts=facts)
    asked = asked.with_(topology=Topology.load("dgx-a100", 1))
    best = best_of(asked)
    left = best.transformer.left_out
    assert left.layout.recompute != "never" or left.layout.microbatch > 2
    assert left.simulated and left.fits and left.iteration_s < seconds_of(best)
    alone = plan_layout(asked.with_(layout=left.layout))
    assert seconds_of(alone) == left.iteration_s
    fixed = Layout(recompute="always", microbatch=left.layout.microbatch)
    again = best_of(asked.with_(layout=fixed))
    assert seconds_of(best) > seconds_of(again) >= left.iteration_s * 0.99
    read = Plan.parse(msgspec.json.encode(best))
    page = " ".join(render(read).split())
    change = left.iteration_s / seconds_of(best) - 1
    assert f"left out: tp {left.layout.tp}, " in page and f"{change:+.1%} by computation" in page
    assert "left out" not in render(again)
    assert not best_of(free()).transformer.left_out  # a model without experts


@pytest.mark.parametrize(
    ("model", "cluster", "servers", "batch", "graphs"),
    [
        # which may make its experts again
        pytest.param("glm-4.5", "gb200-nvl72", 1, 1152, "none", marks=pytest.mark.slow),
        ("mixtral-8x7b", "dgx-h100", 2, 128, "attention"),
        ("qwen3-30b-a3b", "dgx-h100", 1, 128, "none"),  # of which none fits with graphs
    ],
)
def test_graphs_that_a_plan_has_by_itself_are_given_up_where_they_lose(
    model, cluster, servers, batch, graphs
):
    topology = Topology.load(cluster, servers)
    asked = Job(
        load_transformer(model), topology, trainer="megatron", global_batch=batch, sequence=4096
    )
    known = {
        name: estimate_layouts(asked.with_(facts={"graphs": name})).fitting
        for name in ("attention", "none")
    }
    times = {name: fitting[0].seconds for name, fitting in known.items() if fitting}
    chosen, found = choose_graphs(asked)
    assert min(times, key=times.get) == graphs
    assert found.fitting[0].seconds == times[graphs]
    assert chosen.facts == ({"graphs": "none"} if graphs == "none" else {})
    assert Sizes(asked).find_fastest(topology.cluster.devices).seconds == times[graphs]


@pytest.mark.levers
def test_a_page_has_one_time_and_one_memory():
    """Also where closed form and simulation part."""
    asked = job_of("llama2-7b", 4, "megatron", 512, 2048, "tp=1,pp=32,dp=1")
    plan = solve(asked).plan
    change = plan.predicted.iteration_s / plan.transformer.closed_s - 1
    assert abs(change) > 0.05
    page, (first, *_) = render(plan), layout_table(plan)[0]
    assert first.iteration_s == plan.predicted.iteration_s
    assert first.memory_bytes == needed_bytes(plan)
    for text in (format_seconds(first.iteration_s), format_bytes(first.memory_bytes)):
        assert page.count(text) >= 1 + (len(layout_table(plan)[0]) > 1)
    assert f"simulated {change:+.1%} against the closed form" in " ".join(page.split())
    assert all(row.simulated for row in layout_table(plan)[0])
    assert plan.transformer.levers
    for row in [*plan.transformer.levers, plan.transformer.together]:
        alone = solve(asked.with_(facts=row.facts, layout=row.layout), levers=False).plan
        assert row.iteration_s == seconds_of(alone) < seconds_of(plan)
        assert row.saved == 1 - row.iteration_s / seconds_of(plan)


@pytest.mark.slow
@pytest.mark.parametrize(("place", "more"), [(3, True), (6, False)])
def test_more_layouts_are_simulated_where_simulations_part(monkeypatch, place, more):
    """One that is simulated comes down to the first: so may those that are as far from it."""
    asked, told, taken = free(), [], {}
    ranked = differing(search_layouts(asked)[1].fitting, MOST_JUDGED, ["microbatch"])
    factor = 1.001 * ranked[0].seconds / ranked[place].seconds

    def simulate_quickly(job, training, layout):
        plan = simulate_layout(job, training, layout)
        closed_s = plan.transformer.closed_s
        taken[layout] = closed_s * (factor if layout == ranked[place].layout else 1.0)
        predicted = structs.replace(
            plan.predicted, iteration_s=taken[layout], samples_per_s=1 / taken[layout]
        )
        return structs.replace(plan, predicted=predicted)

    monkeypatch.setattr("partopt.search.layout_plans.simulate_layout", simulate_quickly)
    best = seconds_of(solve(asked, lambda *own: told.append(own)).plan)
    simulated = sum(what == "simulating layouts" for what, *_ in told)
    assert best == min(taken[own.layout] for own in ranked[:simulated])
    least = USUALLY * (factor if more else 1.0)
    may, usual = (sum(own.seconds * share <= best for own in ranked) for share in (least, USUALLY))
    assert simulated == max(JUDGED, may)
    assert (may > usual) == more


# what a second or two answers, of every trainer and cluster; the benchmark draws the others
DRAWN = [21, *range(40, 49), 50, 53, 54, 57, 63, 64]


@pytest.mark.levers
@pytest.mark.parametrize("draw", [3, 8, *(pytest.param(n, marks=pytest.mark.slow) for n in DRAWN)])
def test_no_narrower_question_is_answered_better(draw, capsys):
    """As `benchmarks/questions.py --layouts` asks."""
    counts = Counter()
    compare_layouts(random.Random(draw), counts)
    assert counts["free"] == 1 and (counts["narrower"] > 3 or counts["no such layout"])
    failures = {*FAILURES} & counts.keys()
    assert not failures, capsys.readouterr().out


def test_a_page_without_its_switches_leaves_them_unsaid():
    """As what is drawn of the benchmark finds it."""
    model, topology = load_transformer("llama3-8b"), Topology.load("dgx-h100", 1)
    asked = Job(model, topology, trainer="megatron", global_batch=128, sequence=8192)
    bare = solve(asked, levers=False).plan
    told = {line.partition("=")[0] for line in find_unsaid(random.Random(0), asked, bare)}
    assert told >= {"tp-overlap", "gradients"}


@pytest.mark.slow
def test_others_stand_beside_a_plan_and_the_best_beside_a_layout_of_today():
    asked = free("pp=1", memory="60 GB")
    best = best_of(asked)
    assert {own.fits for own in best.transformer.beside} == {True, False}
    check_others(best, asked)
    asked = free("tp=4,pp=2,recompute=always", memory="60 GB")
    compared = judge_layout(asked)
    first, *others = compared.plan.transformer.beside
    assert first.layout == compared.best.layout
    assert first.iteration_s == seconds_of(compared.best)
    assert first.iteration_s <= min(own.iteration_s for own in others if own.fits)
    assert first.part_s < 0
    check_others(compared.plan, asked)


@pytest.mark.slow
def test_a_layout_of_today_is_beside_those_that_cannot_have_its_facts():
    """`tp-overlap` needs tp > 1, which the best layout may lack."""
    facts = {"tp-overlap": "yes"}
    compared = judge_layout(free("tp=8,recompute=always", "gpt3-1.3b", facts=facts))
    best = compared.best
    narrow = best_of(free("", "gpt3-1.3b", facts=facts))
    assert compared.plan.layout.tp == 8 and narrow.layout.tp > 1 and best.layout.tp == 1
    times = [seconds_of(plan) for plan in (best, narrow, compared.plan)]
    assert times == sorted({*times})


def test_a_trainer_that_does_not_interleave_gets_no_chunks():
    _, found, _ = search_layouts(job_of("gpt3-175b", 8, "deepspeed", 128, 2048, "pp=8"))
    assert {own.layout.chunks for own in found.fitting + found.lacking} == {1}


def test_where_nothing_fits_the_layout_that_needs_least_is_told():
    told = []
    plan, found, _ = search_layouts(free(memory="10 GB"), lambda *own: told.append(own))
    assert told == [("estimating layouts", 0, 100)]
    assert not plan.fits and not found.fitting
    assert plan.transformer.layout == found.least.layout


@pytest.mark.slow
def test_of_experts_small_microbatches_come_first():
    asked = job_of("qwen3-30b-a3b", 4, "megatron", 512, 4096, "tp=1,cp=1,pp=4")
    best = best_of(asked).layout
    assert best.microbatch <= 2 and best.recompute != "always"
    fixed = solve(
        job_of("qwen3-30b-a3b", 4, "megatron", 512, 4096, "tp=1,cp=1,pp=4,microbatch=4")
    ).plan
    assert fixed.layout.microbatch == 4


def test_no_layout_is_told_with_what_would_be_one():
    with pytest.raises(PartoptError, match="tp x cp x pp x dp are 6 devices") as error:
        solve(free("tp=3,pp=2"))
    assert (error.value.code, error.value.exit_code) == ("invalid-option", 2)


def test_no_layout_is_an_answer_where_parts_are_open():
    with pytest.raises(PartoptError, match="with what is open at 1") as error:
        solve(job_of("llama3-8b", 1, "megatron", 9, 4096, "tp=1,cp=1,pp=1"))
    assert "layout.dp: 9 samples" in error.value.message
    assert (error.value.code, error.value.exit_code) == ("no-plan", 1)
