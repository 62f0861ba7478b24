"""The profile of a deep model from that of a short one: one of its blocks, repeated.

Blocks of a list are alike: what four of them take, keep and pass on says what eighty would. The
second is repeated, since it has a neighbour of its kind on either side. All others, the first and
the last two among them, keep what was measured of them.
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
    optimizer's step grows with the trained bytes. Raises PartoptError unless the profile has four
    such blocks, no more than `count`, and the second and the third are alike.
    """
    check_option("repeat", count, Count, "give the number of blocks that the model has")
    series = _find(profile, blocks, count)
    order = sorted((new, old) for old in range(len(profile.layers)) for new in series.of(old))
    layers = [series.copy(profile.layers[old], old, new) for new, old in order]
    larger = _trained_bytes(layers) / (_trained_bytes(profile.layers) or 1)

    def deepen(each: Measurement) -> Measurement:
        if each.out_of_memory:
            return each
        tensors, kept = Counter[tuple[int, tuple[int, ...], bool]](), Counter[tuple[int, ...]]()
        for tensor in each.tensors:
            for made, *read in series.spread([tensor.producer, *tensor.consumers]):
                tensors[made, tuple(sorted(read)), tensor.gradient] += tensor.bytes
        for group in each.stash_groups:
            for found in series.spread(group.layers):
                kept[tuple(sorted(found))] += group.bytes
        deeper = [each.layers[old] for _, old in order]
        longer = _seconds(deeper) / (_seconds(each.layers) or 1)
        return replace(
            each,
            layers=deeper,
            tensors=[
                Tensor(producer=made, consumers=list(read), bytes=size, gradient=gradient)
                for (made, read, gradient), size in sorted(tensors.items())
            ],
            stash_groups=[
                StashGroup(layers=list(found), bytes=size) for found, size in sorted(kept.items())
            ],
            step_s=None if each.step_s is None else each.step_s * longer,
            optimizer_s=None if each.optimizer_s is None else each.optimizer_s * larger,
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
        measurements=[deepen(each) for each in profile.measurements],
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
            """The name, with the number of a layer's own block moved on."""
            own = self.pattern.match(name)
            if own is None or own[2] != match[2]:
                return name
            return f"{own[1]}{int(own[2]) + shift}{name[own.end() :]}"

        return replace(
            layer,
            name=rename(layer.name),
            measured_as=old if old < self.third else like,
            shared_parameters=[
                replace(each, name=rename(each.name)) for each in layer.shared_parameters
            ],
        )

    def spread(self, layers: Sequence[int]) -> Iterator[list[int]]:
        """Sets of layers of the deep model for one of the short one, each in its order.

        What the second block shares with its successor is there once for each copy. What came from
        before it is there once: all copies have it if the third block has it too, else the first.
        """
        if self.second <= min(layers) < self.third:
            far = [self.of(each)[0] for each in layers if each >= self.fourth]
            near = [each for each in layers if each < self.fourth]
            for shift in range(0, (self.added + 1) * self.size, self.size):
                yield [each + shift for each in near] + far
            return
        found: list[int] = []
        for each in layers:
            alone = self.second <= each < self.third and each + self.size not in layers
            found += [each] if alone else self.of(each)
        yield found

    def seen_from(self, profile: Profile, start: int) -> tuple[object, object]:
        """The block that begins at `start`: its layers, and what begins there and lives on.

        Layers of the block and of the next one are counted from `start`, those behind as they are.
        """
        own, near = range(start, start + self.size), range(start, start + 2 * self.size)
        layers = [
            (layer.call, layer.type, layer.parameter_bytes, layer.frozen_bytes)
            for layer in profile.layers[start : start + self.size]
        ]
        lives = Counter[object]()
        for number, each in enumerate(profile.measured()):
            held: list[tuple[list[int], int, bool | None]] = [
                *(([t.producer, *t.consumers], t.bytes, t.gradient) for t in each.tensors),
                *((group.layers, group.bytes, None) for group in each.stash_groups),
            ]
            for found, size_bytes, gradient in held:
                if min(found) in own:
                    places = tuple((at in near, at - start * (at in near)) for at in found)
                    lives[number, places, size_bytes, gradient] += 1
        return layers, lives


def _find(profile: Profile, blocks: str, count: int) -> _Series:
    """Where the blocks lie. Raises PartoptError where they cannot be repeated."""
    pattern = re.compile(rf"({re.escape(blocks)}\.?)([0-9]+)(?=\.|$)")
    found = [pattern.match(layer.name) for layer in profile.layers]
    numbers = [int(match[2]) if match else -1 for match in found]
    measured = max(numbers) + 1
    in_order = [number for number in dict.fromkeys(numbers) if number >= 0]
    if measured < 4 or in_order != list(range(measured)):
        what = f"{max(measured, 0)} blocks, and four are needed: two between the first and the last"
    elif count < measured:
        what = f"{measured} blocks already"
    else:
        second, size = numbers.index(1), numbers.index(2) - numbers.index(1)
        series = _Series(pattern, second, size, measured, count - measured)
        if series.seen_from(profile, second) == series.seen_from(profile, series.third):
            return series
        what = "blocks of which the third is not like the second"
    raise PartoptError(
        f"`repeat={blocks}={count}`: {profile.model.name} has {what}",
        "profile a model of four blocks or more that are alike, and name their list, such as "
        "transformer.h",
        code="not-repeatable",
        option="repeat",
        value=blocks,
    )


def _seconds(layers: Sequence[LayerMeasurement]) -> float:
    return sum(layer.forward_s + layer.backward_s for layer in layers)


def _trained_bytes(layers: Sequence[Layer]) -> int:
    """Bytes of the parameters that have a gradient, shared ones once."""
    shared: dict[str, SharedParameter] = {
        each.name: each for layer in layers for each in layer.shared_parameters if not each.frozen
    }
    own = sum(
        layer.parameter_bytes
        - layer.frozen_bytes
        - sum(each.bytes for each in layer.shared_parameters if not each.frozen)
        for layer in layers
    )
    return own + sum(each.bytes for each in shared.values())
