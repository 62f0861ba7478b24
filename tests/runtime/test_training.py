"""Random numbers of a training: others on each rank and in each step, and the same again."""

from types import SimpleNamespace

import pytest
import torch

from partopt import Job, solve
from partopt.profiler.source import find_model
from partopt.profiler.weightless import RandomNumbers
from partopt.runtime import training as module
from partopt.runtime.training import Microbatches, RankTraining, Training
from tests.helpers import chain_profile, flat

MODEL = """
import torch


def build():
    return torch.nn.Linear(4, 4)


def example_inputs(size):
    return torch.randn(size, 4)
"""
RANKS, STEPS = 3, 4


@pytest.fixture
def training(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    options = {"cuts": [1], "replicas": [2, 1], "microbatches": 3, "schedule": "1f1b"}
    plan = solve(Job(chain_profile([1.0, 1.0]), flat(RANKS), **options)).plan
    return lambda seed=0: Training(plan, find_model(str(path)), 3, seed)


def drawn(training, rank, steps, monkeypatch):
    """The first number that a rank draws in each of so many steps."""
    seen = []
    monkeypatch.setattr(
        module, "execute", lambda *_, **__: seen.append(float(torch.rand((), dtype=torch.float64)))
    )
    own = RankTraining.__new__(RankTraining)  # without a process group
    own.training, own.stages, own.tied = training, {}, []
    own.context = SimpleNamespace(rank=rank, ranks=RANKS)
    own.steps = own.first = 0
    for _ in range(steps):
        own.step(learn=False)
        own.end_step()
    return seen


def test_dropout_draws_other_numbers_on_each_rank_in_each_step_of_each_seed(training, monkeypatch):
    before = RandomNumbers()
    seen = {
        (seed, rank): drawn(training(seed), rank, STEPS, monkeypatch)
        for seed in (0, 1)
        for rank in range(RANKS)
    }
    assert len({number for each in seen.values() for number in each}) == 2 * RANKS * STEPS
    assert drawn(training(1), 2, STEPS, monkeypatch) == seen[1, 2]
    before.restore()


def test_every_rank_draws_the_same_inputs_and_none_of_its_own_numbers(training):
    numbers = RandomNumbers()
    of_two = [Microbatches(training(), torch.device("cpu"), (replica, 2)) for replica in range(2)]
    [first, again] = [[own(number) for number in range(4)] for own in of_two]
    assert not numbers.advanced()
    assert all(map(torch.equal, first, again))
    assert len({float(each[0, 0]) for each in first}) == 4
    other = Microbatches(training(1), torch.device("cpu"))
    assert not torch.equal(other(0), first[0])
