"""Any plan: a trainer refuses it, or its export has every layer once, in order and in its stage."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partopt import PartoptError, Plan, export_plan
from partopt.trainers import writers
from tests.examples import examples
from tests.helpers import flat
from tests.trainers.models import names, transformer
from tests.trainers.plans import contents, planned
from tests.trainers.readers import COUNTS, HOLDS, assigned

# schedules, the stages that a device has under them, and the trainers that have them
CHUNKS = {"1f1b": 1, "gpipe": 1, "zb-h1": 1, "interleaved": 2, "zbv": 2, "pipedream": 1}
RUN = {
    "torchtitan": {"1f1b", "gpipe", "zb-h1", "interleaved", "zbv"},
    "megatron": {"1f1b", "interleaved"},
    "megatron-bridge": {"1f1b", "interleaved"},
    "deepspeed": {"1f1b"},
    "colossalai": {"1f1b"},
    "torchgpipe": {"gpipe"},
    "torch": {"1f1b", "gpipe", "zb-h1", "interleaved", "zbv"},
    "torch-csv": {"1f1b", "gpipe", "zb-h1", "interleaved", "zbv"},
    "vllm": CHUNKS.keys(),
    "sglang": CHUNKS.keys(),
    "accelerate": CHUNKS.keys(),
}
ONE_REPLICA = {"vllm", "sglang", "accelerate", "torchgpipe"}
ONE_STAGE_A_DEVICE = {"vllm", "sglang", "accelerate"}
BLOCKS = 6
# the layers with which a stage may begin there: 0 and 1 are the embedding, 8 the norm, 9 the head
ANY = set(range(1, 10))
MAY_BEGIN = dict.fromkeys(writers(), ANY) | {
    "torchtitan": ANY - {1},
    "megatron": ANY - {1, 9},
    "megatron-bridge": ANY - {1, 9},
    "colossalai": {3, 4, 5, 6, 7},
    "vllm": {3, 4, 5, 6, 7},
    "sglang": {3, 4, 5, 6, 7},
}


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    schedule = draw(st.sampled_from(sorted(CHUNKS)))
    chunks = CHUNKS[schedule]
    devices = draw(st.integers(2, 4 if chunks == 1 else 3))
    stages = devices * chunks
    pool = draw(st.sampled_from([ANY, ANY - {1, 9}, MAY_BEGIN["vllm"]]))
    cuts = sorted(draw(st.permutations(sorted(pool)))[: stages - 1])
    replicas = draw(st.sampled_from([1, 1, 2]))
    return planned(
        cuts,
        profile=transformer(BLOCKS),
        cluster=flat(devices * replicas),
        replicas=[replicas] * stages,
        schedule=schedule,
        **({} if schedule == "pipedream" else {"microbatches": 12 * replicas}),
    )


def sayable(plan: Plan, to: str) -> bool:
    """Whether the trainer can say the plan, by what is written about it above."""
    replicas = plan.stages[0].replicas
    chunks = CHUNKS[plan.schedule]
    return (
        plan.schedule in RUN[to]
        and not (replicas > 1 and to in ONE_REPLICA)
        and not (chunks > 1 and to in ONE_STAGE_A_DEVICE)
        and {stage.start for stage in plan.stages[1:]} <= MAY_BEGIN[to]
    )


def has_all_layers(plan: Plan, to: str, text: str) -> bool:
    """Whether the export says which layers each stage has, as the plan does."""
    starts = [stage.start for stage in plan.stages]
    if to in HOLDS:
        return HOLDS[to](text) == contents(plan)
    if to in COUNTS:
        return COUNTS[to](text) == [len(stage.layers) for stage in plan.stages]
    if to == "accelerate":
        points = assigned(text, "ARGUMENTS")["split_points"]
        return points == [names(BLOCKS)[start] for start in starts[1:]]
    rows = [row.split(",") for row in text.splitlines()]
    forwards = sorted(cell for row in rows for cell in row if "F" in cell)
    own = plan.microbatches // plan.stages[0].replicas
    return forwards == sorted(f"{s}F{m}" for s in range(len(starts)) for m in range(own))


@pytest.mark.slow
@given(plan=plans())
@examples(60)
def test_a_trainer_says_all_of_a_plan_or_refuses_it(plan):
    assert [name for stage in contents(plan) for name in stage]
    for to in RUN:
        try:
            text = export_plan(plan, to)
        except PartoptError as error:
            assert {part.code for part in error.parts} == {"target-cannot-say"}
            assert not sayable(plan, to), error.message
        else:
            assert sayable(plan, to), to
            assert has_all_layers(plan, to, text.beside[".csv"] if to == "torch" else text.main)


def test_every_trainer_is_among_them():
    assert RUN.keys() == {*writers()}
