"""The profiler on a device with a queue, which is played in numbers: what it times, and what of."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace

from partopt.documents.profile import Device, Environment, Profile
from partopt.errors import PartoptError
from partopt.profiler import ProfilingStopped
from partopt.profiler.conditions import ClockRate
from partopt.profiler.device import CudaClock
from partopt.profiler.measuring import profile_of
from partopt.profiler.step import device_failure
from partopt.profiler.summary import note_device
from partopt.report.profile_text import render_sizes
from tests.forked import start_ranks
from tests.gpu.device import FakeDevice, PaperTime, installed
from tests.gpu.layers import layers
from tests.helpers import ROOT
from tests.profiler.helpers import structure


@pytest.fixture
def device():
    with installed(FakeDevice(PaperTime())) as found:
        yield found


def profile(model, **options):
    options = {"steps": 3, "clock": CudaClock(), **options}
    return structure(model, lambda size: torch.ones(size), **options)


def times(measured, name):
    return [getattr(each, name) for each in measured.measurements[0].layers]


FOUR = [(1e-3, 2e-3)] * 4


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_failure_of_the_device_names_its_layer(device, direction):
    with pytest.raises(PartoptError) as failed:
        profile(layers(device, *FOUR, fails=direction))
    assert (failed.value.code, failed.value.fields["layer"]) == ("device-failed", "2")
    assert failed.value.message == (
        f"the device failed in the {direction} of 2: CUDA error: device-side assert triggered"
    )
    assert "CUDA_LAUNCH_BLOCKING=1" in failed.value.hint


def test_ranks_of_a_group_are_not_told_to_wait_for_each_other(monkeypatch):
    """Under CUDA_LAUNCH_BLOCKING=1 a host waits within an exchange for the other's."""
    dist = torch.distributed
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    error = device_failure("in a step", RuntimeError("CUDA error: device-side assert triggered"))
    assert "profile one rank's part alone" in error.hint
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    error = device_failure("in a step", RuntimeError("CUDA error: device-side assert triggered"))
    assert error.hint.endswith("CUDA_LAUNCH_BLOCKING=1 in the environment shows the line")


@pytest.mark.parametrize(
    ("name", "capability", "dtype", "rate_hz", "codes"),
    [
        ("Tesla V100", 7, "bfloat16", 1e9, ["emulated"]),
        ("Tesla V100", 7, "float16", None, []),
        ("A100", 8, "bfloat16", None, []),
        ("A100 MIG 1g.5gb", 8, "float32", None, ["no-clock"]),
        ("A100 MIG 1g.5gb", 8, "float32", 1e9, []),
    ],
)
def test_what_a_device_lacks_is_noted(name, capability, dtype, rate_hz, codes):
    environment = Environment(torch="2", python="3", partopt="0", sm_clock_hz=rate_hz)
    settings = SimpleNamespace(torch_device=torch.device("cuda"), dtype=dtype, autocast=None)
    with installed(FakeDevice(name=name, capability=capability)):
        assert [each.code for each in note_device(settings, environment)] == codes
        cpu = SimpleNamespace(torch_device=torch.device("cpu"), dtype=dtype, autocast=None)
        assert [*note_device(cpu, environment)] == []


@pytest.mark.parametrize("forwards", [1, 4, 9, 14])
def test_a_failure_in_a_later_step_is_an_error_of_ours_too(device, forwards):
    with pytest.raises(PartoptError) as failed:
        profile(layers(device, *FOUR, fails="forward", after=forwards))
    assert (failed.value.code, failed.value.fields["microbatch_size"]) == ("device-failed", 1)


def test_a_failure_keeps_the_sizes_that_were_finished(device):
    model = layers(device, *FOUR)

    def inputs(size):
        if size == 2:
            model[2].fails, model[2].left = "forward", 0
        return torch.ones(size)

    with pytest.raises(ProfilingStopped) as stopped:
        structure(model, inputs, microbatch_sizes=[1, 2], clock=CudaClock())
    assert stopped.value.error.code == "device-failed"
    assert [each.microbatch_size for each in stopped.value.profile.measurements] == [1]


def test_an_optimizers_step_is_timed_behind_other_work(device, monkeypatch):
    """Its launches take the host longer than the device, which has its gradients yet to make."""
    step = torch.optim.AdamW.step

    def launch(self, closure=None):
        for _ in range(4):
            device.host.sleep(1e-3)
            device.launch(0.2e-3)
        return step(self, closure)

    monkeypatch.setattr(torch.optim.AdamW, "step", launch)
    measured = profile(layers(device, *FOUR)).measurements[0]
    assert measured.optimizer_s == pytest.approx(0.8e-3, rel=0.01)


@pytest.mark.parametrize("steps", [1, 3])
def test_nothing_waits_or_is_calibrated_inside_of_a_timed_step(device, steps):
    def tell(_size, done, of):
        if of and not done:
            device.log.clear()
        if of and done == of:
            marks = {"synchronize": ".", "launch": "", "event": "e"}
            runs = "".join(marks[each] for each in device.log)
            assert runs == ("ee." + "e" * 10 + "..") * steps  # bare, forward and backward

    profile(layers(device, *FOUR), steps=steps, progress=tell)


def test_each_step_begins_as_far_behind_the_host_as_one_leaves_the_device(device):
    """The first layer's launch is slow; in training the end of the step before hides it."""
    measured = profile(layers(device, (3e-3, 1e-3), (1e-4, 9e-3), (1e-4, 9e-3)))
    assert times(measured, "forward_s") == pytest.approx([1e-3, 9e-3, 9e-3])
    assert measured.measurements[0].step_s == pytest.approx(38e-3)
    assert measured.measurements[0].overhead == pytest.approx(1)


def test_host_and_device_times_are_kept_and_the_page_names_what_launches_bound(device):
    slow, fast = (5e-3, 0.5e-3), (1e-3, 6e-3)
    measured = profile(layers(device, slow, slow, fast, slow))
    assert times(measured, "forward_host_s") == pytest.approx([5e-3, 5e-3, 1e-3, 5e-3])
    assert times(measured, "backward_host_s") == pytest.approx([5e-3, 5e-3, 1e-3, 5e-3])
    [note] = [each for each in measured.notes if each.code == "launch-bound"]
    assert note.fields["layers"] == ["0", "1", "3"]
    bound = sum(
        layer.forward_s + layer.backward_s
        for layer, name in zip(measured.measurements[0].layers, "0123", strict=True)
        if name != "2"
    )
    whole = sum(times(measured, "forward_s") + times(measured, "backward_s"))
    assert note.fields["share"] == pytest.approx(bound / whole)
    assert "`compile` or a larger microbatch" in note.text


@pytest.mark.slow
def test_a_step_that_launches_bound_takes_what_the_host_takes(device):
    measured = profile(layers(device, *[(5e-3, 1e-3)] * 4))
    assert measured.measurements[0].step_s == pytest.approx(40e-3, rel=0.1)
    assert not [e.code for e in profile(layers(device, *FOUR)).notes if e.code == "launch-bound"]


@pytest.mark.slow
@pytest.mark.parametrize("raises_s", [0.1, 1.0, 3.0])
def test_it_is_warmed_up_until_steps_are_steady(device, raises_s):
    """A clock rate that doubles over some seconds: the steps that count have all of it."""
    first_s = device.host.now_s()
    slow = lambda now: 2 - min((now - first_s) / raises_s, 1)  # noqa: E731
    measured = profile(layers(device, *FOUR, slow=slow))
    assert times(measured, "forward_s") == pytest.approx([2e-3] * 4, rel=0.02)
    assert not [each for each in measured.notes if each.code == "unsteady"]


@pytest.mark.slow
def test_steps_that_never_become_steady_are_noted(device):
    first_s = device.host.now_s()
    slow = lambda now: 1.2 ** min(now - first_s, 40)  # noqa: E731
    measured = profile(layers(device, *FOUR, slow=slow), steps=1)
    assert [each.fields["microbatch_size"] for each in measured.notes if each.code == "unsteady"]
    assert device.current.end_s < 700


# --- what decides the clock ---------------------------------------------------------------------


def test_the_clock_rate_and_what_lowers_it_are_recorded(monkeypatch):
    begun = []
    nvml = SimpleNamespace(
        nvmlInit=lambda: begun.append("library"),
        nvmlDeviceGetHandleByUUID=lambda name: begun and name,
        nvmlDeviceGetClockInfo=lambda handle, kind: {("GPU-7", 1): 1410}[handle, kind],
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 0x1 | 0x4 | 0x40,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    properties = SimpleNamespace(uuid="7")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
    rate = ClockRate(torch.device("cuda"))
    rate.sample()
    found = rate.describe(Environment())
    assert found.sm_clock_hz == 1.41e9
    assert found.throttled_by == ["power cap", "thermal slowdown by the hardware"]
    nvml.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: 0x02 | 0x08 | 0x10 | 0x20 | 0x80
    rate.sample()
    assert rate.describe(Environment()).throttled_by == [
        "application clocks",
        "power cap",
        "hardware slowdown",
        "sync boost",
        "thermal slowdown by the driver",
        "thermal slowdown by the hardware",
        "power brake",
    ]
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    rate = ClockRate(torch.device("cuda"))
    rate.sample()
    assert rate.describe(Environment()) == Environment()


def attending():
    class Attending(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4))

        def forward(self, x):
            x = (x * self.weight).view(1, 1, 1, 4)
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    return Attending()


def test_versions_and_settings_are_recorded_and_shown():
    torch.set_float32_matmul_precision("high")
    try:
        measured = structure(attending(), lambda size: torch.ones(size, 4))
    finally:
        torch.set_float32_matmul_precision("highest")
    known = measured.environment
    assert known.float32_matmul_precision == "high"
    assert known.attention == ["flash_attention_for_cpu"]
    shown = replace(
        known,
        driver="550.54",
        cudnn="90100",
        nccl="2.21.5",
        matmul_tf32=True,
        cudnn_tf32=False,
        cudnn_benchmark=True,
        sm_clock_hz=1.41e9,
        throttled_by=["power cap"],
    )
    gpu = Device(name="GPU", type="cuda")
    page = render_sizes(replace(measured, environment=shown, device=gpu))
    for words in (
        "driver 550.54",
        "cuDNN 90100",
        "NCCL 2.21.5",
        "float32 products high",
        "TF32 in products, cuDNN's benchmark",
        "attention flash_attention_for_cpu",
        "1410 MHz",
        "lowered by power cap",
    ):
        assert words in " ".join(page.split()), words


@pytest.mark.slow
def test_a_size_is_not_added_under_other_settings():
    from partopt.documents.profile import Model
    from partopt.profiler.settings import ProfileSettings, Subject
    from tests.profiler.helpers import FakeClock

    first = structure(attending(), lambda size: torch.ones(size, 4))

    def resume(**changes):
        environment = replace(first.environment, **changes)
        settings = ProfileSettings(microbatch_sizes=[2], device="cpu", granularity="leaf", steps=1)
        subject = Subject(
            attending(), lambda size: torch.ones(1, size // size * 4), None, settings, FakeClock()
        )
        return profile_of(subject, Model(name="x"), replace(first, environment=environment))

    assert len(resume().measurements) == 2
    resume(float32_matmul_precision=None, attention=None)  # of a file that does not say
    for changes in (
        {"float32_matmul_precision": "high"},
        {"driver": "1"},
        {"cudnn": "1"},
        {"nccl": "1"},
        {"matmul_tf32": True},
        {"cudnn_tf32": True},
        {"cudnn_benchmark": True},
        {"attention": ["efficient_attention"]},
    ):
        with pytest.raises((PartoptError, ProfilingStopped)) as refused:
            resume(**changes)
        error = getattr(refused.value, "error", None) or refused.value
        [name] = changes
        assert error.fields["mismatched"] == [f"environment.{name}"]


# --- a group ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_rank_without_memory_ends_all_within_seconds_though_nobody_hangs_up(tmp_path):
    """The other waits in a collective that nothing ends but what watches for it."""
    script = str(Path(__file__).with_name("full_rank.py"))
    first, second = start_ranks(2, script, [str(tmp_path)], ROOT)
    done = first.wait()  # within seconds of rank 1, not of its start
    ended_s = time.time()
    second.wait(0)
    assert done.returncode == 1
    assert "another rank of the group ran out of memory" in done.stderr
    assert ended_s - (tmp_path / "full").stat().st_mtime < 20
    finished = Profile.load(tmp_path / "0.json").measurements
    assert [(each.microbatch_size, each.out_of_memory) for each in finished] == [(2, False)]
