"""Random numbers of a training: others on each rank and in each step, and the same again."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace

from partopt import Job, solve
from partopt.errors import PartoptError
from partopt.profiler.source import find_model
from partopt.profiler.weightless import RandomNumbers
from partopt.runtime import training as module
from partopt.runtime.training import Microbatches, PlannedTraining, RankTraining
from tests.helpers import chain_profile, flat
from tests.runtime.plans import straight

MODEL = """
import torch


def build():
    return torch.nn.Linear(4, 4)


def example_inputs(size):
    return torch.randn(size, 4)
"""
DATA = (
    MODEL
    + """

def data(rank, replicas):
    for turn in range(4):
        yield torch.full((1, 4), 10.0 * (turn * replicas + rank) + replicas)
"""
)
RANKS, STEPS = 3, 4


@pytest.fixture
def training(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    options = {"cuts": [1], "replicas": [2, 1], "microbatches": 3, "schedule": "1f1b"}
    plan = solve(Job(chain_profile([1.0, 1.0]), flat(RANKS), **options)).plan
    return lambda seed=0: PlannedTraining(plan, find_model(str(path)), 3, seed)


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
        own.step()
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


@pytest.mark.parametrize(
    ("rank", "skipped"), [(0, 0), (1, 0), (0, 3), (1, 3), (2, 3), (1, 4), (2, 6)]
)
def test_a_replica_goes_on_behind_what_it_has_trained_on_of_its_data(
    training, tmp_path, rank, skipped
):
    """Microbatch n of 3 replicas is that of replica n % 3, whatever others have had before."""
    (tmp_path / "model.py").write_text(DATA)
    own = Microbatches(training(), torch.device("cpu"), (rank, 3))
    own.skip(skipped)
    numbers = range(skipped + (rank - skipped) % 3, 12, 3)
    assert [float(own(number)[0, 0]) for number in numbers] == [10.0 * n + 3 for n in numbers]
    with pytest.raises(
        PartoptError, match=r"ended after 4 microbatches, before number 1[2-4]"
    ) as raised:
        own(12 + rank)
    assert raised.value.code == "too-little-data"


@pytest.mark.parametrize(("schedule", "batch"), [("1f1b", 1), ("pipedream", 2)])
def test_an_asynchronous_stage_steps_by_the_mean_of_a_batch(training, schedule, batch):
    """A loss is a mean over the microbatches of an iteration itself."""
    plan, weight = straight(schedule, [2, 1], 3), torch.nn.Parameter(torch.ones(()))
    own = RankTraining.__new__(RankTraining)
    own.training = dataclasses.replace(training(), plan=replace(plan, optimizer="sgd"), rate=1.0)
    own.sharing, own._stage_optimizers, own.optimizers = {}, {}, {}
    weight.grad = torch.tensor(0.5)
    own._stage_optimizer_of(0, [weight]).step()
    assert weight.item() == 1.0 - 0.5 / batch


@pytest.mark.parametrize("uses", [1, 2])
def test_inputs_are_kept_for_as_many_uses_and_no_longer(training, tmp_path, uses):
    (tmp_path / "model.py").write_text(DATA)
    own = Microbatches(training(), torch.device("cpu"), (0, 1), uses)
    for number in range(3):
        for use in range(uses):
            assert float(own(number)[0, 0]) == 10.0 * number + 1
            assert list(own.made) == ([number] if use < uses - 1 else [])
