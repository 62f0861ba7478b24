"""How long a device is warmed up. No device is needed: time is what the steps say."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from partopt.profiler.group import RankGroup
from partopt.profiler.measuring import _warm_up
from tests.profiler.helpers import FakeClock, linear, structure


class Steps:
    """Stands for a stepper: each bare step takes as long as given, on a clock that only steps
    move.
    """

    def __init__(self, step_s: float) -> None:
        self.step_s, self.now_s, self.kinds = step_s, 0.0, []

    def bare(self) -> None:
        self.kinds.append("bare")
        self.now_s += self.step_s

    def instrumented(self) -> None:
        self.kinds.append("instrumented")


@pytest.mark.parametrize(
    ("device", "step_s", "bare_steps"),
    [("cpu", 0.125, 2), ("cuda", 0.125, 4), ("cuda", 10.0, 2)],
    ids=["cpu", "cuda", "cuda, long steps"],
)
def test_cuda_is_warmed_up_for_half_a_second(
    monkeypatch: pytest.MonkeyPatch, device: str, step_s: float, bare_steps: int
) -> None:
    steps = Steps(step_s)
    monkeypatch.setattr("partopt.profiler.measuring.time.perf_counter", lambda: steps.now_s)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7)
    assert _warm_up(steps, torch.device(device), RankGroup()) == (7 if device == "cuda" else None)
    assert steps.kinds == ["bare"] * bare_steps + ["instrumented"]


@pytest.mark.parametrize(("step_s", "steps"), [(0.001, 10), (1.0, 10), (1.001, 5), (60.0, 5)])
def test_fewer_steps_are_timed_where_a_step_is_long(step_s: float, steps: int) -> None:
    class Paced(FakeClock):
        def intervals_s(self, stamps: Sequence[float]) -> list[float]:
            return [step_s] * (len(stamps) - 1)

    told = []
    structure(
        linear(),
        clock=Paced(),
        steps=None,
        progress=lambda _size, _done, of: told.append(of),
    )
    assert max(told) == steps
