"""Four blocks repeated say what as many that were built say, and nothing else is repeated."""

import pytest
from msgspec.structs import replace
from torch import nn
from torch.utils.checkpoint import checkpoint

from partopt.documents.profile import StashGroup
from partopt.documents.repeat import repeat
from partopt.errors import PartoptError
from partopt.profiler.estimating import estimate_source
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


def test_names_of_shared_weights_move_with_their_block():
    def of(layers):
        blocks = nn.Sequential(*(nn.Sequential(linear(), linear()) for _ in range(layers)))
        for block in blocks:
            block[1].weight = block[0].weight
        return structure(Parts(lambda self, x: self.blocks(x), blocks=blocks))

    assert shape(repeat(of(4), "blocks", 6)) == shape(of(6))


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
