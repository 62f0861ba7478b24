"""Cuts of a recorded model: what crosses them, what forbids them, which parameters they part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from partopt.errors import PartoptError
from partopt.replay.events import EVERYWHERE, Key, Likeness, Record
from partopt.replay.stage import Crossing


@dataclass(frozen=True)
class Cut:
    """The cut before a layer: results made before it that are read at or behind it, in order."""

    keys: tuple[Key, ...]
    likeness: tuple[Likeness, ...]

    @property
    def crossings(self) -> list[Crossing]:
        """What the engine sends and receives."""
        return [
            Crossing(tensor.shape, tensor.dtype, tensor.gradient, tensor.device.type == "cpu")
            for tensor in self.likeness
        ]


def cut_before(record: Record, layer: int) -> Cut:
    """The cut before `layer`: 0 and the number of layers are the model's ends, nothing crosses."""
    keys = sorted(
        {
            key
            for event in record.events
            if event.layer >= layer
            for key in event.reads
            if EVERYWHERE < record.made_by(key) < layer
        }
    )
    return Cut(tuple(keys), tuple(record.likeness[key] for key in keys))


def check_cuts(record: Record, cuts: Iterable[int]) -> None:
    """Raise PartoptError where the model cannot be cut before every one of the layers `cuts`."""
    for cut in cuts:
        if not 0 < cut < len(record.layers):
            continue
        for why, layers in _obstacles(record, cut):
            raise PartoptError(
                f"the model cannot be cut before {record.layer_name(cut)}: {why}",
                "move the boundary, or keep these layers in one stage with `units` or "
                "`granularity`",
                code="cannot-cut",
                layers=[record.layers[layer].name for layer in layers],
            )


def _obstacles(record: Record, cut: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """What keeps a model from being cut there, and which layers it is about."""
    name = record.layer_name
    for event in record.events:  # what Python reads before the cut, stages behind it cannot know
        if EVERYWHERE < event.layer < cut:
            if event.value:
                why = f"Python reads the value of a tensor ({event.name}) behind"
                yield f"{why} {name(event.layer)}", (event.layer,)
            if event.opaque:
                why = f"returns a {event.opaque}, in which tensors cannot be followed"
                yield f"{name(event.layer)} {why}", (event.layer,)
    for (maker, reader), text in sorted(record.hidden.items()):
        if maker < cut <= reader:
            layers = (maker, reader) if "{1}" in text else (maker,)
            yield text.format(name(maker), name(reader)), layers
    for layer, what in sorted(record.wrapped.items()):  # done with what crosses, as with no tensor
        if cut >= layer:
            yield f"{what} wraps what {name(layer)} gets and returns", (layer,)
    # a write to one tensor does not show in another, of the same storage, on another device
    crossing = cut_before(record, cut)
    places = [tensor.storage for tensor in crossing.likeness]
    copied = {place for place in places if places.count(place) > 1}
    written_before: set[int] = set()
    for event in record.events:
        stale = written_before & {
            record.likeness[key].storage for key in event.reads if record.made_by(key) == EVERYWHERE
        }
        if event.layer >= cut and (stale or copied & event.storages_written):
            why = "reads or writes a view of a tensor that is written to in place"
            yield f"{name(event.layer)} {why}", (event.layer,)
        if EVERYWHERE < event.layer < cut:
            written_before |= event.storages_written
    for key, likeness in zip(crossing.keys, crossing.likeness, strict=True):
        if not all(type(size) is int for size in likeness.shape):  # room for it is made once
            maker = record.made_by(key)
            yield f"the shape of a tensor of {name(maker)} depends on values", (maker,)


def with_stride(tensor: Tensor, likeness: Likeness) -> Tensor:
    """The tensor received, laid out in memory as its maker had it, where that is dense."""
    expected = 1  # of a contiguous tensor with its dimensions in some order
    for stride, size in sorted(zip(likeness.stride, likeness.shape, strict=False)):
        if size != 1 and stride != expected:
            return tensor
        expected *= size
    if not likeness.stride or tuple(tensor.stride()) == likeness.stride:
        return tensor
    laid_out = torch.empty_strided(
        likeness.shape, likeness.stride, dtype=tensor.dtype, device=tensor.device
    )
    return laid_out.copy_(tensor)


def held_parameter_names(record: Record, start: int, stop: int) -> list[str]:
    """The parameters that layers [start, stop) need, by the first of their names."""
    span = range(start, stop)
    return [name for name, layers in record.holders.items() if any(k in span for k in layers)]


def shared_parameters(record: Record, starts: Sequence[int]) -> dict[str, list[int]]:
    """The parameters that several stages need, and which; `starts` are the stages' first layers."""
    stops = [*starts[1:], len(record.layers)]
    holding: dict[str, list[int]] = {}
    for s, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        for name in held_parameter_names(record, start, stop):
            holding.setdefault(name, []).append(s)
    return {name: stages for name, stages in holding.items() if len(stages) > 1}
