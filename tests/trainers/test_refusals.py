"""What a trainer cannot say of a plan: every kind of reason, and all of them at once."""

import dataclasses

import pytest
from msgspec.structs import replace

from partopt import TRAINERS, PartoptError, Plan, Profile, export_plan
from partopt.cost.pricing import under
from partopt.documents.engine import Engine
from partopt.documents.profile import Group
from partopt.simulator.execution import execute
from partopt.trainers import writers
from tests.helpers import flat, uniform_profile
from tests.trainers.models import names, transformer
from tests.trainers.plans import LOOPS, PAIRS, on_ranks, planned, recomputing

MEGATRON = {"megatron", "megatron-bridge"}
ONLY_1F1B = {"deepspeed", "colossalai"}
TORCH = {"torch", "torch-csv", "torchtitan"}
TRAINING = {*TORCH, *MEGATRON, *ONLY_1F1B, "torchgpipe"}
SERVERS = {"vllm", "sglang"}
WHOLE_BLOCKS = {"torchtitan", *MEGATRON, "colossalai", *SERVERS}


def reasons(plan: Plan, to: str) -> list[str]:
    """Why the trainer cannot say the plan; none where it can."""
    try:
        export_plan(plan, to)
    except PartoptError as error:
        head = f"{to} cannot say this plan of {plan.profile.name}: "
        for part in error.parts:
            assert (part.code, part.fields, part.exit_code) == (
                "target-cannot-say",
                {"target": to},
                2,
            )
            assert part.message.startswith(head)
        return [part.message.removeprefix(head) for part in error.parts]
    return []


def of_layers(*layers: str) -> Profile:
    return uniform_profile(len(layers), names=layers, name="gpt")


def sharing() -> Profile:
    """A model whose first and last layer share a parameter."""
    return transformer(shared=[("wte.weight", [0, 15], 1000)])


def running_twice() -> Profile:
    """A model that runs one of its layers a second time."""
    own = of_layers("wte", "drop", "h.0", "h.1", "drop", "lm_head")
    layers = [*own.layers]
    layers[4] = replace(layers[4], call=1)
    return replace(own, layers=layers)


# how the plan is made, the reason or how it begins, and the trainers that state it
CASES = [
    (lambda: planned([8], replicas=[2, 1]), "stages have unequal replicas, 2-1", {*writers()}),
    (lambda: planned(**PAIRS),
     "stages have 2 replicas (`replication=none`)", {"torchgpipe", "accelerate", *SERVERS}),
    (lambda: planned(**PAIRS | {"microbatches": 15}),
     "15 microbatches are not a multiple of 2 replicas", TRAINING - {"torchgpipe"}),
    (lambda: planned(schedule="pipedream"),
     "the schedule is pipedream, which never flushes; it runs ", TRAINING),
    (lambda: planned(schedule="zb-h1"), "the schedule is zb-h1; it runs ", TRAINING - TORCH),
    (lambda: planned([9], cluster=flat(2), replicas=[1, 1], schedule="dualpipe"),
     "the schedule is dualpipe; it runs ", TRAINING),
    (lambda: planned([9], cluster=flat(2), replicas=[1, 1], schedule="dualpipe"),
     "each device holds stages of two copies of the model", TRAINING - {"torchgpipe"}),
    (lambda: recomputing(planned(), 1),
     "some stages recompute activations and some do not (`recompute=always` or `never`)",
     {"torchtitan", *MEGATRON, "deepspeed", "torchgpipe"}),
    (lambda: planned(schedule="gpipe", recompute="always"),
     "gpipe recomputes while it waits, and torch has no action for that", TORCH),
    (lambda: planned(**PAIRS, shard="parameters"),
     "replicas hold shares of their parameters (`shard`)", TRAINING - {"torchtitan"}),
    (lambda: planned(**PAIRS, shard="optimizer"),
     "replicas hold shares of their optimizer (`shard`)", {*TORCH, "torchgpipe"} - {"torch"}),
    (lambda: planned(profile=sharing()),
     "stages part layers that share wte.weight (`tied=together`)", {"torchtitan", "torchgpipe"}),
    (lambda: planned([1, 9, 12]), "stage 1 begins with wpe, inside embedding", WHOLE_BLOCKS),
    (lambda: planned([3], profile=of_layers("e", "h.0", "h.1.attn", "h.1.mlp", "h.2", "o")),
     "stage 1 begins with h.1.mlp, inside block 1", WHOLE_BLOCKS),
    (lambda: planned([2, 6, 9]),
     "stage 1 begins with h.0, between embedding and block 0", {"colossalai", *SERVERS}),
    (lambda: planned([6, 9, 14]),
     "stage 3 begins with ln_f, between block 11 and norm", {"colossalai", *SERVERS}),
    (lambda: planned([6, 9, 15]),
     "stage 3 begins with lm_head, between norm and head", WHOLE_BLOCKS - {"torchtitan"}),
    (lambda: planned([4], profile=of_layers(*names()[2:])),
     "the model has no embedding (`map`)", WHOLE_BLOCKS),
    (lambda: planned([4], profile=of_layers(*names()[:-1])),
     "the model has no head (`map`)", WHOLE_BLOCKS),
    (lambda: on_ranks(planned(cluster=flat(6)), [[0], [1], [3], [4]]),
     "rank 2 is idle, and others behind it are not",
     {*writers()} - {"torch", "torch-csv", *SERVERS}),
    (lambda: on_ranks(planned(), [[3], [2], [1], [0]]),
     "its ranks are not numbered so that those of a stage",
     {*writers()} - {"torch", "torch-csv", *SERVERS}),
    (lambda: on_ranks(planned(**PAIRS), [[s, s + 4] for s in range(4)]),
     "its ranks are not numbered so that those of a stage follow each other", {"torchtitan"}),
    (lambda: planned(**LOOPS, microbatches=6),
     "6 microbatches of a pipeline are not a multiple of its 4 devices", MEGATRON),
    (lambda: planned(**LOOPS | {"cluster": flat(8), "replicas": [2] * 8, "microbatches": 12}),
     "6 microbatches of a pipeline are not a multiple of its 4 devices", MEGATRON),
    (lambda: planned([8], cluster=flat(1), schedule="interleaved"),
     "its stages are all on one device", MEGATRON),
    (lambda: planned(microbatches=3),
     "3 microbatches of a pipeline are fewer than its 4 stages", {"colossalai"}),
    (lambda: planned(**PAIRS | {"microbatches": 6}),
     "3 microbatches of a pipeline are fewer than its 4 stages", {"colossalai"}),
    (lambda: planned([], replicas=[2]),
     "it has one stage, and a pipeline has 2 or more", {"torchtitan", "colossalai"}),
    (lambda: planned(**LOOPS), "devices hold several stages", {"accelerate", *SERVERS}),
    (lambda: planned([4], profile=running_twice()),
     "drop runs several times, and a split names a module", {"accelerate"}),
    (lambda: planned(profile=replace(transformer(), group=Group(ranks=2)), cluster=flat(8)),
     "each device is a group of 2 ranks", {"torch", "torchgpipe", "accelerate"}),
]  # fmt: skip


@pytest.mark.parametrize(("make", "reason", "stating"), CASES)
def test_trainers_that_cannot_say_it_give_the_reason(make, reason, stating):
    plan = make()
    found = {to: reasons(plan, to) for to in writers()}
    assert {to for to, each in found.items() if any(r.startswith(reason) for r in each)} == stating
    assert all(len(set(each)) == len(each) for each in found.values())


def test_all_reasons_are_given_at_once():
    plan = recomputing(planned([1, 9, 15], profile=sharing(), schedule="1f1b-eager"), 2)
    assert reasons(on_ranks(plan, [[0], [1], [3], [5]]), "megatron") == [
        "the schedule is 1f1b-eager; it runs 1f1b, interleaved",
        "rank 2 is idle, and others behind it are not",
        "some stages recompute activations and some do not (`recompute=always` or `never`)",
        "stage 1 begins with wpe, inside embedding",
        "stage 3 begins with lm_head, between norm and head",
    ]


def test_idle_ranks_behind_the_others_are_left_out():
    for to in TRAINING - {"torchgpipe"}:
        assert reasons(planned(cluster=flat(6)), to) == []


def test_a_trainer_of_a_package_that_never_recomputes(monkeypatch):
    gpipe = TRAINERS["torchgpipe"]
    own = dataclasses.replace(gpipe, name="own", engine=Engine(), schedules=None)
    monkeypatch.setitem(TRAINERS.builtin, "own", own)
    assert reasons(planned(), "own") == []
    assert reasons(recomputing(planned(), 1), "own") == [
        "stages recompute activations (`recompute=never`)"
    ]


def test_an_unknown_trainer_is_refused_with_the_nearest_name():
    with pytest.raises(PartoptError) as raised:
        export_plan(planned(), "megatron-lm")
    assert raised.value.code == "unknown-trainer"
    assert raised.value.hint == 'did you mean "megatron"?'


@pytest.mark.parametrize("stem", ["my-plan", "1st", "a b", "", "x.y"])
def test_a_file_that_torchtitan_could_not_import_is_refused(stem):
    with pytest.raises(PartoptError) as raised:
        export_plan(planned(), "torchtitan", stem=stem)
    assert (raised.value.code, raised.value.fields["option"]) == ("invalid-option", "output")


@pytest.mark.parametrize("to", sorted(TRAINING - {"torchgpipe"}))
def test_a_warm_up_that_the_schedule_does_not_have(to):
    altered = under(planned(), warmups=[5, 3, 2, 0])
    assert "its warm-up is not that of 1f1b" in reasons(altered, to)
    with pytest.raises(PartoptError, match="stage 0 does 5 forwards first; under 1f1b it does 3"):
        execute(altered)
