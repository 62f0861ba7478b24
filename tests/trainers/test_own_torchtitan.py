"""torchtitan reads exported modules, splits its own Llama by them and builds the schedule."""

import importlib
import itertools
import sys
from typing import Any, NamedTuple

import pytest
import torch

from partopt import Plan, export_plan
from tests.helpers import flat
from tests.trainers.models import transformer
from tests.trainers.own_code import as_rank, needs
from tests.trainers.plans import PAIRS, contents, on_ranks, planned

pytestmark = [needs("torchtitan", "triton"), pytest.mark.filterwarnings("ignore")]

BLOCKS = 6  # of its smallest Llama
NUMBERS = itertools.count()


def small(cuts=(4, 5, 7), devices=None, **options) -> Plan:
    """Six blocks in stages that begin with these layers."""
    cluster = flat(devices or sum(options.get("replicas", [1] * (len(cuts) + 1))))
    return planned(list(cuts), profile=transformer(BLOCKS), cluster=cluster, **options)


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Reads the text of an export as torchtitan's own command line does."""
    from torchtitan.config.manager import ConfigManager

    monkeypatch.syspath_prepend(str(tmp_path))

    def load(plan, old="", new=""):
        stem = f"planned_{next(NUMBERS)}"  # a module is imported once
        text = export_plan(plan, "torchtitan", stem=stem)
        assert old in text.main
        main = text.main.replace(old, new, 1)
        type(text)(main, text.beside).save(str(tmp_path / f"{stem}.py"))
        importlib.invalidate_caches()
        importlib.import_module(stem)  # so that it says itself what is wrong
        return ConfigManager().parse_args(["--module", stem, "--config", "planned"])

    yield load
    for name in [name for name in sys.modules if name.startswith("planned_")]:
        del sys.modules[name]


class Split(NamedTuple):
    """What torchtitan makes of a model."""

    parameters: dict[int, list[str]]  # of each stage, by their names in the whole model
    ranks: dict[int, list[int]]  # of each stage
    schedules: list[Any]  # of each rank


def split(config) -> Split:
    """The stages and schedules of all ranks.

    Every parameter of the whole model has its number as its value, which its copies keep.
    """
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import pipeline_parallel as own

    model = config.model_spec.model.build()
    names = list(dict(model.named_parameters()))
    for number, parameter in enumerate(model.parameters()):
        parameter.data = torch.full((1,), float(number))
    parallelism = config.parallelism
    ranks = parallelism.pipeline_parallel_degree * parallelism.data_parallel_replicate_degree
    ranks *= parallelism.data_parallel_shard_degree
    made = Split({}, {}, [])
    for rank in range(ranks):
        with as_rank(rank, ranks):
            dims = ParallelDims.from_config(parallelism, ranks)
            stages, parts = own._pipeline_module_split(
                model,
                dims.get_mesh("pp"),
                parallelism.pipeline_parallel_schedule,
                torch.device("cpu"),
                parallelism.module_fqns_per_model_part,
            )
            made.schedules.append(
                own._build_pipeline_schedule(
                    parallelism=parallelism,
                    local_batch_size=config.training.local_batch_size,
                    stages=stages,
                    loss_fn=lambda *given: (given[0].sum(), 0),
                )
            )
        for stage, part in zip(stages, parts, strict=True):
            found = [names[int(parameter.item())] for parameter in part.parameters()]
            assert made.parameters.setdefault(stage.stage_index, found) == found
            made.ranks.setdefault(stage.stage_index, []).append(rank)
    return made


def of_parts(names: list[str]) -> list[str]:
    """The parts of the model that have the parameters of these names, as plans name them."""
    kinds = {"tok_embeddings": "embedding", "norm": "norm", "lm_head": "head"}
    parts = [kinds.get(name.split(".")[0]) or name.split(".")[1] for name in names]
    return list(dict.fromkeys(parts))


def check(config, plan: Plan) -> list[Any]:
    """Hold the stages that torchtitan makes against the plan's; its schedules."""
    made = split(config)
    every = [name for s in range(len(plan.stages)) for name in made.parameters[s]]
    assert len(every) == len(set(every))
    assert set(every) == set(dict(config.model_spec.model.build().named_parameters()))
    for s, expected in enumerate(contents(plan)):
        assert sorted(of_parts(made.parameters[s])) == sorted(expected)
        assert made.ranks[s] == plan.stages[s].ranks
    return made.schedules


PLANS = {
    "1f1b": (small, "Schedule1F1B"),
    "pairs": (lambda: small(**PAIRS), "Schedule1F1B"),
    "own stages": (lambda: small([2, 8, 9], schedule="gpipe"), "ScheduleGPipe"),
    "interleaved": (lambda: small(devices=2, schedule="interleaved"), "_PipelineScheduleRuntime"),
    "zbv": (lambda: small(devices=2, schedule="zbv"), "_PipelineScheduleRuntime"),
    "dualpipev": (lambda: small(devices=2, schedule="dualpipev"), "_PipelineScheduleRuntime"),
    "zb-h1": (lambda: small(schedule="zb-h1"), "_PipelineScheduleRuntime"),
    "few": (lambda: small(microbatches=3), "_PipelineScheduleRuntime"),
}


@pytest.mark.parametrize("case", PLANS)
def test_its_own_llama_is_split_as_the_plan_says(read, case):
    make, schedule = PLANS[case]
    plan = make()
    for found in check(read(plan), plan):
        assert type(found).__name__ == schedule
        assert found._n_microbatches == plan.microbatches // plan.stages[0].replicas


@pytest.mark.parametrize(
    ("shard", "replicate", "degree", "always"),
    [("none", 2, 1, False), ("gradients", 1, 2, False), ("parameters", 1, 2, True)],
)
def test_batches_replicas_and_recomputation(read, shard, replicate, degree, always):
    from torchtitan.distributed.activation_checkpoint import FullAC
    from torchtitan.distributed.fsdp import get_fsdp_reshard_after_forward_policy

    config = read(small(**PAIRS, shard=shard, recompute="always"))
    assert isinstance(config.activation_checkpoint, FullAC.Config)
    parallelism, training = config.parallelism, config.training
    assert parallelism.data_parallel_replicate_degree == replicate
    assert parallelism.data_parallel_shard_degree == degree
    policy = parallelism.fsdp_reshard_after_forward
    assert get_fsdp_reshard_after_forward_policy(policy, pp_enabled=True) is always
    # one step of the optimizer for each batch, without gradients accumulated beside the pipeline
    assert training.global_batch_size == training.local_batch_size * 2 == 16
    assert read(small()).activation_checkpoint is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"layers.2"', '"layers.3"'),  # a layer dropped, another twice
        ('["layers.2"]', "[]"),  # an empty stage
        ('"lm_head"', '"output"'),  # a name that the model does not have
        ('"layers.1"],\n    ["layers.2"', '],\n    ["layers.1", "layers.2"'),  # a bound moved
        ('    ["layers.2"],\n', ""),  # a stage dropped
        ("pipeline_parallel_degree = 4", "pipeline_parallel_degree = 2"),
        ("local_batch_size = 8", "local_batch_size = 4"),
    ],
)
def test_a_wrong_export_is_noticed(read, old, new):
    plan = small()
    with pytest.raises((AssertionError, KeyError, ValueError)):
        for found in check(read(plan, old, new), plan):
            assert found._n_microbatches == plan.microbatches


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("disable_cuda_graphs = True", "disable_cuda_graphs = False"),
        ("microbatch_size = 1", "microbatch_size = 3"),
        ("blocks != 6", "blocks != 7"),
    ],
)
def test_its_own_validation_refuses_wrong_fields(read, old, new):
    with pytest.raises((ValueError, SystemExit)):
        read(small(), old, new)


def test_ranks_of_pipelines_beside_each_other_are_not_its_order(read):
    """Such a plan is refused; exported as the other, its stages would be on other ranks."""
    plan = small(**PAIRS)
    with pytest.raises(AssertionError):
        check(read(plan), on_ranks(plan, [[s, s + 4] for s in range(4)]))
