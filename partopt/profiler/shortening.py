"""Running a few of the layers that are alike, and letting the others have their measurements.

A layer that does not run passes on what it got, where that looks like its output, so that values
and gradients flow as they would. Of layers that are alike the first three run, and the last: the
second has a neighbour of its kind on either side, and is the one that others are measured as; the
last is followed by what no other is followed by.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from partopt.profiler.classes import Call, TensorSpec, group_alike
from partopt.profiler.timeline import LayerTimes
from partopt.profiler.tracker import Tracker

_RUN_FIRST = 3


def choose_skipped(tracker: Tracker, calls: Mapping[int, Call]) -> dict[int, int]:
    """For each layer that need not run, the layer that it is measured as.

    A module that is called more than once always runs.
    """
    modules = {index: tracker.modules[key.name] for index, key in enumerate(tracker.layers)}
    called = Counter(key.name for key in tracker.layers)
    alike = group_alike(modules, {index: call.inputs for index, call in calls.items()})
    return {
        layer: group[1]
        for group in alike
        for layer in group[_RUN_FIRST:-1]
        if called[tracker.layers[layer].name] == 1 and calls[layer].is_plain
    }


@contextlib.contextmanager
def skip_layers(modules: Mapping[int, nn.Module], calls: Mapping[int, Call]) -> Iterator[None]:
    """These layers pass on their inputs in this context, in place of running."""
    own = [(module, vars(module).get("forward")) for module in modules.values()]
    try:
        for layer, module in modules.items():
            module.forward = _stand_in(calls[layer].outputs)
        yield
    finally:
        for module, forward in own:
            del module.forward
            if forward is not None:
                module.forward = forward


def expand(times: LayerTimes, measured_as: Mapping[int, int]) -> LayerTimes:
    """The times with those of the layers that ran in place of those that did not."""
    layers = [measured_as.get(layer, layer) for layer in range(len(times.forward_s))]
    return LayerTimes(
        [times.forward_s[layer] for layer in layers],
        [times.backward_s[layer] for layer in layers],
    )


def _stand_in(outputs: Any) -> Callable[..., Any]:
    """A forward that returns `outputs`: inputs that look alike, or else made-up tensors."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        unused = list(given)

        def output(spec: TensorSpec) -> Tensor:
            for position, tensor in enumerate(unused):
                if TensorSpec.of(tensor) == spec:
                    return unused.pop(position).view_as(tensor)
            return _make_up(spec, given)

        return tree_map_only(TensorSpec, output, outputs)

    return forward


def _make_up(spec: TensorSpec, inputs: list[Tensor]) -> Tensor:
    """A tensor of `spec` whose backward reaches the inputs."""
    trained = [tensor for tensor in inputs if tensor.requires_grad]
    if spec.requires_grad and trained:
        return _MadeUp.apply(spec, *trained)  # type: ignore[no-any-return,no-untyped-call]
    return _random(spec.shape, spec.dtype, spec.device).requires_grad_(spec.requires_grad)


class _MadeUp(torch.autograd.Function):
    """Random numbers in the forward, and as gradients."""

    @staticmethod
    def forward(context: Any, spec: TensorSpec, *inputs: Tensor) -> Tensor:
        """A random tensor of `spec`."""
        context.inputs = [TensorSpec.of(tensor) for tensor in inputs]
        return _random(spec.shape, spec.dtype, spec.device)

    @staticmethod
    def backward(context: Any, *_gradient: Tensor) -> Any:
        """A random gradient for each input."""
        return None, *(_random(spec.shape, spec.dtype, spec.device) for spec in context.inputs)


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    made = torch.zeros(shape, dtype=dtype, device=device)
    return made.normal_() if made.is_floating_point() else made
