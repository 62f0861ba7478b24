"""What layouts take at least, by columns: against what every one of them is estimated to take."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partopt.documents.engine import Layout
from partopt.documents.topology import Topology
from partopt.errors import PartoptError
from partopt.importers.hugging_face import load_transformer
from partopt.job import Job
from partopt.search.layout_questions import question_of, training_for
from partopt.transformer.columns import Columns, Question, with_way
from partopt.transformer.faults import find_faults
from partopt.transformer.iteration import estimate, iteration_s
from partopt.transformer.layouts import module_sets
from tests.transformer.helpers import EXPERTS, KINDS, LLAMA, training

DEVICES, BATCH = 8, 16
WITHIN = 1 + 1e-9  # rounding


def ways_of(work):
    found = [Layout(recompute=way) for way in ("never", "selective", "always")]
    return found + [Layout(recompute="selective", modules=modules) for modules in module_sets(work)]


def compare(work, question, sizes=None):
    """Ratios of the bounds to seconds and to bytes, and the largest without what is once.

    Of some of the layouts, if there are more.
    """
    columns, seconds, needed, nearest = Columns.of(work, question), [], [], 0.0
    rows = range(len(columns.rows))
    rows = random.Random(0).sample(rows, min(sizes or len(rows), len(rows)))
    for way in ways_of(work):
        able = columns.allow(work, way)
        bounds = columns.seconds(work, way), columns.bytes(work, way)
        for row in rows:
            layout = with_way(columns.layout(row), way)
            assert able[row] == (not any(find_faults(work, layout, question.batch)))
            if able[row]:
                found = estimate(work, layout, question.batch)
                seconds.append(bounds[0][row] / found.seconds)
                once_s = found.parts["step"] + found.parts["replicas"]
                nearest = max(nearest, bounds[0][row] / (found.seconds - once_s))
                needed.append(bounds[1][row] / found.memory_bytes)
    return np.array(seconds), np.array(needed), nearest


@pytest.mark.parametrize("model", [LLAMA, EXPERTS, KINDS], ids=lambda model: model.name)
@pytest.mark.parametrize("ends", ["stage", "free"])
def test_no_layout_takes_less_time_or_memory_than_its_bounds(model, ends):
    work = training(model, ends=ends, buffer_bytes=0)
    seconds, needed, nearest = compare(work, Question(DEVICES, BATCH, math.inf, Layout()))
    assert seconds.max() <= WITHIN and needed.max() <= WITHIN
    least = 0.8 if model.further else 0.95  # of which blocks are not counted
    assert nearest > least and needed.max() > least and np.median(needed) > 0.6


FACTS = {
    "dtype": ["fp8"],
    "ends": ["free", "blocks"],
    "gradients": ["bfloat16"],
    "tp-overlap": ["buffers"],
    "exchange": ["deepep"],
    "optimizer-offload": ["0.4"],
    "offload": ["all"],
    "fsdp": ["yes"],
    "graphs": ["attention"],
    "lora": [16],
    "optimizer": ["muon"],
    "exchange-overlap": ["yes"],
    "attention": ["unfused"],
}


@given(
    model=st.sampled_from(["llama3-8b", "llama2-13b", "deepseek-v3", "mixtral-8x7b", "gemma2-9b"]),
    trainer=st.sampled_from(["megatron", "megatron-bridge", "torchtitan", "deepspeed"]),
    place=st.tuples(st.sampled_from(["dgx-h100", "gb200-nvl72"]), st.sampled_from([1, 2, 4])),
    batch=st.sampled_from([16, 64, 144, 576]),
    sequence=st.sampled_from([2048, 32_768]),
    facts=st.lists(st.sampled_from([*FACTS]), max_size=2, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: st.sampled_from(FACTS[name]) for name in names})
    ),
)
def test_bounds_hold_for_what_trainers_do(model, trainer, place, batch, sequence, facts):
    stated = dict(facts)
    dtype = {"dtype": stated.pop("dtype")} if "dtype" in stated else {}
    options = {"trainer": trainer, "global_batch": batch, "sequence": sequence, "facts": stated}
    try:
        job = Job(load_transformer(model), Topology.load(*place), **options, **dtype)
        work, question = training_for(job), question_of(job)
    except PartoptError:
        return  # which the trainer does not have, or not together
    seconds, needed, _ = compare(work, question, 12)
    assert seconds.max(initial=0.0) <= WITHIN and needed.max(initial=0.0) <= WITHIN


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_with_some_blocks_made_again_bounds_are_of_as_many_or_more(share):
    work, question = training(LLAMA), Question(DEVICES, BATCH, math.inf, Layout(pp=4))
    columns = Columns.of(work, question)
    way, blocks = Layout(recompute="always"), work.model.blocks
    seconds, needed = (find(work, way, share) for find in (columns.seconds, columns.bytes))
    for row in range(len(columns.rows)):
        core = columns.layout(row)
        for fewer in range(1, blocks // (4 * core.chunks)):
            made, layout = fewer * 4 * core.chunks / blocks, with_way(core, Layout(recompute=fewer))
            if made >= share:
                assert seconds[row] <= iteration_s(work, layout, BATCH) * WITHIN
            if made <= share:
                assert needed[row] <= estimate(work, layout, BATCH).memory_bytes * WITHIN


def test_layouts_of_a_question_are_found_once_for_switches_that_leave_them_alike():
    job = Job(
        load_transformer("llama3-8b"),
        Topology.load("dgx-h100", 1),
        trainer="megatron",
        global_batch=16,
        sequence=4096,
    )
    work, question = training_for(job), question_of(job)
    fused = work.having(work.practice, work.engine, "fp8")
    rows = Columns.of(work, question).rows
    assert Columns.of(fused, question).rows is rows
    other = question._replace(fixed=Layout(tp=2))
    assert set(Columns.of(work, other).t.tolist()) == {2} and len(rows) > 100
