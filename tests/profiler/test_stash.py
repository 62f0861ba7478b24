"""What is kept from forward to backward, worked by hand.

Microbatch 1; float32: 4 bytes an element.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.profiler.helpers import Parts, linear, stash, structure


def test_linear_relu_linear() -> None:
    # Linear 0 keeps its input (4 elements); ReLU keeps its result (8), which is the input that
    # Linear 2 keeps: one storage, two layers
    assert stash(structure(nn.Sequential(linear(4, 8), nn.ReLU(), linear(8, 2)))) == [
        ([0], 16),
        ([1, 2], 32),
    ]


def test_in_place_relu_shares_one_more_storage() -> None:
    assert stash(structure(nn.Sequential(linear(4, 8), nn.ReLU(inplace=True), linear(8, 2)))) == [
        ([0], 16),
        ([1, 2], 32),
    ]


def test_parameters_and_buffers_do_not_count() -> None:
    model = Parts(lambda self, x: self.a(x) * self.scale * self.offset, a=linear())
    model.scale = nn.Parameter(torch.ones(4))
    model.register_buffer("offset", torch.ones(4))
    # x for the linear layer, its result (needed for the gradient of scale); scale and offset are
    # kept anyway
    assert stash(structure(model)) == [([0], 32)]


def test_groups_with_the_same_layers_are_added_up() -> None:
    # sigmoid and tanh keep their results, the linear layer its input: three storages of one layer,
    # 16 bytes each
    model = Parts(lambda self, x: torch.tanh(torch.sigmoid(self.a(x))), a=linear())
    assert stash(structure(model)) == [([0], 48)]


def test_a_skip_connection_is_kept_once_by_all_who_need_it() -> None:
    def forward(self: Parts, x: torch.Tensor) -> torch.Tensor:
        kept = torch.relu(self.a(x))
        return self.c(self.b(kept)) * kept

    # kept (16 bytes): relu's result in a, b's input, a factor in c's product; c keeps its input and
    # the other factor
    assert stash(structure(Parts(forward, a=linear(), b=linear(), c=linear()))) == [
        ([0], 16),
        ([0, 1, 2], 16),
        ([2], 32),
    ]


def test_a_checkpointed_block_keeps_its_input_alone() -> None:
    inner = nn.Sequential(linear(), nn.Sigmoid(), linear())
    model = Parts(
        lambda self, x: checkpoint(self.inner, self.a(x), use_reentrant=False),
        a=linear(),
        inner=inner,
    )
    # a keeps its input, and its result for the checkpoint, which is set up before inner is called;
    # inner keeps nothing
    assert stash(structure(model, units=("inner",), granularity="auto")) == [([0], 32)]


def test_the_stash_is_the_memory_that_a_forward_leaves_behind() -> None:
    """Groups, each counted once, against the storages that the graph itself holds."""
    model = nn.Sequential(
        nn.Linear(4, 8),
        nn.ReLU(),
        nn.BatchNorm1d(8),
        nn.Linear(8, 8),
        nn.Sigmoid(),
        nn.Linear(8, 2),
    )
    inputs = torch.randn(16, 4)
    counted = sum(size for _, size in stash(structure(model, lambda size: inputs)))
    assert counted == _kept_by_graph(model, inputs)


def _kept_by_graph(model: nn.Module, inputs: torch.Tensor) -> int:
    own = {
        tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]
    }
    pending, seen, storages = [model(inputs).sum().grad_fn], set(), {}
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for attribute in dir(node):
            value = getattr(node, attribute) if attribute.startswith("_saved_") else None
            if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() not in own:
                storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        pending.extend(following for following, _ in node.next_functions)
    return sum(storages.values())
