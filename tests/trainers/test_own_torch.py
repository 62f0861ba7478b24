"""torch reads the orders that are exported, finds every action's inputs, and refuses wrong ones."""

import re

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from partopt import Plan, export_plan
from partopt.schedules import schedule
from partopt.trainers.torch import SYNCHRONOUS
from tests.helpers import flat
from tests.trainers.own_code import as_rank
from tests.trainers.plans import planned

M = 8
# what torch adds for sharded parameters, and its simulation does not know
ADDED = {"UNSHARD", "RESHARD", "REDUCE_GRAD"}
LOADED = torch_schedules._PipelineScheduleRuntime


def of(name: str) -> Plan:
    """Four stages under the schedule."""
    devices = {"straight": 4}.get(schedule(name).shape, 2)
    return planned(cluster=flat(devices), schedule=name, microbatches=M)


def load(text: str, plan: Plan, folder) -> LOADED:
    """The schedule that rank 0 of the pipeline has of the text."""
    path = folder / "order.csv"
    path.write_text(text)
    ranks = len({tuple(stage.ranks) for stage in plan.stages})
    with as_rank(0, ranks):
        stages = [
            PipelineStage(nn.Linear(2, 2), s, len(plan.stages), torch.device("cpu"))
            for s, stage in enumerate(plan.stages)
            if stage.ranks[0] == 0
        ]
        found = LOADED(stages, n_microbatches=M, loss_fn=lambda output, target: output.sum())
        found._load_csv(str(path))
    return found


def simulate(found: LOADED) -> dict[int, list]:
    """The steps of every rank, in torch's own simulation, which raises where one cannot go on."""
    order = {
        rank: [
            part  # a pair that is done together, one behind the other
            for action in actions
            for part in action.sub_actions or [action]
            if action.computation_type.name not in ADDED
        ]
        for rank, actions in found.pipeline_order_with_comms.items()
    }
    return torch_schedules._simulate_comms_compute(
        order, lambda s: found.stage_index_to_group_rank[s], found._num_stages
    )


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_it_runs_every_action_on_the_ranks_of_the_plan(name, tmp_path):
    plan = of(name)
    text = export_plan(plan, "torch-csv").main
    found = load(text, plan, tmp_path)
    assert found.stage_index_to_group_rank == {
        s: stage.ranks[0] for s, stage in enumerate(plan.stages)
    }
    done = {str(action) for row in simulate(found).values() for action in row}
    assert set(re.findall("[0-9]+[FBIW][0-9]+", text)) <= done


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("0F7,", ""),  # an action is missing
        ("3B0,", "3B1,"),  # one is done twice, another never
        ("0F0,0F1", "1F0,0F1"),  # a stage on another rank
        ("0F0,", "0B0,0F0,"),  # before what it needs
        ("\n", ",9F0\n"),  # a stage that is not there
        ("0F1", "0X1"),
    ],
)
def test_it_refuses_orders_that_are_wrong(old, new, tmp_path):
    plan = of("1f1b")
    text = export_plan(plan, "torch-csv").main
    assert old in text
    with pytest.raises((AssertionError, ValueError, KeyError, RuntimeError)):
        simulate(load(text.replace(old, new, 1), plan, tmp_path))


def test_it_refuses_orders_that_wait_for_each_other(tmp_path):
    plan = of("1f1b")
    rows = export_plan(plan, "torch-csv").main.splitlines()
    rows[3] = ",".join([f"3F{m}" for m in reversed(range(M))] + [f"3B{m}" for m in range(M)])
    with pytest.raises((AssertionError, ValueError, RuntimeError)):
        simulate(load("\n".join(rows), plan, tmp_path))
