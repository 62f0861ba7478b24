"""The profile of a deep model from that of a short one: one of its blocks, repeated.

Blocks of a list are alike: what two of them take, keep and pass on says what eighty would. The
second is repeated. All layers before and after keep what was measured of them, and so do, of four
blocks or more, the first and the last two.

Of four blocks the second has a neighbour of its kind on either side, and the third has to be like
it. Of two it is the last: what it passes on to the head is what it would pass on to another block.
Where two do not show which that is they are refused, and four do.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from partopt.documents import Note, check_option
from partopt.documents.profile import (
    Count,
    Layer,
    LayerMeasurement,
    Measurement,
    Profile,
    SharedParameter,
    StashGroup,
    Tensor,
)
from partopt.errors import PartoptError


def repeat(profile: Profile, blocks: str, count: int) -> Profile:
    """The profile as if the list `blocks` held `count` blocks.

    `blocks` is how the names of its layers begin before the number: `transformer.h`. Times, bytes
    and operations of the copies are those of the second block, `measured_as` says so. The
    optimizer's step grows with the trained bytes. Raises PartoptError unless the profile has two
    such blocks, or four or more of which the second and the third are alike, and no more than
    `count`.
    """
    check_option("repeat", count, Count, "give the number of blocks that the model has")
    series = _find(profile, blocks, count)
    order = sorted((new, old) for old in range(len(profile.layers)) for new in series.of(old))
    layers = [series.copy(profile.layers[old], old, new) for new, old in order]
    larger = _trained_bytes(layers) / (_trained_bytes(profile.layers) or 1)

    def deepen(measurement: Measurement) -> Measurement:
        if measurement.out_of_memory:
            return measurement
        tensors = Counter[tuple[int, tuple[int, ...], bool]]()
        kept = Counter[tuple[tuple[int, ...], int]]()
        for tensor in measurement.tensors:
            for made, *read in series.spread([tensor.producer, *tensor.consumers]):
                tensors[made, tuple(sorted(read)), tensor.gradient] += tensor.bytes
        for group in measurement.stash_groups:
            for maker, found in series.spread_kept(group):
                kept[tuple(sorted(found)), maker] += group.bytes
        deeper = [measurement.layers[old] for _, old in order]
        longer = _seconds(deeper) / (_seconds(measurement.layers) or 1)
        return replace(
            measurement,
            layers=deeper,
            tensors=[
                Tensor(producer=made, consumers=list(read), bytes=size, gradient=gradient)
                for (made, read, gradient), size in sorted(tensors.items())
            ],
            stash_groups=[
                StashGroup(layers=list(found), bytes=size, producer=None if made < 0 else made)
                for (found, made), size in sorted(kept.items())
            ],
            step_s=None if measurement.step_s is None else measurement.step_s * longer,
            optimizer_s=None
            if measurement.optimizer_s is None
            else measurement.optimizer_s * larger,
            peak_memory_bytes=None,
        )

    text = (
        f"measured with {series.measured} blocks of {blocks}: all others up to {count} have the "
        "measurements of the second"
    )
    fields = {"blocks": blocks, "measured": series.measured, "count": count}
    return replace(
        profile,
        layers=layers,
        measurements=[deepen(measurement) for measurement in profile.measurements],
        notes=[*profile.notes, Note(code="repeated", text=text, fields=fields)],
    )


@dataclass(frozen=True)
class _Series:
    """Blocks of `size` layers; `second`, `third` and `fourth` are the layers where these begin."""

    pattern: re.Pattern[str]
    second: int
    size: int
    measured: int
    added: int

    @property
    def third(self) -> int:
        return self.second + self.size

    @property
    def fourth(self) -> int:
        return self.third + self.size

    def of(self, layer: int) -> range:
        """The layers of the deep model that have the measurements of this one."""
        moved = 0 if layer < self.third else self.added * self.size
        copies = self.added + 1 if self.second <= layer < self.third else 1
        return range(layer + moved, layer + moved + copies * self.size, self.size)

    def copy(self, layer: Layer, old: int, new: int) -> Layer:
        """The layer `old` as the layer `new` of the deep model."""
        shift = (new - old) // self.size
        match = self.pattern.match(layer.name)
        like = None if layer.measured_as is None else self.of(layer.measured_as)[0]
        if match is None or not shift:
            return replace(layer, measured_as=like)

        def rename(name: str) -> str:
            """The name, with the number of the layer's block moved on."""
            parts = self.pattern.match(name)
            if parts is None or parts[2] != match[2]:
                return name
            return f"{parts[1]}{int(parts[2]) + shift}{name[parts.end() :]}"

        return replace(
            layer,
            name=rename(layer.name),
            measured_as=old if old < self.third else like,
            shared_parameters=[
                replace(parameter, name=rename(parameter.name))
                for parameter in layer.shared_parameters
            ],
        )

    def spread(self, layers: Sequence[int]) -> Iterator[list[int]]:
        """Sets of layers of the deep model for one of the short one, each in its order.

        What the second block shares with its successor is there once for every copy. What came from
        before it is there once: all copies have it if the third block has it too, else the first.
        """
        if self.second <= min(layers) < self.third:
            far = [self.of(layer)[0] for layer in layers if layer >= self.fourth]
            near = [layer for layer in layers if layer < self.fourth]
            for shift in range(0, (self.added + 1) * self.size, self.size):
                yield [layer + shift for layer in near] + far
            return
        found: list[int] = []
        for layer in layers:
            alone = self.second <= layer < self.third and layer + self.size not in layers
            found += [layer] if alone else self.of(layer)
        yield found

    def spread_kept(self, group: StashGroup) -> Iterator[tuple[int, list[int]]]:
        """Who made what several keep, -1 if unknown, and the deep model's layers that keep it."""
        found = [group.layers] if group.producer is None else [[group.producer, *group.layers]]
        for layers in self.spread(found[0]):
            yield (-1, layers) if group.producer is None else (layers[0], layers[1:])

    def seen_from(self, profile: Profile, start: int) -> tuple[object, object]:
        """The block that begins at `start`: its layers, and what begins there and lives on.

        Layers of the block and of the next one are counted from `start`, those behind as they are.
        """
        block, near = range(start, start + self.size), range(start, start + 2 * self.size)
        lives = Counter[object]()
        for number, measurement in enumerate(profile.measured()):
            for made, spans, size_bytes, gradient in _held(measurement):
                found = [*made, *spans]
                if min(found) in block:
                    places = tuple((at in near, at - start * (at in near)) for at in found)
                    lives[number, places, size_bytes, gradient] += 1
        return _kinds(profile.layers[start : start + self.size]), lives


@dataclass(frozen=True)
class _Pair(_Series):
    """Two blocks, of which the second is the last."""

    @property
    def first(self) -> int:
        return self.second - self.size

    def spread(self, layers: Sequence[int]) -> Iterator[list[int]]:
        """Sets of layers of the deep model for one of the short one, each in its order.

        What came from before both blocks all copies have. What the two share every pair of
        neighbours shares. What the second shares with what follows only the last copy does.
        """
        shifts = range(0, (self.added + 1) * self.size, self.size)
        places = {self.place(layer) for layer in layers}
        if self.SECOND not in places or {self.BEFORE, self.FIRST} <= places:
            yield [deep for layer in layers for deep in self.of(layer)]
        elif self.AFTER in places:
            yield [self.of(layer)[-1] for layer in layers]
        else:
            yield from ([layer + shift for layer in layers] for shift in shifts)

    BEFORE, FIRST, SECOND, AFTER = range(4)

    def place(self, layer: int) -> int:
        """Where a layer lies beside the two blocks."""
        return sum(layer >= start for start in (self.first, self.second, self.third))

    def represent_many(self, profile: Profile) -> bool:
        """Whether these two show what many would.

        The first has to be like the second, and to pass on, and to keep together with what follows,
        as much as the second does. Nothing goes from one block past the other.
        """
        first, second = profile.layers[self.first : self.second], profile.layers[self.second :]
        if self.first < 0 or _kinds(first) != _kinds(second[: self.size]):
            return False
        following: dict[int, Counter[object]] = {self.FIRST: Counter(), self.SECOND: Counter()}
        for number, measurement in enumerate(profile.measured()):
            for made, spans, size_bytes, gradient in _held(measurement):
                places = {self.place(at) for at in (*made, *spans)}
                if places & {self.FIRST, self.SECOND} and not self._is_known(places):
                    return False
                begins, ends = self.place(spans[0]), self.place(max(spans))
                if begins in following and begins == min(places) < ends:
                    start = self.first if begins == self.FIRST else self.second
                    counted = made if spans[0] in made else spans
                    at = tuple(layer - start for layer in counted if self.place(layer) == begins)
                    following[begins][number, spans[0] in made, at, gradient] += size_bytes
        return following[self.FIRST] == following[self.SECOND]

    def _is_known(self, places: set[int]) -> bool:
        """Whether it is known how what lies at these places goes on in a deep model."""
        before, first, second, after = (where in places for where in range(4))
        if before:
            return first and (second or not after)
        return not (first and after)


def _kinds(layers: Sequence[Layer]) -> list[object]:
    """What alike layers share."""
    return [(layer.call, layer.type, layer.parameter_bytes, layer.frozen_bytes) for layer in layers]


def _held(measurement: Measurement) -> Iterator[tuple[list[int], list[int], int, bool | None]]:
    """What lives on between layers: who made it, the layers that it spans, bytes, gradient."""
    for tensor in measurement.tensors:
        made = [tensor.producer]
        yield made, [*made, *tensor.consumers], tensor.bytes, tensor.gradient
    for group in measurement.stash_groups:
        yield [] if group.producer is None else [group.producer], group.layers, group.bytes, None


def _find(profile: Profile, blocks: str, count: int) -> _Series:
    """Where the blocks lie. Raises PartoptError where they cannot be repeated."""
    pattern = re.compile(rf"({re.escape(blocks)}\.?)([0-9]+)(?=\.|$)")
    found = [pattern.match(layer.name) for layer in profile.layers]
    numbers = [int(match[2]) if match else -1 for match in found]
    measured = max(numbers) + 1
    in_order = [number for number in dict.fromkeys(numbers) if number >= 0]
    if measured < 2 or measured == 3 or in_order != list(range(measured)):
        what = f"{max(measured, 0)} blocks, and two are needed, or four and more"
    elif count < measured:
        what = f"{measured} blocks already"
    elif measured == 2:
        second, size = numbers.index(1), numbers.count(1)
        pair = _Pair(pattern, second, size, measured, count - measured)
        if pair.represent_many(profile):
            return pair
        what = "two blocks that do not show what lies between more of them: four do"
    else:
        second, size = numbers.index(1), numbers.index(2) - numbers.index(1)
        series = _Series(pattern, second, size, measured, count - measured)
        if series.seen_from(profile, second) == series.seen_from(profile, series.third):
            return series
        what = "blocks of which the third is not like the second"
    raise PartoptError(
        f"`repeat={blocks}={count}`: {profile.model.name} has {what}",
        "profile a model of two blocks, or of four or more, that are alike, and name their list, "
        "such as transformer.h",
        code="not-repeatable",
        option="repeat",
    )


def _seconds(layers: Sequence[LayerMeasurement]) -> float:
    return sum(layer.forward_s + layer.backward_s for layer in layers)


def _trained_bytes(layers: Sequence[Layer]) -> int:
    """Bytes of the parameters that have a gradient, shared ones once."""
    shared: dict[str, SharedParameter] = {
        parameter.name: parameter
        for layer in layers
        for parameter in layer.shared_parameters
        if not parameter.frozen
    }
    unshared = sum(
        layer.parameter_bytes
        - layer.frozen_bytes
        - sum(parameter.bytes for parameter in layer.shared_parameters if not parameter.frozen)
        for layer in layers
    )
    return unshared + sum(parameter.bytes for parameter in shared.values())
