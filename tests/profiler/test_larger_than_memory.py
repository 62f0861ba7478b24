"""A model larger than memory has the structure of the real one, and next to nothing is held."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from partopt.documents.profile import Profile
from partopt.errors import PartoptError
from partopt.profiler import larger, measure
from tests.helpers import ROOT
from tests.profiler.helpers import (
    Parts,
    example,
    linear,
    needs_torchvision,
    needs_transformers,
    not_run,
    shared,
    structure,
)
from tests.profiler.zoo_vision import torchvision_model

TINY = {"layers": 6, "width": 32, "heads": 4, "context": 16, "vocabulary": 64}
Inputs = Callable[[int], Any]


def shape(profile: Profile) -> dict[str, Any]:
    """What of a profile is no time."""
    return {
        "layers": [msgspec.structs.replace(each, measured_as=None) for each in profile.layers],
        "sizes": [
            (
                each.microbatch_size,
                each.tensors,
                each.stash_groups,
                [(layer.output_bytes, layer.forward_flops) for layer in each.layers],
            )
            for each in profile.measurements
        ],
    }


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]  # type: ignore[no-any-return]


class Counting(nn.Module):
    """A block with a buffer that it reads and one that it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.part = linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.linspace(0.5, 2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.part(x) * self.scale)


class Routed(nn.Module):
    """Two experts: the values of the input choose which one gets which row."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(linear() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        out = x.clone()
        for index, expert in enumerate(self.experts):
            rows = ((x[:, 0] > 0) == bool(index)).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(x[rows]))
        return out


class Checkpointed(nn.Module):
    """Blocks that run again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(linear(), nn.GELU()) for _ in range(7))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


def tied() -> nn.Module:
    table = nn.Embedding(16, 4)
    parts = {f"b{index}": linear() for index in range(6)}

    def forward(self: Parts, x: Tensor) -> Tensor:
        y = self.table(x.long().abs() % 16).mean(1)
        for name in parts:
            y = y + getattr(self, name)(y)
        return y @ self.table.weight.T

    return Parts(forward, table=table, **parts)


def sequences(size: int) -> Tensor:
    return torch.randn(size, 5, 8)


PLAIN: dict[str, tuple[Callable[[], nn.Module], Inputs]] = {
    "chain": (lambda: nn.Sequential(*(linear() for _ in range(7))), lambda n: torch.randn(n, 4)),
    "buffers": (
        lambda: nn.Sequential(*(Counting() for _ in range(6))),
        lambda n: torch.randn(n + 1, 4),
    ),
    "tied": (tied, lambda n: torch.randn(n, 4)),
    "in place": (
        lambda: nn.Sequential(
            *(part for _ in range(7) for part in (linear(), nn.ReLU(inplace=True)))
        ),
        lambda n: torch.randn(n, 4),
    ),
    "weight norm": (
        lambda: nn.Sequential(*(nn.utils.parametrizations.weight_norm(linear()) for _ in range(7))),
        lambda n: torch.randn(n, 4),
    ),
    "checkpoints": (Checkpointed, lambda n: torch.randn(n, 4)),
    "lstm": (lambda: nn.Sequential(*(Recurrent() for _ in range(6))), sequences),
    "encoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16), 6, enable_nested_tensor=False
        ),
        sequences,
    ),
}


@pytest.mark.parametrize(
    "name, granularity",
    [*((name, "auto") for name in PLAIN), ("in place", "leaf"), ("lstm", "leaf")],
)
def test_the_structure_is_that_of_the_real_model(name: str, granularity: str) -> None:
    build, inputs = PLAIN[name]
    options = {"granularity": granularity, "microbatch_sizes": [1, 2]}
    torch.manual_seed(0)
    real = structure(build(), inputs, **options)
    torch.manual_seed(0)
    assert shape(shared(build(), inputs, **options)) == shape(real)


def test_the_structure_of_a_model_that_reads_values() -> None:
    # fakes have none: it is observed on the shared weights
    model = nn.Sequential(*(Routed() for _ in range(6)))
    real = structure(model, granularity="auto")
    profile = shared(model, granularity="auto")
    assert shape(profile) == shape(real)
    assert not_run(profile) == {4: 2}


def test_the_structure_of_the_gpt() -> None:
    source = example("gpt", **TINY)
    given = source.example_inputs, source.loss_fn
    real = structure(source.build(), *given, granularity="auto")
    profile = shared(source.build(), *given, granularity="auto")
    assert shape(profile) == shape(real)
    assert not_run(profile)


@needs_transformers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name, dtype", [("gpt2", "float32"), ("bert", "float32"), ("llama", "bfloat16")]
)
def test_the_structure_of_transformers_examples(name: str, dtype: str) -> None:
    more = {"kv_heads": 2, "ffn": 64} if name == "llama" else {}
    source = example(name, **TINY, **more)
    options = {"granularity": "auto", "dtype": dtype}
    real = structure(source.build(), source.example_inputs, **options)
    profile = shared(source.build(), source.example_inputs, **options)
    assert shape(profile) == shape(real)
    assert len(not_run(profile)) == 2


@needs_transformers
@pytest.mark.filterwarnings("ignore")
def test_the_structure_of_an_encoder_and_decoder() -> None:
    example("bert", **TINY).build()  # declares what transformers needs
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        num_layers=6, d_model=32, d_kv=8, num_heads=4, d_ff=64, vocab_size=64, use_cache=False
    )
    config.decoder_start_token_id = 0

    def inputs(size: int) -> dict[str, Tensor]:
        ids = torch.randint(64, (size, 16))
        return {"input_ids": ids, "labels": ids}

    real = structure(T5ForConditionalGeneration(config), inputs, granularity="auto")
    profile = shared(T5ForConditionalGeneration(config), inputs, granularity="auto")
    assert shape(profile) == shape(real)
    # the first block of each half makes the position bias, and is a kind of its own
    assert len(not_run(profile)) == 2


@needs_torchvision
def test_the_structure_of_a_resnet() -> None:
    source = example("resnet50", size=32, classes=10)
    build = partial(torchvision_model, "resnet18")
    real = structure(build(), source.example_inputs, source.loss_fn, microbatch_sizes=[2])
    profile = shared(build(), source.example_inputs, source.loss_fn, microbatch_sizes=[2])
    assert shape(profile) == shape(real)


def test_kernels_that_differ_are_taken_from_the_layers_that_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build, inputs = PLAIN["lstm"]
    real = shape(structure(build(), inputs, granularity="auto"))
    monkeypatch.setattr(larger.LargeMeasurer, "_correct", lambda _self, groups, *_: groups)
    assert shape(shared(build(), inputs, granularity="auto")) != real


def test_dropout_of_nothing_reads_nothing_on_fakes_either() -> None:
    # it returns its input without an operation
    def build() -> nn.Module:
        return nn.Sequential(linear(), nn.Dropout(0.0), linear())

    [real] = structure(build()).measurements
    [large] = shared(build()).measurements
    for found in (real, large):
        assert [(each.producer, each.consumers) for each in found.tensors] == [(0, [2])]
    assert large.stash_groups == real.stash_groups


def test_measure_takes_a_model_on_the_meta_device() -> None:
    source = example("gpt", **TINY)
    with torch.device("meta"):
        model = source.build()
        model.register_buffer("table", torch.arange(4))
    profile = measure(
        model,
        source.example_inputs,
        loss_fn=source.loss_fn,
        microbatch_sizes=[1],
        steps=1,
        device="cpu",
    )
    assert shape(profile) == shape(
        structure(source.build(), source.example_inputs, source.loss_fn, granularity="auto")
    )
    assert "larger-than-memory" in [note.code for note in profile.notes]
    assert all(each.is_meta for each in [*model.parameters(), *model.buffers()])


STRUCTURE = """
import json, re, sys, torch
from pathlib import Path
from partopt.profiler import find_model
from partopt.profiler.building import build_within
from partopt.profiler.free_memory import Memory
from partopt.profiler.larger import LargeMeasurer
from partopt.profiler.settings import check_settings
from partopt.profiler.subject import Subject

source = find_model(sys.argv[1], json.loads(sys.argv[2]))
memory = Memory(float("inf"), float("inf"), 4)
model, _ = build_within(source.build, memory, torch.float32, True)
settings = check_settings([1], "cpu", "float32", "auto", (), 1, None)
subject = Subject(model, source.example_inputs, source.loss_fn, settings, None, memory)
measurer = LargeMeasurer(subject, memory)
with measurer.placed():
    _, structure = measurer.observe_structure(source.example_inputs(1))
print(json.dumps({
    "bytes": sum(each.nbytes for each in model.parameters()),
    "described": sum(layer.parameter_bytes for layer in structure.layers),
    "layers": len(structure.layers),
    "kept": sum(group.bytes for group in structure.stash_groups),
    # unlike ru_maxrss it does not begin with what the parent held at the fork
    "peak": 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]),
}))
"""


def test_a_model_on_the_meta_device_cannot_be_measured_whole() -> None:
    model = linear().to("meta")
    with pytest.raises(PartoptError) as failed:
        measure(model, lambda size: torch.randn(size, 4), device="cpu", larger_than_memory=False)
    assert failed.value.fields == {"option": "larger_than_memory", "value": False}


def test_measure_leaves_a_model_that_is_measured_so_as_it_was() -> None:
    model = nn.Sequential(*(linear() for _ in range(8))).double()
    before = [each.clone() for each in model.parameters()]
    profile = measure(
        model,
        lambda size: torch.randn(size, 4),
        microbatch_sizes=[1],
        steps=1,
        device="cpu",
        larger_than_memory=True,
    )
    assert not_run(profile)
    after = list(model.parameters())
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert all(each.dtype is torch.float64 and each.grad is None for each in after)


@pytest.mark.parametrize("given", ["yes", 1])
def test_the_option_is_checked(given: object) -> None:
    with pytest.raises(PartoptError, match="neither True nor False"):
        measure(linear(), lambda size: torch.randn(size, 4), larger_than_memory=given)


def test_the_structure_of_a_model_of_hundreds_of_gigabytes_takes_next_to_no_memory() -> None:
    arguments = {"layers": 16, "width": 16384, "heads": 64, "context": 2048, "vocabulary": 32000}
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            STRUCTURE,
            str(ROOT / "examples" / "gpt.py"),
            json.dumps(arguments),
        ],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    found = json.loads(done.stdout)
    blocks = 16 * (12 * 16384 + 13) * 16384
    assert found["bytes"] == 4 * (blocks + (32000 + 2048 + 2) * 16384) > 200e9
    assert found["layers"] == 16 + 3
    assert found["kept"] > 25e9
    assert found["peak"] < 1.5e9
