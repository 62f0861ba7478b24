"""Advice: every finding by a plan that has it, and by one that just does not."""

import msgspec
import pytest

from partopt.documents.topology import Level
from partopt.simulator import execute
from partopt.simulator.advice import FULL, findings
from partopt.simulator.case import BUSY, NOTICED
from partopt.simulator.restate import with_conditions
from tests.helpers import flat
from tests.report.timelines import plan_of
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
    return with_conditions(msgspec.structs.replace(plan, stages=stages), warmups=warmups)


TIMES = ("forward_s", "backward_s", "backward_weight_s", "compute_s")
FAST = flat(4, 1e12)


def found(plan, memory_bytes=None, microbatches=None):
    return {
        finding.code: finding
        for finding in findings(execute(limited(plan, memory_bytes), microbatches))
    }


def test_a_balanced_plan_with_enough_microbatches_has_nothing_to_point_at():
    assert found(case("zb-h1", topology=FAST), 10**9) == {}
    assert found(case("pipedream", microbatches=None, topology=FAST)) == {}


@pytest.mark.parametrize("excess, has", [(0.08, True), (0.06, False)])
def test_imbalance(excess, has):
    plan = case(topology=FAST, slower={3: 1 + excess})
    assert ("imbalance" in found(plan)) == has


def test_the_layer_of_the_slowest_stage_that_its_lighter_neighbour_could_take():
    plan = case(topology=FAST, slower={2: 2.0, 1: 1.2})
    stages = list(plan.stages)
    stages[2] = msgspec.structs.replace(stages[2], stop=7, modules=["a", "b", "c", "d", "e"])
    stages[3] = msgspec.structs.replace(stages[3], start=7, stop=8)
    finding = found(msgspec.structs.replace(plan, stages=stages))["imbalance"]
    assert finding.value == pytest.approx(2 / 1.3)
    assert (
        finding.text
        == "stage 2 takes 18.00 ms a microbatch, 1.54 times the mean of all devices, 11.70 ms"
    )
    assert (
        finding.change
        == "stage 3 takes 9.00 ms: try layer 6, e, on stage 3: `solve` `cuts=[1, 2, 6]`"
    )


def test_where_the_slowest_stage_is_one_layer_it_gets_a_replica_more():
    idle = found(case(topology=flat(5, 1e12), slower={3: 2.0}))["imbalance"]
    assert idle.change == (
        "a replica more of stage 3, of the idle ranks: `solve` `cuts=[1, 2, 3]` "
        "`replicas=[1, 1, 1, 2]`"
    )
    taken = found(case(ranks=[[0, 1, 2], [3]], topology=FAST, slower={1: 2.0}))["imbalance"]
    assert (
        taken.change == "a replica more of stage 1 and one less of stage 0: `solve` `cuts=[1]` "
        "`replicas=[2, 2]`"
    )
    none = found(case(topology=FAST, slower={3: 2.0}))["imbalance"]
    assert (
        none.change
        == "stage 3 is one layer, layer3: profile smaller ones, `measure` `granularity=leaf`"
    )


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
    assert finding.change == "`microbatches=16`, a batch of 16 samples"
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
    plan = case(microbatches=64, topology=flat(4, bandwidth), comm="serial")
    assert ("transfers" in found(plan)) == has


def test_serial_transfers_could_overlap():
    finding = found(case(microbatches=64, topology=flat(4, 1e9), comm="serial"))["transfers"]
    assert finding.value > NOTICED
    assert finding.change.startswith("`comm=overlap`")


def test_latency_is_hidden_by_eager_1f1b():
    slow = flat(4, 1e12, latency=1e-3)
    finding = found(case(microbatches=64, topology=slow))["transfers"]
    assert finding.change.startswith("`schedule=1f1b-eager`")
    assert (
        share_of_transfers(case("1f1b-eager", microbatches=64, topology=slow)) < finding.value / 2
    )


def test_the_bandwidth_that_hides_what_waits_for_a_full_port():
    plan = case("pipedream", [[0], [1]], None, [8, 0], topology=flat(2, 1e8))
    finding = found(plan)["transfers"]
    # 10 ms a message at 100 MB/s, and a stage takes 9 ms
    assert finding.change == '`bandwidth={"all": "130 MB/s"}`'
    better = with_conditions(plan, topology=flat(2, 1.3e8), warmups=[8, 0])
    assert not {"transfers", "port"} & found(better).keys()


@pytest.mark.parametrize("share, has", [(BUSY + 0.02, True), (BUSY - 0.02, False)])
def test_a_port_that_has_little_left(share, has):
    plan = case("pipedream", [[0], [1]], None, [8, 0], topology=flat(2, 10**6 / (9e-3 * share)))
    findings = found(plan)
    assert ("port" in findings) == has
    if has:
        assert findings["port"].value == pytest.approx(share)
        assert findings["port"].change.startswith('`links={"all": 2}`, or `bandwidth={"all": "')


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
        assert findings["all-reduce"].change == "`microbatches=16`: one exchange for twice the work"


def test_an_asynchronous_all_reduce_that_blocks_could_overlap():
    plan = case(
        "pipedream",
        [[0, 1]],
        None,
        topology=flat(2, 1e9),
        parameter_bytes=10**6,
        allreduce="blocking",
    )
    assert found(plan)["all-reduce"].change.startswith("`allreduce=overlap`")
    assert "all-reduce" not in found(with_conditions(plan, allreduce="overlap"))


def test_memory():
    plan = case("zb-h1", topology=FAST)
    peak = int(execute(plan).peak_memory_bytes.max())
    assert found(plan, round(peak / FULL * 1.001)) == {}
    near = found(plan, round(peak / FULL * 0.999))["memory"]
    assert (near.severity, near.change) == ("risk", "`solve` `recompute=always`")
    assert found(plan, peak)["memory"].severity == "risk"
    over = found(plan, peak - 1)["memory"]
    assert over.severity == "fault"
    assert over.text.endswith("exceeds the limit by 1 B")


def test_more_stages_where_everything_is_recomputed():
    assert found(case("zb-h1", topology=FAST, recompute=True), 1)["memory"].change.startswith(
        "`solve` with more `stages`"
    )


def test_microbatches_that_do_not_settle():
    plan = case("pipedream", microbatches=None, topology=FAST)
    finding = found(plan, microbatches=8)["unsettled"]
    assert (finding.value, finding.change) == (8, "`microbatches=32`")
    assert "unsettled" not in found(plan, microbatches=32)


@pytest.mark.parametrize("warmups, has", [([2, 2, 1, 0], True), ([3, 2, 1, 0], False)])
def test_too_few_in_flight(warmups, has):
    findings = found(case("pipedream", STRAIGHT, None, warmups, topology=FAST))
    assert ("in-flight" in findings) == has
    if has:
        assert findings["in-flight"].change == (
            "`warmup=+1`: one microbatch more in flight on each device, 4 instead of 3 on the first"
        )


@pytest.mark.parametrize("microbatches, has", [(97, True), (98, False)])
def test_a_schedule_with_a_smaller_bubble(microbatches, has):
    assert ("schedule" in found(case(microbatches=microbatches, topology=FAST))) == has


@pytest.mark.parametrize(
    "schedule, text",
    [
        (
            "gpipe",
            (
                "gpipe takes 10.72 ms a microbatch; the same stages take under zb-h1 9.59 "
                "ms and 8 MB a device"
            ),
        ),
        (
            "naive",
            (
                "naive takes 36.04 ms a microbatch; the same stages take under 1f1b 10.72 "
                "ms and 6 MB a device"
            ),
        ),
    ],
)
def test_another_schedule_is_executed_and_told_with_what_it_takes(schedule, text):
    assert found(case(schedule, topology=FAST))["schedule"].text == text


def test_interleaving_is_for_models_with_two_layers_a_device():
    plan = case(topology=FAST)
    stages = [
        msgspec.structs.replace(stage, start=2 * s, stop=2 * s + 2, modules=[f"{s}a", f"{s}b"])
        for s, stage in enumerate(plan.stages)
    ]
    finding = found(msgspec.structs.replace(plan, stages=stages))["chunks"]
    assert finding.change == "`solve` `schedule=interleaved` `chunks=2`"
    assert finding.value == pytest.approx(3 / 19 - 1.5 / 17.5)


@pytest.mark.parametrize("devices, has", [(5, True), (4, False)])
def test_idle_ranks(devices, has):
    assert ("idle-ranks" in found(case("zb-h1", topology=flat(devices, 1e12)))) == has


@pytest.mark.parametrize("forward_s, has", [(1.99e-3, True), (2e-3, False)])
def test_forwards_that_launches_may_take_longer_than(forward_s, has):
    findings = found(case("zb-h1", topology=FAST, forward_s=forward_s))
    assert ("launches" in findings) == has
    if has:
        assert findings["launches"].change == "`solve` `microbatch_size=2`"


def test_faults_come_first_and_risks_last():
    plan = case(microbatches=4, topology=flat(5, 1e12), forward_s=1e-3)
    severities = [finding.severity for finding in findings(execute(limited(plan, 1)))]
    assert severities == sorted(severities, key=["fault", "loss", "risk"].index)
    assert {"fault", "loss", "risk"} == set(severities)


def test_every_number_has_its_level_and_unit():
    level = Level(name="wire", size=2, bandwidth_bytes_per_s=1e8)
    topology = msgspec.structs.replace(flat(2, 1e8), levels=[level])
    finding = found(case("pipedream", [[0], [1]], None, [8, 0], topology=topology))["transfers"]
    assert "level wire" in finding.text
    assert finding.options["bandwidth"].keys() == {"wire"}
