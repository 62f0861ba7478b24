"""Which tensors cross a cut, and what keeps a model from being cut there."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from partopt.errors import PartoptError
from partopt.runtime.events import EVERYWHERE, Key, Likeness, Record
from partopt.runtime.stage import Crossing

_UNCUT = "move the boundary, or keep these layers in one stage with `units` or `granularity`"


@dataclass(frozen=True)
class Cut:
    """The cut before a layer: results made before it that are read at or behind it, in order."""

    keys: tuple[Key, ...]
    likeness: tuple[Likeness, ...]

    @property
    def crossings(self) -> list[Crossing]:
        """What the engine sends and receives."""
        return [Crossing(each.shape, each.dtype, each.gradient) for each in self.likeness]

    @property
    def bytes(self) -> int:
        """Bytes that cross, one way."""
        return sum(math.prod(each.shape) * each.dtype.itemsize for each in self.likeness)


def cut_before(record: Record, layer: int) -> Cut:
    """The cut before `layer`: 0 and the number of layers are the model's ends, nothing crosses."""
    keys = sorted(
        {
            key
            for event in record.events
            if event.layer >= layer
            for key in event.reads
            if record.made_by(key) != EVERYWHERE and record.made_by(key) < layer
        }
    )
    return Cut(tuple(keys), tuple(record.likeness[key] for key in keys))


def check_cuts(record: Record, cuts: Iterable[int]) -> None:
    """Raise PartoptError where the model cannot be cut before each of the layers `cuts`."""
    for cut in cuts:
        if 0 < cut < len(record.layers):
            _check_values(record, cut)
            _check_hidden(record, cut)
            _check_wrapped(record, cut)
            _check_views(record, cut)
            _check_shapes(record, cut)


def _check_hidden(record: Record, cut: int) -> None:
    for (maker, reader), text in sorted(record.hidden.items()):
        if maker < cut <= reader:
            why = text.format(record.layer_name(maker), record.layer_name(reader))
            layers = (maker, reader) if "{1}" in text else (maker,)
            raise _cannot_cut(record, cut, why, layers)


def _check_wrapped(record: Record, cut: int) -> None:
    """It is done with what crosses as well, which is no tensor of the forward."""
    for layer, what in sorted(record.wrapped.items()):
        if cut >= layer:
            why = f"{what} wraps what {record.layer_name(layer)} gets and returns"
            raise _cannot_cut(record, cut, why, (layer,))


def _check_values(record: Record, cut: int) -> None:
    """What Python reads before the cut, stages behind it cannot know."""
    for event in record.events:
        if event.layer == EVERYWHERE or event.layer >= cut:
            continue
        name = record.layer_name(event.layer)
        if event.value:
            why = f"Python reads the value of a tensor ({event.name}) behind {name}"
            raise _cannot_cut(record, cut, why, (event.layer,))
        if event.opaque:
            why = f"{name} returns a {event.opaque}, in which tensors cannot be followed"
            raise _cannot_cut(record, cut, why, (event.layer,))


def _check_views(record: Record, cut: int) -> None:
    """A write to one tensor does not show in another, of the same storage, on another device."""
    crossing = cut_before(record, cut)
    places = [each.storage for each in crossing.likeness]
    copied = {place for place in places if places.count(place) > 1}
    written_before: set[int] = set()
    for event in record.events:
        stale = written_before & {
            record.likeness[key].storage for key in event.reads if record.made_by(key) == EVERYWHERE
        }
        if event.layer >= cut and (stale or copied & event.storages_written):
            name = record.layer_name(event.layer)
            why = f"{name} reads or writes a view of a tensor that is written to in place"
            raise _cannot_cut(record, cut, why, (event.layer,))
        if EVERYWHERE < event.layer < cut:
            written_before |= event.storages_written


def _check_shapes(record: Record, cut: int) -> None:
    """Room for what crosses is made once."""
    crossing = cut_before(record, cut)
    for key, likeness in zip(crossing.keys, crossing.likeness, strict=True):
        if not all(type(size) is int for size in likeness.shape):
            maker = record.made_by(key)
            why = f"the shape of a tensor of {record.layer_name(maker)} depends on values"
            raise _cannot_cut(record, cut, why, (maker,))


def _cannot_cut(record: Record, cut: int, why: str, layers: tuple[int, ...]) -> PartoptError:
    return PartoptError(
        f"the model cannot be cut before {record.layer_name(cut)}: {why}",
        _UNCUT,
        code="cannot-cut",
        cut=cut,
        layers=[record.layers[layer].name for layer in layers],
    )


def with_stride(tensor: Tensor, likeness: Likeness) -> Tensor:
    """The tensor received, laid out in memory as its maker had it, where that is dense."""
    if tuple(tensor.stride()) == likeness.stride or not _is_dense(likeness):
        return tensor
    laid_out = torch.empty_strided(
        likeness.shape, likeness.stride, dtype=tensor.dtype, device=tensor.device
    )
    return laid_out.copy_(tensor)


def _is_dense(likeness: Likeness) -> bool:
    """Whether the strides are those of a contiguous tensor with its dimensions in some order."""
    expected = 1
    for stride, size in sorted(zip(likeness.stride, likeness.shape, strict=False)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return bool(likeness.stride)
