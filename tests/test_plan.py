import hashlib
import json
import subprocess
import sys

import pytest
from msgspec.structs import replace

from partopt import documents, planners
from partopt.cost.problem import problem_from_plan, problem_of
from partopt.documents.engine import Engine, Layout
from partopt.documents.plan import Plan
from partopt.documents.stage import device_bytes, stages_text
from partopt.errors import PartoptError
from tests.helpers import ROOT, chain_profile, changed, flat, two_level, uniform_profile

PIPELINE = documents.encode(
    planners.plan(
        "manual", problem_of(uniform_profile(6), flat(4), cuts=(2, 4), replicas=(2, 1, 1))
    )
)


def requesting(**request):
    """The plan with another request."""
    document = json.loads(PIPELINE)
    document["request"] |= request
    return json.dumps(document).encode()


def faults(content):
    with pytest.raises(PartoptError) as error:
        Plan.parse(content, "plan.json")
    return [part.message for part in error.value.parts]


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw", "1f1b", "gpipe", "naive"])
def test_what_every_planner_writes_is_read_back_the_same(schedule):
    options = {"microbatches": None if schedule.startswith("pipedream") else 8}
    for name, planner in planners.PLANNERS.items():
        if planner.plans_for(schedule):
            cuts = (2,) if name == "manual" else ()
            problem = problem_of(
                uniform_profile(6), two_level(2, 2), schedule=schedule, cuts=cuts, **options
            )
            planned = planners.plan(name, problem)
            assert Plan.parse(documents.encode(planned)) == planned


def test_a_stage_without_a_backward_is_read_back():
    """Sums of different layers differ by less than nothing: 2 + 1 + 6 + 1 ms less the forwards."""
    problem = problem_of(chain_profile([1e-3] * 4, [2e-3, 0.0, 5e-3, 0.0]), flat(4), cuts=(1, 2, 3))
    planned = planners.plan("manual", problem)
    assert planned.stages[3].backward_s == 0.0
    assert Plan.parse(documents.encode(planned)) == planned


WRONG = [
    (("stages",), [], "stages: expected a list of length >= 1"),
    (("stages", 1, "start"), 3, "stages[1]: layers [3, 4) do not follow layer 2"),
    (("stages", 0, "stop"), 1, "stages[1]: layers [2, 4) do not follow layer 1"),
    (("stages", 2, "stop"), 4, "stages[2]: layers [4, 4) do not follow layer 4"),
    (("stages", 0, "modules"), ["layer0"], "stages[0].modules: 1 names for 2 layers"),
    (("stages", 0, "replicas"), 0, "stages[0].replicas: expected a whole number >= 1"),
    (("stages", 0, "replicas"), 3, "stages[0].ranks: 2 ranks for 3 replicas"),
    (("stages", 0, "ranks"), [0, 4], "stages[0].ranks: no rank 4"),
    (("stages", 0, "ranks"), [0, -1], "stages[0].ranks[1]: expected a whole number >= 0"),
    (("stages", 1, "ranks"), [1], "stages: some ranks hold more of them than others"),
    (("stages", 0, "ranks"), [0, 0], "stages[0].ranks: rank 0 appears twice"),
    (("engine", "messages"), "some", "engine.messages: invalid enum value 'some'"),
    (
        ("stages", 0, "memory", "total_bytes"),
        -5,
        "stages[0].memory.total_bytes: expected a whole number >= 0",
    ),
    (("communication", 0, "source"), 3, "communication[0]: no stage 3"),
    (
        ("predicted", "estimate", "loads", 0, "place"),
        3,
        "predicted.estimate.loads[0].place: 3, of 3 stages",
    ),
    (("predicted", "period_s"), 0, "predicted.period_s: expected a number > 0.0"),
    (("microbatches",), 0, "microbatches: expected a whole number >= 1"),
    (("topology", "devices"), 5, "topology: 5 devices, but the sizes of the levels multiply to 4"),
    (
        ("topology", "levels", 0, "size"),
        10**9,
        "topology: 1000000000 devices; partopt plans for up to 1048576",
    ),
    (
        ("topology", "levels", 0, "bandwidth_bytes_per_s"),
        0,
        "topology.levels[0].bandwidth_bytes_per_s: expected a number > 0.0",
    ),
    (
        ("topology", "device", "memory_bytes"),
        0,
        "topology.device.memory_bytes: expected a whole number >= 1",
    ),
]


@pytest.mark.parametrize(("path", "value", "message"), WRONG)
def test_a_wrong_value_is_named_with_its_place(path, value, message):
    assert f"plan.json: {message}" in faults(changed(PIPELINE, *path, to=value))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"cut_at": [0, 4, 2]}, "request.cut_at: not ascending layers from 0 on"),
        ({"cut_at": [2, 4]}, "request.cut_at: not ascending layers from 0 on"),
        ({"cut_at": [0, 2, 4, 6]}, "request.cut_at: not ascending layers from 0 on"),
        ({"costs": [1.0, 2.0]}, "request.costs: 2 costs for 6 layers"),
        ({"costs": [-1.0] * 6}, "request.costs[0]: expected a number >= 0.0"),
        ({"recompute": "sometimes"}, "request.recompute: invalid enum value 'sometimes'"),
        ({"replication": "equal"}, "request.replication: invalid enum value 'equal'"),
        ({"stages": 0}, "request.stages: expected a whole number >= 1"),
    ],
)
def test_a_request_that_these_layers_do_not_have_is_refused(request_, message):
    assert f"plan.json: {message}" in faults(requesting(**request_))


@pytest.mark.parametrize(
    ("request_", "what"),
    [
        ({"stages": 2}, "2 stages requested, 3 planned"),
        ({"replication": "uniform"}, "replication uniform requested, 2-1-1 planned"),
        ({"replication": "none"}, "replication none requested, 2-1-1 planned"),
        ({"cut_at": [0, 4]}, "stage 1 begins at layer 2, where none was requested to"),
    ],
)
def test_a_plan_says_how_it_departs_from_its_request(request_, what):
    assert list(Plan.parse(requesting(**request_)).find_deviations()) == [what]


@pytest.mark.parametrize(
    ("schedule", "given", "stated"),
    [
        ("pipedream", {}, ([], [1])),
        ("pipedream", {"replicas": [2]}, ([], [2])),
        ("pipedream", {"cuts": [2, 4]}, ([2, 4], [1, 1, 1])),
        ("1f1b", {"cuts": [2], "replicas": [2, 1]}, ([2], [2, 1])),
        ("interleaved", {"cuts": [1, 2, 4], "replicas": [2] * 4}, ([1, 2, 4], [2] * 4)),
        ("dualpipe", {"cuts": [3]}, ([3], [1, 1])),
    ],
)
def test_a_manual_plan_states_its_split_and_is_planned_again_from_it(schedule, given, stated):
    microbatches = None if schedule == "pipedream" else 8
    profile = uniform_profile(6)
    problem = problem_of(profile, flat(4), schedule=schedule, microbatches=microbatches, **given)
    planned = Plan.parse(documents.encode(planners.plan("manual", problem)))
    assert (planned.request.cuts, planned.request.replicas) == stated
    assert planners.plan("manual", problem_from_plan(planned, profile)) == planned


def test_fewer_stages_than_requested_are_kept_to_where_that_is_the_most():
    for stages, deviations in ((4, []), (2, ["2 stages requested, 3 planned"])):
        plan = Plan.parse(requesting(stages=stages))
        assert list(plan.find_deviations(fewer=True)) == deviations


def test_a_contiguous_plan_has_consecutive_ranks():
    scattered = changed(PIPELINE, "stages", 0, "ranks", to=[0, 3])
    scattered = changed(scattered, "stages", 2, "ranks", to=[1])
    told = "plan.json: stages[0].ranks: not consecutive, in a contiguous plan"
    assert faults(scattered) == [told]


def test_every_field_of_a_plan_is_required_but_for_those_of_some_flows():
    for key in json.loads(PIPELINE).keys() - {"schema"}:
        document = json.loads(PIPELINE)
        del document[key]
        assert faults(json.dumps(document).encode()) == [f"plan.json: {key}: missing"]


def test_a_shape_is_written_as_the_papers_do_and_long_runs_fold():
    for replicas, shape in (
        ([15, 1], "15-1"),
        ([1] * 4, "1-1-1-1"),
        ([1] * 64, "1x64"),
        ([2] + [1] * 5 + [3, 3], "2-1x5-3-3"),
    ):
        split = {"cuts": range(1, len(replicas)), "replicas": replicas}
        problem = problem_of(uniform_profile(len(replicas)), flat(sum(replicas)), **split)
        assert planners.plan("manual", problem).shape == shape
    assert Plan.parse(PIPELINE).idle_ranks == []
    alone = problem_of(uniform_profile(6), flat(4), cuts=(2,))
    assert planners.plan("manual", alone).idle_ranks == [2, 3]


@pytest.mark.parametrize(
    ("again", "said"),  # blocks of four that each stage computes again, None where it does not
    [
        ([None, None, None], "never"),
        ([4, 4, 4], "always"),
        ([4, None, 4], "auto"),
        ([1, 1, 1], 1),
        ([0, 0, 0], 0),
        ([1, 2, 1], "auto"),
        ([1, None, 1], "auto"),
        ([4, 1, 1], "auto"),
    ],
)
def test_a_layout_says_what_all_stages_recompute(again, said):
    stages = [
        replace(stage, recompute=True, blocks=4, blocks_again=count) if count is not None else stage
        for stage, count in zip(Plan.parse(PIPELINE).stages, again, strict=True)
    ]
    assert Layout.of(stages, 1).recompute == said
    if said == 1:  # all two blocks of a stage are its first two, and one is fewer
        for blocks, expected in ((2, "auto"), (1, 1)):
            short = replace(stages[2], blocks=blocks, blocks_again=blocks)
            assert Layout.of([*stages[:2], short], 1).recompute == expected


@pytest.mark.parametrize(("copies", "dp", "pp"), [(1, 2, 3), (2, 1, 3)])
def test_a_layout_has_the_degrees_of_its_stages(copies, dp, pp):
    own = Plan.parse(PIPELINE).stages
    even = [replace(each, replicas=2, ranks=[2 * s, 2 * s + 1]) for s, each in enumerate(own)]
    found = Layout.of(even, copies)
    assert (found.dp, found.pp, found.chunks) == (dp, pp, 1)
    assert Layout.of(own, copies).dp is None
    looped = Layout.of([replace(each, ranks=[s % 2]) for s, each in enumerate([*even, even[0]])], 1)
    assert (looped.pp, looped.chunks) == (2, 2)


ENGINES = [
    ({}, {"bucket_bytes": 1}, ["bucket_bytes"]),
    ({"allreduce": "blocking"}, {"bucket_bytes": 1}, ["allreduce"]),
    ({"allreduce": "blocking"}, {"bucket_bytes": 1, "allreduce": "blocking"}, []),
    ({"waits": ("1f1b",)}, {"waits": ("1f1b", "gpipe")}, []),
    ({"waits": ("1f1b",)}, {"messages": "split"}, ["waits", "messages"]),
    ({"gradients": "float32"}, {"buffers": "all"}, ["gradients", "buffers"]),
    ({}, {"optimizer_bytes": 0}, ["optimizer_bytes"]),
    ({"reserve_bytes": 1, "recompute": ("stage",)}, {"shard": ("optimizer",)}, []),
]


@pytest.mark.parametrize(("one", "other", "names"), ENGINES)
def test_engines_differ_in_what_a_plan_rests_on(one, other, names):
    found = Engine(**one).find_differences(Engine(**other), "1f1b", "none")
    assert found == names


def test_whole_sums_count_where_replicas_share():
    one, other = Engine(whole_sums=True), Engine()
    assert one.find_differences(other, "1f1b", "none") == []
    assert one.find_differences(other, "1f1b", "optimizer") == ["whole_sums"]


def test_ranks_and_their_stages():
    options = {"schedule": "interleaved", "microbatches": 8, "cuts": (1, 3, 4)}
    problem = problem_of(uniform_profile(6), flat(4), replicas=(1, 1, 1, 1), **options)
    plan = planners.plan("manual", problem)
    assert plan.stages_by_rank() == {0: [0, 2], 1: [1, 3]}
    assert (plan.world_size, plan.idle_ranks) == (2, [2, 3])
    assert plan.stages_of(3) == []
    for rank in (-1, 4):
        with pytest.raises(PartoptError, match=f"no rank {rank}$") as error:
            plan.stages_of(rank)
        assert error.value.hint == "ranks are numbered 0 to 3"
    pair = Plan.parse(PIPELINE).stages[0]
    assert [pair.rank_of(m) for m in range(4)] == [*pair.ranks, *pair.ranks]
    for rank, held in plan.stages_by_rank().items():
        assert plan.stages_of(rank) == [plan.stages[s] for s in held]
        for chunk, s in enumerate(held):
            assert plan.stage_of(rank, chunk) == plan.stages[s]
        for chunk in (-1, 2):
            with pytest.raises(PartoptError, match=f"none of number {chunk}"):
                plan.stage_of(rank, chunk)
    assert [stages_text(held) for held in ([3], [0, 2], [0, 2, 4])] == [
        "stage 3",
        "stages 0 and 2",
        "stages 0, 2 and 4",
    ]


def test_of_the_stages_of_a_device_one_runs_at_a_time():
    first, *_ = Plan.parse(PIPELINE).stages
    pairs = [
        replace(first, memory=replace(first.memory, total_bytes=total, transient_bytes=passing))
        for total, passing in ((100, 30), (70, 50))
    ]
    assert device_bytes(pairs) == 70 + 20 + 50
    assert device_bytes(pairs[:1]) == 100


SCRIPT = """
import sys
from partopt import Profile, documents, planners
from partopt.cost.problem import problem_of
from tests.helpers import two_level
loaded = Profile.load(sys.argv[1])
for name in planners.PLANNERS:
    plan = planners.plan(name, problem_of(loaded, two_level(2, 4)))
    sys.stdout.buffer.write(documents.encode(plan))
"""


@pytest.mark.slow
def test_plans_are_the_same_bytes_whatever_the_seed_of_the_hashes(tmp_path):
    """Equal layers tie everywhere, so that a set's order would show."""
    uniform_profile(12).save(str(tmp_path / "p.json"))
    digests = set()
    for seed in ("0", "1"):
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / "p.json")]
        done = subprocess.run(
            command,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            check=True,
            cwd=ROOT,
        )
        digests.add(hashlib.sha256(done.stdout).hexdigest())
    assert len(digests) == 1
