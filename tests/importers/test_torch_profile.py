"""Traces of torch.profiler put onto a profile: real ones, and one of a GPU made by hand."""

import gzip
import json
import random

import pytest
import torch

import partopt
from partopt.documents.profile import Profile
from partopt.errors import PartoptError
from partopt.importers import torch_profile
from tests.helpers import measurement, profile_of
from tests.importers import traces
from tests.importers.traces import event, on_gpu, record, write


def check(profile, forward_ms, backward_ms):
    [found] = profile.measurements
    assert [each.forward_s * 1e3 for each in found.layers] == pytest.approx(forward_ms)
    assert [each.backward_s * 1e3 for each in found.layers] == pytest.approx(backward_ms)


def plan_of(profile, *cuts, **options):
    options |= {"planner": "manual", "cuts": cuts, "replicas": (1,) * (len(cuts) + 1)}
    return partopt.solve(partopt.Job(profile, partopt.Topology.load("v100-pcie"), **options)).plan


TWO = profile_of(
    [measurement([1.0, 1.0], output_bytes=[5, 6], microbatch_size=8)], names=["first", "second"]
)
PLAN = plan_of(TWO, 1)
GPU = {"deviceProperties": [{"id": 0, "name": "NVIDIA H200", "totalGlobalMem": 150754820096}]}


def imported(path, found=None, profile=TWO, plan=PLAN, fields=(), **options):
    """The times of one trace, by default the one made by hand."""
    file = write(path / "t.json", on_gpu() if found is None else found, **dict(fields))
    return torch_profile.import_times([file], profile, plan, **options)


def test_on_a_gpu_the_time_is_that_of_the_kernels(tmp_path):
    """Each kernel once: by its launch, by none, by its operation. Messages are not computing."""
    profile = imported(tmp_path, fields=GPU)
    check(profile, [0.150, 0.200], [0.180, 0.400])
    [found] = profile.measurements
    assert found.optimizer_s == pytest.approx(70e-6)
    assert [each.output_bytes for each in found.layers] == [5, 6]
    assert profile.layers == TWO.layers
    assert found.step_s is None and found.coverage is None
    device = profile.device
    assert (device.name, device.type, device.memory_bytes) == ("NVIDIA H200", "cuda", 150754820096)
    [note] = profile.notes
    assert note.code == "times-of-a-trace" and "medians of 1 passes" in note.text
    profile.save(str(tmp_path / "measured.json"))
    assert Profile.load(str(tmp_path / "measured.json")) == profile
    assert partopt.solve(partopt.Job(profile, partopt.Topology.load("workstation-2"))).plan.stages


def test_of_three_steps_the_first_is_left_out_and_the_rest_have_a_median(tmp_path):
    found = []
    for number, factor in enumerate((9, 1, 2)):
        ts = number * 10_000.0
        found.append(event("user_annotation", f"ProfilerStep#{number}", ts - 1, 9_000))
        slower = {"kernel": factor}
        found += [each | {"dur": each["dur"] * slower.get(each["cat"], 1)} for each in on_gpu(ts)]
    profile = imported(tmp_path, found, device="mine")
    check(profile, [0.225, 0.300], [0.270, 0.600])
    assert profile.device.name == "mine"
    assert "medians of 2 passes" in profile.notes[0].text
    assert "the first step left out" in profile.notes[0].text
    assert profile.notes[0].fields["traces"][0] in profile.notes[0].text


def test_the_stages_of_several_processes_are_put_together(tmp_path):
    """Each process has one of the stages; the order of the files does not matter."""
    paths = []
    for stage in (0, 1):
        found = [each for each in on_gpu() if not each["name"].startswith(f"PP:{1 - stage}")]
        paths.append(write(tmp_path / f"{stage}.json", found))
    with pytest.raises(PartoptError, match="no action of stage 1"):
        torch_profile.import_times(paths[:1], TWO, PLAN)
    one, other = (torch_profile.import_times(each, TWO, PLAN) for each in (paths, paths[::-1]))
    assert one.measurements == other.measurements


def test_a_forward_that_the_backward_runs_again_is_not_counted_twice(tmp_path):
    profile = imported(tmp_path, plan=plan_of(TWO, 1, recompute="always"))
    check(profile, [0.150, 0.200], [0.030, 0.200])


def test_a_compressed_trace_is_the_same(tmp_path):
    plain = imported(tmp_path)
    (tmp_path / "t.json.gz").write_bytes(gzip.compress((tmp_path / "t.json").read_bytes()))
    packed = torch_profile.import_times([tmp_path / "t.json.gz"], TWO, PLAN)
    assert packed.measurements == plain.measurements


def test_an_event_without_a_time_is_named(tmp_path):
    event = 'traceEvents[1] "aten::linear": no time: '
    for fields, error in (
        ({"dur": None}, event + "ts 2.0, dur nan"),
        ({"ts": None}, event + "ts nan"),
        ({"dur": -3}, event + "ts 2.0, dur -3.0"),
        ({"ts": "inf"}, event + "ts inf"),
        ({"dur": "long"}, "Expected `float`, got `str` - at `$.traceEvents[1].dur`"),
        ({"name": "a\x1b[31m", "dur": -1}, 'traceEvents[1] "a\\x1b[31m": no time'),
        ({"args": 7}, "Expected `object`, got `int` - at `$.traceEvents[1].args`"),
    ):
        found = on_gpu()
        found[1] = {key: own for key, own in (found[1] | fields).items() if own is not None}
        with pytest.raises(PartoptError) as raised:
            imported(tmp_path, found)
        assert raised.value.message.startswith(f"{tmp_path / 't.json'}: {error}")
        assert raised.value.hint and raised.value.exit_code == 2


JUNK = [None, -1, 1e300, "x", "", [], {}, True, 2**70, float("inf"), "PP:0F0", "PP:9B9"]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_a_trace_holds_it_is_read_or_refused(tmp_path, seed):
    """Values of events replaced by junk, events dropped and repeated, files cut: no other error."""
    draw = random.Random(seed)
    found = on_gpu()
    for _ in range(draw.choice([1, 3, 30])):
        chosen = draw.choice(found)
        place = draw.choice([chosen, chosen.get("args", chosen)])
        if isinstance(place, dict) and place:
            place[draw.choice(list(place))] = draw.choice(JUNK)
        if draw.random() < 0.3:
            found.append(dict(draw.choice(found)))
        if draw.random() < 0.3:
            found.pop(draw.randrange(len(found)))
    path = write(tmp_path / "t.json", found)
    if seed % 5 == 0:
        path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])
    try:
        profile = torch_profile.import_times([path], TWO, PLAN)
    except PartoptError as error:
        starts = (str(path), "of the plan's 2 stages", "stage ")
        assert all(part.message.startswith(starts) for part in error.parts)
        return
    assert list(profile.faults()) == []


def test_what_is_not_a_trace_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "t.json"
    for content, error in (
        (b"", "the file is empty"),
        (b"{", "input data was truncated"),
        (json.dumps({"traceEvents": on_gpu()}).encode()[:900], "input data was truncated"),
        (b"[]", 'no list "traceEvents"'),
        (b'{"traceEvents": 3}', 'no list "traceEvents"'),
        (b'{"schema": "partopt.plan/1"}', 'no list "traceEvents"'),
        (b'{"traceEvents": []}', "no operations"),
        (b"\x1f\x8bnot gzip", "cannot be uncompressed"),
        (gzip.compress(b'{"traceEvents": []}', mtime=0)[:-12], "cannot be uncompressed"),
        (b"\xff\xfe", ""),
        (b"[" * 100_000, ""),
    ):
        path.write_bytes(content)
        with pytest.raises(PartoptError) as raised:
            torch_profile.import_times([path], TWO, PLAN)
        assert raised.value.message.lower().startswith(f"{path}: {error}".lower())


@pytest.mark.parametrize("packed", [False, True])
def test_a_trace_may_be_as_large_as_is_stated_and_no_larger(tmp_path, monkeypatch, packed):
    monkeypatch.setattr(torch_profile, "LARGEST", 20_000)
    path, content = tmp_path / "t.json", json.dumps({"traceEvents": on_gpu()}).encode()
    for size, refused in ((20_000, False), (20_001, True), (10**6, True)):
        padded = content.ljust(size)
        path.write_bytes(gzip.compress(padded) if packed else padded)
        if refused:  # before it is read
            with pytest.raises(PartoptError, match="more than"):
                torch_profile.import_times([path], TWO, PLAN)
        else:
            check(torch_profile.import_times([path], TWO, PLAN), [0.150, 0.200], [0.180, 0.400])


def test_work_is_of_the_action_in_which_it_begins(tmp_path):
    """At its first microsecond, too; what begins as it ends is of the next."""
    names = ("PP:0F0", "PP:1F0", "PP:1B0", "PP:0B0")
    found = [event("user_annotation", name, 10 * n, 10) for n, name in enumerate(names)]
    found += [event("cpu_op", "aten::mm", 10 * n, n + 1) for n in range(4)]
    check(imported(tmp_path, found), [1e-3, 2e-3], [4e-3, 3e-3])


def test_passes_that_cannot_be_timed_are_refused(tmp_path):
    forwards = [each for each in on_gpu() if "B0" not in each["name"]]
    with pytest.raises(PartoptError, match="stage 0: the traces have no whole pass of it"):
        imported(tmp_path, forwards)
    overlapping = on_gpu()
    overlapping[0]["dur"] = 25  # beyond the start of the second
    with pytest.raises(PartoptError, match=r"PP:1F0 begins at .* before PP:0F0"):
        imported(tmp_path, overlapping)
    other = profile_of([measurement([1.0, 1.0], microbatch_size=4)], names=["first", "second"])
    with pytest.raises(PartoptError, match="not measured at a microbatch size of 8"):
        imported(tmp_path, profile=other)


ACTIONS = [("0F0", 10), ("0F1", 14), ("1F0", 30), ("1I0", 40), ("1W0", 8), ("0B0", 50)]


def pipeline():
    """Actions of two stages on one thread, each an operation of 4 us less than the range; the
    backwards run on a thread of their own, and a receive is no computing.
    """
    found, now = [], 0.0
    for name, duration in ACTIONS:
        thread = 2 if name[1] in "BIW" else 1
        found.append(event("user_annotation", f"PP:{name}", now, duration))
        found.append(event("cpu_op", "aten::mm", now + 1, duration - 4, thread))
        found.append(event("cpu_op", "c10d::recv_", now + duration - 2, 1, thread))
        now += duration + 5
    return found


def test_a_stage_is_timed_by_its_actions_and_its_layers_share_it_as_before(tmp_path):
    """Stage 0, one layer: forward the median of 6 and 10 us, backward 46. Stage 1, layers of 1 and
    3 s: forward 26 us, backward the parts of 36 and 4.
    """
    profile = profile_of([measurement([1.0, 1.0, 3.0], [2.0, 1.0, 3.0], microbatch_size=8)])
    found = imported(tmp_path, pipeline(), profile, plan_of(profile, 1))
    check(found, [8e-3, 6.5e-3, 19.5e-3], [46e-3, 10e-3, 30e-3])


def test_stages_that_the_plan_has_not_or_the_traces_have_not_are_named(tmp_path):
    four, five = (profile_of([measurement([1.0] * n, microbatch_size=8)]) for n in (4, 5))
    plain = [each for each in on_gpu() if not each["name"].startswith("PP:")]
    later = [each | {"ts": each["ts"] + 1000} for each in pipeline()]
    for each in later:
        each["name"] = each["name"].replace("PP:0", "PP:3").replace("PP:1", "PP:2")
    four_stages = pipeline() + later
    for found, profile, cuts, error in (
        (pipeline(), four, (1, 2), r"of the plan's 3 stages .* no action of stage 2"),
        (four_stages, four, (1,), r"of the plan's 2 stages .* the plan has no stage 2, 3$"),
        (plain, four, (1, 2), "no action of a pipeline"),
        (pipeline(), five, (1,), "the plan has 4 layers, the profile 5"),
    ):
        with pytest.raises(PartoptError, match=error):
            imported(tmp_path, found, profile, plan_of(four, *cuts))


def test_a_pipeline_of_torch_is_read(tmp_path):
    """Two stages of torch's runtime in one process, the second of far larger matrices."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        parts = [torch.nn.Linear(16, 512), torch.nn.Linear(512, 512)]
        stages = [
            PipelineStage(part, index, 2, torch.device("cpu")) for index, part in enumerate(parts)
        ]
        schedule = _PipelineScheduleRuntime(stages, 2, loss_fn=lambda y, t: (y - t).square().mean())
        (tmp_path / "order.csv").write_text("0F0,1F0,1I0,1W0,0B0,0F1,1F1,1I1,1W1,0B1\n")
        schedule._load_csv(str(tmp_path / "order.csv"), format="compute_only")
        x, target = torch.randn(256, 16), torch.randn(256, 512)
        path = record(tmp_path / "pp.json", lambda: schedule.step(x, target=target), 3)
    finally:
        dist.destroy_process_group()
    profile = profile_of([measurement([1.0, 1.0], microbatch_size=128)])
    found = torch_profile.import_times([path], profile, plan_of(profile, 1))
    ranges = [each for each in traces.events(path) if each["name"].startswith("PP:1F")]
    longest = max(each["dur"] for each in ranges) / 1e6
    first, second = found.measurements[0].layers
    assert first.forward_s > 0 and 0 < second.forward_s <= longest
    assert first.backward_s > 0 and second.backward_s > 0
