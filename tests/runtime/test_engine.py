"""The engine trains what one process trains, in the order that the simulator runs."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from partopt.schedules import SCHEDULES
from tests.helpers import ROOT
from tests.runtime.engine_cases import Case, Ran, cases
from tests.runtime.references import expected

CASES = cases()


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Ran]]:
    """What every rank was left with, by case."""
    path = tmp_path_factory.mktemp("engine") / "ran.pickle"
    subprocess.run(
        [sys.executable, "-m", "tests.runtime.engine_cases", str(path)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=True,
        timeout=300,
    )
    ranks = pickle.loads(Path(path).read_bytes())
    return {case.name: [rank[i] for rank in ranks] for i, case in enumerate(CASES)}


def test_every_schedule_is_a_case():
    assert {case.plan.schedule for case in CASES} == set(SCHEDULES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_losses_and_weights_are_those_of_one_process(case: Case, ran: dict[str, list[Ran]]):
    weights, losses = expected(case)
    found: dict[int, float] = {}
    for rank in ran[case.name]:
        found |= rank.losses
        for s, own in rank.weights.items():
            for weight, right in zip(own, weights[s], strict=True):
                torch.testing.assert_close(weight, right, rtol=1e-10, atol=1e-12)
    assert found == pytest.approx(losses, rel=1e-10)
    held = {s for rank in ran[case.name] for s in rank.weights}
    assert held == set(range(len(case.plan.stages)))
