"""ColossalAI's plugin, stage manager, schedule and checkpoints take the exported arguments.

It does not import without packages of its own time: the classes that decide are run alone.
"""

import types
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from partopt import Plan, export_plan
from tests.trainers.own_code import as_rank, defined, needs
from tests.trainers.plans import BLOCKS, PAIRS, on_ranks, planned, planned_for, recomputing
from tests.trainers.readers import assigned

pytestmark = [needs("colossalai"), pytest.mark.filterwarnings("ignore")]


def own(file: str, *names: str, **others: Any) -> Any:
    return defined("colossalai", f"colossalai/{file}.py", *names, **others)


@pytest.fixture(scope="module")
def plugin() -> type:
    """Its `HybridParallelPlugin`, with the parts that place and order stages."""
    schedule = own(
        "pipeline/schedule/one_f_one_b",
        "OneForwardOneBackwardSchedule",
        PipelineSchedule=own("pipeline/schedule/base", "PipelineSchedule"),
        PipelineP2PCommunication=mock.MagicMock(),
        get_batch_size=len,
    )
    return own(
        "booster/plugin/hybrid_parallel_plugin",
        "HybridParallelPlugin",
        PipelinePluginBase=object,
        ProcessGroupMesh=own("cluster/process_group_mesh", "prod", "ProcessGroupMesh"),
        PipelineStageManager=own("pipeline/stage_manager", "PipelineStageManager"),
        OneForwardOneBackwardSchedule=schedule,
        ShardConfig=types.SimpleNamespace,
        PRECISION_TORCH_TYPE={"fp32": None},
        get_dist_logger=mock.MagicMock(),
    )


def check(plan: Plan, arguments: dict[str, Any], plugin: type, batch: int) -> None:
    """Hold the blocks, the peers and the microbatches of every rank against the plan."""
    stages = {rank: s for s, stage in enumerate(plan.stages) for rank in stage.ranks}
    taken = []
    for rank, s in stages.items():
        with as_rank(rank, len(stages)):
            made = plugin(**arguments, precision="fp32")
            manager = made.stage_manager
            assert manager.stage == s
            k = plan.stages[s].ranks.index(rank)
            peers = dist.get_process_group_ranks(made.pp_group)
            assert peers == [stage.ranks[k] for stage in plan.stages]
            assert dist.get_process_group_ranks(made.dp_group) == plan.stages[s].ranks
            first, last = manager.get_stage_index(manager.distribute_layers(BLOCKS))
            own = [f"h.{block}" for block in range(first, last)]
            assert own == [name for name in plan.stages[s].modules if name.startswith("h.")]
            taken += own if k == 0 else []
            made.scheduler.forward_only = False
            made.scheduler.load_batch(iter([range(batch)]))
            assert made.scheduler.num_microbatches * plan.stages[0].replicas == plan.microbatches
    assert taken == [f"h.{block}" for block in range(BLOCKS)]


def arguments_of(plan: Plan) -> dict[str, Any]:
    return assigned(export_plan(plan, "colossalai").main, "ARGUMENTS")


PLANS = {
    "4-3-3-2": planned,
    "pairs": lambda: planned(**PAIRS),
    "beside": lambda: on_ranks(planned(**PAIRS), [[s, s + 4] for s in range(4)]),
}


@pytest.mark.parametrize("case", PLANS)
def test_every_rank_has_the_blocks_and_the_peers_of_the_plan(case, plugin):
    plan = PLANS[case]()
    check(plan, arguments_of(plan), plugin, batch=8)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_layers_per_stage", [4, 3, 4, 1]),  # a bound moved
        ("num_layers_per_stage", [4, 3, 3, 1]),  # a block dropped
        ("num_layers_per_stage", [4, 3, 5]),  # a stage dropped
        ("pp_size", 2),
        ("num_microbatches", 4),
        ("zero_stage", 2),
        ("pp_style", "interleaved"),
    ],
)
def test_wrong_arguments_are_noticed(field, value, plugin):
    plan = planned()
    with pytest.raises((AssertionError, KeyError, IndexError, NameError)):
        check(plan, arguments_of(plan) | {field: value}, plugin, batch=8)


def test_the_other_order_of_ranks_is_noticed(plugin):
    plan = PLANS["beside"]()
    with pytest.raises(AssertionError):
        check(plan, arguments_of(plan) | {"dp_outside": False}, plugin, batch=8)


def test_fewer_microbatches_than_stages_are_refused_there_too(plugin):
    plan = planned()
    fewer = arguments_of(plan) | {"num_microbatches": 3}
    with pytest.raises(AssertionError, match="larger than number of stages"):
        check(plan, fewer, plugin, batch=3)


def test_stages_checkpoint_the_blocks_that_they_recompute():
    ratio = own("shardformer/shard/grad_ckpt_config", "GradientCheckpointConfig")
    config = own(
        "shardformer/shard/grad_ckpt_config",
        "PipelineGradientCheckpointConfig",
        GradientCheckpointConfig=ratio,
    )
    for plan, expected in (
        (recomputing(planned(), 0, 2), [4, 0, 3, 0]),
        (planned_for("colossalai", recompute="always"), [4, 3, 3, 2]),
        (planned_for("colossalai", recompute=3), [3, 3, 3, 2]),
    ):
        text = export_plan(plan, "colossalai").main
        made = config(**assigned(text, "CHECKPOINTS"))
        counts = assigned(text, "ARGUMENTS")["num_layers_per_stage"]
        assert [made.get_num_ckpt_layers(s, 4, counts[s]) for s in range(4)] == expected
    with pytest.raises(AssertionError):
        config(num_ckpt_layers_per_stage=[5, 0, 3, 0]).get_num_ckpt_layers(0, 4, 4)
