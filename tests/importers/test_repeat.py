"""Four blocks repeated say what as many that were built say, and nothing else is repeated."""

from collections import Counter
from functools import cache

import pytest
from hypothesis import assume, given
from hypothesis import example as with_example
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import nn
from torch.utils.checkpoint import checkpoint

from partopt.documents.profile import StashGroup
from partopt.errors import PartoptError
from partopt.importers.repeat import repeat
from partopt.profiler.estimating import estimate_source
from tests.examples import examples
from tests.helpers import chain_profile, with_memory_of
from tests.profiler.helpers import (
    EXAMPLES,
    Parts,
    example,
    linear,
    needs_torchvision,
    needs_transformers,
    structure,
)

TINY = {"width": 32, "heads": 4, "context": 16, "vocabulary": 64}
LISTS = {
    "gpt": (TINY, ["blocks"]),
    "gpt2": (TINY, ["transformer.h"]),
    "bert": (TINY, ["bert.encoder.layer"]),
    "llama": ({**TINY, "ffn": 48}, ["model.layers"]),
    "mixtral": ({**TINY, "kv_heads": 2, "ffn": 48, "experts": 3}, ["model.layers"]),
    "t5": ({**TINY, "ffn": 48}, ["encoder.block", "decoder.block"]),
    "vit": (
        {"width": 32, "heads": 4, "ffn": 48, "patch": 16, "size": 32},
        ["encoder.layers.encoder_layer_"],
    ),
}


class Blocks(nn.Module):
    """Blocks that read a table and run again in the backward; a head tied to the table."""

    def __init__(self, layers, reach=1):
        super().__init__()
        self.table = nn.Embedding(16, 4)
        self.blocks = nn.ModuleList(
            nn.Sequential(linear(), nn.GELU(), linear()) for _ in range(layers)
        )
        self.reach = reach

    def forward(self, x):
        bias = self.table(x.long().abs() % 16).mean(1)
        made = [x * 1.0]
        for block in self.blocks:
            made.append(checkpoint(block, made[-1] + bias, use_reentrant=False))  # type: ignore[arg-type]
            made[-1] = sum(made[-1 - self.reach :])  # type: ignore[call-overload]
        return made[-1] @ self.table.weight.T


def shape(profile):
    """All of a profile but its times."""
    bytes_of = ("output_bytes", "transient_bytes", "split_stash_bytes", "forward_flops")
    layers = [replace(layer, measured_as=None) for layer in profile.layers]
    measured = [
        [getattr(layer, name) for each in profile.measurements for layer in each.layers]
        for name in bytes_of
    ]
    return layers, measured, [(each.tensors, each.stash_groups) for each in profile.measurements]


@cache
def of_example(name, layers, granularity):
    source = example(name, layers=layers, **LISTS[name][0])
    return structure(source.build(), source.example_inputs, source.loss_fn, granularity=granularity)


of_every_model = pytest.mark.parametrize(
    "name",
    [
        "gpt",
        pytest.param("vit", marks=needs_torchvision),
        *(
            pytest.param(name, marks=needs_transformers)
            for name in ("gpt2", "bert", "llama", "mixtral", "t5")
        ),
    ],
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("granularity", ["auto", "leaf"])
@of_every_model
def test_four_blocks_say_what_six_say_and_two_do_or_are_refused(name, granularity):
    deep = of_example(name, 6, granularity)
    for layers in (4,) if (name, granularity) == ("vit", "auto") else (4, 2):
        # two are none to find, where nobody says that they are blocks; then vit's are cut otherwise
        size = "block" if (layers, granularity) == (2, "auto") else granularity
        short = of_example(name, layers, size)
        if (name, layers) == ("t5", 2):  # the first block makes a table that all others read
            with pytest.raises(PartoptError, match="two blocks that do not show"):
                repeat(short, LISTS[name][1][0], 6)
            return
        for blocks in LISTS[name][1]:
            short = repeat(short, blocks, 6)
        assert shape(short) == shape(deep)
        assert list(short.faults()) == []


@pytest.mark.slow
def test_times_are_those_of_the_deep_model_too():
    def of(layers):
        options = {"arguments": {**TINY, "layers": layers}, "microbatch_sizes": [1]}
        return estimate_source(EXAMPLES / "gpt.py", "h100", **options)

    [mine], [its] = repeat(of(4), "blocks", 6).measurements, of(6).measurements
    for one, other in zip(mine.layers, its.layers, strict=True):
        for name in ("forward_s", "backward_s", "backward_input_s"):
            assert getattr(one, name) == pytest.approx(getattr(other, name))
    assert mine.optimizer_s == pytest.approx(its.optimizer_s)


@pytest.mark.slow
@pytest.mark.parametrize("granularity", ["auto", "leaf"])
def test_tables_that_all_blocks_read_and_checkpoints(granularity):
    two, four, six = (structure(Blocks(n), granularity=granularity) for n in (2, 4, 6))
    assert shape(repeat(four, "blocks", 6)) == shape(six)
    # what is added to the second's input is added behind the first: for the third nothing shows it
    with pytest.raises(PartoptError, match="two blocks that do not show"):
        repeat(two, "blocks", 6)


@pytest.mark.slow
def test_a_profile_says_what_was_repeated():
    short = of_example("gpt", 4, "auto")
    known = [replace(each, peak_memory_bytes=10**9) for each in short.measurements]
    deep = repeat(replace(short, measurements=known), "blocks", 6)
    assert [layer.measured_as for layer in deep.layers] == [None, None, None, 2, 2, *[None] * 4]
    assert deep.notes[-1].code == "repeated"
    [mine], [its] = deep.measurements, short.measurements
    assert mine.coverage == its.coverage
    assert mine.peak_memory_bytes is None  # that of four blocks
    assert mine.step_s == pytest.approx(
        sum(each.forward_s + each.backward_s for each in mine.layers) / mine.coverage
    )
    assert shape(repeat(short, "blocks", 4)) == shape(short)


@pytest.mark.slow
def test_names_of_shared_weights_move_with_their_block():
    def of(layers):
        blocks = nn.Sequential(*(nn.Sequential(linear(), linear()) for _ in range(layers)))
        for block in blocks:
            block[1].weight = block[0].weight
        return structure(Parts(lambda self, x: self.blocks(x), blocks=blocks))

    assert shape(repeat(of(4), "blocks", 6)) == shape(of(6))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "blocks", "count", "code", "what"),
    [
        (3, "blocks", 9, "not-repeatable", "has 3 blocks, and two are needed, or four and more"),
        (4, "layers", 9, "not-repeatable", "has 0 blocks, and two are needed"),
        (4, "blocks", 3, "not-repeatable", "has 4 blocks already"),
        (4, "blocks", 0, "invalid-option", "whole number >= 1"),
    ],
)
def test_what_cannot_be_repeated(layers, blocks, count, code, what):
    with pytest.raises(PartoptError, match=what) as failed:
        repeat(structure(Blocks(layers), granularity="auto"), blocks, count)
    assert failed.value.code == code


@pytest.mark.slow
def test_blocks_have_to_be_alike():
    model = Blocks(4)
    model.blocks[2][2] = nn.Linear(4, 4)
    plain = structure(Blocks(4), granularity="auto")
    [measured] = plain.measurements
    third = [layer.name for layer in plain.layers].index("blocks.2.0")
    kept = [*measured.stash_groups, StashGroup(layers=[third], bytes=8)]
    for other in (
        structure(model, granularity="auto"),
        structure(Blocks(5, reach=2), granularity="auto"),
        replace(plain, measurements=[replace(measured, stash_groups=kept)]),
    ):
        with pytest.raises(PartoptError, match="the third is not like the second"):
            repeat(other, "blocks", 9)


# what one block and its neighbours hand on: how, from which of its layers, to which, the bytes,
# and whether they have a gradient
REGULAR = ("inside", "next", "from the first layer to all", "into the first", "out of the last")
ODD = (
    *("to the last layer from all", "past the next", "into the second", "out of the first"),
    "from the first to the second",
)
HANDED = st.tuples(
    st.sampled_from([*REGULAR, *ODD]),
    *(st.integers(0, 1), st.integers(0, 1), st.integers(1, 9), st.booleans()),
)


def handed(how, i, j, b):
    """Producers and consumers of a model of b blocks of two layers, after one and before two."""
    first, last = 0, 2 * b + 1
    at = [1 + 2 * block for block in range(b)]
    following = [*at[1:], last]
    return {
        "inside": [(own, [own + 1]) for own in at],
        "next": [
            (own + i, [after + (j if after < last else 0)])
            for own, after in zip(at, following, strict=True)
        ],
        "from the first layer to all": [(first, [own + j for own in at])],
        "into the first": [(first, [at[0] + j])],
        "out of the last": [(at[-1] + i, [last])],
        "to the last layer from all": [(own + i, [last]) for own in at],
        "past the next": [(own + i, [far + j]) for own, far in zip(at, at[2:], strict=False)],
        "into the second": [(first, [at[1] + j])],
        "out of the first": [(at[0] + i, [last + 1])],
        "from the first to the second": [(at[0] + i, [at[1] + j])],
    }[how]


def of_blocks(b, tensors, groups):
    """A profile of b blocks that hand these on, and keep these for their backwards."""
    names = ["e", *(f"b.{n}.{part}" for n in range(b) for part in "xy"), "f", "g"]
    times = [1.0, *[2.0, 3.0] * b, 1.0, 1.0]
    found = [
        (*ends, size, gradient) for *how, size, gradient in tensors for ends in handed(*how, b)
    ]
    profile = chain_profile(
        times,
        names=names,
        tensors=[own[:3] for own in found],
        stash_groups=[
            (sorted({made, *read}), size)
            for *how, size, _ in groups
            for made, read in handed(*how, b)
        ],
        step_s=1.5 * 2 * sum(times),
    )
    [measured] = profile.measurements
    made = [
        replace(own, gradient=gradient)
        for own, (*_, gradient) in zip(measured.tensors, found, strict=True)
    ]
    return replace(profile, measurements=[replace(measured, tensors=made)])


def sums(profile):
    """What is handed on and kept, whatever its order, equal ones together."""
    [measured], found = profile.measurements, Counter()
    for own in measured.tensors:
        found[own.gradient, own.producer, *own.consumers] += own.bytes
    for own in measured.stash_groups:
        found[frozenset(own.layers)] += own.bytes
    return [layer.name for layer in profile.layers], found, measured.step_s


def told_apart(b, drawn, gradients):
    """What was drawn, as b blocks show it.

    Of two, what goes from the first to the second and as much out of the last is what every block
    hands to the next.
    """
    left, told = list(drawn), slice(3, 5 if gradients else 4)
    for odd in drawn:
        same = ("out of the last", odd[1], odd[told])
        alike = [own for own in left if (*own[:2], own[told]) == same]
        if b == 2 and odd[0] == ODD[-1] and alike:
            left.remove(odd)
            left[left.index(alike[0])] = ("next", *odd[1:])
    return left


@pytest.mark.slow
@examples(300)
@given(
    b=st.sampled_from([2, 4, 5]),
    tensors=st.lists(HANDED, max_size=3),
    groups=st.lists(HANDED, max_size=2),
    n=st.integers(5, 7),
)
@with_example(
    b=2,
    tensors=[(ODD[-1], 0, 0, 1, True), ("out of the last", 0, 0, 1, False)],
    groups=[],
    n=5,
)
@with_example(
    b=2,
    tensors=[],
    groups=[("out of the last", 0, 0, 1, False), (ODD[-1], 0, 0, 1, False)],
    n=5,
)
@with_example(
    b=2,
    tensors=[("out of the last", 1, 0, 3, True), (ODD[-1], 1, 1, 3, True)],
    groups=[],
    n=6,
)
def test_whatever_blocks_hand_on_they_are_repeated_as_if_built_or_refused(b, tensors, groups, n):
    used = {how for how, *_ in [*tensors, *groups]}
    assume(b > 2 or "past the next" not in used)  # of which two show nothing
    try:
        deep = repeat(of_blocks(b, tensors, groups), "b", n)
    except PartoptError as error:
        assert error.code == "not-repeatable"
        assert b == 2 or not used <= {*REGULAR}
        return
    tensors, groups = told_apart(b, tensors, True), told_apart(b, groups, False)
    assert sums(deep) == sums(of_blocks(n, tensors, groups))


@pytest.mark.parametrize("tied", [0, 40, 100])
@pytest.mark.parametrize("frozen", [0, 10])
def test_the_optimizers_step_grows_with_the_trained_bytes_shared_ones_once(tied, frozen):
    """100 bytes before the blocks and 100 after them, `tied` of them the same, and 10 and 20 in
    each block; it takes a millisecond for each that has a gradient.
    """

    def of(b):
        plain = chain_profile(
            [1.0] * (2 * b + 2),
            names=["e", *(f"b.{n}.{part}" for n in range(b) for part in "xy"), "f"],
            parameter_bytes=[100, *[10, 20] * b, 100],
            shared=[("tied", [0, 2 * b + 1], tied)] if tied else [],
            optimizer_s=1e-3 * (200 - tied + (30 - frozen) * b),
        )
        return with_memory_of(plain, [0, *[frozen, 0] * b, 0], [0] * (2 * b + 2))

    for b in (2, 4):
        assert repeat(of(b), "b", 7).measurements[0].optimizer_s == pytest.approx(
            of(7).measurements[0].optimizer_s
        )
