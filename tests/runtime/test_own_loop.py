"""A loop of one's own over a pipeline, and the exported program that has one."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from partopt import Job, solve
from partopt.errors import PartoptError
from partopt.profiler import measure_source
from partopt.profiler.source import find_model
from partopt.runtime.own_loop import train_with
from partopt.runtime.training import Microbatches, PlannedTraining
from partopt.trainers import export_plan
from tests.forked import run_forked, start_ranks
from tests.helpers import flat
from tests.runtime.test_run import MODEL

STEPS = 3


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Writes the model, and a plan of it; gives the plan and the path of the model."""
    folder = tmp_path_factory.mktemp("own")
    path = folder / "model.py"
    path.write_text(MODEL)
    profile = measure_source(str(path), microbatch_sizes=[2], steps=1, granularity="block")

    def make(devices, **options):
        options = {"schedule": "1f1b", "microbatches": 4} | options
        return solve(Job(profile, flat(devices), **options)).plan, str(path)

    return make


def losses_of_one_process(plan, model):
    """Of AdamW over the whole model, whose gradients are those of the mean of 4 microbatches."""
    source = find_model(model, None)
    torch.manual_seed(0)
    whole = source.build().train()
    inputs = Microbatches(PlannedTraining(plan, source, 4), torch.device("cpu"))
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        loss = sum(
            nn.functional.cross_entropy(whole(ids).flatten(0, 1), ids.flatten()) / 4
            for ids in map(inputs, range(4 * step, 4 * step + 4))
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.slow
def test_the_exported_program_trains_as_one_process_does(made, tmp_path):
    plan, model = made(4, cuts=[2], replicas=[2, 2])
    text = export_plan(plan, "torch", stem="train")
    program = tmp_path / "train.py"
    assert text.main.count("STEPS, RATE = 10, 1e-3") == 1
    files = text.save(str(program))
    assert [Path(name).name for name in files] == ["train.py", "train.plan.json", "train.csv"]
    program.write_text(text.main.replace("STEPS, RATE = 10", f"STEPS, RATE = {STEPS}"))
    ranks = [rank.wait() for rank in start_ranks(4, str(program), [model])]
    assert [rank.returncode for rank in ranks] == [0] * 4, ranks
    printed = "".join(rank.stdout for rank in ranks)
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", printed)]
    assert losses == pytest.approx(losses_of_one_process(plan, model), rel=1e-5)
    alone = run_forked(str(program))
    assert alone.returncode == 1 and "train.py MODEL.py" in alone.stderr
    assert "Traceback" not in alone.stderr


def adam(pipeline):
    """The losses of the steps, and the names of the parameters of rank 0."""
    optimizer = torch.optim.AdamW(pipeline.parameters.values(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        losses.append(pipeline.step())
        optimizer.step()
    return losses, sorted(pipeline.parameters)


@pytest.mark.slow
def test_a_loop_over_unequal_replicas(made):
    plan, model = made(3, cuts=[2], replicas=[2, 1])
    losses, names = train_with(adam, plan, model)
    assert losses == pytest.approx(losses_of_one_process(plan, model), rel=1e-5)
    assert len(names) == 7
    assert {name.split(".")[0] for name in names} == {"embed", "body"}


def sharing(pipeline):
    """As `adam`, with the optimizer that shares, and how many numbers of state are here."""
    optimizer = pipeline.make_optimizer(lambda params: torch.optim.AdamW(params, lr=1e-3))
    losses = []
    for _ in range(STEPS):
        losses.append(pipeline.step())
        optimizer.step()
    states = [state for one in optimizer.optimizers for state in one.state.values()]
    trained = sum(p.numel() for p in pipeline.parameters.values() if p.requires_grad)
    return losses, sum(state["exp_avg"].numel() for state in states), trained


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["partopt", "torch"])
@pytest.mark.parametrize("shard", ["none", "optimizer"])
def test_a_loop_shares_the_state_as_the_plan_does(made, shard, engine):
    plan, model = made(4, cuts=[2], replicas=[2, 2], shard=shard)
    assert plan.shard == shard
    losses, held, trained = train_with(sharing, plan, model, engine=engine)
    assert losses == pytest.approx(losses_of_one_process(plan, model), rel=1e-5)
    assert held == trained if shard == "none" else 0 < held < 0.8 * trained


@pytest.mark.slow
def test_a_loop_over_a_vee_whose_first_rank_holds_a_parameter_twice(made):
    _, model = made(2, cuts=[2])
    profile = measure_source(model, microbatch_sizes=[2], steps=1, granularity="leaf")
    plan = solve(Job(profile, flat(2), schedule="zbv", microbatches=4, cuts=[2, 4, 6])).plan
    losses, names = train_with(adam, plan, model)
    assert losses == pytest.approx(losses_of_one_process(plan, model), rel=1e-5)
    assert "embed.weight" in names


@pytest.mark.slow
def test_an_asynchronous_plan_has_no_loop(made):
    options = {"schedule": "pipedream", "microbatches": None, "tied": "together"}
    plan, model = made(2, cuts=None, **options)
    with pytest.raises(PartoptError, match="pipedream is asynchronous"):
        train_with(adam, plan, model)
