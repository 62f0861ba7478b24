"""Advice: every finding by a plan that has it, and by one that just does not."""

import re

import pytest
from msgspec.structs import replace

import partopt
from partopt.cost.pricing import under
from partopt.report.plan_text import render
from partopt.simulator import execute
from partopt.simulator.prediction import NOTICED, _without_limit, _without_others, held_back
from partopt.what_if.advice import BUSY, FULL, WORTH
from tests.helpers import chain_profile, flat
from tests.report.timelines import plan_of
from tests.simulator import plans
from tests.simulator.plans import limited

STRAIGHT = [[0], [1], [2], [3]]


TIMES = ("forward_s", "backward_s", "backward_weight_s", "compute_s")


def case(schedule="1f1b", ranks=STRAIGHT, microbatches=16, warmups=None, slower=(), **fields):
    """Stages of 3 ms forward and 6 ms backward that exchange 1 MB; those in `slower`, {stage:
    factor}, take longer.
    """
    usual = dict(zip(TIMES, (3e-3, 6e-3, 3e-3, 9e-3), strict=True)) | {"output_bytes": 10**6}
    plan = plan_of(schedule, ranks, microbatches, **(usual | fields))
    stages = []
    for s, stage in enumerate(plan.stages):
        times = {name: getattr(stage, name) * dict(slower).get(s, 1.0) for name in TIMES}
        stages.append(replace(stage, input_bytes=10**6 if s else 0, **times))
    return under(replace(plan, stages=stages), warmups=warmups)


FAST = flat(4, 1e12)


def found(plan, memory_bytes=None, **conditions):
    simulation = partopt.simulate(limited(plan, memory_bytes), **conditions)
    return {finding.code: finding for finding in simulation.document.advice}


def test_a_balanced_plan_with_enough_microbatches_has_nothing_to_point_at():
    assert found(case("zb-h1", topology=FAST), 10**9) == {}
    assert found(case("pipedream", microbatches=None, topology=FAST)) == {}


WIRE = {"microbatches": 64, "serial": True}
# on both sides of the boundary: the code, a plan that has it, one that just does not
BOUNDARIES = [
    ("imbalance", {"slower": {3: 1.08}}, {"slower": {3: 1.06}}),
    ("microbatches", {"microbatches": 15}, {"microbatches": 16}),
    ("transfers", {"topology": flat(4, 7e9), **WIRE}, {"topology": flat(4, 9e9), **WIRE}),
    ("schedule", {"microbatches": 98}, {"microbatches": 100}),
    ("idle-ranks", {"topology": flat(5, 1e12)}, {}),
    (
        "launches",
        {"schedule": "zb-h1", "forward_s": 1.99e-3},
        {"schedule": "zb-h1", "forward_s": 2e-3},
    ),
]


@pytest.mark.parametrize("code, there, not_there", BOUNDARIES)
def test_what_is_found_on_one_side_of_its_boundary(code, there, not_there):
    assert code in found(case(**{"topology": FAST, **there}))
    assert code not in found(case(**{"topology": FAST, **not_there}))


def test_launches_and_idle_ranks_say_their_numbers():
    finding = found(case("zb-h1", topology=FAST, forward_s=1.99e-3))["launches"]
    assert (finding.severity, finding.value, finding.unit) == ("risk", 1.99e-3, "s")
    assert finding.text.startswith("the forward of stage 0, the slowest, takes 1.99 ms")
    finding = found(case(topology=flat(6, 1e12)))["idle-ranks"]
    assert (finding.severity, finding.value, finding.unit) == ("loss", 2, "ranks")
    assert finding.text == "2 of 6 devices have no work"


def test_imbalance_says_which_stage():
    finding = found(case(topology=FAST, slower={2: 2.0, 1: 1.2}))["imbalance"]
    assert finding.value == pytest.approx(2 / 1.3)
    told = "stage 2 takes 18.00 ms a microbatch, 1.54 times the mean of all devices, 11.70 ms"
    assert finding.text == told
    assert (finding.verb, finding.options, finding.change) == ("", {}, "")


def test_replicas_share_the_work_of_a_stage_and_a_device_has_that_of_all_its_stages():
    """27 ms over two replicas, beside 9 ms; and of pairs of stages 18 + 9 ms beside 9 + 9 ms."""
    shared = case(ranks=[[0, 1], [2]], topology=FAST, slower={0: 3.0})
    finding = found(shared)["imbalance"]
    assert finding.value == pytest.approx(13.5 / 12)
    assert finding.text.startswith("stage 0 takes 13.50 ms a microbatch, 1.12 times the mean")
    looped = case("interleaved", [[0], [1], [0], [1]], topology=FAST, slower={2: 2.0})
    finding = found(looped)["imbalance"]
    assert finding.value == pytest.approx(27 / 22.5)
    assert finding.text.startswith("stages 0 and 2 together take 27.00 ms a microbatch, 1.20 times")


def test_few_microbatches_say_what_enough_would_bring():
    finding = found(case(microbatches=8, topology=FAST))["microbatches"]
    assert (finding.value, finding.unit) == (2.0, "microbatches a device")
    assert finding.text == (
        "8 microbatches for 4 devices: equal stages wait for 27.3% of the time, with 16 for 15.8%"
    )
    assert (finding.verb, finding.options) == ("simulate", {"microbatches": 16})
    # 99 and 171 ms: (8 + 3) and (16 + 3) times 9 ms
    assert finding.speedup == pytest.approx((99 / 8) / (171 / 16), rel=5e-3)
    assert finding.change == "16.0% faster, a batch of 16 samples"
    # replicas of one stage have no pipeline to fill
    replicas = case(ranks=[[0, 1, 2, 3]], microbatches=4, topology=FAST, parameter_bytes=0)
    assert "microbatches" not in found(replicas)


def test_serial_transfers_could_overlap():
    finding = found(case(microbatches=64, topology=flat(4, 1e9), serial=True))["transfers"]
    assert finding.value > NOTICED
    assert finding.options == {"facts": {"waits": "none"}}
    assert finding.change.endswith("% faster, where the trainer sends while it computes")


def test_latency_is_hidden_by_eager_1f1b():
    slow = {"microbatches": 64, "topology": flat(4, 1e12, latency=1e-3)}
    finding = found(case(**slow))["transfers"]
    assert finding.options == {"schedule": "1f1b-eager"}
    eager = found(case("1f1b-eager", **slow)).get("transfers")
    assert eager is None or eager.value < finding.value / 2


def test_the_bandwidth_that_hides_what_waits_for_a_full_port():
    [level] = flat(2, 1e8).levels
    topology = replace(flat(2, 1e8), levels=[replace(level, name="wire")])
    plan = case("pipedream", [[0], [1]], None, [8, 0], topology=topology)
    finding = found(plan)["transfers"]
    # 10 ms a message at 100 MB/s, and a stage takes 9 ms
    assert finding.options == {"bandwidth": {"wire": "130 MB/s"}}
    assert "level wire" in finding.text
    assert finding.speedup == pytest.approx(10 / 9)
    better = under(plan, topology=flat(2, 1.3e8), warmups=[8, 0])
    assert not {"transfers", "port"} & found(better).keys()


@pytest.mark.parametrize("share, has", [(BUSY + 0.02, True), (BUSY - 0.02, False)])
def test_a_port_that_has_little_left(share, has):
    plan = case("pipedream", [[0], [1]], None, [8, 0], topology=flat(2, 10**6 / (9e-3 * share)))
    findings = found(plan)
    assert ("port" in findings) == has
    if has:
        assert findings["port"].value == pytest.approx(share)
        # it is a risk, which costs nothing that is simulated
        assert findings["port"].verb == ""


@pytest.mark.parametrize("exchange_s, has", [(2.1e-3, True), (1.8e-3, False)])
def test_an_all_reduce_that_is_waited_for(exchange_s, has):
    size = {"parameter_bytes": round(exchange_s * 1e9)}
    findings = found(case(ranks=[[0, 1]], microbatches=8, topology=flat(2, 1e9), **size))
    assert ("all-reduce" in findings) == has
    if has:
        assert findings["all-reduce"].options == {"microbatches": 16}
        assert findings["all-reduce"].change.endswith(
            "% faster, a batch of 16 samples: one exchange for twice the work"
        )


def test_an_asynchronous_all_reduce_that_blocks_could_overlap():
    options = {"parameter_bytes": 10**6, "allreduce": "blocking"}
    plan = case("pipedream", [[0, 1]], None, topology=flat(2, 1e9), **options)
    assert found(plan)["all-reduce"].options == {"facts": {"allreduce": "overlap"}}
    assert "all-reduce" not in found(under(plan.with_engine(allreduce="overlap")))


def test_memory():
    plan = case("zb-h1", topology=FAST)
    peak = int(execute(plan).peak_memory_bytes.max())
    assert found(plan, round(peak / FULL * 1.001)) == {}
    near = found(plan, round(peak / FULL * 0.999))["memory"]
    assert (near.severity, near.change) == ("risk", "")
    assert found(plan, peak)["memory"].severity == "risk"
    over = found(plan, peak - 1)["memory"]
    assert over.severity == "fault"
    assert over.text.endswith("exceeds the limit by 1 B")


def test_a_plan_that_does_not_fit_is_told_the_fastest_schedule_that_does():
    """GPipe holds all 16 microbatches, 1F1B 4 of them on the first device and 1 on the last; the
    naive schedule holds 1 and takes four times as long.
    """
    plan = case("gpipe", topology=FAST)
    fits = int(execute(under(plan, "1f1b")).peak_memory_bytes.max())
    fault = found(plan, fits)["memory"]
    assert fault.options == {"schedule": "1f1b"}
    assert fault.peak_memory_bytes == fits
    assert fault.change.endswith("% memory, it fits")
    assert found(plan, 1)["memory"].verb == ""


def test_nothing_faster_is_advised_that_does_not_fit():
    plan = case("1f1b", topology=FAST)
    limit = int(execute(plan).peak_memory_bytes.max())
    needed = found(plan)["schedule"].peak_memory_bytes
    assert "schedule" not in found(plan, needed - 1)
    assert found(plan, needed)["schedule"].options == {"schedule": "zb-h1"}
    assert needed >= limit


def test_a_change_is_called_with_what_was_given_too():
    plan = case(microbatches=8, topology=flat(4, 1e9))
    conditions = {"bandwidth": {"all": "1 TB/s"}, "latency": {"all": 0}}
    assert found(plan, **conditions)["microbatches"].options == {**conditions, "microbatches": 16}
    plan = case("pipedream", [[0], [1]], None, [8, 0], topology=flat(2, 1e8))
    given = found(plan, latency={"all": 1e-4}, bandwidth={"all": "90 MB/s"})["transfers"].options
    assert given["bandwidth"] != {"all": "90 MB/s"}
    assert given["latency"] == {"all": 1e-4}


CASES = [
    case(microbatches=8),
    case("gpipe", microbatches=32),
    case("naive"),
    case(microbatches=64, topology=flat(4, 1e9), serial=True),
    case(microbatches=64, topology=flat(4, 1e12, latency=1e-3)),
    case("pipedream", [[0], [1]], None, [8, 0], topology=flat(2, 1e8)),
    case("pipedream", STRAIGHT, None, [2, 2, 1, 0]),
    case(ranks=[[0, 1]], microbatches=8, topology=flat(2, 1e9), parameter_bytes=3 * 10**6),
    case("pipedream", [[0, 1]], None, topology=flat(2, 1e8), parameter_bytes=10**6),
]


@pytest.mark.parametrize("plan", CASES)
def test_what_is_promised_is_what_comes(plan):
    now, promised = partopt.simulate(plan), 0
    for finding in now.document.advice:
        if finding.verb:
            promised += 1
            then = partopt.simulate(plan, **finding.options).document
            assert finding.speedup == now.document.period_s / then.period_s
            assert finding.speedup >= 1 + WORTH
            assert finding.peak_memory_bytes == then.peak_memory_bytes
        else:
            assert (finding.options, finding.change, finding.speedup) == ({}, "", None)
    assert promised


def test_microbatches_that_do_not_settle():
    plan = case("pipedream", microbatches=None, topology=FAST)
    finding = found(plan, microbatches=8)["unsettled"]
    assert (finding.value, finding.options) == (8, {"microbatches": 32})
    assert finding.change.endswith("a steady state")
    assert "unsettled" not in found(plan, microbatches=32)


@pytest.mark.parametrize("warmups, has", [([2, 2, 1, 0], True), ([3, 2, 1, 0], False)])
def test_too_few_in_flight(warmups, has):
    findings = found(case("pipedream", STRAIGHT, None, warmups, topology=FAST))
    assert ("in-flight" in findings) == has
    if has:
        assert findings["in-flight"].options == {"warmup": [3, 2, 1, 0]}
        assert findings["in-flight"].change.endswith(
            "% faster, 4 microbatches in flight on each device of the first stage instead of 3"
        )


def test_another_schedule_is_tried_without_the_warm_up_that_was_given():
    plan = plans.plan_of([1] * 4, schedule="1f1b-eager", microbatches=8)
    advice = partopt.simulate(plan, warmup=[0, 0, 0, 0]).document.advice
    assert {"schedule": "zb-h1"} in [finding.options for finding in advice]


def test_another_schedule_is_executed_and_told_with_what_it_takes():
    for schedule, change in {
        "gpipe": "11.7% faster, -75.0% memory",
        "naive": "275.6% faster, +300.0% memory",
    }.items():
        finding = found(case(schedule, topology=FAST, parameter_bytes=0))["schedule"]
        assert (finding.options, finding.change) == ({"schedule": "zb-h1"}, change)


def test_faults_come_first_and_risks_last():
    plan = case(microbatches=4, topology=flat(5, 1e12), forward_s=1e-3)
    severities = [each.severity for each in partopt.simulate(limited(plan, 1)).document.advice]
    assert severities == sorted(severities, key=["fault", "loss", "risk"].index)
    assert {"fault", "loss", "risk"} == set(severities)


def test_a_plan_that_computes_nothing_waits_for_messages():
    for limits in ({}, {"schedule": "1f1b", "microbatches": 8}):
        plan = plans.plan_of([1, 1], [0.0, 0.0], [0.0, 0.0], cuts=[5], **limits)
        assert [*found(plan)] == ["transfers"]


# --- what memory costs a plan that is held back by it: the number is one of the simulator's -----


def solved(memory_bytes, last_s=1e-3, schedule="1f1b-eager"):
    """Four stages of 3 ms, whose messages take 1 ms and whose microbatches 10 MB each."""
    forward = [1e-3] * 3 + [last_s]
    profile = chain_profile(forward, output_bytes=[10**7] * 4, parameter_bytes=[4] * 4)
    options = {"microbatches": None if schedule == "pipedream" else 16, "cuts": [1, 2, 3]}
    on = flat(4, 1e10, memory_bytes=memory_bytes)
    return partopt.solve(partopt.Job(profile, on, schedule=schedule, **options)).plan


def held_in_words(plan):
    """The line `binds` of the plan's page, and the texts of its advice."""
    page = " ".join(render(plan).split())
    advice = [(each.severity, each.text) for each in partopt.simulate(plan).document.advice]
    return re.search(r"binds (.*?) (?:slack|memory [0-9])", page)[1], advice


@pytest.mark.parametrize(
    ("schedule", "megabytes", "text"),
    [
        ("1f1b-eager", 50, "2 in flight on stage 0 in place of 7, to fit: 273% slower"),
        ("1f1b-eager", 120, "2 in flight on stage 1 in place of 5, to fit: 132% slower"),
        ("pipedream", 60, "2 in flight on stage 0 in place of 4, to fit: 186% slower"),
    ],
)
def test_fewer_microbatches_in_flight_are_named_with_what_they_cost(schedule, megabytes, text):
    plan = solved(megabytes * 10**6, schedule=schedule)
    roomy = solved(10**12, schedule=schedule)
    usual = [int(each) - 1 for each in ([7, 5, 3, 1] if schedule == "1f1b-eager" else [4, 3, 2, 1])]
    then = partopt.simulate(roomy, warmup=usual).document.period_s
    found = held_back(plan)
    assert found.text == text
    assert found.slower == pytest.approx(plan.predicted.period_s / then - 1)
    binds, advice = held_in_words(plan)
    assert binds == f"memory: {text}"
    assert any(severity == "loss" and told.startswith(text) for severity, told in advice)
    assert not any(severity == "risk" and "needs" in told for severity, told in advice)


@pytest.mark.parametrize(
    ("memory_bytes", "last_s"),
    [
        (10**12, 1e-3),
        (None, 1e-3),
        # messages cost more: without them it is 51 % faster, with its schedule's warm-up 40 %
        (100 * 10**6, 2e-3),
        (140 * 10**6, 1e-3),
        (100 * 10**6, 4e-3),  # a slow stage paces it
        (30 * 10**6, 1e-3),  # it does not fit
    ],
)
def test_what_is_not_held_back_names_another_cause(memory_bytes, last_s):
    plan = solved(memory_bytes, last_s)
    assert held_back(plan) is None
    assert not held_in_words(plan)[0].startswith("memory:")
    long = replace(solved(50 * 10**6), microbatches=10**6)  # is not simulated again
    assert held_back(long) is None


def test_recomputation_to_fit_is_named():
    stash = {"stash_groups": [([n], 2 * 10**7) for n in range(8)], "parameter_bytes": [4] * 8}
    profile = chain_profile([1e-3] * 8, output_bytes=[10**6] * 8, **stash)
    options = {"schedule": "1f1b", "microbatches": 32, "recompute": "auto", "stages": 4}
    on = flat(4, 1e12, memory_bytes=10**8)
    job = partopt.Job(profile, on, planner="optimal", replication="none", **options)
    plan = partopt.solve(job).plan
    assert any(stage.recompute for stage in plan.stages)
    found = held_back(plan)
    assert re.match(r"recomputation of stages? [0-9, and]+, to fit: [0-9]+% slower", found.text)
    asked = replace(plan, request=replace(plan.request, recompute="always"))
    assert held_back(asked) is None


def test_without_the_limit_a_stage_holds_its_schedules_or_what_it_held_if_that_is_more():
    """1f1b-eager holds 7, 5, 3 and 1; here stage 0 holds fewer, and stage 2 more."""
    options = {"schedule": "1f1b-eager", "microbatches": 16, "warmups": [4, 4, 3, 0]}
    plan = case(**options, stash_bytes=10**6)
    full = under(plan, warmups=[6, 4, 3, 0]).peak_memory_bytes
    lifted, texts = _without_limit(limited(plan, full - 1))
    assert [stage.in_flight for stage in lifted.stages] == [7, 5, 4, 1]
    assert texts == ["5 in flight on stage 0 in place of 7"]
    for roomy in (full, None):  # the limit is not why
        assert _without_limit(limited(plan, roomy)) == (limited(plan, roomy), [])


def test_with_equal_stages_replicas_take_equally_long():
    plan = plans.plan_of([2, 1], [4.0, 4.0], [8.0, 8.0], schedule="1f1b", microbatches=4)
    free, equal = _without_others(plan)
    assert all(level.latency_s == 0 for level in free.topology.levels)
    assert [stage.compute_s for stage in free.stages] == [12.0, 12.0]
    assert [stage.compute_s for stage in equal.stages] == [16.0, 8.0]  # 24 s of three devices
    assert [stage.forward_s for stage in equal.stages] == pytest.approx([16 / 3, 8 / 3])
