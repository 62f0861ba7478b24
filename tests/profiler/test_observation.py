"""What crosses between layers, what is kept for the backward, and whose parameters are whose.

Worked by hand: a float32 vector of 4 is 16 bytes; layers are numbered in the order of their calls.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from partopt.documents.profile import Layer, StashGroup
from partopt.profiler.observation import Structure, _combine
from partopt.profiler.step import device_failure
from tests.profiler.helpers import Parts, example, flows, linear, names, stash, structure


def parts(count, forward):
    """`count` linear layers, a, b and so on, in `forward`."""
    return Parts(forward, **{name: linear() for name in "abcd"[:count]})


class Two(nn.Module):
    def forward(self, x):
        return x * 2, x * 3


class Add(nn.Module):
    def forward(self, pair):
        return pair[0] + pair[1]


class Write(nn.Module):
    def forward(self, x):
        return x[:].mul_(2.0)


class Shapes(nn.Linear):
    """Shapes its input; who reads it in that shape could make it himself."""

    def forward(self, x):
        rows = x.view(2, 2).view(-1, 4)
        return super().forward(rows), rows


class Masked(nn.Module):
    def forward(self, x, mask):
        return x * mask


def skip(self, x):
    kept = self.a(x)
    return self.d(self.c(self.b(kept)) + kept)  # the sum runs after c and before d: it is c's


def view(self, x):
    made = self.a(x)
    return self.c(self.b(made.view(1, 4)) * made.view(2, 2).t().sum())


def halved(self, x):
    return self.b(self.a(x).chunk(2, 1)[0])


def mask(self, x):
    made, outside = self.a(x), x > 0
    return self.masked(self.b(made), outside)


def shaped(self, x):
    made, rows = self.shapes(x)
    return self.c(self.b(made)) * rows


def written(self, x):
    kept = self.write(x)
    return self.b(self.a(kept) + x)  # x in its new values: read by a, and by the sum after it


CHAIN = [(0, [1], 16), (1, [2], 16)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.Sequential(linear(4, 8), linear(8, 2), linear(2, 1)), [(0, [1], 32), (1, [2], 8)]),
        (parts(4, skip), [(0, [1, 2], 16), (1, [2], 16), (2, [3], 16)]),
        (nn.Sequential(linear(), nn.ReLU(inplace=True), linear()), CHAIN),
        (parts(3, view), CHAIN),
        # only the part that is read is carried
        (Parts(halved, a=linear(4, 8), b=linear()), [(0, [1], 16)]),
        # tensors that go the same way are added up
        (nn.Sequential(linear(), Two(), Add()), [(0, [1], 16), (1, [2], 32)]),
        # inputs of the model, and what is made of them outside of every layer, have no producer
        (parts(2, lambda self, x: self.b(self.a(x) * (x > 0)) + x), [(0, [1], 16)]),
        (Parts(mask, a=linear(), b=linear(), masked=Masked()), CHAIN),
        (Parts(shaped, shapes=Shapes(4, 4), b=linear(), c=linear()), CHAIN),
        (Parts(written, write=Write(), a=linear(), b=linear()), CHAIN),
    ],
)
def test_producers_consumers_and_bytes(model, expected):
    assert flows(structure(model)) == expected


def test_a_module_called_twice_is_two_layers_and_makes_no_cycle():
    model = parts(2, lambda self, x: self.a(self.b(self.a(x))))
    profile = structure(model)
    assert names(profile) == ["a", "b", "a#1"]
    assert flows(profile) == CHAIN
    assert shared(profile) == [["a.weight"], [], ["a.weight"]]
    assert distinct_bytes(profile) == total_bytes(model)


def test_work_on_parameters_before_the_first_layer_belongs_to_it():
    model = parts(2, lambda self, x: self.b(self.a(x @ self.root) * self.root.sum()))
    model.root = nn.Parameter(torch.eye(4))
    profile = structure(model)
    assert flows(profile) == [(0, [1], 16)]
    assert profile.layers[0].parameter_bytes == 128


def test_buffers_are_not_carried_nor_frozen_parameters():
    model = nn.Sequential(nn.BatchNorm1d(4), linear(), nn.BatchNorm1d(4))
    profile = structure(model, lambda size: torch.randn(8, 4))
    assert flows(profile) == [(0, [1], 128), (1, [2], 128)]
    assert [layer.frozen_bytes for layer in profile.layers] == [0, 0, 0]


def test_output_bytes_are_those_of_the_modules_output():
    model = nn.Sequential(linear(4, 8), nn.ReLU(inplace=True), linear(8, 2))
    [measurement] = structure(model).measurements
    assert [layer.output_bytes for layer in measurement.layers] == [32, 32, 8]


class Positive(nn.Module):
    """Where its input is positive, which has no gradient."""

    def forward(self, x):
        return (x > 0).float()


def test_a_tensor_without_gradient_says_so_and_is_told_from_one_with():
    """The first layer's result goes on, and beside it where it is positive, as a mask."""

    def forward(self, x):
        made = self.a(x)
        where = self.positive(made)
        return self.c(self.b(made) * where)

    model = Parts(forward, a=linear(), positive=Positive(), b=linear(), c=linear())
    [measurement] = structure(model).measurements
    found = {(each.producer, *each.consumers): each.gradient for each in measurement.tensors}
    assert found == {(0, 1, 2): True, (1, 2): False, (2, 3): True}


# --- the stash --------------------------------------------------------------------------------


def with_factors():
    model = parts(1, lambda self, x: self.a(x) * self.scale * self.offset)
    model.scale = nn.Parameter(torch.ones(4))
    model.register_buffer("offset", torch.ones(4))
    return model


def skipped(self, x):
    kept = torch.relu(self.a(x))
    return self.c(self.b(kept)) * kept


@pytest.mark.parametrize(
    ("model", "kept"),
    [
        # Linear 0 keeps its input (4 numbers); ReLU keeps its result (8), which is the input that
        # Linear 2 keeps: one storage, two layers; also in place
        (nn.Sequential(linear(4, 8), nn.ReLU(), linear(8, 2)), [([0], 16), ([1, 2], 32)]),
        (nn.Sequential(linear(4, 8), nn.ReLU(True), linear(8, 2)), [([0], 16), ([1, 2], 32)]),
        # x and the linear layer's result; the factors, parameter and buffer, are kept anyway
        (with_factors(), [([0], 32)]),
        # sigmoid and tanh keep their results, the linear layer its input: three storages
        (parts(1, lambda self, x: torch.tanh(torch.sigmoid(self.a(x)))), [([0], 48)]),
        # relu's result is b's input and a factor in c's product; c keeps its input and the other
        (parts(3, skipped), [([0], 16), ([0, 1, 2], 16), ([2], 32)]),
    ],
)
def test_what_is_kept_from_forward_to_backward(model, kept):
    assert stash(structure(model)) == kept


def test_a_checkpointed_block_keeps_its_input_alone():
    inner = nn.Sequential(linear(), nn.Sigmoid(), linear())
    model = Parts(
        lambda self, x: checkpoint(self.inner, self.a(x), use_reentrant=False),
        a=linear(),
        inner=inner,
    )
    # a keeps its input; the checkpoint keeps a's result for inner before that is called
    assert stash(structure(model, units=("inner",), granularity="auto")) == [([0], 16), ([1], 16)]


def test_the_stash_is_the_memory_that_a_forward_leaves_behind():
    """Groups, each counted once, against the storages that the graph itself holds."""
    layers = nn.Linear(4, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Sigmoid()
    model, inputs = nn.Sequential(*layers, nn.Linear(8, 2)), torch.randn(16, 4)
    counted = sum(size for _, size in stash(structure(model, lambda size: inputs)))
    assert counted == kept_by_graph(model, inputs)


def kept_by_graph(model, inputs):
    held = [*model.parameters(), *model.buffers()]
    own = {tensor.untyped_storage().data_ptr() for tensor in held}
    pending, seen, storages = [model(inputs).sum().grad_fn], set(), {}
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        saved = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        for tensor in saved:
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in own:
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        pending.extend(following for following, _ in node.next_functions)
    return sum(storages.values())


# --- parameters -------------------------------------------------------------------------------


def distinct_bytes(profile):
    layers = profile.layers
    tied = {each.name: each.bytes for layer in layers for each in layer.shared_parameters}
    shares = sum(each.bytes for layer in layers for each in layer.shared_parameters)
    return sum(layer.parameter_bytes for layer in layers) - shares + sum(tied.values())


def total_bytes(model):
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def shared(profile):
    return [[parameter.name for parameter in layer.shared_parameters] for layer in profile.layers]


@pytest.mark.slow
@pytest.mark.parametrize("granularity", ["auto", "block", "leaf"])
def test_a_tied_gpt_adds_up_to_the_model(granularity):
    source = example("gpt", layers=2, width=8, heads=2, context=4, vocabulary=11)
    model = source.build()
    profile = structure(model, source.example_inputs, source.loss_fn, granularity=granularity)
    assert distinct_bytes(profile) == total_bytes(model)
    assert shared(profile)[0] == shared(profile)[-1] == ["tokens.weight"]
    # the embedding, and the positions that it is added to
    assert profile.layers[0].parameter_bytes == (11 * 8 + 4 * 8) * 4


def test_a_head_that_borrows_the_embeddings_weight_holds_it_too():
    model = Parts(
        lambda self, x: functional.linear(self.norm(self.a(x)), self.a.weight),
        a=linear(),
        norm=nn.LayerNorm(4),
    )
    profile = structure(model)
    assert shared(profile) == [["a.weight"], ["a.weight"]]
    assert profile.layers[1].parameter_bytes == 64 + 32
    assert distinct_bytes(profile) == total_bytes(model)


def test_a_parameter_that_nothing_uses_is_not_lost():
    model = Parts(lambda self, x: self.a(x), a=linear(), never=linear(4, 100))
    assert distinct_bytes(structure(model)) == total_bytes(model)
    model = nn.Sequential(linear(), linear())
    model[1].register_parameter("spare", nn.Parameter(torch.zeros(100)))
    assert [layer.parameter_bytes for layer in structure(model).layers] == [64, 64 + 400]


@pytest.mark.slow
def test_bytes_and_floating_inputs_are_those_of_the_dtype():
    class Seen(nn.Linear):
        def forward(self, x):
            seen.append(x.dtype)
            return super().forward(x)

    seen: list[torch.dtype] = []
    for dtype, size in (("float32", 64), ("bfloat16", 32 + 8)):
        bias = dtype == "bfloat16"
        profile = structure(Seen(4, 4, bias=bias), dtype=dtype)
        assert profile.layers[0].parameter_bytes == size
        assert seen[-1] == getattr(torch, dtype)


class Adapted(nn.Module):
    """LoRA: a frozen weight of 4 x 4, and a trained product of rank 2 beside it."""

    def __init__(self):
        super().__init__()
        self.base = linear().requires_grad_(False)
        self.down, self.up = linear(4, 2), linear(2, 4)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def test_frozen_parameters_are_told_apart():
    profile = structure(nn.Sequential(linear(), Adapted(), Adapted()), granularity="auto")
    held = [(layer.parameter_bytes, layer.frozen_bytes) for layer in profile.layers]
    assert held == [(64, 0), (128, 64), (128, 64)]
    assert list(profile.faults()) == []


def test_what_peft_freezes_is_held_without_gradients():
    reason = "peft adds adapters: pip install peft"
    peft = pytest.importorskip("peft", reason=reason, exc_type=ImportError)
    config = peft.LoraConfig(r=2, target_modules=["0", "2"])
    model = peft.inject_adapter_in_model(config, nn.Sequential(linear(), nn.GELU(), linear()))
    adapted, profile = 2 * (4 * 2 + 2 * 4), structure(model, granularity="auto")
    layers = profile.layers
    assert sum(layer.frozen_bytes for layer in layers) == 2 * 64
    assert sum(layer.parameter_bytes for layer in layers) == 2 * 64 + 4 * adapted
    assert list(profile.faults()) == []


def test_a_shared_parameter_is_frozen_wherever_it_is_used():
    def forward(self, x):
        return functional.linear(self.b(self.a(x)), self.a.weight)

    profile = structure(Parts(forward, a=linear().requires_grad_(False), b=linear()))
    assert [layer.frozen_bytes for layer in profile.layers] == [64, 64]
    assert [[each.frozen for each in layer.shared_parameters] for layer in profile.layers] == [
        [True],
        [True],
    ]
    assert list(profile.faults()) == []


def held_by(parameters=(50, 50), stash=(50, 50), transient=(90, 10), split=1):
    """What a rank shows of two layers; the memory of a backward is one layer's at a time."""
    return Structure(
        layers=[
            Layer(name=f"l{n}", type="Linear", parameter_bytes=size)
            for n, size in enumerate(parameters)
        ],
        stash_groups=[StashGroup(layers=[n], bytes=size) for n, size in enumerate(stash)],
        transient_bytes=dict(enumerate(transient)),
        split_stash_bytes={0: split},
        output_bytes={0: split},
        flops={},
        tensors=[],
        attention=[],
    )


@pytest.mark.parametrize(
    ("other", "fuller"),
    [
        ({"parameters": (20, 81)}, True),
        ({"stash": (101, 0)}, True),
        ({"transient": (1, 91)}, True),
        ({"transient": (60, 60)}, False),
        ({"parameters": (0, 0), "stash": (0, 0), "transient": (290, 0)}, False),
        ({"parameters": (0, 0), "stash": (0, 0), "transient": (0, 291)}, True),
    ],
)
def test_memory_is_that_of_the_rank_that_holds_the_most(other, fuller):
    """100 bytes of parameters, as many kept, and 90 of the backward that takes most."""
    own, found = held_by(), held_by(**other, split=2)
    group = SimpleNamespace(gather=lambda value: [value, found])
    combined, most = _combine(own, group), found if fuller else own
    memory = ("layers", "stash_groups", "transient_bytes", "split_stash_bytes")
    assert [getattr(combined, name) for name in memory] == [getattr(most, name) for name in memory]
    assert combined.output_bytes == own.output_bytes


def test_a_device_that_fails_is_told_in_the_first_line_of_its_error():
    error = RuntimeError(
        "\nCUDA error: device-side assert triggered\nCompile with TORCH_USE_CUDA_DSA"
    )
    failed = device_failure("in the forward of 2", error, layer="2")
    assert failed.message == (
        "the device failed in the forward of 2: CUDA error: device-side assert triggered"
    )
    assert (failed.code, failed.fields) == ("device-failed", {"layer": "2"})
    assert "CUDA_LAUNCH_BLOCKING=1" in failed.hint
