"""Splitting the units that do much of the work, where a plan may cut inside them.

A unit that does more than a tenth of the forward's floating-point operations is split where a cut
is crossed by what one layer makes, into as few pieces as it takes for none to do more than a tenth;
what does more between two such cuts stays together, and so does what would leave a piece with less
than a hundredth. A unit stays whole which

- stands in a list beside others of its class: a repeated block, which trainers do not cut;
- is called more than once, or calls no other module.

Operations, not seconds, so that the layers of a model are the same on every device and in every
run. A piece is the modules from one that calls no other up to the next piece's, and has the name of
its first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from partopt.documents.profile import Tensor
from partopt.profiler.dataflow import DataflowMode
from partopt.profiler.step import Inputs, Loss, run_loss
from partopt.profiler.tracker import Tracker
from partopt.profiler.units import is_inside, is_leaf

# shares of the forward's operations
LARGE = 0.10
SLIGHT = 0.01


@dataclass(frozen=True)
class Work:
    """The layers of one forward, their operations, and the layers whose results cross each cut."""

    names: list[str]
    flops: list[int]
    crossing: list[int]  # cut c lies before layer c

    @property
    def total(self) -> int:
        """Operations of the whole forward."""
        return sum(self.flops)


def split_large_units(
    model: nn.Module, inputs: Inputs, loss_fn: Loss | None, units: list[str], calls: Sequence[str]
) -> list[str]:
    """The units with the large ones split; `calls` names the modules that a forward calls."""
    work = _observe_work(model, inputs, loss_fn, units)
    counts = Counter(calls)
    large = [
        name
        for name, flops in zip(work.names, work.flops, strict=True)
        if flops > LARGE * work.total and _may_split(model, name, counts)
    ]
    if not large:
        return units
    leaves = {unit: [*_single_leaves(unit, counts)] for unit in large}
    opened = [part for unit in units for part in leaves.get(unit, [unit])]
    work = _observe_work(model, inputs, loss_fn, opened)
    return [part for unit in units for part in _pieces(unit, leaves.get(unit, []), work)]


def _observe_work(model: nn.Module, inputs: Inputs, loss_fn: Loss | None, units: list[str]) -> Work:
    tracker = Tracker(model, units)
    flow = DataflowMode(model, tracker)
    with torch.no_grad(), tracker.discover(), flow:
        run_loss(model, inputs, loss_fn)
    layers = range(len(tracker.layers))
    return Work(
        [key.name for key in tracker.layers],
        [flow.flops[layer] for layer in layers],
        [_crossing(flow.tensors(), cut) for cut in layers],
    )


def _crossing(tensors: list[Tensor], cut: int) -> int:
    return len({each.producer for each in tensors if each.producer < cut <= max(each.consumers)})


def _may_split(model: nn.Module, name: str, counts: Counter[str]) -> bool:
    module = model.get_submodule(name)
    if is_leaf(module) or counts[name] != 1:
        return False
    parent = model.get_submodule(name.rpartition(".")[0]) if name else model
    in_list = isinstance(parent, nn.Sequential | nn.ModuleList | nn.ModuleDict)
    return not in_list or sum(type(each) is type(module) for each in parent.children()) == 1


def _single_leaves(unit: str, counts: Counter[str]) -> Iterator[str]:
    """The modules inside `unit` that call no other and are called once, in the order of calls."""
    names = set(counts)
    return (
        name
        for name, count in counts.items()
        if count == 1 and is_inside(unit, {name}) and not is_inside(name, names)
    )


def _pieces(unit: str, leaves: list[str], work: Work) -> Iterator[str]:
    """The names of the pieces of `unit`; itself where it stays whole."""
    inside = [layer for layer, name in enumerate(work.names) if name in set(leaves)]
    starts: list[int] = []
    held = 0
    for part in _parts(inside, work):
        flops = sum(work.flops[layer] for layer in part)
        if not starts or held + flops > LARGE * work.total:
            starts, held = [*starts, part[0]], 0
        held += flops
    yield from [work.names[start] for start in starts] if len(starts) > 1 else [unit]


def _parts(layers: list[int], work: Work) -> list[list[int]]:
    """The layers, parted at cuts that one layer's results cross, none of the parts slight."""
    parts: list[list[int]] = []
    for layer in layers:
        if not parts or (work.crossing[layer] == 1 and not _is_slight(parts[-1], work)):
            parts.append([])
        parts[-1].append(layer)
    if len(parts) > 1 and _is_slight(parts[-1], work):
        slight = parts.pop()
        parts[-1] += slight
    return parts


def _is_slight(layers: list[int], work: Work) -> bool:
    return sum(work.flops[layer] for layer in layers) < SLIGHT * work.total
