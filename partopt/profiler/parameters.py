"""Which layer holds which parameter.

Every distinct parameter is on at least one layer, a shared one on each layer that uses it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from torch import nn

from partopt.documents.profile import Layer, SharedParameter
from partopt.profiler.tensors import local_tensors
from partopt.profiler.tracker import Tracker


def describe_layers(
    model: nn.Module, tracker: Tracker, used_by: Mapping[str, set[int]]
) -> list[Layer]:
    """The layers with their parameters.

    A layer holds the parameters of its module and those that it was seen to use (`used_by`: name to
    layers), such as a positional embedding on the root or a head that multiplies by the embedding's
    weight. A parameter that nothing uses goes to the first layer, so that no byte is lost. One that
    requires no gradient is frozen.
    """
    holders = _holders(model, tracker, used_by)
    sizes = {
        name: sum(part.numel() * part.element_size() for part in local_tensors(parameter))
        for name, parameter in model.named_parameters()
    }
    frozen = {name for name, each in model.named_parameters() if not each.requires_grad}
    held: defaultdict[int, list[str]] = defaultdict(list)
    for name in sizes:
        for layer in holders[name] or {0}:
            held[layer].append(name)
    return [
        Layer(
            name=key.name,
            call=key.call,
            type=type(tracker.modules[key.name]).__name__,
            parameter_bytes=sum(sizes[name] for name in held[index]),
            frozen_bytes=sum(sizes[name] for name in held[index] if name in frozen),
            shared_parameters=[
                SharedParameter(name=name, bytes=sizes[name], frozen=name in frozen)
                for name in held[index]
                if len(holders[name]) > 1
            ],
        )
        for index, key in enumerate(tracker.layers)
    ]


def _holders(
    model: nn.Module, tracker: Tracker, used_by: Mapping[str, set[int]]
) -> dict[str, set[int]]:
    """For each distinct parameter the layers that hold it."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    holders = {name: set(used_by.get(name, ())) for name in names.values()}
    for layer, key in enumerate(tracker.layers):
        for parameter in tracker.modules[key.name].parameters():
            holders[names[id(parameter)]].add(layer)
    return holders
