"""Megatron Core reads exported layouts and builds every rank's part of a GPT from them."""

import functools
import itertools
import re
import types
from typing import Any
from unittest import mock

import pytest
import torch

from partopt import Plan, export_plan
from partopt.schedules import order
from partopt.schedules.placement import placement_of
from tests.trainers.megatron_core import build, configured
from tests.trainers.own_code import needs
from tests.trainers.plans import LOOPS, PAIRS, contents, on_ranks, planned, planned_for
from tests.trainers.readers import layout_of_shell

pytestmark = [needs("megatron-core"), pytest.mark.filterwarnings("ignore")]


def beside() -> Plan:
    """Two pipelines whose own ranks follow each other."""
    return on_ranks(planned(**PAIRS), [[s, s + 4] for s in range(4)])


PLANS = {
    "4-3-3-2": planned,
    "own stages": lambda: planned([2, 8, 14]),
    "norm and head": lambda: planned([6, 9, 14]),
    "interleaved": lambda: planned(**LOOPS),
    "pairs": lambda: planned(**PAIRS),
    "beside": beside,
    "one stage": lambda: planned([]),
}


def fields_of_shell(text: str) -> dict[str, Any]:
    """The fields that Megatron-LM sets from the arguments of these names."""
    [size] = [
        line.split()[1] for line in text.splitlines() if "--pipeline-model-parallel-size" in line
    ]
    return {
        "pipeline_model_parallel_size": int(size),
        "pipeline_model_parallel_layout": layout_of_shell(text),
    }


def check(plan: Plan, text: str) -> None:
    """Hold every rank's part of the model against the plan."""
    mapping = "tp-cp-ep-pp-dp" if "--use-tp-pp-dp-mapping" in text else "tp-cp-ep-dp-pp"
    d = plan.stages[0].replicas
    made = build(fields_of_shell(text), d, mapping)
    whole = build({"pipeline_model_parallel_size": 1}, 1, mapping)
    assert sum(chunk.parameters for chunk in made) == d * whole[0].parameters
    assert sorted((chunk.stage, chunk.rank) for chunk in made) == [
        (s, rank) for s, stage in enumerate(plan.stages) for rank in stage.ranks
    ]
    for chunk in made:
        assert chunk.holds == contents(plan)[chunk.stage]


@pytest.mark.parametrize("case", PLANS)
def test_every_rank_builds_its_stages_of_a_gpt(case):
    plan = PLANS[case]()
    check(plan, export_plan(plan, "megatron").main)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("|t*3|t*3|", "|t*3|t*2|"),  # a layer dropped
        ("|t*3|t*3|", "|t*4|t*2|"),  # a bound moved
        ("Et*4", "t*4"),
        ("t*2L", "t*2"),
        ("Et*4|", "t*4|E"),  # the embedding elsewhere
        ("|t*3|t*3|", "|t*6|"),  # a stage dropped
        ("Et*4", "Ex*4"),
        ("size 4", "size 2"),
    ],
)
def test_a_wrong_layout_is_noticed(old, new):
    plan = planned()
    text = export_plan(plan, "megatron").main
    assert old in text
    with pytest.raises((AssertionError, ValueError)):
        check(plan, text.replace(old, new, 1))


def test_the_other_order_of_ranks_is_noticed():
    plan = beside()
    with pytest.raises(AssertionError):
        check(plan, export_plan(plan, "megatron").main.replace("--use-tp-pp-dp-mapping", ""))


@pytest.mark.parametrize("microbatches", [4, 8, 12])
def test_its_interleaved_schedule_is_that_of_the_plan(microbatches):
    """The table of forwards by its own code; backwards are the same table, chunks reversed."""
    from megatron.core.pipeline_parallel import schedules

    P, v = 4, 2
    plan = planned(**LOOPS, microbatches=microbatches)
    own = order(plan.schedule, placement_of(plan))
    table = schedules.get_schedule_table(microbatches, v, P)
    for rank in range(P):
        peers = types.SimpleNamespace(size=lambda: P, rank=lambda rank=rank: rank)
        communicator = types.SimpleNamespace(pp_group=peers, virtual_pipeline_model_parallel_size=v)
        total, _, first, _ = schedules.get_pp_rank_microbatches(
            microbatches, v, P, p2p_communicator=communicator
        )
        forwards = [f"{chunk * P + rank}F{m}" for m, chunk in table]
        backwards = [f"{(v - 1 - chunk) * P + rank}B{m}" for m, chunk in table]
        pairs = zip(forwards[first:], backwards, strict=False)
        expected = [*forwards[:first], *itertools.chain.from_iterable(pairs)]
        expected += backwards[total - first :]
        assert [name for name in own.names(rank) if name[1] in "FB"] == expected


@pytest.mark.parametrize(("group", "microbatches"), [(4, 6), (4, 2)])
def test_it_refuses_batches_that_the_exporter_refuses(group, microbatches, monkeypatch):
    """Its loop raises before it does anything, where they are no multiple of the devices."""
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel import schedules

    monkeypatch.setattr(torch, "zeros", mock.MagicMock())  # it makes one on a GPU before that
    peers = types.SimpleNamespace(size=lambda: group, rank=lambda: 0)
    model = torch.nn.Module()
    model.model_type = ModelType.encoder_or_decoder
    model.config = configured(microbatch_group_size_per_vp_stage=group)
    with pytest.raises((ValueError, RuntimeError), match=r"multiple|micro-batch|remainder"):
        schedules.forward_backward_pipelining_with_interleaving(
            forward_step_func=None,
            data_iterator=[iter(())] * 2,
            model=[model] * 2,
            num_microbatches=microbatches,
            seq_length=4,
            micro_batch_size=1,
            p2p_communicator=types.SimpleNamespace(
                pp_group=peers, virtual_pipeline_model_parallel_size=2, config=model.config
            ),
            pg_collection=mock.MagicMock(),
        )


@pytest.mark.parametrize("how", [1, 3, "always", "never"])
def test_it_makes_the_blocks_again_that_the_plan_says(how, monkeypatch):
    """Its loop over the layers of a stage, run alone: those inside a checkpoint are made again."""
    from megatron.core.transformer import transformer_block

    plan = planned_for("megatron", recompute=how)
    again, inside = [], []

    def checkpoint(function, distribute, *arguments):
        inside.append(True)
        return function(*arguments), inside.pop()

    def layer(index, *, hidden_states, **_):
        again.append(bool(inside))
        return hidden_states, None

    monkeypatch.setattr(transformer_block.tensor_parallel, "checkpoint", checkpoint)
    words = re.findall(r"--(recompute-[a-z-]+) (\w+)", export_plan(plan, "megatron").main)
    fields = {name.replace("-", "_"): value for name, value in words}
    assert (how == "never") == (not fields)
    if fields:
        fields["recompute_num_layers"] = int(fields["recompute_num_layers"])
        for stage in plan.stages:
            again.clear()
            own = types.SimpleNamespace(
                config=types.SimpleNamespace(
                    fp8=None, fp4=None, distribute_saved_activations=False, **fields
                ),
                num_layers_per_pipeline_rank=stage.blocks,
                _get_layer=lambda index: functools.partial(layer, index),
            )
            run = transformer_block.TransformerBlock._checkpointed_forward
            run(own, torch.zeros(1), *[None] * 6, use_inner_quantization_context=False)
            rest = stage.blocks - stage.blocks_again
            assert again == [True] * stage.blocks_again + [False] * rest


def test_recomputation_is_accepted():
    fields = {"recompute_granularity": "full", "recompute_method": "uniform"}
    assert configured(**fields, recompute_num_layers=1).recompute_num_layers == 1
    with pytest.raises(ValueError, match="recompute_num_layers"):
        configured(**fields)
