"""A model is refused before it takes more than is free, and an estimate builds it without weights.

The memory of the machine is a number that the tests give.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from partopt import measure_source
from partopt.errors import PartoptError
from partopt.profiler import measure, memory
from partopt.profiler.memory import HEADROOM, build_within_memory
from partopt.profiler.weightless import LARGE, build_without_weights, fake_mode, is_fake
from tests.profiler.helpers import linear

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ROWS = LARGE // 64  # of 64 floats: as many as count as large
MODEL_BYTES = 8 * 16 * 4  # of the eight layers below


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    return lambda free: monkeypatch.setattr(memory, "free_host_bytes", lambda: free)


def eight() -> nn.Module:
    return nn.Sequential(*(linear() for _ in range(8)))


def fits(
    build: Callable[[], nn.Module],
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
) -> bool:
    try:
        build_within_memory(build, device, dtype)
    except PartoptError as error:
        assert error.code == "out-of-memory"
        assert "repeat" in (error.hint or "")
        return False
    return True


def test_the_boundary_is_weights_gradients_moments_and_headroom(
    limit: Callable[[float], None],
) -> None:
    for copies, device, dtype in (
        (4, CPU, torch.float32),
        (2, CPU, torch.bfloat16),
        (1, CUDA, torch.float32),  # a GPU says itself when it is full
    ):
        needed = HEADROOM * copies * MODEL_BYTES
        limit(needed + 1)
        assert fits(eight, device, dtype)
        limit(needed - 1)
        assert not fits(eight, device, dtype)


def test_a_model_that_does_not_fit_is_left_early(limit: Callable[[float], None]) -> None:
    made = []

    def build() -> nn.Module:
        while len(made) < 8:
            made.append(linear())
        return nn.Sequential(*made)

    limit(3 * 64 * HEADROOM)
    assert not fits(build)
    assert len(made) == 3


def test_what_is_frozen_or_shared_counts_once(limit: Callable[[float], None]) -> None:
    limit(HEADROOM * MODEL_BYTES + 1)
    assert fits(lambda: eight().requires_grad_(False))

    def tied() -> nn.Module:
        model = eight()
        for layer in model:  # type: ignore[union-attr]
            layer.weight = model[0].weight  # type: ignore[index]
        return model

    limit(HEADROOM * MODEL_BYTES + 1)  # of what is built; of what is trained there is an eighth
    assert fits(tied)


def test_a_build_that_fails_fails_as_ever() -> None:
    before = nn.Module.register_parameter
    with pytest.raises(ZeroDivisionError):
        build_within_memory(lambda: 1 / 0, CPU, torch.float32)  # type: ignore[arg-type,return-value]
    assert nn.Module.register_parameter is before


def test_a_model_without_weights_is_not_measured() -> None:
    with torch.device("meta"):
        model = eight()
    with pytest.raises(PartoptError, match="it has no weights to measure") as failed:
        measure(model, lambda size: torch.randn(size, 4), device="cpu", steps=1)
    assert failed.value.code == "no-weights"


def test_measure_source_refuses_what_does_not_fit(
    tmp_path: Path, limit: Callable[[float], None]
) -> None:
    (tmp_path / "net.py").write_text(FILE)
    limit(MODEL_BYTES)
    with pytest.raises(PartoptError, match=r"net\.py: training the model takes 512 B or more"):
        measure_source(tmp_path / "net.py", steps=1, device="cpu")


FILE = """
import torch
from torch import nn

def build():
    return nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(9)))

def example_inputs(size):
    return torch.randn(size, 4)
"""


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


def build(made: Callable[[], nn.Module]) -> nn.Module:
    with build_without_weights(fake_mode()):
        return made()


@pytest.mark.parametrize("does", [fill_part, initialise, convert, tie, on_meta, copy])
def test_initialisation_is_no_obstacle(does: Callable[[Trap], None]) -> None:
    model = build(lambda: Trap(does))
    assert all(map(is_fake, model.parameters()))
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

    model = build(Features)
    assert not is_fake(model.drawn)  # type: ignore[arg-type]
    assert model.drawn.abs().sum() > 0  # type: ignore[operator,union-attr]


def test_building_leaves_torch_as_it_was() -> None:
    before = nn.Module.register_parameter, dict(vars(nn.init))
    build(eight)
    assert (nn.Module.register_parameter, dict(vars(nn.init))) == before


# --- memory -----------------------------------------------------------------------------------


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    alone = memory.free_host_bytes()
    assert alone > 0
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("700\n")
    assert memory.free_host_bytes() > 1000
    (tmp_path / "memory.max").write_text("1000\n")
    assert memory.free_host_bytes() == 300
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 200\n")
    assert memory.free_host_bytes() == 500
