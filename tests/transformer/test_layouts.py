"""The layouts that are tried: all that there are, those that fit by their seconds."""

from __future__ import annotations

import itertools
import math

import pytest
from msgspec.structs import replace

from partopt.documents.engine import Engine, Layout
from partopt.documents.transformer import Scores
from partopt.transformer.columns import EXPERTS_MOST, FEW_CHUNKS, Question, shard_of
from partopt.transformer.faults import find_faults
from partopt.transformer.iteration import Estimate, estimate
from partopt.transformer.layouts import (
    ENOUGH,
    EXPERTS_MICROBATCH,
    MISSING,
    find_fastest,
    find_layouts,
    layouts,
    module_sets,
)
from tests.transformer.helpers import EXPERTS, KINDS, LLAMA, training

DEVICES, BATCH = 8, 16
POWERS = (1, 2, 4, 8, 16)
WIDE = replace(LLAMA, kv_heads=4)
MANY = replace(LLAMA, kv_heads=8, blocks=24)
# of stages of so many blocks all have as many: as they are, with both ends, with up to two
COUNTED = {"stage": (0,), "blocks": (2,), "fewer": (0, 1, 2)}


def every(work, ways):
    """All layouts whose degrees multiply to the devices and have no fault, one by one."""
    more = COUNTED[work.practice.ends]
    for t, c, p, n in itertools.product(POWERS, POWERS, range(1, 9), range(1, 9)):
        if t * c * p * n != DEVICES:
            continue
        cut = (None, t) if work.model.experts and t > 1 else (None,)
        for e, etp, b, v in itertools.product(POWERS, cut, POWERS, range(1, 7)):
            if (etp and e * etp > work.rates.server) or (work.model.experts and b > EXPERTS_MOST):
                continue
            alike = any((work.model.blocks + own) % (p * v) == 0 for own in more)
            if v > FEW_CHUNKS and not alike:
                continue
            own = Layout(tp=t, cp=c, ep=e, etp=etp, pp=p, chunks=v, dp=n, microbatch=b)
            if not any(find_faults(work, own, BATCH)):
                name = "interleaved" if v > 1 else "1f1b"
                for again in ways:
                    shard = shard_of(work, p)
                    again, _, modules = again.partition(" ")
                    made = {"recompute": again, "modules": modules or None}
                    yield replace(own, **made, shard=shard, schedule=name)


def key(layout):
    return repr(layout)


@pytest.mark.parametrize("ends", COUNTED)
@pytest.mark.parametrize("model", [WIDE, EXPERTS], ids=lambda model: model.name)
def test_every_layout_that_has_no_fault_is_tried_once(model, ends):
    work = training(model, ends=ends)
    found = list(layouts(work, DEVICES, BATCH, Layout()))
    sets = [f"selective {modules}" for modules in module_sets(work)] if model.experts else []
    assert len(sets) == (3 if model.experts else 0)
    expected = list(every(work, ["never", *sets, "always"]))
    assert sorted(found, key=key) == sorted(expected, key=key)
    assert {own.pp for own in found} >= {1, 2, 4} and len({own.chunks for own in found}) > 1


@pytest.mark.parametrize(
    "fixed",
    [
        Layout(tp=2),
        Layout(cp=2, microbatch=2),
        Layout(pp=2, chunks=2),
        Layout(dp=4),
        Layout(recompute="always"),
        Layout(shard="none"),
    ],
)
def test_parts_that_are_fixed_stay(fixed):
    work = training(WIDE)
    parts = {name: value for name in fixed.__struct_fields__ if (value := getattr(fixed, name))}
    found = list(layouts(work, DEVICES, BATCH, fixed))
    tried = [
        replace(own, shard=fixed.shard or own.shard) for own in every(work, ["never", "always"])
    ]
    expected = [own for own in tried if all(getattr(own, n) == v for n, v in parts.items())]
    assert sorted(found, key=key) == sorted(expected, key=key) and found


@pytest.mark.parametrize(
    ("practice", "ways"),
    [
        ({}, {"never", "always"}),  # no scores, of which nothing would be made again
        ({"scores": Scores(forward=9, backward=11, kept=5)}, {"never", "selective", "always"}),
        ({"selective": "operations"}, {"never", "selective", "always"}),
    ],
)
def test_what_is_made_again_selectively_is_tried_where_it_is_something(practice, ways):
    found = layouts(training(WIDE, **practice), DEVICES, BATCH, Layout())
    assert {own.recompute for own in found} == ways


@pytest.mark.parametrize(
    ("shard", "p", "expected"),
    [
        (("none",), 1, "none"),
        (("none", "optimizer"), 2, "optimizer"),
        (("none", "gradients", "parameters"), 1, "parameters"),
        (("none", "gradients", "parameters"), 2, "gradients"),
    ],
)
def test_replicas_share_all_that_the_trainer_has(shard, p, expected):
    assert shard_of(training(engine=Engine(shard=shard)), p) == expected


def first_of_degrees(fitting):
    """Layouts that are no slower than `ENOUGH` others, which differ in degrees."""
    fastest = {}
    for own in sorted(fitting, key=lambda one: one.seconds):
        degrees = ("tp", "cp", "ep", "etp", "pp", "dp", "shard")
        fastest.setdefault(tuple(getattr(own.layout, name) for name in degrees), own.seconds)
    seconds = [*fastest.values()]
    most_s = seconds[ENOUGH - 1] if len(seconds) >= ENOUGH else math.inf
    return {own.layout for own in fitting if own.seconds <= most_s}


@pytest.mark.parametrize("share", [0.3, 0.6, 2.0])
def test_those_that_fit_are_found_by_seconds_and_those_that_nearly_do_by_bytes(share):
    work = training(WIDE)
    all_own = [estimate(work, own, BATCH) for own in every(work, ["never", "always"])]
    sizes = sorted(own.memory_bytes for own in all_own)
    limit = sizes[-1] * share if share > 1 else sizes[int(share * len(sizes))]
    found = find_layouts(work, Question(DEVICES, BATCH, limit, Layout(), partly=False))
    fitting = [own for own in all_own if own.memory_bytes <= limit]
    by_layout = {own.layout: own for own in fitting}
    assert first_of_degrees(fitting) <= {own.layout for own in found.fitting}
    assert all(by_layout[own.layout] == own for own in found.fitting)
    seconds = [own.seconds for own in found.fitting]
    assert seconds == sorted(seconds) and seconds[0] == min(own.seconds for own in fitting)
    first_s = found.fitting[0].seconds
    lacking = {
        own.layout: own.memory_bytes
        for own in all_own
        if limit < own.memory_bytes <= MISSING * limit and own.seconds < first_s
    }
    assert {own.layout: own.memory_bytes for own in found.lacking} == lacking
    assert [own.memory_bytes for own in found.lacking] == sorted(lacking.values())
    assert len(found.fitting) + len(lacking) <= found.tried < len(all_own)


def test_where_nothing_fits_the_least_is_known():
    found = find_layouts(training(WIDE), Question(DEVICES, BATCH, 1e9, Layout(), partly=True))
    assert found.fitting == found.lacking == [] and found.least.memory_bytes > 1e9
    none = find_layouts(training(WIDE), Question(DEVICES, 1, 1e9, Layout(pp=5), partly=True))
    assert (none.tried, none.least) == (0, None)


@pytest.mark.parametrize(
    ("share", "numbers"), [(0.7, {(1, 5)}), (0.8, {(1, 3), (2, 2)}), (0.95, {(2, 1), (3, 1)})]
)
def test_as_few_blocks_are_made_again_as_fit(share, numbers):
    """Of layouts with so many chunks, of the blocks of a stage; none where all may be kept."""
    work = training(replace(WIDE, blocks=24))
    limit = share * estimate(work, Layout(pp=4, dp=2), BATCH).memory_bytes
    found = []
    for partly in (False, True):
        fixed = Layout(tp=1, cp=1, dp=2, microbatch=1)
        fitting = find_layouts(work, Question(DEVICES, BATCH, limit, fixed, partly)).fitting
        found.append({own.layout for own in fitting})
    expected = set()
    for own in found[0]:
        if replace(own, recompute="never") not in found[0]:
            few = [replace(own, recompute=k) for k in range(1, -(-24 // (4 * own.chunks)))]
            fit = [one for one in few if estimate(work, one, BATCH).memory_bytes <= limit]
            expected |= set(fit[:1])
    made = {own for own in found[1] - found[0] if own.modules}
    assert found[1] - found[0] == expected | made
    # or the feed-forward of all blocks: where all are made again, none need not be, and it fits
    with_all = [replace(own, recompute="always", modules=None) for own in made]
    assert {own.modules for own in made} <= {"mlp"} and {*with_all} <= found[0]
    for own in {replace(own, recompute="always") for own in expected}:
        one = replace(own, recompute="selective", modules="mlp")
        assert (one in made) == (estimate(work, one, BATCH).memory_bytes <= limit)
    assert {(own.chunks, own.recompute) for own in expected} >= numbers
    for own in expected:  # to the byte
        limit = estimate(work, own, BATCH).memory_bytes
        fitting = find_layouts(work, Question(DEVICES, BATCH, limit, fixed, partly=True)).fitting
        assert own in [each.layout for each in fitting]


@pytest.mark.parametrize("model", [EXPERTS, KINDS], ids=lambda model: model.name)
@pytest.mark.parametrize("share", [0.2, 0.5, 2.0])
def test_the_first_is_that_of_all_layouts_though_few_are_estimated(model, share):
    """What is skipped is slower than what is found: every layout is estimated here."""
    work = training(model, ends="free", graphs="attention", buffer_bytes=0)
    known = [estimate(work, own, BATCH) for own in layouts(work, DEVICES, BATCH, Layout())]
    sizes = sorted(own.memory_bytes for own in known)
    limit = sizes[-1] if share > 1 else sizes[int(share * len(sizes))]
    found = find_layouts(work, Question(DEVICES, BATCH, limit, Layout(), True, 0.85 * limit))
    fit = [own for own in known if own.memory_bytes <= 0.85 * limit]
    assert found.fitting[0].seconds == min(own.seconds for own in fit)
    assert found.tried < len(known)
    degrees = {(own.layout.tp, own.layout.cp, own.layout.ep, own.layout.pp) for own in fit}
    assert len(found.fitting) >= min(ENOUGH, len(degrees))
    # asked for the first alone, and for what is faster than it, of which there is none
    question, first = (
        Question(DEVICES, BATCH, limit, Layout(), True, 0.85 * limit),
        found.fitting[0],
    )
    assert find_fastest([work], question)[0].seconds == first.seconds
    assert find_fastest([work], question, first.seconds * (1 + 1e-9))[0].seconds == first.seconds
    assert find_fastest([work], question, first.seconds) is None


def test_experts_leave_room_and_make_blocks_again_only_where_nothing_fits_without():
    work = training(EXPERTS)
    whole = find_layouts(work, Question(DEVICES, BATCH, 1e12, Layout(), True))
    first = whole.fitting[0]
    tight = find_layouts(work, Question(DEVICES, BATCH, first.memory_bytes, Layout(), True, 1.0))
    assert tight.fitting[0].layout == first.layout  # nothing leaves so much
    room = 0.99 * first.memory_bytes
    found = find_layouts(work, Question(DEVICES, BATCH, first.memory_bytes, Layout(), True, room))
    assert found.fitting[0].memory_bytes <= room
    assert first.layout in [left.layout for left in found.left_out]
    work = training(EXPERTS, selective="operations")  # whole blocks keep least
    every_one = [estimate(work, own, BATCH) for own in layouts(work, DEVICES, BATCH, Layout())]
    without = [own for own in every_one if own.layout.recompute != "always"]
    limit = 0.999 * min(own.memory_bytes for own in without)
    again = find_layouts(work, Question(DEVICES, BATCH, limit, Layout(), True))
    assert {own.layout.recompute for own in again.fitting} >= {"always"}
    assert not {own.layout.recompute for own in again.fitting} & {"never", "selective"}


def test_where_graphs_hold_what_the_host_starts_microbatches_may_be_large():
    held = training(EXPERTS, graphs="attention")
    found = find_layouts(held, Question(4, 8, 1e12, Layout(), partly=True)).fitting
    assert max(own.layout.microbatch for own in found) > EXPERTS_MICROBATCH
    assert "moe" in " ".join(module_sets(training(EXPERTS))).replace("moe_act", "")
    assert "moe" not in " ".join(module_sets(held)).replace("moe_act", "")


def test_of_experts_small_microbatches_that_make_nothing_again_are_usual():
    work = training(EXPERTS)
    usual = find_layouts(work, Question(4, 8, 1e12, Layout(), partly=True)).fitting
    assert {own.layout.microbatch for own in usual} == {1, 2}
    assert {own.layout.recompute for own in usual} == {"never"}
    large = find_layouts(work, Question(4, 8, 1e12, Layout(microbatch=4), partly=True)).fitting
    assert {(own.layout.microbatch, own.layout.recompute) for own in large} == {(4, "never")}
    again = Layout(recompute="always")
    made = find_layouts(work, Question(4, 8, 1e12, again, partly=True)).fitting
    assert {own.layout.microbatch for own in made} == {1, 2}


@pytest.mark.parametrize("offload", ["", "qkv_linear+core_attn+attn_proj"])
@pytest.mark.parametrize("sequence", [2048, 65_536])
@pytest.mark.parametrize("share", [0.15, 0.3, 0.5, 0.8])
def test_of_all_ways_to_make_a_dense_model_again_the_fastest_is_found(share, sequence, offload):
    """Some blocks, all, or the feed-forward: every layout is estimated here."""
    work = training(MANY, sequence=sequence, offload=offload, buffer_bytes=0)
    assert module_sets(work) == ["mlp"]
    known = list[Estimate]()
    for own in {replace(own, recompute=None) for own in layouts(work, 8, 16, Layout())}:
        most = -(-MANY.blocks // (own.pp * own.chunks))
        ways = [replace(own, recompute=again) for again in ("never", "always", *range(1, most))]
        ways.append(replace(own, recompute="selective", modules="mlp"))
        known += [estimate(work, way, 16) for way in ways if not any(find_faults(work, way, 16))]
    sizes = sorted(one.memory_bytes for one in known)
    limit = sizes[int(share * len(sizes))]
    found = find_layouts(work, Question(8, 16, limit, Layout(), partly=True)).fitting[0]
    fit = [one for one in known if one.memory_bytes <= limit]
    assert found.seconds == min(one.seconds for one in fit)


def test_with_long_sequences_the_feed_forward_alone_is_made_again():
    """Attention takes most of the time, and keeps less than the feed-forward."""
    first = {}
    for sequence in (2048, 65_536):
        work = training(MANY, sequence=sequence, buffer_bytes=0)
        limit = 0.7 * estimate(work, Layout(dp=8), 16).memory_bytes
        fixed = Layout(tp=1, cp=1, pp=1, microbatch=1)
        first[sequence] = (
            find_layouts(work, Question(8, 16, limit, fixed, partly=True)).fitting[0].layout
        )
    assert first[2048].modules is None and first[65_536].modules == "mlp"
