import re

import click
import pytest
from msgspec.structs import replace

import partopt as po
from partopt import planners
from partopt.cost.problem import certify, problem_of
from partopt.documents.plan import Plan
from partopt.documents.stage import Load, Reserve
from partopt.report.phrases import format_ranks
from partopt.report.plan_text import _layers, memory_lines, render
from partopt.report.text import page_style
from partopt.schedules import order
from partopt.schedules.placement import placement_of
from partopt.simulator import simulate_plan
from partopt.units import format_bytes
from tests.helpers import flat, measurement, profile_of, uniform_profile, with_memory_of
from tests.planners.problems import topology
from tests.simulator.plans import limited
from tests.trainers.plans import planned_for


def two_one_plan(transient_bytes=(0, 0, 0), **options):
    """Layers of 6, 3 and 3 s on a 2-1 split of four devices."""
    outputs, names = [8000, 8000, 0], ["body.0", "body.1", "head"]
    sizes = measurement([2.0, 1.0, 1.0], [4.0, 2.0, 2.0], outputs, microbatch_size=4)
    profile = profile_of([sizes], parameter_bytes=[4000, 4000, 8000], names=names)
    loaded = with_memory_of(profile, [0, 0, 0], transient_bytes)
    problem = problem_of(loaded, topology((4, 1e6)), cuts=(2,), replicas=(2, 1), **options)
    return planners.plan("manual", problem)


@pytest.mark.parametrize(
    ("how", "firsts", "line"),
    [
        (3, [], "in the first 3 blocks of each stage"),
        (1, [], "in the first block of each stage"),
        ("auto", [2, 0, 1, 0], "in the first 2-1 blocks of stages 0 and 2"),
        ("auto", [4, 0, 3, 0], "in stages 0 and 2"),
        ("always", [], None),
    ],
)
def test_the_blocks_that_are_recomputed(how, firsts, line):
    plan = planned_for("megatron", recompute="always" if firsts else how)
    if firsts:
        own = zip(plan.stages, firsts, strict=True)
        stages = [replace(s, recompute=n > 0, blocks_again=n) for s, n in own]
        plan = replace(plan, stages=stages).with_layout(recompute=how)
    found = [text for text in render(plan).splitlines() if "activations recomputed" in text]
    assert found == [] if line is None else found[0].strip() == f"activations recomputed {line}"


def test_a_plan_is_read_at_a_glance():
    """Stage 0 holds 2 microbatches: 2 x 8 kB of weights, 8 of gradients, 16 of moments, 2 x 16 of
    activations, 2 x 8 of buffers: 88 kB.
    """
    assert click.unstyle(render(limited(two_one_plan(), 200_000))).splitlines() == [
        "model    chain: 3 layers, 16 kB of parameters, microbatch 4",
        "cluster  test, 4 x device: level1 (4, 1 MB/s)",
        "plan     manual: 2 stages, 2-1, schedule pipedream",
        "weights  up to 1 update old; synchronous: `schedule=1f1b` `global_batch=64`",
        "",
        "#  LAYERS         RANKS     COMPUTE     SYNC  FLIGHT  MEMORY  BUSY",
        "0  0-1 body.0..1  0-1 (x2)   4.50 s  4.00 ms       2   88 kB  ████",
        "1  2 head         2          3.00 s        -       1   48 kB  ██▋",
        "",
        "speed    0.8889 samples/s, 2.67 times one device; devices idle 11.1%",
        "period   4.50 s a microbatch",
        "binds    compute of stage 0",
        "slack    cut before stage 1 (after layer 1) 100%, ports of stage 0 100%,",
        "         all-reduce of stage 0 100%, memory of stage 0 56% (112 kB)",
        "flight   NOAM 2: microbatches in flight for each replica of the first stage",
        "trainer  partopt's own engine; pipedream is asynchronous. For trainers that",
        "         flush: `for=megatron`, `for=torchtitan`, `for=deepspeed`",
        "memory   88 kB on each device of stage 0, 44% of 200 kB",
        "         █████▓▓▒▒▒▒▒░░░░░░░░░░====··································",
        "         █ parameters 16 kB, ▓ gradients 8 kB, ▒ optimizer 16 kB,",
        "         ░ activations 32 kB, = buffers 16 kB, · free 112 kB",
        "idle     1 of 4 devices: rank 3",
    ]


@pytest.mark.parametrize("replicas", [(1, 1, 1, 1), (2, 1, 1), (1, 2, 1), (3, 1)])
def test_weights_are_as_old_as_the_steps_from_a_forward_to_its_backward(replicas):
    cuts = [*range(1, len(replicas))]
    job = po.Job(uniform_profile(4), flat(4), cuts=cuts, replicas=replicas, schedule="pipedream")
    plan = po.solve(job).plan
    steps = order("pipedream", placement_of(plan, 60))
    ages = []
    for rank in range(4):
        names = [name.lstrip("0123456789") for name in steps.names(rank)]  # without the stage
        for i, name in enumerate(names):
            if name[0] == "F":
                passed = names[i + 1 : names.index(f"B{name[1:]}")]
                ages.append(sum(other[0] == "B" for other in passed))
    assert f"\nweights  up to {max(ages)} update" in render(plan)


@pytest.mark.parametrize(
    "options", [{"replicas": [2]}, {"schedule": "1f1b", "microbatches": 4, "cuts": [2]}]
)
def test_weights_that_every_forward_has_as_they_are_have_no_age(options):
    assert "weights  " not in render(po.solve(po.Job(uniform_profile(4), flat(2), **options)).plan)


@pytest.mark.parametrize("limit", [50_000, 88_000, 200_000, None])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_memory_is_a_bar_of_parts_against_the_limit(limit, ascii_only):
    """16, 8, 16, 32 and 16 of 88 kB, and what is free: 60 cells, or as far as they reach."""
    plan = replace(
        limited(two_one_plan(), limit), reserve=Reserve(size_bytes=12_000, basis="given")
    )
    whole = max(limit or 0, 88_000) + 12_000
    with page_style(ascii_only=ascii_only):
        _, cells, *parts = memory_lines(plan)
    sizes = [("P", 16), ("G", 8), ("O", 16), ("A", 32), ("=", 16), ("x", 12)]
    blocks = dict(zip("PGOA", "█▓▒░", strict=True))
    for letter, size in sizes:
        mark = letter if ascii_only else blocks.get(letter, letter)
        assert abs(cells.count(mark) - 60 * size * 1000 / whole) <= 1
    assert len(cells) == 60
    assert all(len(line) <= 71 for line in parts)
    assert ("free" in " ".join(parts)) == (limit == 200_000)
    assert "x reserved 12 kB" in " ".join(parts)


def test_memory_is_held_against_the_limit_with_what_a_backward_takes():
    """88 kB, and the larger of 2 and 12 kB: of stage 1, which holds 48 kB, 60 kB are less."""
    for transient, limit, text in (
        ((0, 0, 0), 50_000, "DOES NOT FIT 50 kB, over by 38 kB"),
        ((0, 0, 0), None, "no limit is known"),
        ([2000, 12_000, 60], 200_000, "100 kB on each device of stage 0, 50% of 200 kB"),
        ([2000, 12_000, 60], 200_000, "+ transient 12 kB"),
    ):
        page = click.unstyle(render(limited(two_one_plan(transient), limit)))
        assert text in " ".join(page.split())


def loads(plan, limit=None):
    """The lines on what binds and what is slack, as one each."""
    page = click.unstyle(render(limited(plan, limit))).split("\nbinds    ")[1]
    lines = re.split(r"\n(?:flight|trainer|memory) ", page)[0].replace("\n         ", " ")
    return lines.split("\nslack    ")


def test_what_binds_is_named_and_of_the_rest_the_slack():
    """9 / 2 s of compute; 4 ms of all-reduce a microbatch and 8 ms for a cut of 8 kB, after layer
    1; 88 of 100 kB.
    """
    cut = "cut before stage 1 (after layer 1) 100%, ports of stage 0 100%, "
    slack = f"{cut}all-reduce of stage 0 100%"
    assert loads(two_one_plan()) == ["compute of stage 0", slack]
    assert loads(two_one_plan(), 100_000)[1] == f"{slack}, memory of stage 0 12% (12 kB)"
    assert loads(two_one_plan(), 50_000)[1].endswith("of stage 0 100%")
    plan = two_one_plan(schedule="naive", microbatches=4)  # has no slack but of memory
    assert loads(plan) == ["every stage in turn"]
    assert loads(plan, 10**6)[1].startswith("memory of stage ")


def predicting(plan, **fields):
    return replace(plan, predicted=replace(plan.predicted, **fields))


def test_of_many_loads_the_three_tightest_are_named():
    plan, beside = two_one_plan(), [("all-reduce", 0, 0.9), ("cut", 1, 1.8), ("ports", 1, 3.6)]
    beside += [("compute", 0, 4.5), ("compute and all-reduce", 1, 3.15)]
    estimate = replace(plan.predicted.estimate, loads=[Load(*each) for each in beside])
    assert loads(predicting(plan, estimate=estimate))[1] == (
        "ports of stage 1 20%, compute and all-reduce of stage 1 30%, cut before stage 1 "
        "(after layer 1) 60%"
    )


def test_a_cut_that_binds_is_named_with_its_layer():
    sizes = measurement([1.0, 1.0], [2.0, 2.0], output_bytes=[4_000_000, 0])
    problem = problem_of(profile_of([sizes], [0, 0]), topology((2, 1e6)), cuts=(1,))
    assert loads(planners.plan("manual", problem)) == [
        "cut before stage 1 (after layer 0)",
        "compute of stage 0 25%",
    ]


def test_where_nothing_is_always_busy_every_load_has_slack():
    slower = predicting(two_one_plan(), period_s=5.0, bound_by="microbatches in flight")
    binds, slack = loads(slower)
    assert (binds, slack.split(",")[0]) == ("microbatches in flight", "compute of stage 0 10%")


def test_ports_that_bind_in_the_simulator_are_not_free_by_the_formula():
    binds, slack = loads(predicting(two_one_plan(), period_s=5.0, bound_by="ports of cluster"))
    assert binds == "ports of cluster" and "ports" not in slack and "cut before stage 1" in slack


@pytest.mark.parametrize("slower, text", [(1.002, "(formula 4.50 ms)"), (1.0005, "a microbatch\n")])
def test_the_formula_stands_beside_a_simulation_that_differs(slower, text):
    plan = two_one_plan()
    estimate = replace(plan.predicted.estimate, period_s=4.5e-3)
    page = render(predicting(plan, period_s=4.5e-3 * slower, estimate=estimate))
    assert text in page.split("\nperiod")[1].split("binds")[0]


@pytest.mark.parametrize(
    "lower_bound_s, text",
    [
        (4.5, "optimal among plans of 3 layers"),
        (4.4, "no plan is more than 2.27 % faster, among plans of 3 layers; bound 4.40 s"),
        (0.0, "no bound is known, among plans of 3 layers"),
    ],
)
def test_what_is_proven_of_a_simulated_plan_and_among_which(lower_bound_s, text):
    certificate = certify(4.5, lower_bound_s, "plans of 3 layers", "a search")
    page = render(replace(two_one_plan(), planner="optimal", certificate=certificate))
    assert " ".join(page.partition("\nproof")[2].split()) == text
    assert "\nobjective" not in page


def test_the_objective_of_another_planner_and_what_is_proven_of_it():
    certificate = certify(4.5, 4.5, "splits", "see `microbatches=8`", "optimal for the recurrence")
    plan = replace(two_one_plan(), planner="pipedream", certificate=certificate)
    with page_style(spell=lambda text: text.replace("`microbatches=8`", "--microbatches 8")):
        page = render(plan)
    assert page.splitlines()[-2:] == [
        "objective 4.50 s, optimal for the recurrence",
        "proof     among splits: see --microbatches 8",
    ]


def test_the_page_of_the_saved_plan_is_the_same(tmp_path):
    plan = two_one_plan()
    plan.save(str(tmp_path / "plan.json"))
    assert render(Plan.load(str(tmp_path / "plan.json"))) == render(plan)


def test_a_synchronous_plan_shows_its_iteration():
    """Stage 0 takes 4 turns of 9 s, then waits 3 s for stage 1; two messages take 8 ms each, then 8
    kB go around at 1 MB/s: 36 s of 39.02 s.
    """
    text = render(simulate_plan(two_one_plan(schedule="1f1b", microbatches=8)))
    assert "         39.02 s an iteration of 8 microbatches\n" in text
    assert (
        "binds    compute of stage 0, busy 92% of the time; all-reduce of stage 0 "
        "adds\n         0.0%\n"
    ) in text
    assert "NOAM" not in text


def test_layer_names_are_kept_to_a_column_and_ranks_folded():
    for names, shown in (
        (["wte"], "4 wte"),
        (["h.0", "h.1"], "4-5 h.0..1"),
        (["transformer.h.0", "transformer.h.11"], "4-5 h.0..11"),
        (["wte", "head.0.1"], "4-5 wte..head.0.1"),
        (["features.22", "classifier.6"], "4-5 features.22.."),
        (["a" * 30], "4 aaaaaa..aaaaaaaaa"),
    ):
        stage = replace(two_one_plan().stages[0], start=4, stop=4 + len(names), modules=names)
        assert _layers(stage, 19) == shown
    for ranks, text in (([3], "3"), ([0, 1, 2], "0-2 (x3)"), ([0, 4, 1, 5], "0-1,4-5 (x4)")):
        assert format_ranks(ranks) == text


def test_one_stage_says_why_there_is_no_pipeline():
    profile = profile_of([measurement([1.0] * 3)], parameter_bytes=[4000] * 3)
    whole = planners.plan("data_parallel", problem_of(profile, topology((2, 1e6))))
    peak = whole.peak_memory_bytes
    text = f"each device holds the whole model, {format_bytes(peak)}"
    for limit in (None, peak, peak + 1):
        assert text in " ".join(click.unstyle(render(limited(whole, limit))).split())
    assert "pipeline" not in click.unstyle(render(limited(whole, peak - 1)))  # it does not fit
    assert "pipeline " not in click.unstyle(render(two_one_plan()))


@pytest.mark.parametrize(("schedule", "named"), [("zbv", True), ("dualpipe", False)])
def test_the_engine_is_named_and_torch_where_it_runs_the_schedule(schedule, named):
    job = po.Job(uniform_profile(8), flat(2), schedule=schedule, microbatches=8)
    page = render(po.solve(job).plan)
    assert "partopt's own engine" in page
    assert ("for=torch" in page) == named
