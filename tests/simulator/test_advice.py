"""Advice: every finding by a plan that has it, and by one that just does not."""

import msgspec
import pytest

import partopt
from partopt.cost.plan import under
from partopt.documents.topology import Level
from partopt.simulator import execute
from partopt.simulator.advice import BUSY, FULL, NOTICED, WORTH
from tests.helpers import flat
from tests.report.timelines import plan_of
from tests.simulator import plans
from tests.simulator.plans import limited

STRAIGHT = [[0], [1], [2], [3]]


def case(schedule="1f1b", ranks=STRAIGHT, microbatches=16, warmups=None, slower=(), **fields):
    """Stages of 3 ms forward and 6 ms backward that exchange 1 MB; those in `slower`, {stage:
    factor}, take longer.
    """
    usual = {
        "forward_s": 3e-3,
        "backward_s": 6e-3,
        "backward_weight_s": 3e-3,
        "compute_s": 9e-3,
        "output_bytes": 10**6,
    }
    plan = plan_of(schedule, ranks, microbatches, **(usual | fields))
    stages = [
        msgspec.structs.replace(
            stage,
            input_bytes=10**6 if s else 0,
            **{name: getattr(stage, name) * factor for name in TIMES},
        )
        for s, stage in enumerate(plan.stages)
        for factor in [dict(slower).get(s, 1.0)]
    ]
    return under(msgspec.structs.replace(plan, stages=stages), warmups=warmups)


TIMES = ("forward_s", "backward_s", "backward_weight_s", "compute_s")
FAST = flat(4, 1e12)


def found(plan, memory_bytes=None, **conditions):
    simulation = partopt.simulate(limited(plan, memory_bytes), **conditions)
    return {finding.code: finding for finding in simulation.document.advice}


def test_a_balanced_plan_with_enough_microbatches_has_nothing_to_point_at():
    assert found(case("zb-h1", topology=FAST), 10**9) == {}
    assert found(case("pipedream", microbatches=None, topology=FAST)) == {}


@pytest.mark.parametrize("excess, has", [(0.08, True), (0.06, False)])
def test_imbalance(excess, has):
    plan = case(topology=FAST, slower={3: 1 + excess})
    assert ("imbalance" in found(plan)) == has


def test_imbalance_says_which_stage():
    finding = found(case(topology=FAST, slower={2: 2.0, 1: 1.2}))["imbalance"]
    assert finding.value == pytest.approx(2 / 1.3)
    assert (
        finding.text
        == "stage 2 takes 18.00 ms a microbatch, 1.54 times the mean of all devices, 11.70 ms"
    )
    assert (finding.verb, finding.options, finding.change) == ("", {}, "")


@pytest.mark.parametrize("microbatches, has", [(15, True), (16, False)])
def test_few_microbatches(microbatches, has):
    findings = found(case(microbatches=microbatches, topology=FAST))
    assert ("microbatches" in findings) == has


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
    assert "microbatches" not in found(
        case(microbatches=finding.options["microbatches"], topology=FAST)
    )


def test_replicas_of_one_stage_have_no_pipeline_to_fill():
    assert "microbatches" not in found(
        case(ranks=[[0, 1, 2, 3]], microbatches=4, topology=FAST, parameter_bytes=0)
    )


def share_of_transfers(plan):
    return found(plan)["transfers"].value if "transfers" in found(plan) else 0.0


@pytest.mark.parametrize("bandwidth, has", [(7e9, True), (9e9, False)])
def test_transfers_that_are_waited_for(bandwidth, has):
    plan = case(microbatches=64, topology=flat(4, bandwidth), serial=True)
    assert ("transfers" in found(plan)) == has


def test_serial_transfers_could_overlap():
    finding = found(case(microbatches=64, topology=flat(4, 1e9), serial=True))["transfers"]
    assert finding.value > NOTICED
    assert finding.options == {"facts": {"waits": "none"}}
    assert finding.change.endswith("% faster, where the trainer sends while it computes")


def test_latency_is_hidden_by_eager_1f1b():
    slow = flat(4, 1e12, latency=1e-3)
    finding = found(case(microbatches=64, topology=slow))["transfers"]
    assert finding.options == {"schedule": "1f1b-eager"}
    assert (
        share_of_transfers(case("1f1b-eager", microbatches=64, topology=slow)) < finding.value / 2
    )


def test_the_bandwidth_that_hides_what_waits_for_a_full_port():
    plan = case("pipedream", [[0], [1]], None, [8, 0], topology=flat(2, 1e8))
    finding = found(plan)["transfers"]
    # 10 ms a message at 100 MB/s, and a stage takes 9 ms
    assert finding.options == {"bandwidth": {"all": "130 MB/s"}}
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
    findings = found(
        case(
            ranks=[[0, 1]],
            microbatches=8,
            topology=flat(2, 1e9),
            parameter_bytes=round(exchange_s * 1e9),
        )
    )
    assert ("all-reduce" in findings) == has
    if has:
        assert findings["all-reduce"].options == {"microbatches": 16}
        assert findings["all-reduce"].change.endswith(
            "% faster, a batch of 16 samples: one exchange for twice the work"
        )


def test_an_asynchronous_all_reduce_that_blocks_could_overlap():
    plan = case(
        "pipedream",
        [[0, 1]],
        None,
        topology=flat(2, 1e9),
        parameter_bytes=10**6,
        allreduce="blocking",
    )
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
    finding = found(plan, bandwidth={"all": "1 TB/s"}, latency={"all": 0})["microbatches"]
    assert finding.options == {
        "bandwidth": {"all": "1 TB/s"},
        "latency": {"all": 0},
        "microbatches": 16,
    }
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


@pytest.mark.parametrize("microbatches, has", [(98, True), (100, False)])
def test_a_schedule_with_a_smaller_bubble(microbatches, has):
    assert ("schedule" in found(case(microbatches=microbatches, topology=FAST))) == has


@pytest.mark.parametrize(
    "schedule, change",
    [("gpipe", "11.7% faster, -75.0% memory"), ("naive", "275.6% faster, +300.0% memory")],
)
def test_another_schedule_is_executed_and_told_with_what_it_takes(schedule, change):
    plan = case(schedule, topology=FAST, parameter_bytes=0)
    assert (found(plan)["schedule"].options, found(plan)["schedule"].change) == (
        {"schedule": "zb-h1"},
        change,
    )


@pytest.mark.parametrize("devices, has", [(5, True), (4, False)])
def test_idle_ranks(devices, has):
    assert ("idle-ranks" in found(case("zb-h1", topology=flat(devices, 1e12)))) == has


@pytest.mark.parametrize("forward_s, has", [(1.99e-3, True), (2e-3, False)])
def test_forwards_that_launches_may_take_longer_than(forward_s, has):
    findings = found(case("zb-h1", topology=FAST, forward_s=forward_s))
    assert ("launches" in findings) == has


def test_faults_come_first_and_risks_last():
    plan = case(microbatches=4, topology=flat(5, 1e12), forward_s=1e-3)
    severities = [
        finding.severity for finding in partopt.simulate(limited(plan, 1)).document.advice
    ]
    assert severities == sorted(severities, key=["fault", "loss", "risk"].index)
    assert {"fault", "loss", "risk"} == set(severities)


def test_every_number_has_its_level_and_unit():
    level = Level(name="wire", size=2, bandwidth_bytes_per_s=1e8)
    topology = msgspec.structs.replace(flat(2, 1e8), levels=[level])
    finding = found(case("pipedream", [[0], [1]], None, [8, 0], topology=topology))["transfers"]
    assert "level wire" in finding.text
    assert finding.options["bandwidth"].keys() == {"wire"}


def test_a_plan_that_computes_nothing_waits_for_messages():
    for limits in ({}, {"schedule": "1f1b", "microbatches": 8}):
        plan = plans.plan_of([1, 1], [0.0, 0.0], [0.0, 0.0], cuts=[5], **limits)
        assert [*found(plan)] == ["transfers"]
