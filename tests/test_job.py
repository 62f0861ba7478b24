"""The question: checked once, when it is made, with clear errors."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from partopt import solve
from partopt.cost.memory import reserve_of
from partopt.documents.engine import Engine, Layout
from partopt.documents.stage import Reserve
from partopt.errors import PartoptError
from partopt.importers.hugging_face import load_transformer
from partopt.job import Job
from partopt.options import MOST_BYTES
from partopt.search.compare import compare
from tests.helpers import (
    chain_profile,
    flat,
    measurement,
    profile_of,
    rows,
    two_level,
    uniform_profile,
)

PROFILE, CLUSTER = uniform_profile(6), two_level(2, 2, memory_bytes=10**9)


def refusal(**options):
    with pytest.raises(PartoptError) as raised:
        Job(PROFILE, CLUSTER, **options)
    return raised.value


REFUSALS = rows("""
    effort="most" | invalid-option | effort | =most`: unknown effort
    optimizer="lion" | invalid-option | optimizer | =lion`: unknown optimizer
    recompute="often" | invalid-option | recompute | =often`: unknown recompute
    engine="megatron" | invalid-option | engine | =str`: must be an Engine
    memory=0 | invalid-option | memory | =0`: must be positive
    memory="0 GB" | invalid-option | memory | =0 GB`: must be positive
    memory=1.5 | invalid-option | memory | =1.5`: must be positive
    memory=True | invalid-option | memory | =True`: must be positive
    memory=-1 | invalid-option | memory | =-1`: must be positive
    memory=MOST_BYTES + 1 | invalid-option | memory | =10^18`: is too large
    facts={"bucket": 0} | invalid-option | bucket | =0`: must be positive
    facts={"reserve": -1} | invalid-option | reserve | =-1`: must be 0 or more
    facts={"reserve": 10**6}, memory=10**6 | invalid-option | reserve |
        =1 MB`: leaves nothing of 1 MB
    facts={"optimizer_bytes": -1} | invalid-option | optimizer_bytes |
        =-1`: must be a number of bytes
    facts={"gradients": "fp8"} | invalid-option | gradients | =fp8`: unknown gradients
    facts={"buffers": "all"} | conflicting-options | buffers |
        =all`: pipedream is asynchronous, its microbatches have no end
    stages=2.0 | invalid-option | stages | =2.0`: expected a whole number, found a number
    stages=True | invalid-option | stages | =True`: expected a whole number, found true or false
    microbatch_size=0 | invalid-option | microbatch_size | =0`: expected a whole number >= 1
    cuts="5,9" | invalid-option | cuts | =5,9`: must be a list of whole numbers
    cuts=[2], planner="gpipe" | conflicting-options | planner |
        =gpipe`: `cuts` and `replicas` go with `planner=manual`
    cuts=[2], cut_at=["layer2"] | conflicting-options | cut_at |
        `: `cuts` already fixes the boundaries
    cut_at="layer2" | invalid-option | cut_at | =layer2`: must be a list of names
    cut_at=["no"] | no-such-layer | cut_at | =no`: no layer of chain has such a name
    cost="time of day" | invalid-option | cost | =time of day`: unknown cost
    cost="flops" | no-costs | cost | =flops`: the profile has none
    cost=[1.0, 2.0] | wrong-length | cost | `: 2 costs for 6 layers
    cost=[float("nan")] * 6 | invalid-option | cost |
        `: must be finite and not negative, and not all zero
    cost=[0.0] * 6 | invalid-option | cost | `: must be finite and not negative, and not all zero
    cost=[-1.0, *[1.0] * 5] | invalid-option | cost |
        `: must be finite and not negative, and not all zero
    cost=[float("inf"), *[1.0] * 5] | invalid-option | cost |
        `: must be finite and not negative, and not all zero
    chunks=2 | conflicting-options | chunks | `: not for pipedream
    schedule="pipedream", microbatches=8 | conflicting-options | microbatches |
        `: pipedream is asynchronous and has no iterations
    schedule="auto", microbatches=4, stages=2 | conflicting-options | stages |
        `: `schedule=auto` chooses that itself
    schedule="auto", microbatches=4, replication="uniform" | conflicting-options | replication |
        =uniform`: `schedule=auto` tries all grids
    schedule="auto" | microbatches-needed | schedule |
        =auto`: needs either `microbatches` or `global_batch`
    schedule="1f1b" | microbatches-needed | schedule |
        =1f1b`: needs either `microbatches` or `global_batch`
    schedule="1f1b", microbatches=4, global_batch=4 | conflicting-options | schedule |
        =1f1b`: `microbatches` and `global_batch` are both given
    layout=Layout(tp=2) | invalid-option | layout | =tp=2`: the profile is of tp=1
    layout=Layout(cp=2) | invalid-option | layout | =cp=2`: the profile is of cp=1
    layout=Layout(ep=2) | invalid-option | layout | =ep=2`: the profile is of ep=1
    layout=Layout(etp=2) | invalid-option | layout | =etp=2`: the profile is of etp=1
    layout=Layout(recompute="always", modules="moe_act") | invalid-option | layout |
        =modules=moe_act`: modules made again are of a transformer's layout
    layout=Layout(pp=2, dp=3) | invalid-option | layout | =pp=2,dp=3`: 6 devices needed, 4 there
    layout=Layout(pp=5, dp=1) | invalid-option | layout | =pp=5,dp=1`: 5 devices needed, 4 there
    layout=Layout(pp=5) | invalid-option | layout | =pp=5,dp=1`: 5 devices needed, 4 there
    layout=Layout(dp=5) | invalid-option | layout | =pp=1,dp=5`: 5 devices needed, 4 there
    schedule="1f1b", microbatches=4, layout=Layout(chunks=2) | invalid-option | layout |
        =chunks=2`: 1f1b has 1 on each device
""")


@pytest.mark.parametrize(("options", "code", "option", "message"), REFUSALS)
def test_refusals(options, code, option, message):
    error = refusal(**eval(f"dict({options})"))
    assert (error.code, error.fields["option"]) == (code, option)
    assert error.message == f"`{option}{message}"
    assert error.hint


@pytest.mark.parametrize(
    "options",
    [
        {"layout": Layout(tp=1, cp=1, ep=1)},
        {"layout": Layout(pp=2, dp=2)},
        {"layout": Layout(pp=4, dp=1)},
        {"layout": Layout(dp=4)},
        {"schedule": "interleaved", "microbatches": 4, "layout": Layout(chunks=3)},
        {"schedule": "auto", "microbatches": 4, "layout": Layout(chunks=2)},
        {"cost": [*[0.0] * 5, 1e-9]},
        {"memory": MOST_BYTES},
        {"memory": "1 TB", "facts": {"reserve": 0, "bucket": 1}},
        {"memory": 10**6 + 1, "facts": {"reserve": 10**6}},
        {"cuts": [2], "replicas": [1, 1], "planner": "manual"},
        {"cut_at": ["layer2"], "planner": "gpipe"},
    ],
)
def test_what_is_just_possible_is_asked(options):
    assert Job(PROFILE, CLUSTER, **options).topology == CLUSTER


def test_a_job_at_each_of_its_sizes_and_the_sizes_between_which_times_lie():
    sizes = [measurement([1e-3] * 4, microbatch_size=size) for size in (1, 2, 4, 8)]
    job = Job(profile_of(sizes), flat(2), schedule="1f1b", global_batch=12)
    assert [each.microbatch_size for each in job.at_each_size()] == [1, 2, 4]
    assert [each.problem.microbatches for each in job.at_each_size()] == [12, 6, 3]
    one = job.with_(microbatch_size=2)
    assert [each.microbatch_size for each in one.at_each_size()] == [2]
    for size, between in ((2, []), (3, ["2 and 4"]), (6, ["4 and 8"])):
        notes = job.with_(microbatch_size=size).notes
        told = [note.text.rpartition("of ")[2] for note in notes if note.code == "interpolated"]
        assert told == between
    any_schedule = Job(profile_of(sizes[1:]), flat(2), schedule="auto", global_batch=16)
    for size in (1, 16):  # smaller and larger than all
        assert any_schedule.with_(microbatch_size=size).notes == []


@pytest.mark.parametrize(
    ("recompute", "first"), [(None, None), ("never", None), ("always", None), (1, 1), (3, 3)]
)
def test_a_number_of_blocks_is_the_first_of_each_stage(recompute, first):
    assert Job(PROFILE, CLUSTER, recompute=recompute).first == first


def test_refusals_of_what_is_not_known():
    error = refusal(facts={"bukket": "1 MB"})
    assert (error.code, error.message) == ("unknown-fact", "no fact `bukket` of an engine")
    error = refusal(microbatch_size=3)
    assert (error.code, error.fields["option"]) == ("not-measured", "microbatch_size")
    told = "microbatch size 3 was not measured, and times are never extrapolated"
    assert error.message == told and error.hint
    error = refusal(schedule="1f2b")
    assert (error.code, error.hint) == ("unknown-schedule", 'did you mean "1f1b"?')
    for wrong in (None, "gpt.json", CLUSTER):
        with pytest.raises(PartoptError, match="must be a Profile"):
            Job(wrong, CLUSTER)


def test_documents_made_in_code_are_checked_like_files():
    slow = chain_profile([float("nan"), 1.0])
    with pytest.raises(PartoptError, match=r"profile: measurements\[0\]"):
        Job(slow, CLUSTER)
    with pytest.raises(PartoptError, match="topology: levels"):
        Job(PROFILE, flat(2, bandwidth=-1.0))


def test_a_job_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Job(PROFILE, CLUSTER).schedule = "1f1b"


@pytest.mark.slow
@given(st.sampled_from(["never", "always", "auto"]), st.integers(1, 64), st.booleans())
def test_changing_an_option_is_asking_anew(recompute, microbatches, serial):
    options = {
        "schedule": "1f1b",
        "recompute": recompute,
        "microbatches": microbatches,
        "engine": Engine(waits=("1f1b",) if serial else ()),
    }
    changed = Job(PROFILE, CLUSTER).with_(**options)
    assert changed == Job(PROFILE, CLUSTER, **options)
    assert changed.problem.microbatches == microbatches
    assert changed.problem.waits == serial
    assert changed.problem.recompute_per_stage == (recompute == "auto")


def test_a_changed_job_is_checked_again():
    job = Job(PROFILE, CLUSTER, schedule="1f1b", microbatches=4)
    with pytest.raises(PartoptError, match="no option `microbatch`") as raised:
        job.with_(microbatch=4)
    assert raised.value.hint == 'did you mean "microbatches"?'
    with pytest.raises(PartoptError, match="asynchronous"):
        job.with_(schedule="pipedream")


def test_the_batch_is_divided_by_the_microbatch_size_that_is_taken():
    sizes = [measurement([1e-3] * 4, microbatch_size=size) for size in (1, 2, 4)]
    job = Job(profile_of(sizes), flat(2), schedule="1f1b", global_batch=8)
    assert job.problem.chain.microbatch_size == 4
    assert job.problem.microbatches == 2
    other = job.with_(global_batch=10)  # of which 4 is no divisor
    assert (other.sizes, other.problem.chain.microbatch_size) == ([1, 2], 2)
    with pytest.raises(PartoptError, match="`global_batch=10`: not a multiple") as raised:
        job.with_(global_batch=10, microbatch_size=4)
    assert raised.value.fields["microbatch_size"] == 4
    with pytest.raises(PartoptError, match="`global_batch=9`: not a multiple"):
        Job(profile_of(sizes[1:]), flat(2), schedule="1f1b", global_batch=9)


def test_the_limit_is_the_topologys_unless_it_is_given():
    assert Job(PROFILE, CLUSTER).problem.memory_bytes == 10**9
    assert Job(PROFILE, CLUSTER, memory="2 GB").problem.memory_bytes == 2 * 10**9
    assert Job(PROFILE, CLUSTER, memory=5).problem.memory_bytes == 5
    assert Job(PROFILE, flat(2)).problem.memory_bytes is None


def test_what_is_reserved_is_given_or_by_default_that_of_a_gpu_whose_memory_is_known():
    gpu = replace(PROFILE, device=replace(PROFILE.device, type="cuda"))
    GB, default = 10**9, reserve_of(gpu, 40 * 10**9)
    given = Reserve(size_bytes=GB, basis="given")
    for limit, options, reserve in (
        (40 * GB, {}, default),
        (40 * GB, {"memory": "40 GB"}, Reserve()),
        (40 * GB, {"facts": {"reserve": "1 GB"}}, given),
        (None, {"facts": {"reserve": "1 GB"}, "memory": 40 * GB}, given),
        (None, {"facts": {"reserve": "1 GB"}}, Reserve()),
        (None, {}, Reserve()),
    ):
        problem = Job(gpu, flat(2, memory_bytes=limit), **options).problem
        assert problem.reserve == reserve
        left = 40 * GB - reserve.size_bytes
        assert problem.memory_bytes == (left if limit or "memory" in options else None)
    assert default.size_bytes > GB


@pytest.mark.parametrize(
    "options",
    [
        {"shard": "optimizer"},
        {"recompute": "always"},
        {"chunks": 3, "schedule": "interleaved"},
        {"optimizer": "sgd"},
        {"tied": "together"},
        {"replication": "uniform"},
        {"stages": 2},
        {"cuts": [2], "replicas": [1, 2]},
    ],
)
def test_a_problem_holds_what_is_asked(options):
    given = {"schedule": "1f1b", "microbatches": 4} | options
    problem = Job(PROFILE, CLUSTER, **given).problem
    for name, value in given.items():
        assert getattr(problem, name, getattr(problem.request, name, None)) == value


@pytest.mark.parametrize(
    ("layout", "options", "held"),
    [
        (Layout(schedule="gpipe"), {}, {"schedule": "gpipe"}),
        (Layout(microbatch=1), {}, {"microbatch_size": 1}),
        (Layout(recompute="always"), {}, {"recompute": "always"}),
        (Layout(shard="optimizer"), {}, {"shard": "optimizer"}),
        (Layout(dp=1), {}, {"replication": "none"}),
        (Layout(dp=2), {}, {"replication": "uniform"}),
        (Layout(pp=2), {}, {"stages": 2}),
        (Layout(pp=2, schedule="zbv"), {}, {"stages": 4}),
        (Layout(pp=2, chunks=1), {}, {"stages": 2, "chunks": None}),
        (Layout(pp=2, chunks=3, schedule="interleaved"), {}, {"stages": 6, "chunks": 3}),
        (Layout(pp=2, schedule="interleaved"), {"chunks": 3}, {"stages": 6, "chunks": 3}),
        (Layout(pp=2, schedule="interleaved"), {}, {"stages": None, "chunks": None}),
        (Layout(pp=2, schedule="auto"), {}, {"stages": None, "chunks": None}),
        (Layout(pp=2, dp=1), {"cuts": [3]}, {"stages": None, "replication": "free"}),
    ],
)
def test_a_layout_says_what_options_say(layout, options, held):
    """They may say it too, alike; degrees alone are left in the layout."""
    schedule = {} if layout.schedule else {"schedule": "1f1b"}
    job = Job(PROFILE, CLUSTER, layout=layout, microbatches=4, **schedule, **options)
    assert {name: getattr(job, name) for name in held} == held
    assert job.layout == Layout(pp=layout.pp, dp=layout.dp, chunks=layout.chunks)
    assert job.with_(layout=layout, **options) == job


@pytest.mark.parametrize(
    ("layout", "option", "stated", "said"),
    [
        (Layout(schedule="gpipe"), "schedule", "1f1b", "gpipe"),
        (Layout(microbatch=1), "microbatch_size", 2, 1),
        (Layout(recompute="always"), "recompute", "never", "always"),
        (Layout(shard="optimizer"), "shard", "gradients", "optimizer"),
        (Layout(pp=2), "stages", 3, 2),
        (Layout(dp=1), "replication", "uniform", "none"),
        (Layout(schedule="interleaved", chunks=3), "chunks", 2, 3),
    ],
)
def test_a_layout_that_says_something_else_is_refused(layout, option, stated, said):
    schedule = layout.schedule or "1f1b"
    error = refusal(layout=layout, microbatches=4, **{"schedule": schedule, option: stated})
    assert (error.code, error.fields["option"]) == ("conflicting-options", option)
    assert error.message == f"`{option}={stated}`: `layout` says {said}"


def test_costs_of_parameters_are_the_layers_bytes():
    costs = Job(PROFILE, CLUSTER, cost="parameters").problem.request.costs
    assert costs == [layer.parameter_bytes for layer in PROFILE.layers]


def test_blocks_are_for_an_engine_that_makes_them_again():
    job = Job(PROFILE, CLUSTER, recompute=2)  # the engine may be stated later
    with pytest.raises(PartoptError, match="`recompute=2`: partopt recomputes whole stages"):
        assert job.problem
    problem = job.with_(engine=Engine(recompute=("none", "blocks")), block_bounds=[1, 3, 5]).problem
    assert (problem.first, problem.request.recompute) == (2, 2)
    assert problem.request.block_bounds == [1, 3, 5]
    for bounds in ([0], [3, 1], [2, 2], [0, 7]):
        with pytest.raises(PartoptError, match="block_bounds"):
            job.with_(engine=problem.engine, block_bounds=bounds)


@pytest.mark.parametrize(("shard", "codes"), [("optimizer", []), ("gradients", ["not-run"])])
def test_shares_that_our_own_trainer_does_not_run_are_noted(shard, codes):
    notes = Job(PROFILE, CLUSTER, schedule="1f1b", microbatches=4, shard=shard).notes
    assert [note.code for note in notes if note.code == "not-run"] == codes


@pytest.mark.parametrize(
    ("device", "noted"),
    [("CPU", False), ("CPU of a server", False), ("AMD EPYC", False), ("A100", True)],
)
def test_times_of_a_cpu_are_noted_on_other_devices_alone(device, noted):
    cpu = replace(PROFILE, device=replace(PROFILE.device, type="cpu", name="AMD EPYC"))
    cluster = replace(CLUSTER, device=replace(CLUSTER.device, name=device))
    notes = [note.text for note in Job(cpu, cluster).notes]
    assert ("chain was measured on a CPU, not on A100" in notes) == noted
    assert noted or not any("CPU" in text for text in notes)


def test_a_split_names_what_its_counts_must_be():
    for cuts, hint in (
        ([2], "give 2, one for each stage"),
        ([1, 2], "give 3, one for each stage"),
    ):
        with pytest.raises(PartoptError) as refused:
            solve(Job(PROFILE, CLUSTER, cuts=cuts, replicas=[1]))
        assert refused.value.hint == hint


MODEL = load_transformer("llama3-8b")
TRAINED = {"trainer": "megatron", "global_batch": 64, "sequence": 4096}


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ({"cuts": [5]}, "unused-option", "`cuts`: llama3-8b is a transformer's configuration"),
        ({"schedule": "1f1b"}, "unused-option", "`schedule`: llama3-8b is a transformer's"),
        ({"sequence": None}, "missing-option", "`sequence`: needed to plan llama3-8b"),
        ({"global_batch": 0}, "invalid-option", "`global_batch=0`"),
        ({"dtype": "fp4"}, "invalid-option", "`dtype=fp4`: unknown dtype"),
        ({"chunks": 2, "layout": Layout(chunks=4)}, "contradiction", "`layout` says chunks=4"),
    ],
)
def test_a_transformer_is_refused_what_it_cannot_be_asked(options, code, message):
    with pytest.raises(PartoptError) as refused:
        Job(MODEL, CLUSTER, **TRAINED | options)
    assert refused.value.code == code and message in refused.value.message


@pytest.mark.parametrize("name", ["sequence", "dtype", "calibrate"])
def test_a_profile_is_refused_what_a_transformer_is_asked(name):
    assert refusal(**{name: None}).code == "unused-option"
    with pytest.raises(PartoptError, match=f"`{name}`: goes with a transformer's configuration"):
        Job(PROFILE, CLUSTER).with_(**{name: None})


def test_what_options_say_of_a_layout_is_in_it():
    job = Job(MODEL, CLUSTER, **TRAINED, recompute=4, microbatch_size=2, layout=Layout(pp=2))
    assert job.layout == Layout(pp=2, recompute=4, microbatch=2)
    assert job.with_(shard="none").layout == Layout(pp=2, recompute=4, microbatch=2, shard="none")
    assert job.with_(layout=Layout()).layout == Layout()
    assert job.limit_bytes == 95 * 10**7 and job.with_(memory="1 GB").limit_bytes == 10**9


def test_what_takes_a_profile_says_that_a_transformer_is_none():
    job = Job(MODEL, CLUSTER, **TRAINED)
    for ask in (compare, lambda job: job.problem):
        with pytest.raises(PartoptError, match="llama3-8b is a transformer's") as refused:
            ask(job)
        assert refused.value.hint == "`solve` plans its layouts"
    with pytest.raises(PartoptError, match="`for`: needed to plan llama3-8b"):
        solve(Job(MODEL, CLUSTER, global_batch=64, sequence=4096))
