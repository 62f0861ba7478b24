"""DeepSpeed builds every rank's layers of an exported pipeline and runs a recomputed stage."""

import copy
import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from partopt import Plan, export_plan
from partopt.documents.profile import Group
from partopt.schedules import order
from partopt.schedules.placement import placement_of
from tests.helpers import ROOT, flat
from tests.trainers.models import transformer
from tests.trainers.own_code import as_rank, needs
from tests.trainers.plans import PAIRS, on_ranks, planned

pytestmark = [needs("deepspeed"), pytest.mark.filterwarnings("ignore")]

LAYERS = 16


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    """No operators are compiled; the accelerator is the CPU."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("LOCAL_RANK", "0")
    import deepspeed.comm

    backend = importlib.import_module("deepspeed.comm.torch")

    monkeypatch.setattr(backend, "build_shm_op", lambda: None)
    yield
    deepspeed.comm.comm.cdb = None


def module(text: str) -> dict[str, Any]:
    space: dict[str, Any] = {}
    exec(text, space)
    return space


def on_every_rank(
    text: str, ranks: int, layers: Callable[[], list[nn.Module]], look: Callable[[int, Any], None]
) -> None:
    """Show `look` the pipeline of each rank."""
    import deepspeed

    for rank in range(ranks):
        with as_rank(rank, ranks):
            deepspeed.init_distributed(dist_backend="fake", auto_mpi_discovery=False)
            look(rank, module(text)["PlannedPipeline"](layers()))
            deepspeed.comm.comm.cdb = None


def linear() -> list[nn.Module]:
    """Layers, each with its number as its weight."""
    layers = [nn.Linear(1, 1, bias=False) for _ in range(LAYERS)]
    for number, layer in enumerate(layers):
        nn.init.constant_(layer.weight, float(number))
    return layers


def check(plan: Plan, text: str) -> None:
    """Hold the layers and the groups of every rank against the plan."""
    stages = {rank: s for s, stage in enumerate(plan.stages) for rank in stage.ranks}
    held: dict[int, list[int]] = {}

    def look(rank: int, pipeline: Any) -> None:
        stage, k = plan.stages[stages[rank]], plan.stages[stages[rank]].ranks.index(rank)
        assert pipeline.stage_id == stages[rank]
        held[rank] = [int(parameter.item()) for parameter in pipeline.parameters()]
        assert held[rank] == list(stage.layers)
        grid = pipeline.mpu()
        assert grid.get_data_parallel_group_ranks() == stage.ranks
        assert grid.pp_group == [each.ranks[k] for each in plan.stages]
        assert [grid.stage_to_global(s) for s in range(len(plan.stages))] == grid.pp_group

    on_every_rank(text, len(stages), linear, look)
    first = [stage.ranks[0] for stage in plan.stages]
    assert [layer for rank in first for layer in held[rank]] == list(range(LAYERS))


PLANS = {
    "4-3-3-2": planned,
    "anywhere": lambda: planned([1, 9, 15]),
    "pairs": lambda: planned(**PAIRS),
    "beside": lambda: on_ranks(planned(**PAIRS), [[s, s + 4] for s in range(4)]),
    "one stage": lambda: planned([]),
}


@pytest.mark.parametrize("case", PLANS)
def test_every_rank_has_the_layers_and_the_peers_of_the_plan(case):
    plan = PLANS[case]()
    check(plan, export_plan(plan, "deepspeed").main)


def test_groups_of_ranks_are_the_innermost_axis():
    grouped = replace(transformer(), group=Group(ranks=2))
    plan = planned(profile=grouped, cluster=flat(8))

    def look(rank: int, pipeline: Any) -> None:
        grid = pipeline.mpu()
        assert pipeline.stage_id == rank // 2
        assert grid.slice_group == [rank // 2 * 2, rank // 2 * 2 + 1]

    on_every_rank(export_plan(plan, "deepspeed").main, 8, linear, look)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[0, 6, 9, 12, 16]", "[0, 6, 8, 12, 16]"),  # a bound moved
        ("[0, 6, 9, 12, 16]", "[0, 6, 6, 12, 16]"),  # an empty stage
        ("[0, 6, 9, 12, 16]", "[0, 6, 9, 12, 15]"),  # a layer dropped
        ("[0, 6, 9, 12, 16]", "[1, 6, 9, 12, 16]"),
        ("dims=[4, 1]", "dims=[2, 2]"),
        ("stage + 1]", "stage]"),
    ],
)
def test_a_wrong_export_is_noticed(old, new):
    plan = planned()
    text = export_plan(plan, "deepspeed").main
    assert old in text
    with pytest.raises((AssertionError, ValueError, IndexError, KeyError)):
        check(plan, text.replace(old, new, 1))


def test_the_other_order_of_ranks_is_noticed():
    plan = planned(**PAIRS)
    text = export_plan(plan, "deepspeed").main
    other = text.replace("axes=['pipe', 'data'], dims=[4, 2]", "axes=['data', 'pipe'], dims=[2, 4]")
    assert other != text
    with pytest.raises(AssertionError):
        check(plan, other)


@pytest.mark.parametrize("microbatches", [2, 4, 9])
def test_its_schedule_is_that_of_the_plan(microbatches):
    from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, TrainSchedule

    plan = planned(microbatches=microbatches)
    own = order("1f1b", placement_of(plan))
    for s in range(4):
        done = {ForwardPass: 0, BackwardPass: 0}
        found = []
        for step in TrainSchedule(microbatches, 4, s).steps():
            for command in step:
                if type(command) in done:
                    letter = "F" if isinstance(command, ForwardPass) else "B"
                    found.append(f"{s}{letter}{done[type(command)]}")
                    done[type(command)] += 1
        assert [name for name in own.names(s) if name[1] in "FB"] == found


def test_its_configuration_has_the_batches_of_the_plan():
    from deepspeed.runtime.config import DeepSpeedConfig

    plan = planned(profile=transformer(microbatch_size=2), **PAIRS, shard="optimizer")
    text = export_plan(plan, "deepspeed").main

    def look(rank: int, pipeline: Any) -> None:
        config = DeepSpeedConfig(module(text)["CONFIG"], mpu=pipeline.mpu())
        assert config.train_batch_size == 32
        assert config.train_micro_batch_size_per_gpu == 2
        assert config.gradient_accumulation_steps == 8
        assert config.zero_optimization_stage == 1

    on_every_rank(text, 8, linear, look)


class Embedding(nn.Embedding):
    """The first layer, whose inputs have no gradient."""

    def __init__(self) -> None:
        super().__init__(5, 3)


def gradients(text: str, network: list[nn.Module]) -> list[torch.Tensor | None]:
    """Of the parameters of the first stage, as DeepSpeed's engine runs it."""
    found: list[torch.Tensor | None] = []

    def look(rank: int, pipeline: Any) -> None:
        if rank == 0:
            pipeline._precompute_checkpointable_values()  # as its engine does
            pipeline(torch.tensor([[1, 2, 4]])).square().sum().backward()
            found.extend(parameter.grad for parameter in pipeline.parameters())

    on_every_rank(text, 4, lambda: network, look)
    return found


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_a_first_stage_that_recomputes_has_the_gradients_of_one_that_does_not(recompute):
    text = export_plan(planned(recompute=recompute), "deepspeed").main
    network = [Embedding(), *(nn.Linear(3, 3) for _ in range(LAYERS - 1))]
    alone = copy.deepcopy(nn.Sequential(*network[:6]))
    alone(torch.tensor([[1, 2, 4]])).square().sum().backward()
    for own, found in zip(alone.parameters(), gradients(text, network), strict=True):
        assert found is not None
        torch.testing.assert_close(found, own.grad)


def test_its_own_default_would_lose_them():
    text = export_plan(planned(recompute="always"), "deepspeed").main
    line = "activation_checkpoint_func=checkpointing.non_reentrant_checkpoint,"
    assert line in text
    network = [Embedding(), *(nn.Linear(3, 3) for _ in range(LAYERS - 1))]
    with pytest.raises(RuntimeError, match="does not require grad"):
        gradients(text.replace(line, ""), network)


@pytest.mark.parametrize("case", ["pairs", "beside"])
def test_four_processes_train_by_it_as_one_does(case, tmp_path):
    plan = planned([6], replicas=[2, 2], recompute="always" if case == "beside" else "never")
    ranks = {"pairs": [[0, 1], [2, 3]], "beside": [[0, 2], [1, 3]]}
    export_plan(on_ranks(plan, ranks[case]), "deepspeed").save(str(tmp_path / "planned.py"))
    script = ROOT / "tests/trainers/deepspeed_training.py"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launch, "--nproc-per-node", "4", str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("LOSSES ")]
    losses, alone = json.loads(line.removeprefix("LOSSES "))
    assert losses == pytest.approx(alone, rel=1e-5)
    assert losses[0] > losses[-1]
