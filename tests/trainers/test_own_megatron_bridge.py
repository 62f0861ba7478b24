"""The fields that are set for Megatron Bridge exist, and Megatron Core accepts what they say.

Bridge does not import without the packages of a GPU: its classes of fields are run alone.
"""

import types
from typing import Any

import pytest

from partopt import Plan, export_plan
from tests.trainers.megatron_core import configured
from tests.trainers.own_code import defined, needs
from tests.trainers.plans import LOOPS, PAIRS, contents, on_ranks, planned, planned_for, recomputing

pytestmark = [
    needs("megatron-core", "megatron-bridge"),
    pytest.mark.filterwarnings("ignore"),
]

PLANS = {
    "4-3-3-2": planned,
    "interleaved": lambda: planned(**LOOPS),
    "beside": lambda: on_ranks(planned(**PAIRS), [[s, s + 4] for s in range(4)]),
}


def bridge_config() -> Any:
    """A configuration with the parts of Megatron Bridge's whose fields are set, set otherwise."""
    file = "megatron/bridge/training/config.py"
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig

    return types.SimpleNamespace(
        model=configured(
            pipeline_model_parallel_size=2,
            recompute_granularity="full",
            recompute_method="block",
            recompute_num_layers=2,
        ),
        train=defined("megatron-bridge", file, "TrainingConfig")(),
        dist=defined("megatron-bridge", file, "DistributedInitConfig")(),
        ddp=DistributedDataParallelConfig(use_distributed_optimizer=True),
        optimizer=OptimizerConfig(use_distributed_optimizer=True),
    )


def applied(plan: Plan) -> Any:
    """A configuration after the exported function; an attribute that is no field is refused."""
    config = bridge_config()
    parts = vars(config).items()
    before = {name: set(vars(part)) for name, part in parts}
    space: dict[str, Any] = {}
    exec(export_plan(plan, "megatron-bridge").main, space)
    assert space["use_plan"](config) is config
    assert {name: set(vars(part)) for name, part in parts} == before
    return config


@pytest.mark.parametrize("case", PLANS)
def test_fields_of_megatron_bridge(case):
    plan = PLANS[case]()
    config = applied(plan)
    config.model.__post_init__()  # as the configuration does once it is complete
    chunks = 2 if case == "interleaved" else None
    assert config.model.virtual_pipeline_model_parallel_size == chunks
    assert config.model.recompute_granularity is None
    stages = [
        stage
        for column in zip(*config.model.pipeline_model_parallel_layout.layout, strict=True)
        for stage in column
    ]
    counts = [sum(layer.isdigit() for layer in stage) for stage in contents(plan)]
    assert [sum(kind.name == "decoder" for kind in stage) for stage in stages] == counts
    assert config.train.global_batch_size == plan.microbatches
    assert config.dist.use_tp_pp_dp_mapping is (case == "beside")
    assert config.ddp.use_distributed_optimizer is config.optimizer.use_distributed_optimizer


def test_the_first_blocks_recompute_in_megatron_bridge():
    config = applied(planned_for("megatron-bridge", recompute=3))
    config.model.__post_init__()
    assert (config.model.recompute_method, config.model.recompute_num_layers) == ("block", 3)


def test_recomputation_and_shards_in_megatron_bridge():
    config = applied(recomputing(planned(**PAIRS, shard="optimizer")))
    config.model.__post_init__()
    assert (config.model.recompute_method, config.model.recompute_num_layers) == ("uniform", 1)
    assert config.ddp.use_distributed_optimizer is True
