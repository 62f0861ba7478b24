"""A model that fits is built once, as if nobody watched; one that does not, without its weights.

The memory of the machine is a number that the tests give.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click.testing
import pytest
import torch
from torch import nn

from partopt import measure_source
from partopt.cli import profile as command
from partopt.documents.profile import Profile
from partopt.errors import PartoptError
from partopt.profiler import building, find_model, free_memory
from partopt.profiler.fake import LARGE, is_fake
from partopt.profiler.free_memory import Memory
from tests.profiler.helpers import linear, not_run

ROWS = LARGE // 64  # of 64 floats: as many as count as large
MODEL_BYTES = 8 * 16 * 4  # of the eight layers below
PLENTY, LITTLE = 16.0 * MODEL_BYTES, 3.0 * MODEL_BYTES


def memory(free_bytes: float) -> Memory:
    return Memory(free_bytes, free_bytes, copies=4)


def eight() -> nn.Module:
    return nn.Sequential(*(linear() for _ in range(8)))


def build(
    made: Callable[[], nn.Module], free_bytes: float, larger: bool | None = None
) -> tuple[nn.Module, bool]:
    return building.build_within(made, memory(free_bytes), torch.float32, larger)


def fakes(model: nn.Module) -> list[bool]:
    return [is_fake(each) for each in model.parameters()]


def test_the_size_decides() -> None:
    model, large = build(eight, PLENTY)
    assert (large, any(fakes(model))) == (False, False)
    model, large = build(eight, LITTLE)
    assert (large, all(fakes(model))) == (True, True)


def test_the_boundary_is_weights_gradients_moments_and_headroom() -> None:
    needed = free_memory.HEADROOM * 4 * MODEL_BYTES
    assert build(eight, needed + 1)[1] is False
    assert build(eight, needed - 1)[1] is True


def test_the_caller_decides() -> None:
    assert build(eight, PLENTY, larger=True)[1]
    model, large = build(eight, LITTLE, larger=False)
    assert (large, any(fakes(model))) == (False, False)


def test_a_model_built_on_meta_is_measured_so() -> None:
    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return eight()

    model, large = build(on_meta, PLENTY)
    assert large
    assert all(each.is_meta for each in model.parameters())
    with pytest.raises(PartoptError, match="it has no weights"):
        build(on_meta, PLENTY, larger=False)


def test_a_model_that_fits_is_built_once_and_one_that_does_not_is_left_early() -> None:
    begun: list[str] = []

    def watched() -> nn.Module:
        begun.append("build")
        layers = []
        for _ in range(8):
            layers.append(linear())
            begun.append("layer")
        return nn.Sequential(*layers)

    build(watched, PLENTY)
    assert begun == ["build", *["layer"] * 8]
    begun.clear()
    build(watched, LITTLE)
    # the sixth was too much
    assert begun == ["build", *["layer"] * 5, "build", *["layer"] * 8]


def test_a_model_that_freezes_what_it_registered_may_fit_after_all() -> None:
    def frozen() -> nn.Module:
        return eight().requires_grad_(False)

    torch.manual_seed(3)
    expected = [each.clone() for each in frozen().parameters()]
    torch.manual_seed(3)
    model, large = build(frozen, LITTLE)
    assert not large
    # the same random numbers as if it had been built once
    found = list(model.parameters())
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_a_build_that_catches_everything_does_not_catch_that_it_is_left() -> None:
    def stubborn() -> nn.Module:
        try:
            return eight()
        except Exception:
            return linear()

    model, large = build(stubborn, LITTLE)
    assert large
    assert len(list(model.parameters())) == 8


def test_a_build_that_fails_fails_as_ever() -> None:
    def broken() -> nn.Module:
        raise ValueError("no such layer")

    with pytest.raises(ValueError, match="no such layer"):
        build(broken, PLENTY)


def test_a_parameter_in_two_places_counts_once() -> None:
    def tied() -> nn.Module:
        model = eight()
        for layer in model[1:]:  # type: ignore[index]
            layer.weight = model[0].weight  # type: ignore[index]
        return model

    needed = free_memory.HEADROOM * 4 * MODEL_BYTES / 8
    model, large = build(tied, 2 * needed)
    assert not large
    assert len(list(model.parameters())) == 1


# --- builds that look at their weights --------------------------------------------------------


class Trap(nn.Module):
    """A large weight, and something that its initialisation does."""

    def __init__(self, does: Callable[[Trap], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(ROWS, 64).normal_())
        self.drawn = nn.Parameter(torch.randn(ROWS, 64) * 0.02)
        self.register_buffer("table", 1.0 / 10 ** torch.arange(4))
        does(self)


def fill_part(trap: Trap) -> None:
    trap.weight.data[:2] = torch.ones(2, 64)
    trap.weight.data[1].zero_()
    with torch.no_grad():
        trap.weight[0].fill_(float(trap.table[0].item()))


def initialise(trap: Trap) -> None:
    nn.init.trunc_normal_(trap.weight, std=0.02)
    nn.init.orthogonal_(trap.weight)
    nn.init.uniform_(trap.weight, -1 / trap.table.sum().item(), 1)


def convert(trap: Trap) -> None:
    trap.to(torch.bfloat16).to(torch.float32)
    trap.requires_grad_(False).requires_grad_(True)


def tie(trap: Trap) -> None:
    trap.again = trap.weight
    trap.list = nn.ParameterList([trap.weight, trap.drawn])


def on_meta(trap: Trap) -> None:
    with torch.device("meta"):
        trap.other = nn.Linear(2**20, 2**20)


def copy(trap: Trap) -> None:
    trap.weight.data.copy_(torch.ones(ROWS, 64))
    trap.load_state_dict(trap.state_dict())


@pytest.mark.parametrize("does", [fill_part, initialise, convert, tie, on_meta, copy])
def test_initialisation_is_no_obstacle(does: Callable[[Trap], None]) -> None:
    model, large = build(lambda: Trap(does), LITTLE)
    assert large
    assert all(fakes(model))
    torch.testing.assert_close(model.table, 1.0 / 10 ** torch.arange(4), rtol=0.01, atol=0)
    assert model.weight.requires_grad
    if does is tie:
        assert model.again is model.weight is model.list[0]  # type: ignore[index]


def test_random_numbers_that_fit_are_drawn() -> None:
    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("drawn", torch.randn(8))
            self.part = linear()

    model, _ = build(Features, LITTLE, larger=True)
    assert not is_fake(model.drawn)  # type: ignore[arg-type]
    assert model.drawn.abs().sum() > 0  # type: ignore[operator,union-attr]


def reading() -> nn.Module:
    model = eight()
    for layer in model:  # type: ignore[union-attr]
        layer.weight.data = torch.from_numpy(layer.weight.detach().numpy() * 2)
    return model


def test_a_build_that_reads_its_weights_has_them_where_they_fit_once() -> None:
    model, large = build(reading, LITTLE)
    assert large
    assert not any(fakes(model))


def test_a_build_that_reads_its_weights_and_does_not_fit_is_an_error() -> None:
    with pytest.raises(PartoptError) as failed:
        build(reading, MODEL_BYTES / 2)
    assert failed.value.code == "out-of-memory"
    assert failed.value.message.startswith(
        "the model does not fit into the 256 B of memory that are free, and building it without "
        "its weights raised "
    )
    assert "meta device" in failed.value.hint


def test_building_leaves_torch_as_it_was() -> None:
    before = nn.Module.register_parameter, dict(vars(nn.init))
    build(eight, LITTLE)
    with pytest.raises(PartoptError):
        build(reading, MODEL_BYTES / 2)
    assert (nn.Module.register_parameter, dict(vars(nn.init))) == before


# --- the whole way ----------------------------------------------------------------------------

FILE = """
import torch
from torch import nn

def build(layers=8):
    return nn.Sequential(nn.LayerNorm(4), *(nn.Linear(4, 4, bias=False) for _ in range(layers)))

def example_inputs(size):
    return torch.randn(size, 4)
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(FILE)
    return str(tmp_path / "net.py")


def limit(monkeypatch: pytest.MonkeyPatch, free_bytes: float) -> None:
    monkeypatch.setattr(free_memory, "free_host_bytes", lambda: free_bytes)


def measured(model: str, **options: bool | None) -> Profile:
    return measure_source(model, microbatch_sizes=[1], steps=1, device="cpu", **options)


def test_measure_source_chooses_by_the_memory_that_is_free(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, PLENTY)
    assert not_run(measured(model)) == {}
    assert not_run(measured(model, larger_than_memory=True)) == dict.fromkeys([4, 5, 6, 7], 2)
    limit(monkeypatch, LITTLE)
    assert not_run(measured(model)) == dict.fromkeys([4, 5, 6, 7], 2)
    assert not_run(measured(model, larger_than_memory=False)) == {}


def test_the_command_chooses_too_and_show_marks_what_did_not_run(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from partopt.report.profile import render

    limit(monkeypatch, PLENTY)
    output = str(tmp_path / "net.json")
    options = [model, "--microbatch", "1", "--steps", "1", "--device", "cpu", "--force", "-o"]
    run = click.testing.CliRunner().invoke
    for flag, marked in (("--no-larger-than-memory", 0), ("--larger-than-memory", 4)):
        result = run(command.command, [*options, output, flag])
        assert result.exit_code == 0
        shown = render(Profile.load(output), all_layers=True)
        assert sum("*" in line for line in shown.splitlines()) == marked + bool(marked)
        assert ("layers did not run" in result.stderr) is bool(marked)
    assert shown.endswith("\n\n* did not run: has the measurements of layer 2")


def test_a_module_that_the_file_built_may_be_measured_so(model: str) -> None:
    Path(model).write_text(FILE.replace("def build(layers=8):\n    return", "model ="))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.layers", 8, raising=False)
        assert not_run(measured(model, larger_than_memory=True))
        found = find_model(model).build()
    assert not any(fakes(found))


# --- memory -----------------------------------------------------------------------------------


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_memory, "_CGROUP", tmp_path)
    alone = free_memory.free_host_bytes()
    assert alone > 0
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("700\n")
    assert free_memory._control_group_bytes() == float("inf")
    (tmp_path / "memory.max").write_text("1000\n")
    assert free_memory.free_host_bytes() == 300
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 200\n")
    assert free_memory.free_host_bytes() == 500


def test_host_and_device_have_their_own_room() -> None:
    gpu = Memory(host_bytes=111, device_bytes=222, copies=2)
    assert gpu.holds(100, 200)
    assert not gpu.holds(102, 200)
    assert not gpu.holds(100, 203)


def test_the_size_in_another_number_format() -> None:
    model = nn.Sequential(linear(), linear())
    model[0].weight.requires_grad_(False)
    size = free_memory.size_of(model, torch.bfloat16, copies=4)
    assert (size.built_bytes, size.trained_bytes) == (128, 32 + 4 * 32)
