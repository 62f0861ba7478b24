"""A run on a GPU: what it copies, what it loads before the first step, and what it checks where."""

from __future__ import annotations

import json
import re
import textwrap
from types import SimpleNamespace
from typing import ClassVar
from unittest import mock

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from partopt import Job, Plan, Topology, run_source, solve
from partopt.cost.memory import CHANNELS
from partopt.documents.training_run import Run
from partopt.errors import PartoptError
from partopt.profiler import measure_source
from partopt.profiler.source import find_model
from partopt.profiler.tensors import place
from partopt.profiler.weightless import RandomNumbers
from partopt.replay.cuts import Cut, cut_before
from partopt.replay.packing import Packing
from partopt.replay.stage import Crossing
from partopt.report.run_text import render as render_run
from partopt.runtime import check, link_measurement, run
from partopt.runtime.clock import DeviceClock
from partopt.runtime.context import Context, Direction, Progress
from partopt.runtime.engine import RankRun
from partopt.runtime.optimizers import warm_up
from partopt.runtime.processes import run_local
from partopt.runtime.run import RunOptions
from partopt.runtime.training import Microbatches, PlannedTraining, RankTraining
from tests.gpu.device import FRAGMENTS_BYTES, FakeDevice, PaperTime, installed
from tests.gpu.nccl import rehearse
from tests.helpers import flat
from tests.replay.replayed import (
    replayed,
    run_backwards,
    run_forwards,
    summed_gradients,
    worst_error,
)

GB, MEMORY = 10**9, ("reserved_bytes", "device_bytes")
MODEL = """
import torch
from torch import nn


def build(width=8):
    layers = [nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh())
              for _ in range(6)]
    return nn.Sequential(*layers)


def example_inputs(batch_size):
    return torch.randn(batch_size, 8)


def loss_fn(output, inputs):
    return output.square().mean()
"""


# --- what crosses and what is copied ----------------------------------------------------------


def test_a_tensor_of_the_host_crosses_through_the_device_and_comes_back():
    gpu = torch.device("cuda", 0)
    with FakeTensorMode():
        own = [torch.zeros(2, 3, device="cuda"), torch.zeros(4, dtype=torch.int64)]
        crossings = [
            Crossing((2, 3), torch.float32, True),
            Crossing((4,), torch.int64, False, on_host=True),
        ]
        alone = Packing(crossings[1:])
        assert alone.pack(own[1:], gpu).device.type == "cuda"
        there = [each.to(gpu) for each in own]
        found = Packing(crossings).give_back(there)
        assert [each.device.type for each in found] == ["cuda", "cpu"]
        assert [each.dtype for each in found] == [each.dtype for each in own]


def test_where_a_tensor_lies_is_known_of_every_cut():
    case = replayed(
        lambda: nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]), lambda n: torch.randn(n, 4)
    )
    own = cut_before(case.record, 1)
    assert [each.on_host for each in own.crossings] == [True]
    gpu = torch.device("cuda", 0)
    moved = Cut(own.keys, tuple(each._replace(device=gpu) for each in own.likeness))
    assert [each.on_host for each in moved.crossings] == [False]


def test_inputs_are_copied_from_pinned_memory_and_the_host_goes_on(monkeypatch):
    calls = []

    def pin(self):
        calls.append("pin")
        return self

    def to(self, device, dtype, non_blocking=False):
        calls.append((device.type, dtype, non_blocking))
        return self

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", to)
    inputs = {"x": torch.zeros(2), "ids": torch.zeros(2, dtype=torch.int64)}
    place(inputs, torch.device("cuda", 0), torch.bfloat16)
    assert calls == ["pin", ("cuda", torch.bfloat16, True), "pin", ("cuda", torch.int64, True)]
    calls.clear()
    place(inputs, torch.device("cpu"), torch.bfloat16)
    assert "pin" not in calls


# --- before the first step --------------------------------------------------------------------


class Counted(nn.Module):
    """A layer with running statistics and dropout, which counts its forwards and backwards."""

    forwards = backwards = 0

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        Counted.forwards += 1
        made = nn.functional.dropout(self.norm(self.linear(x)), 0.5)
        if made.requires_grad:
            made.register_hook(Counted.count)
        return made

    @staticmethod
    def count(_):
        Counted.backwards += 1


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_all_that_a_step_runs_is_run_before_and_leaves_nothing(recompute, monkeypatch):
    case = replayed(
        lambda: nn.Sequential(*[nn.Sequential(Counted(), nn.Tanh()) for _ in range(3)]),
        lambda n: torch.randn(n, 4),
    )
    packed, pack = [], Packing.pack
    monkeypatch.setattr(Packing, "pack", lambda *own: packed.append(own) or pack(*own))
    for s, stage in enumerate(case.stages(case.thirds(), recompute=recompute)):
        before = {name: each.clone() for name, each in stage.model.state_dict().items()}
        Counted.forwards = Counted.backwards = 0
        numbers = RandomNumbers()
        packed.clear()
        summed = [[] for _ in stage.parameters]
        hooks = [
            each.register_post_accumulate_grad_hook(lambda own, seen=seen: seen.append(own.grad))
            for each, seen in zip(stage.parameters, summed, strict=True)
        ]
        stage.warm_up(case.inputs[0], torch.device("cpu"))
        tried = int(s == 1)  # once without the model's inputs, which it may not need
        assert (Counted.forwards, Counted.backwards) == (2 + 2 * recompute + tried, 2)
        assert len(packed) == 2  # what is sent, and what goes back
        # of the second backward gradients are added to those of the first, not put in their place
        assert all(len(seen) == 2 and seen[0] is seen[1] for seen in summed)
        for hook in hooks:
            hook.remove()
        assert not numbers.advanced()
        assert not stage.losses
        assert all(each.grad is None for each in stage.parameters)
        for name, each in stage.model.state_dict().items():
            assert each.is_meta or torch.equal(each, before[name])


class Masked(nn.Module):
    """A chain whose layers compute with the model's inputs too, or with the first one's alone."""

    def __init__(self, reads):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
        self.reads = reads

    def forward(self, x):
        made = x
        for layer in self.layers:
            made = layer(made * x.abs() if self.reads else made)
        return made


@pytest.mark.slow
@pytest.mark.parametrize("reads", [False, True])
def test_stages_between_the_first_and_the_last_get_inputs_where_they_compute_with_them(reads):
    case = replayed(lambda: Masked(reads), lambda n: torch.randn(n, 4))
    stages = case.stages(case.thirds())
    asked = []
    for s, stage in enumerate(stages):
        stage.warm_up(case.inputs[0], torch.device("cpu"))
        inputs_of = stage._inputs_of
        stage._inputs_of = lambda m, s=s, given=inputs_of: asked.append(s) or given(m)
    losses, gradients, _ = case.reference
    torch.testing.assert_close(run_forwards(stages), losses)
    run_backwards(stages)
    assert worst_error(summed_gradients(stages), gradients) < 1e-6
    assert set(asked) == ({0, 1, 2} if reads else {0, 2})


@pytest.mark.slow
def test_inputs_are_drawn_and_pinned_before_a_step(made, monkeypatch):
    model, plan, _ = made
    training, cpu = PlannedTraining(plan, find_model(model), 4), torch.device("cpu")
    expected = [Microbatches(training, cpu, (1, 2))(number) for number in (5, 7)]
    pinned, pin_memory = [], torch.Tensor.pin_memory
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda own: pinned.append(own) or own)
    inputs = Microbatches(training, torch.device("cuda", 0), (1, 2))
    inputs.draw_step(4, 4)
    assert (len(pinned), list(inputs.drawn)) == (2, [5, 7])
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(PlannedTraining, "draw_on_host", None)  # nothing is drawn any more
    inputs.device = cpu
    assert all(map(torch.equal, [inputs(5), inputs(7)], expected))
    assert not inputs.drawn


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "partopt"])
def test_a_step_begins_with_its_inputs_drawn(made, monkeypatch, engine):
    model, plan, _ = made
    training = PlannedTraining(plan, find_model(model), 4, engine=engine)

    def first_and_last(context):
        own, drawn = RankTraining(training, context), []
        for stage in own.stages.values():
            stage.draws_ahead = True
        begin = RankRun.begin_step

        def noted(self, step):
            drawn.append({s: list(inputs.drawn) for s, inputs in own.inputs.items()})
            begin(self, step)

        with mock.patch.object(RankRun, "begin_step", noted):
            own.step()
            own.end_step()
            own.step()
        return drawn

    found = run_local(2, first_and_last, start="fork")
    assert found == [[{s: [0, 1, 2, 3]}, {s: [4, 5, 6, 7]}] for s in (0, 1)]


class Rated(torch.optim.SGD):
    """An optimizer that notes what it steps."""

    stepped: ClassVar = []

    def step(self, closure=None):
        Rated.stepped.append([tuple(each.shape) for each in self.param_groups[0]["params"]])
        return super().step(closure)


def test_an_optimizer_is_tried_on_small_parameters_of_the_same_dimensions():
    layer = nn.Linear(8, 4)
    before = [each.clone() for each in layer.parameters()]
    warm_up(Rated, list(layer.parameters()))
    assert Rated.stepped == [[(2, 2), (2,)]] * 2
    assert all(map(torch.equal, before, layer.parameters()))
    assert all(each.grad is None for each in layer.parameters())


# --- the clock --------------------------------------------------------------------------------


def test_times_of_a_step_count_from_its_barrier_and_are_read_at_its_end():
    with installed(FakeDevice(PaperTime())) as device:
        device.launch(0.5)  # of what came before
        clock, times = DeviceClock(), np.zeros((1, 3), np.int64)
        began_ns = clock.begin_step()
        device.launch(0.3)
        clock.note(times, (0, 1))
        stamp = clock.now()
        device.launch(0.2)
        clock.note(times, (0, [0, 2]), stamp)
        assert not times.any()
        clock.end_step()
        assert (times - began_ns)[0].tolist() == pytest.approx([0.3e9] * 3, abs=2)
        assert device.host.now_s() * 1e9 == pytest.approx(began_ns + 0.5e9, abs=1e3)


# --- the check --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model's file, its plan for two stages, and the plan's file."""
    folder = tmp_path_factory.mktemp("gpu")
    model, path = folder / "model.py", folder / "plan.json"
    model.write_text(textwrap.dedent(MODEL))
    profile = measure_source(str(model), microbatch_sizes=[4], steps=1, granularity="block")
    solve(
        Job(profile, flat(2), schedule="1f1b", microbatches=4, cuts=[3], replicas=[1, 1])
    ).plan.save(str(path))
    return str(model), Plan.load(str(path)), str(path)


class Alone(Context):
    def gather(self, value):
        return [value]


@pytest.mark.slow
def test_a_model_that_the_device_does_not_hold_is_told_of_before_anything_starts(made, monkeypatch):
    model, plan, _ = made
    training = PlannedTraining(plan, find_model(model), 4)
    context = Alone(0, 2, torch.device("cuda", 0), Progress(), backend="nccl")
    room = {"cuda": 1000.0, "cpu": 1e12}
    monkeypatch.setattr(check, "free_bytes", lambda device: room[device.type])
    with pytest.raises(PartoptError, match="one GPU has 1 kB free") as raised:
        check.check_first(training, context, context.device)
    assert "`check_device=cpu`" in raised.value.hint
    check.check_room(training, context, torch.device("cpu"))
    room["cpu"] = 1000.0
    with pytest.raises(PartoptError, match="the host has 1 kB free"):
        check.check_room(training, context, torch.device("cpu"))
    # weights and gradients, on its own device beside those of rank 0's stage
    whole, own = (
        2 * each for each in (plan.profile.parameter_bytes, plan.stages[0].parameter_bytes)
    )
    for device, stale, needed in (
        ("cpu", False, whole),
        ("cuda", False, whole + own),
        ("cuda", True, whole + 2 * own),  # with the weights before, and sums of gradients
    ):
        monkeypatch.setattr(PlannedTraining, "asynchronous", stale)
        room[device] = needed
        check.check_room(training, context, torch.device(device, 0))
        room[device] = needed - 1
        with pytest.raises(PartoptError, match="needs the whole model in one process"):
            check.check_room(training, context, torch.device(device, 0))
    with installed(FakeDevice(memory_bytes=24 * 10**9)) as device:
        device.allocate(4 * 10**9)
        monkeypatch.undo()
        assert check.free_bytes(torch.device("cuda", 0)) == 20 * 10**9


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"check": True, "check_device": "tpu"}, "`check_device=tpu`: not possible"),
        ({"check_device": "cpu"}, "`check_device=cpu`: nothing is checked"),
    ],
)
def test_where_a_check_cannot_be(options, expected):
    with pytest.raises(PartoptError, match=expected):
        RunOptions(**options)


# --- memory -----------------------------------------------------------------------------------


def test_memory_is_that_of_tensors_of_the_allocator_and_of_the_device():
    with installed(FakeDevice(memory_bytes=10**9)) as device:
        device.allocate(2 * 10**8)
        device.free(10**8)
        device.others_bytes = 3 * 10**8
        found = run.gpu_memory(torch.device("cuda", 0))
    assert found == (2 * 10**8, 2 * 10**8 + FRAGMENTS_BYTES, 4 * 10**8)


@pytest.mark.slow
def test_a_page_has_the_memory_that_no_plan_predicts(made):
    model, plan, _ = made
    document = run_source(plan, model, steps=2).document
    assert "its allocator has" not in render_run(document)
    ranks = [
        structs.replace(each, measured=structs.replace(each.measured, **dict.fromkeys(MEMORY, GB)))
        for each in document.ranks
    ]
    text = render_run(structs.replace(document, ranks=ranks))
    for row in ("its allocator has", "its GPU has in use"):
        assert re.search(rf"{row} +- +1 GB +-", text)


def test_groups_of_a_direction_have_few_channels(monkeypatch):
    """So much memory NCCL takes for each, and processors of the device; rings need theirs."""
    made = []
    options = SimpleNamespace(Options=lambda: SimpleNamespace(config=SimpleNamespace()))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", options, raising=False)
    monkeypatch.setattr(torch.distributed, "new_group", lambda *_, **given: made.append(given))
    context = Context(0, 2, torch.device("cpu"), Progress(), backend="nccl")
    context.channel(Direction(0, 1))
    context.group([0, 1])
    assert made[0]["pg_options"].config.max_ctas == CHANNELS
    assert made[1]["pg_options"] is None


@pytest.mark.slow
def test_the_memory_of_a_check_is_given_back_before_the_run(made, monkeypatch):
    model, plan, _ = made
    asked = []
    monkeypatch.setattr(run, "check_first", lambda *_: asked.append("check"))
    monkeypatch.setattr(run, "release_memory", lambda: asked.append("release"))
    monkeypatch.setattr(run, "RankTraining", lambda *_: asked.append("train") or 1 / 0)
    context = Alone(0, 2, torch.device("cpu"), Progress())
    with pytest.raises(ZeroDivisionError):
        run._Main(PlannedTraining(plan, find_model(model), 4), RunOptions(check=True), None)(
            context
        )
    assert asked == ["check", "release", "train"]


# --- all of it --------------------------------------------------------------------------------


@pytest.fixture
def on_paper(monkeypatch):
    """Lets every rank have a device on paper, and gloo keep to NCCL's rules."""

    def run_ranks(main, ranks, backend):
        assert backend == "nccl"
        return rehearse(main, ranks)[0]

    for module in (run, link_measurement):
        monkeypatch.setattr(module, "choose_backend", lambda *_: "nccl")
        monkeypatch.setattr(module, "run_ranks", run_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "partopt"])
@pytest.mark.usefixtures("on_paper")
def test_a_run_is_equal_to_one_process_and_its_record_is_read_as_any_other(
    made, partopt, tmp_path, engine
):
    model, _, plan = made
    written, trace = tmp_path / "run.json", tmp_path / "run.trace.json"
    options = ["--check", "--check-device", "cpu", "--engine", engine, "--steps", 3]
    outcome = partopt("run", plan, model, *options, "-o", written)
    assert outcome.code == 0, outcome.err
    assert "equal to one process" in outcome.out
    document = Run.load(str(written))
    assert (document.backend, document.check.equal, document.steps) == ("nccl", True, 3)
    assert document.measured_s > 0 and all(each.forward_s > 0 for each in document.stages)
    losses = run_source(Plan.load(plan), model, steps=3, engine=engine).document.losses
    assert document.losses == losses
    assert partopt("run", plan, model, *options, "-o", trace).code == 0
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"0F0", "1B3"} <= names or {"F0", "B3"} <= names


@pytest.mark.slow
@pytest.mark.usefixtures("on_paper")
def test_the_links_of_two_gpus_become_a_topology(partopt, tmp_path):
    path = tmp_path / "cluster.yaml"
    given = ["--ranks", 2, "--sizes", "64kB,1MB,4MB", "--repetitions", 5, "--accept-poor"]
    outcome = partopt("topology", "measure", "-o", path, *given)
    assert outcome.code == 0, outcome.err
    assert Topology.load(str(path)).levels[0].link == "nccl"
