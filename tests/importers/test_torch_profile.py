"""Traces of torch.profiler put onto a profile: real ones, and one of a GPU made by hand.

The witness of a real trace is the names of its operations: what `SinBackward0` took is the backward
of the layer that is a sine, whatever its sequence number says.
"""

from __future__ import annotations

import gzip
import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch.utils.checkpoint import checkpoint

import partopt
from partopt.documents.profile import Profile
from partopt.errors import PartoptError
from partopt.importers.torch_profile import import_times, trace
from tests.helpers import measurement, profile_of
from tests.importers import traces
from tests.importers.traces import NAMES, Three, event, on_gpu, onto, record, training, write


def milliseconds(profile: Profile) -> list[tuple[float, float]]:
    [found] = profile.measurements
    return [(each.forward_s * 1e3, each.backward_s * 1e3) for each in found.layers]


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of `Three`, its modules recorded by the profiler."""
    path = tmp_path_factory.mktemp("trace") / "modules.json"
    return record(path, training(Three(named=False)), 3, marked=True, with_stack=True)


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of `Three`, its layers named by ranges of the user."""
    path = tmp_path_factory.mktemp("trace") / "named.json"
    return record(path, training(Three(named=True)), 3, marked=True)


def backwards(path: Path, name: str) -> list[float]:
    """Seconds of the backward of one name, an occurrence each, the first left out."""
    found = [
        each
        for each in traces.events(path)
        if each["name"] == f"autograd::engine::evaluate_function: {name}"
    ]
    return [each["dur"] / 1e6 for each in sorted(found, key=lambda each: each["ts"])][1:]


@pytest.mark.parametrize("kind", ["modules", "named"])
def test_the_backward_of_a_layer_is_that_of_its_operations_by_name(kind, request):
    path = request.getfixturevalue(kind)
    sine, power, _ = import_times([path], onto()).measurements[0].layers
    assert sine.backward_s >= statistics.median(backwards(path, "SinBackward0"))
    assert power.backward_s == pytest.approx(statistics.median(backwards(path, "ExpBackward0")))


def test_what_was_computed_is_in_a_layer_once(named):
    """Sums over the last step, of which two are kept: outermost operations by name, from the JSON.

    The optimizer's are none of a layer's, nor is making the input, before the first of them.
    """
    [step] = [each for each in traces.events(named) if each["name"] == "ProfilerStep#3"]
    [update] = [
        each
        for each in traces.events(named)
        if each["name"].startswith("Optimizer.step#") and each["ts"] > step["ts"]
    ]
    first = max(each["ts"] for each in traces.events(named) if each["name"] == "sine")
    outermost, end = 0.0, 0.0
    for each in sorted(traces.events(named), key=lambda each: (each["ts"], -each.get("dur", 0))):
        if each.get("cat") == "cpu_op" and first <= each["ts"] < update["ts"] and each["ts"] >= end:
            outermost, end = outermost + each["dur"] / 1e6, each["ts"] + each["dur"]
    one_step = write(
        named.parent / "one.json",
        [each for each in traces.events(named) if each["ts"] >= step["ts"]],
    )
    found = import_times([one_step], onto()).measurements[0].layers
    assert sum(each.forward_s + each.backward_s for each in found) == pytest.approx(outermost)


def test_times_are_the_traces_and_all_else_is_the_profiles(named):
    profile = import_times([named], onto((2, 4)), microbatch_size=4)
    [found] = profile.measurements
    assert found.microbatch_size == 4
    assert [each.output_bytes for each in found.layers] == [10, 20, 30]
    assert profile.layers == onto().layers
    assert (profile.device.name, profile.device.type) == ("CPU of a trace", "cpu")
    assert found.optimizer_s and found.optimizer_s > 0
    assert found.step_s is None and found.coverage is None
    [note] = profile.notes
    assert note.code == "times-of-a-trace"
    assert "medians of 2 passes" in note.text and "the first step left out" in note.text


def test_a_compressed_trace_is_the_same(named, tmp_path):
    (tmp_path / "named.json.gz").write_bytes(gzip.compress(named.read_bytes()))
    packed = import_times([tmp_path / "named.json.gz"], onto())
    assert packed.measurements == import_times([named], onto()).measurements


def test_without_steps_the_first_of_three_passes_is_left_out(tmp_path):
    path = record(tmp_path / "t.json", training(Three(named=True)), 3, marked=False)
    power = import_times([path], onto()).measurements[0].layers[1]
    assert power.backward_s == pytest.approx(statistics.median(backwards(path, "ExpBackward0")))


def test_two_passes_are_both_kept(tmp_path):
    path = record(tmp_path / "t.json", training(Three(named=True)), 2, marked=False)
    [note] = import_times([path], onto()).notes
    assert "medians of 2 passes" in note.text and "left out" not in note.text


def test_a_pass_without_a_backward_is_not_counted(tmp_path):
    model = Three(named=True)
    step = training(model)

    def evaluate_and_train() -> None:
        with torch.no_grad():
            model(torch.randn(4, 64))
        step()

    path = record(tmp_path / "t.json", evaluate_and_train, 3, marked=False)
    assert "medians of 2 passes" in import_times([path], onto()).notes[0].text


def test_only_forwards_are_refused(tmp_path):
    model = Three(named=True)
    x = torch.randn(4, 64)
    path = record(tmp_path / "t.json", lambda: model(x).sum(), 3, marked=True)
    with pytest.raises(PartoptError, match="no backward of these layers"):
        import_times([path], onto())


def test_a_forward_that_the_backward_computes_again_is_not_counted_twice(tmp_path):
    """With checkpointing the ranges of the layers begin once more inside the backward."""
    model = Three(named=True)

    def step() -> None:
        x = torch.randn(4, 64, requires_grad=True)
        checkpoint(model, x, use_reentrant=False).square().sum().backward()

    path = record(tmp_path / "t.json", step, 2, marked=False)
    profile = import_times([path], onto())
    assert [note.code for note in profile.notes] == ["times-of-a-trace", "recomputed"]
    assert "medians of 2 passes" in profile.notes[0].text


def test_a_module_called_twice_is_two_layers(tmp_path):
    model = Three(named=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)

    def step() -> None:
        x = model(model(torch.randn(4, 64, requires_grad=True)))
        x.sum().backward()
        optimizer.step()

    path = record(tmp_path / "t.json", step, 2, marked=True)
    single = onto()
    layers = [*single.layers, *(replace(layer, call=1) for layer in single.layers)]
    twice = Profile(
        model=single.model,
        device=single.device,
        dtype="float32",
        layers=layers,
        measurements=[measurement([1.0] * 6, microbatch_size=4)],
    )
    found = import_times([path], twice).measurements[0].layers
    durations = [
        each["dur"] / 1e6
        for each in sorted(traces.events(path), key=lambda each: each["ts"])
        if each["name"].endswith("evaluate_function: ExpBackward0")
    ]
    later, earlier = durations[0::2], durations[1::2]
    assert found[1].backward_s == pytest.approx(statistics.median(earlier))
    assert found[4].backward_s == pytest.approx(statistics.median(later))
    with pytest.raises(PartoptError, match="not as many passes of every layer"):
        import_times(
            [write(tmp_path / "x.json", [e for e in traces.events(path) if not _first(e, path)])],
            twice,
        )


def _first(found: dict[str, Any], path: Path) -> bool:
    """Whether it is the first range of the sine."""
    return found["name"] == "sine" and found["ts"] == min(
        each["ts"] for each in traces.events(path) if each["name"] == "sine"
    )


TWO = profile_of(
    [measurement([1.0, 1.0], output_bytes=[5, 6], microbatch_size=8)], names=["first", "second"]
)
GPU = {"deviceProperties": [{"id": 0, "name": "NVIDIA H200", "totalGlobalMem": 150754820096}]}


def test_on_a_gpu_the_time_is_that_of_the_kernels(tmp_path):
    """Each kernel once: by its launch, by none, by its operation. Messages are not computing."""
    profile = import_times([write(tmp_path / "gpu.json", on_gpu(), **GPU)], TWO)
    assert milliseconds(profile) == [
        pytest.approx((0.150, 0.180)),
        pytest.approx((0.200, 0.400)),
    ]
    assert profile.measurements[0].optimizer_s == pytest.approx(70e-6)
    assert (profile.device.name, profile.device.type) == ("NVIDIA H200", "cuda")
    assert profile.device.memory_bytes == 150754820096


def test_of_three_steps_the_first_is_left_out_and_the_rest_have_a_median(tmp_path):
    found = []
    for number, factor in enumerate((9, 1, 2)):
        ts = number * 10_000.0
        found.append(event("user_annotation", f"ProfilerStep#{number}", ts - 1, 9_000))
        found += [
            {**each, "dur": each["dur"] * (factor if each["cat"] == "kernel" else 1)}
            for each in on_gpu(ts)
        ]
    profile = import_times([write(tmp_path / "gpu.json", found)], TWO, device="mine")
    assert milliseconds(profile)[1] == pytest.approx((0.300, 0.600))
    assert profile.measurements[0].layers[1].forward_stdev_s == pytest.approx(0.1e-3 * 2**0.5)
    assert profile.device.name == "mine"


def test_the_layers_of_several_processes_are_put_together(tmp_path):
    """Each process has one of the layers; the order of the files does not matter."""
    first, second = on_gpu(), on_gpu()
    paths = [
        write(tmp_path / "0.json", [each for each in first if each["name"] != "second"]),
        write(tmp_path / "1.json", [each for each in second if each["name"] != "first"]),
    ]
    with pytest.raises(PartoptError, match="no range of 1 layers: second"):
        import_times(paths[:1], TWO)
    assert [layer.name for layer in import_times(paths, TWO).layers] == ["first", "second"]
    assert milliseconds(import_times(paths, TWO)) == milliseconds(import_times(paths[::-1], TWO))


def test_much_outside_all_layers_is_noted(tmp_path):
    """As much again as all layers, before the first of them begins."""
    extra = [event("cpu_op", "aten::copy_", -20, 5, 1), event("cuda_runtime", "x", -19, 1, 1)]
    extra[1]["args"]["correlation"] = 77
    kernel = event("kernel", "copy", 0, 930, 7, correlation=77)
    profile = import_times([write(tmp_path / "gpu.json", [*extra, *on_gpu(), kernel])], TWO)
    assert [note.code for note in profile.notes] == ["times-of-a-trace", "outside-layers"]
    assert "50% of what the traces computed" in profile.notes[1].text


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"dur": None}, 'traceEvents[1] "aten::linear": no dur'),
        ({"ts": None}, 'traceEvents[1] "aten::linear": no ts'),
        ({"dur": -3}, 'traceEvents[1] "aten::linear": dur: -3 is negative'),
        ({"ts": "nan"}, 'traceEvents[1] "aten::linear": ts: nan is not finite'),
        ({"dur": "long"}, "traceEvents[1]: dur: "),
        ({"name": "a\x1b[31m", "dur": -1}, 'traceEvents[1] "a\\x1b[31m": dur: -1 is negative'),
        ({"args": 7}, "traceEvents[1]: args: "),
    ],
)
def test_an_event_without_a_time_is_named(tmp_path, fields, error):
    found = on_gpu()
    found[1] = {key: value for key, value in {**found[1], **fields}.items() if value is not None}
    path = write(tmp_path / "t.json", found)
    with pytest.raises(PartoptError) as raised:
        import_times([path], TWO)
    assert raised.value.message.startswith(f"{path}: {error}")
    assert raised.value.hint and raised.value.exit_code == 2


JUNK = [None, -1, 1e300, "x", "", [], {}, True, 2**70, float("inf"), "PP:0F0", "nn.Module: A_0"]


@pytest.mark.parametrize("seed", range(40))
def test_whatever_a_trace_holds_it_is_read_or_refused(tmp_path, named, seed):
    """Values of events replaced by junk, events dropped and repeated, files cut: no other error."""
    draw = random.Random(seed)
    found = traces.events(named) if seed % 2 else on_gpu()
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
        profile = import_times([path], onto() if seed % 2 else TWO)
    except PartoptError as error:
        assert all(part.message.startswith((str(path), "the traces")) for part in error.parts)
        return
    assert list(profile.faults()) == []


def test_all_faults_of_a_file_are_said_to_be_of_it(tmp_path):
    found = [{**each, "dur": -1} for each in on_gpu()]
    with pytest.raises(PartoptError) as raised:
        import_times([write(tmp_path / "t.json", found)], TWO)
    assert len(raised.value.parts) == len(found)
    assert raised.value.fields["file"] == str(tmp_path / "t.json")


@pytest.mark.parametrize(
    ("content", "error"),
    [
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
    ],
)
def test_what_is_not_a_trace_is_refused(tmp_path, content, error):
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(PartoptError) as raised:
        import_times([tmp_path / "t.json"], TWO)
    assert raised.value.message.lower().startswith(f"{tmp_path / 't.json'}: {error}".lower())


def test_a_huge_file_is_refused_before_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "LARGEST", 1000)
    for name, content in (("t.json", b" " * 1001), ("t.gz", gzip.compress(b" " * 10**6))):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(PartoptError, match="more than"):
            import_times([tmp_path / name], TWO)


def test_layers_that_overlap_or_lie_in_one_another_are_refused(tmp_path):
    for duration in (25, 40):  # beyond the start of the second, beyond its end
        found = on_gpu()
        found[0]["dur"] = duration
        with pytest.raises(PartoptError, match=r'"second" begins at .* before "first"'):
            import_times([write(tmp_path / "t.json", found)], TWO)


def test_modules_that_are_not_the_profiles_are_refused(modules):
    other = onto()
    other.layers[1], other.layers[2] = other.layers[2], other.layers[1]
    with pytest.raises(PartoptError, match="no call of a Power, which is layer power"):
        import_times([modules], other)


def test_the_microbatch_size_is_asked_for_where_several_were_measured(named):
    with pytest.raises(PartoptError, match="three has 2, 4") as raised:
        import_times([named], onto((2, 4)))
    assert raised.value.fields == {"option": "microbatch_size"}
    with pytest.raises(PartoptError, match="not measured at a microbatch size of 3"):
        import_times([named], onto((2, 4)), microbatch_size=3)


ACTIONS = [("0F0", 10), ("0F1", 14), ("1F0", 30), ("1I0", 40), ("1W0", 8), ("0B0", 50)]


def pipeline_trace(path: Path) -> Path:
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
    return write(path, found)


def test_a_stage_is_timed_by_its_actions_and_its_layers_share_it_as_before(tmp_path):
    """Stage 0, one layer: forward the median of 6 and 10 us, backward 46. Stage 1, layers of 1 and
    3 s: forward 26 us, backward the parts of 36 and 4.
    """
    profile = profile_of([measurement([1.0, 1.0, 3.0], [2.0, 1.0, 3.0], microbatch_size=8)])
    plan = plan_of(profile, "1")
    found = import_times([pipeline_trace(tmp_path / "pp.json")], profile, plan=plan)
    assert milliseconds(found) == [
        pytest.approx((8e-3, 46e-3)),
        pytest.approx((6.5e-3, 10e-3)),
        pytest.approx((19.5e-3, 30e-3)),
    ]


def plan_of(profile: Profile, cuts: str) -> partopt.Plan:
    topology = partopt.Topology.load("v100-pcie")
    splits = tuple(int(cut) for cut in cuts.split(","))
    job = partopt.Job(
        profile, topology, planner="manual", cuts=splits, replicas=(1,) * (len(splits) + 1)
    )
    return partopt.solve(job).plan


def test_stages_that_the_plan_has_not_or_the_traces_have_not_are_named(tmp_path):
    profile = profile_of([measurement([1.0] * 4, microbatch_size=8)])
    path = pipeline_trace(tmp_path / "pp.json")
    with pytest.raises(PartoptError, match=r"of the plan's 3 stages .* no action of stage 2"):
        import_times([path], profile, plan=plan_of(profile, "1,2"))
    with pytest.raises(PartoptError, match="no action of a pipeline"):
        import_times([write(tmp_path / "t.json", on_gpu())], profile, plan=plan_of(profile, "1,2"))
    other = profile_of([measurement([1.0] * 5, microbatch_size=8)])
    with pytest.raises(PartoptError, match="the plan has 4 layers, the profile 5"):
        import_times([path], other, plan=plan_of(profile, "1"))


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
        path = record(tmp_path / "pp.json", lambda: schedule.step(x, target=target), 3, marked=True)
    finally:
        dist.destroy_process_group()
    profile = profile_of([measurement([1.0, 1.0], microbatch_size=128)])
    found = import_times([path], profile, plan=plan_of(profile, "1"))
    ranges = [each for each in traces.events(path) if each["name"].startswith("PP:1F")]
    longest = max(each["dur"] for each in ranges) / 1e6
    first, second = found.measurements[0].layers
    assert first.forward_s > 0 and 0 < second.forward_s <= longest
    assert first.backward_s > 0 and second.backward_s > 0


def test_the_profile_is_planned_as_any(named, tmp_path):
    profile = import_times([named], onto())
    profile.save(str(tmp_path / "measured.json"))
    assert Profile.load(str(tmp_path / "measured.json")) == profile
    assert partopt.solve(partopt.Job(profile, partopt.Topology.load("workstation-2"))).plan.stages
    assert [layer.name for layer in profile.layers] == NAMES
