"""Stages of unequal units: against all cuts that there are, and beside published layouts."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import math
import random
import re

import pytest
from msgspec.structs import replace

from benchmarks.published_older import DATA
from benchmarks.published_rows import USUAL, ends_of, layout_of, topology_of, training_of
from partopt.documents.engine import Layout
from partopt.documents.plan import seconds_of
from partopt.documents.topology import Topology
from partopt.importers.hugging_face import load_transformer
from partopt.job import Job
from partopt.report.transformer_text import cut_text
from partopt.search.layout_plans import move_unequal_cuts, simulate_layout
from partopt.search.layout_questions import training_for
from partopt.transformer.as_profile import ends_of_starts, stage_starts
from partopt.transformer.iteration import Degrees, estimate, settle_cut, stages_of
from partopt.transformer.rates import Seconds
from partopt.transformer.unequal_stages import cut_for_makespan, cut_units, makespan_s, pace_s
from partopt.transformer.unequal_stages import ends_of as ends_of_counts
from tests.transformer.helpers import EXPERTS, KINDS, LLAMA, training

LAYOUTS = DATA / "layouts-experts.csv"
WORSE = 1.002  # of what a published layout takes, at most


def cuts(units, stages):
    """The sums of all ways to cut units into so many stages."""
    for inner in itertools.combinations(range(1, len(units)), stages - 1):
        bounds = itertools.pairwise((0, *inner, len(units)))
        yield [sum(units[start:stop]) for start, stop in bounds]


def paces(sums, p):
    """The slowest stage of every chunk, but no less than the mean stage."""
    mean = sum(sums) / len(sums)
    return sum(max(mean, *sums[k : k + p]) for k in range(0, len(sums), p))


@pytest.mark.parametrize("seed", range(300))
def test_no_cut_into_stages_of_one_chunk_is_faster(seed):
    drawn = random.Random(seed)
    passes = [0.0, *map(float, range(7)), drawn.random()]
    units = [Seconds(drawn.choice(passes), drawn.choice(passes)) for _ in range(9)]
    p, m = drawn.randint(1, 6), drawn.randint(1, 12)

    def seconds(bounds):
        stages = [units[start:stop] for start, stop in itertools.pairwise(bounds)]
        loads = [sum(map(sum, stage)) for stage in stages]
        return makespan_s(loads, [sum(unit.forward for unit in stage) for stage in stages], m)

    counts = cut_for_makespan(tuple(units), p, m)
    assert len(counts) == p and sum(counts) == len(units) and min(counts) > 0
    inner = itertools.combinations(range(1, len(units)), p - 1)
    best = min(seconds((0, *cut, len(units))) for cut in inner)
    assert seconds([0, *itertools.accumulate(counts)]) == pytest.approx(best, rel=1e-9)


def test_of_equally_fast_cuts_one_near_the_mean_is_taken():
    """Three blocks are the slowest stage in any case: the last one holds the head."""
    units = [*[Seconds(1.0, 2.0)] * 8, Seconds(1.5, 3.0)]
    assert cut_for_makespan(tuple(units), 4, 32) == (3, 2, 2, 2)


@pytest.mark.parametrize("m", [8, 64])
@pytest.mark.parametrize("p", [2, 3, 5, 8])
@pytest.mark.parametrize("model", [LLAMA, EXPERTS, KINDS], ids=lambda model: model.name)
def test_more_words_are_never_faster(model, p, m):
    """Nor are they with chunks, but for what cuts in tenths of a block miss."""
    model = replace(model, blocks=2 * p)
    known = [
        [
            estimate(training(larger, ends="free"), Layout(pp=p, chunks=v, dp=1), m).seconds
            for words in (10_000, 20_000, 40_000, 80_000, 160_000, 320_000)
            for larger in [replace(model, vocabulary=words)]
        ]
        for v in (1, 2)
    ]
    for seconds, slack in zip(known, (1e-9, 0.01), strict=True):
        for fewer, more in itertools.pairwise(seconds):
            assert fewer <= more * (1 + slack)


@pytest.mark.parametrize("blocks", [8, 9, 11, 13])
@pytest.mark.parametrize(("p", "v"), [(3, 1), (4, 1), (2, 2), (5, 1)])
@pytest.mark.parametrize("model", [LLAMA, EXPERTS], ids=lambda model: model.name)
def test_of_ways_that_are_open_the_fastest_with_room_is_taken(model, blocks, p, v):
    model, layout = replace(model, blocks=blocks), Layout(pp=p, chunks=v, dp=2)
    ways = [
        estimate(training(model, ends=ends), layout, 60) for ends in ("fewer", "stage", "blocks")
    ]
    for room in (math.inf, *(way.memory_bytes for way in ways), 0.0):
        work = training(model, ends="fewer", other_ends=("stage", "blocks"), room=room)
        found, able = estimate(work, layout, 60), [way for way in ways if way.memory_bytes <= room]
        if able:
            assert found.memory_bytes <= room
            assert found.seconds == min(way.seconds for way in able)
        else:
            assert found.memory_bytes == min(way.memory_bytes for way in ways)
        assert found == estimate(settle_cut(work, layout, 60), layout, 60)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("p", "v"), [(2, 1), (3, 1), (5, 1), (2, 2), (3, 2), (2, 3)])
def test_no_cut_is_faster(p, v, seed):
    drawn = random.Random(seed)
    units = tuple(float(drawn.randint(0, 9)) for _ in range(10))
    counts = cut_units(units, p, v)
    assert len(counts) == p * v and sum(counts) == len(units) and min(counts) > 0
    ends = [0, *itertools.accumulate(counts)]
    ours = [sum(units[start:stop]) for start, stop in itertools.pairwise(ends)]
    best = min(paces(sums, p) for sums in cuts(units, p * v))
    assert paces(ours, p) == pytest.approx(best)


def test_megatron_s_layout_of_deepseek_v3_is_found():
    """That of the help of its argument, where a dense block takes 0.9 of one with experts."""
    units = (0.05, *[0.9] * 3, *[1.0] * 58, 1.9, 1.0)
    counts = cut_units(units, 8, 4)
    assert ends_of_counts(counts, 61, 1) == "-".join(["3", *["2"] * 29, "0m", "0"])
    letters, stages = "E" + "t" * 61 + "mL", iter(counts)
    starts = itertools.accumulate(counts, initial=0)
    text = [letters[start : start + count] for start, count in zip(starts, stages, strict=False)]
    assert cut_text(text) == "Et*3|(tt|)*29m|L"


def test_a_slot_is_as_long_as_its_slowest_device():
    assert pace_s([(1.0, 2.0)] * 6, 2) == pytest.approx(9.0)  # all alike: three chunks of 3 s
    # two chunks on two devices, one stage of 4 s: a device has 3 + 1 + 3 + 1 in the mean and waits
    slow = pace_s([(1.0, 3.0), (1.0, 1.0), (1.0, 1.0), (1.0, 1.0)], 2)
    assert 6.0 <= slow <= 8.0


@pytest.mark.parametrize(("p", "v"), [(2, 1), (4, 1), (2, 2), (2, 4)])
def test_stages_of_kinds_are_as_fast_as_any_by_their_seconds(p, v):
    work = training(KINDS, ends="free")
    layout, layers = Layout(pp=p, chunks=v, dp=2), len(KINDS.kinds()) + 3
    degrees = Degrees.of(work, layout, 16)
    stages = stages_of(work, degrees)
    assert sum(stage.blocks for stage in stages) == KINDS.blocks
    assert [stage.further for stage in stages].count(1) == 1
    ends = ends_of_starts(KINDS, stage_starts(work, degrees))
    as_said = training(KINDS, ends=ends)
    assert stages_of(as_said, Degrees.of(as_said, layout, 16)) == stages
    ours_s = estimate(work, layout, 16).seconds
    slack = 1.02 if v > 1 else 1 + 1e-9
    for inner in itertools.combinations(range(1, layers), p * v - 1):
        counts = [stop - start for start, stop in itertools.pairwise((0, *inner, layers))]
        stated = training(KINDS, ends=ends_of_counts(counts, KINDS.blocks, 1))
        assert ours_s <= estimate(stated, layout, 16).seconds * slack


@pytest.mark.parametrize(
    ("blocks", "words", "p", "m"), [(9, 32_000, 4, 4), (6, 32_000, 2, 2), (8, 256_000, 2, 8)]
)
def test_no_cut_of_equal_blocks_in_chunks_is_much_faster_simulated(blocks, words, p, m):
    """Cuts are moved with the step of the first of them: of so few blocks that is some percent."""
    model = replace(load_transformer("llama3-8b"), blocks=blocks, vocabulary=words)
    layout = Layout(pp=p, chunks=2, tp=1, cp=1, ep=1, dp=8 // p, microbatch=1)
    layout = replace(layout, schedule="interleaved", recompute="never", shard="optimizer")
    topology, batch = Topology.load("dgx-h100", 1), 8 // p * m
    asked = Job(model, topology, trainer="megatron", global_batch=batch, sequence=4096)
    asked = asked.with_(facts={"ends": "free"}, memory=10**12)
    work = training_for(asked)

    def seconds_by(counts):
        stated = work.cut_by(ends_of_counts(counts, blocks, 0))
        return seconds_of(simulate_layout(asked, stated, layout))

    ours = move_unequal_cuts(asked, work, simulate_layout(asked, work, layout))
    inner = itertools.combinations(range(1, blocks + 2), 2 * p - 1)
    bounds = (itertools.pairwise((0, *cut, blocks + 2)) for cut in inner)
    best_s = min(seconds_by([stop - start for start, stop in pairs]) for pairs in bounds)
    assert seconds_of(ours) <= 1.03 * best_s


@pytest.mark.skipif(not LAYOUTS.exists(), reason="published layouts are not beside this checkout")
@pytest.mark.parametrize("number", range(8))
def test_no_published_layout_of_deepseek_v3_is_faster(number):
    with LAYOUTS.open() as file:
        published = [*csv.DictReader(file)][number]
    with (DATA / "runs-experts.csv").open() as file:
        given = [*csv.DictReader(file)]
    rows = [USUAL | {name: text for name, text in row.items() if text} for row in given]
    p, v = map(int, re.findall("[0-9]+", published["stages_by_chunks"]))
    row = next(
        row
        for row in rows
        if (row["model"], row["device_name"]) == ("deepseek-v3", published["device"])
    )
    row |= {"stages": published["published_layout"], "pp": str(p), "chunks": str(v)}
    row["mtp"] = "1" if "m" in row["stages"] else "0"
    row["dp"] = str(int(row["gpus"]) // (p * int(row["tp"]) * int(row["cp"])))
    row["ep"] = str(min(int(row["ep"]), int(row["dp"]) * int(row["tp"])))
    work, layout = training_of(row), layout_of(row)
    layout = replace(layout, schedule="interleaved" if v > 1 else "1f1b")
    asked = Job(
        work.model,
        topology_of(row),
        trainer="megatron",
        global_batch=int(row["global_batch"]),
        sequence=work.sequence,
        dtype=work.format,
        memory=10**15,
    )
    theirs = simulate_layout(asked, work, layout)
    assert work.practice.ends == ends_of(row)
    free = dataclasses.replace(work, practice=replace(work.practice, ends="free"))
    ours = move_unequal_cuts(asked, free, simulate_layout(asked, free, layout))
    assert seconds_of(ours) <= WORSE * seconds_of(theirs)
