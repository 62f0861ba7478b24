"""torch reads the orders that are exported, finds every action's inputs, and refuses wrong ones."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.tensor import DTensor

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


@pytest.mark.parametrize("gathers_again", [True, False])
def test_a_stage_keeps_what_a_backward_gathered(gathers_again, monkeypatch):
    """Why torchtitan's `fsdp_reshard_after_forward = "always"` is not planned in pipelines.

    The first forward of a step gathers, and every backward after a forward: M + 1 times in place of
    once. Behind a backward the whole stage is there, as are its gradients.
    """
    gathers, foreach_all_gather = [0], param_group.foreach_all_gather

    def states():
        groups = [fully_shard.state(block)._fsdp_param_groups[0] for block in blocks]
        return {group._sharded_state.name for group in groups}

    def gather(*args, **kwargs):
        gathers[0] += 1
        return foreach_all_gather(*args, **kwargs)

    monkeypatch.setattr(param_group, "foreach_all_gather", gather)
    with as_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        blocks = [nn.Linear(8, 8) for _ in range(3)]
        for block in blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=gathers_again)
        whole = fully_shard(nn.Sequential(*blocks), mesh=mesh, reshard_after_forward=gathers_again)
        stage = PipelineStage(whole, 0, 1, torch.device("cpu"), group=dist.new_group([0]))
        left, backward = [], stage.backward_one_chunk

        def noted(*args, **kwargs):
            backward(*args, **kwargs)
            sharded = any(isinstance(block.weight.grad, DTensor) for block in blocks)
            left.append((states(), sharded))

        monkeypatch.setattr(stage, "backward_one_chunk", noted)
        order = torch_schedules.Schedule1F1B(stage, M, loss_fn=nn.functional.mse_loss)
        for _ in range(2):  # in the first step torch infers shapes, too
            gathers[0] = 0
            left.clear()
            order.step(torch.randn(2 * M, 8), target=torch.randn(2 * M, 8))
        assert states() == {"SHARDED"}
    assert gathers[0] == len(blocks) * (M + 1 if gathers_again else 1)
    assert left == [({"UNSHARDED"}, False)] * M
