"""Switches of trainers: against all of their combinations, and against published layouts."""

import random

import numpy as np
import pytest
from msgspec import UNSET, structs

from benchmarks.levers import SWITCHES as TRIED
from benchmarks.levers import best_of_all, best_of_page, combinations
from partopt import find_profile, verify
from partopt.documents.engine import Layout
from partopt.documents.topology import Topology
from partopt.errors import PartoptError
from partopt.importers.hugging_face import load_transformer
from partopt.job import Job
from partopt.report.transformer_text import render, render_change, render_parts
from partopt.search.jobs import job_for
from partopt.search.judging import judge_layout, plan_layout
from partopt.search.layout_questions import estimate_layouts, training_for
from partopt.search.levers import Switches, find_challenger, take_best
from partopt.search.solve import solve
from partopt.trainers import TRAINERS, export_plan
from partopt.transformer.as_profile import estimate_again
from partopt.transformer.chances import APART, fits_chance
from partopt.transformer.faults import find_faults
from partopt.transformer.iteration import estimate
from partopt.transformer.layouts import layouts
from partopt.transformer.rates import PLANNED, USABLE
from tests.examples import PROFILE

pytestmark = [pytest.mark.slow, pytest.mark.levers]


def job_of(model, servers, batch, sequence, trainer="megatron", **options):
    model, topology = load_transformer(model), Topology.load("dgx-h100", servers)
    return Job(model, topology, trainer=trainer, global_batch=batch, sequence=sequence, **options)


# those of the benchmark, with finer shares, and sequence parallelism on
SWITCHES = {
    trainer: {name: values for name, values in switches.items() if name != "sequence-parallel"}
    for trainer, switches in TRIED.items()
}
for trainer in ("megatron", "megatron-bridge"):
    SWITCHES[trainer]["optimizer-offload"] = ("0", "0.1", "0.3", "1")
NUMBERS = {"gradients": "float32", "optimizer_bytes": "12", "dtype": "bfloat16"}


def half_of(asked):
    """The question of half the blocks on half the devices of a server, which has fewer layouts."""
    model = structs.replace(asked.model, blocks=asked.model.blocks // 2)
    topology = asked.topology.resize(asked.topology.cluster.devices // 2)
    return asked.with_(model=model, topology=topology, global_batch=asked.global_batch // 2)


# memory in GB: what fits, and what fits with little to spare
@pytest.mark.parametrize(
    ("trainer", "question", "memory"),
    [
        ("megatron", ("llama3-8b", 1, 32, 8192), None),
        ("megatron", ("qwen3-14b", 1, 16, 4096), 50),
        ("megatron", ("qwen3-8b", 1, 16, 8192), 32),
        ("megatron", ("llama2-13b", 1, 16, 4096), 36),
        ("megatron-bridge", ("llama2-13b", 2, 16, 4096), None),
        ("megatron-bridge", ("llama3-8b", 1, 16, 8192), 28),
        ("torchtitan", ("llama3-8b", 1, 16, 8192), None),
    ],
)
def test_no_combination_of_switches_is_faster_than_the_page_says(trainer, question, memory):
    """Of some of them, in a nightly run of all; once for those that change no numbers, too."""
    asked = half_of(job_of(*question, trainer))
    if memory is not None:
        asked = asked.with_(memory=memory * 10**9)
    every = [*combinations(SWITCHES[trainer])]
    if PROFILE != "nightly" and len(every) > 8:
        every = random.Random(0).sample(every, len(every) // 16)
    compare_with_page(asked, every)


def compare_with_page(asked, every):
    """What a page says is the best is as good as the best of all these facts."""
    times = {True: [], False: []}
    for facts in every:
        found_s, _ = best_of_all(asked, {name: (value,) for name, value in facts.items()})
        same = all(facts.get(name, usual) == usual for name, usual in NUMBERS.items())
        times[True].append(found_s)
        times[False] += [found_s] * same
    for numbers, found in times.items():
        assert min(found) < float("inf")
        assert best_of_page(asked, numbers) <= min(found) * (1 + 2e-3)


@pytest.mark.parametrize(("model", "cluster"), [("moonlight-16b-a3b", "dgx-h100")])
def test_no_dispatcher_and_no_format_is_faster_than_the_page_says(model, cluster):
    dispatcher, narrow = ("deepep", "fp8") if cluster == "dgx-h100" else ("hybridep", "mxfp8")
    asked = half_of(job_of(model, 1, 32, 4096)).with_(topology=Topology.load(cluster, 1).resize(4))
    switches = {
        "exchange": ("alltoall", dispatcher),
        "dtype": ("bfloat16", narrow),
        "gradients": ("float32", "parameters"),
        "ends": ("free", "stage"),
    }
    compare_with_page(asked, [*combinations(switches)])


@pytest.mark.parametrize(
    ("cluster", "model", "said"),
    [
        ("dgx-h100", "qwen3-30b-a3b", {"exchange": "deepep", "dtype": "fp8"}),
        ("dgx-b200", "qwen3-30b-a3b", {"exchange": "deepep", "dtype": "mxfp8"}),
        ("gb200-nvl72", "qwen3-30b-a3b", {"exchange": "hybridep", "dtype": "mxfp8"}),
        ("dgx-a100", "qwen3-30b-a3b", {"exchange": "deepep"}),
        ("dgx-h100", "qwen3-8b", {"dtype": "fp8"}),
    ],
)
def test_dispatchers_and_formats_are_those_of_the_cluster(cluster, model, said):
    asked = job_of(model, 1, 64, 4096).with_(topology=Topology.load(cluster, 1))

    def open_(job):
        levers = Switches(job, estimate_layouts(job)).levers
        last = [lever.facts[-1] for lever in levers]
        return {name: value for name, value in last if name in ("exchange", "dtype")}

    assert open_(asked) == said
    assert "dtype" not in open_(asked.with_(dtype="bfloat16"))
    if "exchange" in said:
        padded = asked.with_(facts={"routing": "capacity"}), asked.with_(layout=Layout(ep=1))
        assert all("exchange" not in open_(job) for job in padded)


@pytest.mark.parametrize(
    ("question", "fact", "lines"),
    [
        (
            ("qwen3-30b-a3b", 2, 512, 8192),
            "exchange",
            ("token-dispatcher-type flex", "dispatcher-backend deepep"),
        ),
        (("mixtral-8x7b", 2, 128, 4096), "dtype", ("fp8-format hybrid",)),
    ],
)
def test_a_dispatcher_and_a_format_are_taken_exported_and_verified(question, fact, lines):
    asked = job_of(*question)
    plan = solve(asked).plan
    row = next(row for row in plan.transformer.levers if fact in row.facts)
    assert row.saved > 0.05 and row.verified == row.changes_numbers == (fact == "dtype")
    best = solve(asked.with_(facts=row.facts)).plan
    assert best.transformer.closed_s == pytest.approx(row.iteration_s, rel=2e-3)
    assert best.transformer.facts == row.facts
    assert fact not in {name for row in best.transformer.levers for name in row.facts}
    assert verify(best, find_profile(best)).ok
    assert all(line in export_plan(best, "megatron").main for line in lines)


def test_graphs_that_were_given_up_are_tried_again_with_every_switch():
    """Against the layouts of both questions, with graphs and without, for every switch."""
    asked = job_of("qwen3-30b-a3b", 2, 128, 4096)
    plan = solve(asked).plan
    assert plan.transformer.practice.graphs == "none"
    rows = {name: row for row in plan.transformer.levers for name in row.facts}
    levers = Switches(asked, estimate_layouts(asked)).levers
    for lever in [lever for lever in levers if not lever.frees and lever.needs != "tp"]:
        times = {}
        for graphs in ("none", "attention"):
            on = asked.with_(facts={"graphs": graphs, **dict(lever.facts)})
            fitting = estimate_layouts(on).fitting
            times[graphs] = fitting[0].seconds if fitting else float("inf")
        best = min(times, key=times.get)
        if times[best] < (1 - 2e-3) * plan.transformer.closed_s:
            row = rows[lever.facts[-1][0]]
            simulated = row.facts.get("ends") == "free" and row.layout.chunks > 1
            assert row.iteration_s == pytest.approx(times[best], rel=0.01 if simulated else 1e-9)
            assert (row.graphs or "none") == best
    assert rows["exchange"].graphs == "attention"
    assert "graphs attention), unverified" in " ".join(render(plan).split())
    taken = estimate_layouts(take_best(asked)).fitting[0]
    assert taken.seconds <= min(rows[name].iteration_s for name in ("exchange", "loss"))


def test_a_dispatcher_without_what_it_needs_is_refused():
    facts = {"exchange": "deepep"}
    for more, layout in (({}, Layout(tp=1, ep=1)), ({"routing": "capacity"}, Layout())):
        with pytest.raises(PartoptError, match="exchange"):
            solve(job_of("moonlight-16b-a3b", 1, 64, 4096, facts=facts | more, layout=layout))


def test_what_frees_memory_is_tried_on_every_layout_in_every_share():
    asked = job_of("llama3-8b", 1, 8, 8192, memory=32 * 10**9)
    switches = Switches(asked, estimate_layouts(asked))
    lever = next(lever for lever in switches.levers if lever.values)
    works = [
        training_for(asked.with_(facts=switches.facts([lever.at(share)]))) for share in lever.values
    ]
    known, devices = [], asked.topology.cluster.devices
    for layout in layouts(works[0], devices, 8, Layout()):
        candidates = [estimate(work, layout, 8, asked.limit_bytes) for work in works]
        known.append(min(candidate.seconds for candidate in candidates))
    found, chosen, _ = switches.fastest([lever])
    assert chosen and found.seconds < switches.seconds(())
    assert found.seconds <= min(known) * (1 + 1e-9)
    again = training_for(asked.with_(facts=switches.facts(chosen)))
    assert estimate(again, found.layout, 8).seconds == pytest.approx(found.seconds, rel=1e-12)
    less = lever.at(f"{again.practice.optimizer_offload - 0.01:.2g}")
    less = training_for(asked.with_(facts=switches.facts([less])))
    assert estimate(less, found.layout, 8).memory_bytes > asked.limit_bytes


@pytest.mark.parametrize("chosen", range(6))
def test_the_search_finds_what_a_look_at_every_layout_finds(chosen):
    rng = random.Random(chosen)
    asked = job_of(rng.choice(["llama3-8b", "qwen3-8b"]), rng.choice([1, 2]), 32, 8192)
    switches = Switches(asked, estimate_layouts(asked))
    on = [lever for lever in switches.levers if rng.random() < 0.5 and not lever.frees]
    work = training_for(asked.with_(facts=switches.facts(on)))
    plain = [lever for lever in on if not lever.needs]
    alone = training_for(asked.with_(facts=switches.facts(plain)))
    devices, known = asked.topology.cluster.devices, []
    for layout in layouts(alone, devices, 32, Layout()):
        of_layout = work if (layout.tp or 1) > 1 else alone
        if not any(find_faults(of_layout, layout, 32)):
            candidate = estimate(of_layout, layout, 32)
            known += [candidate.seconds] if candidate.memory_bytes <= asked.limit_bytes else []
    assert switches.seconds(on) <= min(known) * (1 + 1e-9)
    found, chosen, _ = switches.fastest(on)
    assert chosen <= {*on}
    of_layout = training_for(asked.with_(facts=switches.facts(chosen)))
    assert estimate(of_layout, found.layout, 32).seconds == pytest.approx(found.seconds)


# NVIDIA's layouts: Megatron Bridge at 067f987d, perf_recipes/llama/h100
@pytest.mark.parametrize(
    ("model", "servers", "batch", "layout"),
    [
        ("llama3-8b", 1, 128, "tp=1,cp=2,pp=1,chunks=1,microbatch=1"),
        ("llama3-70b", 8, 256, "tp=4,cp=2,pp=4,chunks=5,microbatch=1"),
        ("llama3-405b", 128, 1536, "tp=8,cp=2,pp=8,chunks=8,microbatch=1"),
    ],
)
def test_the_facts_of_a_recipe_lead_to_its_layout(model, servers, batch, layout):
    asked = job_of(model, servers, batch, 8192, "megatron-bridge", facts={"recipe": "benchmark"})
    job = job_for(asked, "megatron-bridge")
    found, published = estimate_layouts(job).fitting, Layout.parse(layout)
    for name in ("tp", "cp", "pp", "microbatch"):
        assert getattr(found[0].layout, name) == getattr(published, name), name
    as_many = estimate_layouts(job.with_(layout=published)).fitting[0]
    assert as_many.seconds <= 1.005 * found[0].seconds  # chunks hardly matter


def test_a_recipe_is_written_and_is_the_first_lever():
    asked = job_of("llama3-70b", 4, 512, 4096, "megatron-bridge")
    levers = solve(asked).plan.transformer.levers
    assert levers[0].facts == {"recipe": "benchmark"}
    assert levers[0].changes_numbers and not levers[0].verified
    plan = solve(asked.with_(facts={"recipe": "benchmark"})).plan
    assert plan.transformer.facts == {"gradients": "parameters", "tp-overlap": "yes"}
    again = job_for(asked.with_(facts={"recipe": "benchmark"}), "megatron-bridge")
    fastest_s = estimate_layouts(again).fitting[0].seconds
    assert fastest_s == pytest.approx(levers[0].iteration_s, rel=1e-9)
    written = export_plan(plan, "megatron-bridge").main
    assert "config.model.tp_comm_overlap = True" in written
    assert "config.ddp.grad_reduce_in_fp32 = False" in written


@pytest.mark.parametrize(
    ("trainer", "model", "recipe", "message"),
    [
        ("megatron-bridge", "mistral-7b", "benchmark", "no recipe of mistral-7b"),
        ("megatron-bridge", "llama3-8b", "quick", "unknown recipe"),
        ("torchtitan", "llama3-8b", "benchmark", "torchtitan has no recipe"),
    ],
)
def test_recipes_that_are_not_known_are_refused(trainer, model, recipe, message):
    with pytest.raises(PartoptError, match=message):
        solve(job_of(model, 1, 64, 4096, trainer, facts={"recipe": recipe}))


def test_what_is_stated_goes_before_a_recipe():
    facts = {"recipe": "benchmark", "gradients": "float32"}
    asked = job_for(
        job_of("llama3-70b", 4, 512, 4096, "megatron-bridge", facts=facts), "megatron-bridge"
    )
    assert asked.facts == {"gradients": "float32", "tp-overlap": "yes"}


def test_facts_of_an_engine_stay_as_they_are():
    facts = {"bucket": 20_000_000, "optimizer_bytes": 8, "recipe": "benchmark"}
    plan = solve(job_of("llama3-8b", 1, 16, 4096, "megatron-bridge", facts=facts)).plan
    assert plan.engine.bucket_bytes == 20_000_000 and plan.engine.gradients == "parameters"


def test_what_the_job_states_is_no_lever_and_what_it_contradicts_is_none():
    names = {lever.facts[-1][0] for lever in TRAINERS["megatron"].levers}
    for facts, gone in (
        ({}, set()),
        ({"tp_overlap": "no"}, {"tp-overlap"}),
        ({"sequence-parallel": "no"}, {"tp-overlap"}),
        ({"gradients": "parameters", "ends": "stage"}, {"gradients", "ends"}),
    ):
        asked = job_of("llama3-8b", 1, 16, 4096, facts=facts)
        levers = Switches(asked, estimate_layouts(asked)).levers
        assert {lever.facts[-1][0] for lever in levers} == names - gone - {"exchange"}


def test_overlap_without_sequence_parallelism_is_refused():
    facts = {"sequence-parallel": "no", "tp-overlap": "yes"}
    with pytest.raises(PartoptError, match="only sequence parallel exchanges"):
        solve(job_of("llama3-8b", 1, 16, 4096, facts=facts))


def test_overlap_is_not_taken_where_one_rank_is_the_best():
    asked = job_of("llama3-8b", 1, 128, 8192, dtype="bfloat16")
    switches = Switches(asked, estimate_layouts(asked))
    together = switches.worth(switches.combine(switches.levers))
    assert together.layout.tp == 1
    assert together.facts.keys() == {"loss", "ends", "gradients", "optimizer_bytes"}
    overlap = next(lever for lever in switches.levers if lever.needs == "tp")
    assert switches.worth([overlap]).layout.tp == 2


def test_async_tensor_parallelism_brings_what_it_needs():
    asked = job_of("llama3-8b", 1, 16, 8192, "torchtitan")
    switches = Switches(asked, estimate_layouts(asked))
    overlap = next(lever for lever in switches.levers if lever.needs == "tp")
    assert switches.facts([overlap]) == {"compile": "yes", "async-tp": "yes"}
    refused = asked.with_(facts={"compile": "no"})
    levers = Switches(refused, estimate_layouts(refused)).levers
    assert all(lever.frees for lever in levers)


def test_the_best_that_is_taken_changes_no_numbers_unless_it_may():
    asked = job_of("llama3-8b", 1, 128, 8192)
    assert take_best(asked).facts == {"tp-overlap": "yes", "loss": "fused", "fsdp": "yes"}
    taken = take_best(asked.with_(dtype="bfloat16"), numbers=True)
    assert taken.facts == {
        "loss": "fused",
        "ends": "free",
        "gradients": "parameters",
        "optimizer_bytes": "8",
    }
    plan = solve(taken).plan
    assert plan.transformer.levers == [] and not plan.transformer.together


def test_a_switch_that_makes_the_first_layout_fit_is_found():
    asked = job_of("llama3-70b", 2, 64, 8192)
    least = estimate_layouts(asked).least.memory_bytes
    asked = asked.with_(memory=round(0.97 * least))
    found = estimate_layouts(asked)
    assert not found.fitting
    gradients, state, offload = Switches(asked, found).alone()
    assert gradients.facts == {"gradients": "parameters"} and gradients.saved is UNSET
    assert state.facts == {"optimizer_bytes": "8"} and state.changes_numbers
    assert offload.facts.keys() == {"offload-overlap", "optimizer-offload"}
    assert "fits, " in render(solve(asked).plan)


def _worths(found, usable, seed=0):
    """What tries of all layouts save in the mean of draws: of computed gains and of what fits."""
    normal = np.random.default_rng(seed).normal(0, APART, 100_000)
    best = found.fitting[0]
    others = [*found.lacking, *found.fitting[1:]]
    return {
        other.layout: fits_chance(other.memory_bytes, usable)
        * np.maximum(1 - other.seconds / best.seconds + normal, 0).mean()
        for other in others
    }


@pytest.mark.parametrize(
    ("model", "servers", "batch", "sequence", "trainer"),
    [("llama3-70b", 4, 512, 4096, "megatron"), ("llama3-8b", 1, 128, 8192, "torchtitan")],
)
def test_the_challenger_is_the_one_that_draws_say(model, servers, batch, sequence, trainer):
    asked = job_of(model, servers, batch, sequence, trainer)
    found = estimate_layouts(asked)
    gains = _worths(found, asked.limit_bytes / PLANNED)
    challenger, best = find_challenger(asked, found, found.fitting[0]), found.fitting[0].layout
    for layout in [*gains]:  # in chunks alone they are no other layout
        if structs.replace(layout, chunks=best.chunks, schedule=best.schedule) == best:
            del gains[layout]
    assert gains[challenger.layout] == pytest.approx(max(gains.values()), abs=5e-4)
    slower = challenger.saved < 0
    page = render(solve(asked).plan)
    assert ("slower as computed" in page) == slower and ("faster, if it fits" in page) != slower


def test_a_layout_that_is_far_slower_is_no_challenger():
    asked = job_of("llama3-70b", 4, 512, 4096)
    found = estimate_layouts(asked)
    far = [one for one in found.fitting[1:] if one.seconds > 1.1 * found.fitting[0].seconds]
    alone = found._replace(fitting=[found.fitting[0], *far], lacking=[])
    assert far and find_challenger(asked, alone, found.fitting[0]) is UNSET


def test_chances_fall_with_what_is_needed():
    chances = [fits_chance(0.01 * step * USABLE * 80e9, 80e9) for step in range(50, 151)]
    assert chances == sorted(chances, reverse=True)
    assert chances[50] == pytest.approx(0.5) and 0.8 < chances[45] < chances[40] < 0.95
    assert 0.99 < chances[0] < 1 and 0 < chances[-1] < 0.01


def test_a_layout_without_room_says_with_which_switch_it_fits():
    asked = job_of("llama3-70b", 4, 512, 4096)
    plan = solve(asked).plan
    lacking = [row for row in plan.transformer.beside if not row.fits]
    assert lacking and not any(row.fits_with for row in plan.transformer.beside if row.fits)
    switches = Switches(asked, estimate_layouts(asked))
    for row in lacking:
        able = {}
        for lever in switches.levers:
            for one in [lever.at(value) for value in lever.values] or [lever]:
                work = training_for(asked.with_(facts=switches.facts([one])))
                found = estimate(work, row.layout, 512)
                if found.memory_bytes <= asked.limit_bytes:
                    able[found.seconds] = switches.facts([one])
        assert row.fits_with.facts == able[min(able)]
        assert row.fits_with.iteration_s == pytest.approx(min(able))
        assert row.fits_with.layout == row.layout
    page = " ".join(render(plan).split())
    assert "tp 4, pp 4, dp 2, mb 1 fits with --grad-reduce-in-bf16: -8.1%" in page


def test_a_lever_is_planned_and_exported_with_the_share_that_it_found():
    asked = job_of("llama3-70b", 1, 512, 4096)
    lever = min(solve(asked).plan.transformer.levers, key=lambda one: one.iteration_s)
    assert lever.saved is UNSET and lever.facts.keys() == {"offload-overlap", "optimizer-offload"}
    plan = solve(take_best(asked)).plan
    share = plan.transformer.practice.optimizer_offload
    assert plan.fits and 0.9 < share <= 1
    written = export_plan(plan, "megatron")
    for line in ("cpu-offload", f"offload-fraction {share:g}"):
        assert f"    --optimizer-{line}\n" in written.main.replace("1.0\n", "1\n")
    assert "    --overlap-cpu-optimizer-d2h-h2d\n" in written.main
    assert "    --use-precision-aware-optimizer\n" in written.main
    assert any("OMP_NUM_THREADS" in note for note in written.notes)
    assert "of a server's memory" in " ".join(render(plan).split())


def test_switches_that_the_trainer_cannot_have_together_are_not_taken_together():
    asked = job_of("llama3-8b", 1, 16, 8192, memory=30 * 10**9)
    switches = Switches(asked, estimate_layouts(asked))
    names = ("optimizer_bytes", "optimizer-offload")
    state, offload = (one for one in switches.levers if one.facts[-1][0] in names)
    with pytest.raises(PartoptError, match="with its state in float32"):
        training_for(asked.with_(facts=switches.facts([state, offload.at("0.5")])))
    taken = switches.facts(switches.combine(switches.levers))
    assert not {"optimizer_bytes", "optimizer-offload"} <= taken.keys()
    with pytest.raises(PartoptError) as unknown:
        training_for(asked.with_(facts={"optimizer-offload": "0.455"}))
    assert unknown.value.hint == "from 0 to 1, as 0.01"
    muon = asked.with_(facts={"muon": "yes"})
    levers = Switches(muon, estimate_layouts(muon)).levers
    assert not {"fsdp", "optimizer-offload"} & {lever.facts[-1][0] for lever in levers}


def test_switches_are_of_what_the_plan_does_where_nothing_fits_with_graphs():
    few = structs.replace(load_transformer("qwen3-30b-a3b"), blocks=24)
    topology = Topology.load("dgx-h100", 1).resize(4)
    asked = Job(few, topology, trainer="megatron", global_batch=64, sequence=4096)
    plan = solve(asked).plan
    assert plan.fits and plan.transformer.practice.graphs == "none"
    again = asked.with_(facts={"graphs": "none"})
    found = estimate_layouts(again)
    rows = plan.transformer.levers
    assert rows == [*Switches(again, found, before=asked).alone()]
    without = [row for row in rows if row.graphs is UNSET]
    assert len(without) < len(rows) and without == [*Switches(again, found).alone()]
    assert verify(plan, find_profile(plan)).ok
    best = judge_layout(asked.with_(layout=Layout(tp=4, ep=4))).best
    assert best.layout == plan.layout
    assert best.transformer.levers == plan.transformer.levers


def test_an_import_names_the_switches_that_a_script_lacks():
    asked = job_of("llama3-70b", 4, 512, 4096, "megatron-bridge", layout=Layout(tp=8, pp=4))
    judged = judge_layout(asked)
    assert judged.best.transformer.levers[0].facts == {"recipe": "benchmark"}
    page = render_change(judged.plan, judged.best, [])
    assert "also" in page and "PART" in page
    assert not judged.plan.transformer.levers


def test_all_together_are_told_where_they_save_more_than_one():
    asked = job_of("llama3-70b", 4, 512, 4096)
    about = solve(asked).plan.transformer
    singles = [lever.iteration_s for lever in about.levers]
    assert about.together.iteration_s < min(singles)
    assert sum(lever.saved for lever in about.levers) > about.together.saved  # worths do not add


def test_layouts_side_by_side_sum_to_their_seconds():
    first, other = (
        plan_layout(job_of("llama3-70b", 4, 512, 4096, layout=Layout(tp=tp, pp=32 // tp)))
        for tp in (4, 8)
    )
    page = render_parts(first, other, ("FIRST", "BESIDE"))
    rows = [line.split() for line in page.partition("PART")[2].splitlines()[1:]]
    sizes = [abs(float(row[-1].rstrip("%"))) for row in rows]
    assert len(sizes) > 2 and sizes[:-1] == sorted(sizes[:-1], reverse=True)
    gain = estimate_again(other).seconds / estimate_again(first).seconds - 1
    assert rows[-1][0] == "all" and rows[-1][-1] == f"{gain:+.1%}"


def test_the_plan_is_kept_where_the_search_of_switches_is_interrupted():
    def stop(what, *_):
        if what == "estimating what else helps":
            raise KeyboardInterrupt

    asked = job_of("llama3-8b", 1, 16, 4096)
    with pytest.raises(KeyboardInterrupt) as stopped:
        solve(asked, stop)
    assert stopped.value.found.plan.transformer.levers == []
