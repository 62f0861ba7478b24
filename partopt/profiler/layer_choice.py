"""Choosing the units of planning: which modules of a model become the layers of its profile.

The rule, in plain words, for every granularity:

`auto`   A repeated block is one unit: a module that has children and whose class occurs more than
         once (a transformer block, a Bottleneck). A stage, that is a repeated module which itself
         holds a list of two or more blocks of one class, is opened instead, down to its blocks.
         Plain lists (Sequential, ModuleList, ModuleDict) are always opened, so that every child of
         VGG's `features` is a unit. What is left is covered by the largest modules that hold
         neither a block nor a list: an embedding, a final norm, a head. One of them that does much
         of the work is split.
         A module with one weight, such as a convolution with its norm, is no block that opens what
         holds it: an Inception block stays whole. Nor are modules that stand side by side in a
         list, such as the experts of a router.
`block`  The same, except that a list of modules without a block in it stays one unit, and that
         nothing is split.
`leaf`   Every module that calls no other.
GLOBs    Exactly the modules whose names match, the outermost where one lies in another; what is
         left is covered by the largest modules that hold none of them. `*` stays within one part of
         a dotted name: `transformer.h.*` does not match `transformer.h.0.mlp`.

A module that is never called (a ModuleList, or one whose parts are used apart) is opened
whatever the rule says. Units never lie in one another. What runs outside of every unit belongs to
the unit entered last, see `partopt.profiler.layers`.

*Branches.* Modules of a list usually run in series, one on what another made. A cut between
two that do not is crossed by all that they read and made, and helps no pipeline. Whether they do is
seen in one forward; a sum over experts depends on all of them, yet none of them on another.

*Large units.* A unit that does more than a tenth of the forward's floating-point operations is
split where a cut is crossed by what one layer makes, into as few pieces as it takes for none to do
more than a tenth; what does more between two such cuts stays together, and so does what would leave
a piece with less than a hundredth. A unit stays whole which stands in a list beside others of its
class (a repeated block, which trainers do not cut), is called more than once, or calls no other
module. Operations, not seconds, so that the layers of a model are the same on every device and in
every run. A piece is the modules from one that calls no other up to the next piece's, and has the
name of its first.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from partopt.errors import PartoptError, unknown
from partopt.profiler.layers import Tracker, remove_after
from partopt.profiler.observation import Recorder
from partopt.profiler.operations import Operation, StorageMap, Watch, storages_in
from partopt.profiler.settings import Subject
from partopt.profiler.step import run_forward, run_loss
from partopt.profiler.tensors import Inputs, Loss

# shares of the forward's operations
LARGE_SHARE = 0.10
SLIGHT_SHARE = 0.01
_FORWARDS = 3  # whose calls are compared
_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def track(subject: Subject, inputs: Inputs) -> Tracker:
    """The tracker of the units that the settings choose.

    Raises PartoptError where a glob matches no module that is called, and unless every one of a few
    forwards calls the same units in the same order.
    """
    model, settings = subject.model, subject.settings
    forwards = [called_modules(model, inputs) for _ in range(_FORWARDS)]
    called = set(itertools.chain.from_iterable(forwards))
    by_rule = settings.granularity != "leaf" and not settings.units
    branching = find_branching(model, inputs) if by_rule else set()
    units = choose_units(model, called, settings.granularity, settings.units, branching)
    orders = [[name for name in forward if name in set(units)] for forward in forwards]
    if any(order != orders[0] for order in orders):
        counts = [Counter(order) for order in orders]
        varied = [unit for unit in units if len({count[unit] for count in counts}) > 1]
        raise calls_vary(varied or units)
    if by_rule and settings.granularity == "auto":
        units = split_large_units(model, inputs, subject.loss_fn, units, forwards[0])
    return Tracker(model, units)


def called_modules(model: nn.Module, inputs: Inputs) -> list[str]:
    """Names of the modules that one forward calls, in the order of the calls."""
    called: list[str] = []
    handles = [
        module.register_forward_pre_hook(lambda _module, _inputs, name=name: called.append(name))
        for name, module in model.named_modules()
    ]
    with remove_after(handles), torch.no_grad():
        run_forward(model, inputs)
    return called


def calls_vary(names: Sequence[str]) -> PartoptError:
    """The error of a model that calls the layers `names` in some forwards and not in others."""
    return PartoptError(
        "the model calls other layers from one forward to the next: not every forward calls "
        f"{name_some(names)}",
        "switch off what skips layers at random, such as layer drop, or make one module of all "
        "that depends on the data, and name it: `units`",
        code="calls-vary",
        layers=list(names),
    )


def name_some(names: Sequence[str], most: int = 3) -> str:
    """The first of the names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(name or "the model" for name in names[:most]) + more


# --- the rule -------------------------------------------------------------------------------------


def choose_units(
    model: nn.Module,
    calls: Iterable[str],
    granularity: str = "auto",
    globs: Sequence[str] = (),
    branching: Iterable[str] = (),
) -> list[str]:
    """Names of the modules that become layers, in the order of the module tree.

    `calls` names those that the forward calls, `branching` the lists whose modules stand beside
    one another. Raises PartoptError where a glob matches no module that is called.
    """
    called = set(calls)
    chosen = _matching(called, globs) if globs else set()
    by_rule = granularity != "leaf" and not globs
    stays_whole = _rule(model, branching, open_lists=granularity == "auto")

    def is_unit(name: str, module: nn.Module) -> bool:
        if by_rule:
            return stays_whole(module)
        return name in chosen or not _is_inside(name, chosen or called)

    def cover(name: str, module: nn.Module) -> Iterator[str]:
        if name in called and is_unit(name, module):
            yield name
            return
        for child_name, child in _children(name, module):
            yield from cover(child_name, child)

    units = [unit for name, child in _children("", model) for unit in cover(name, child)]
    return units or [""]


def _rule(
    model: nn.Module, branching: Iterable[str], open_lists: bool
) -> Callable[[nn.Module], bool]:
    """The automatic rule for one model: whether a module stays whole."""
    beside = {model.get_submodule(name) for name in branching}
    branches = {module for modules_of_list in beside for module in modules_of_list.modules()}
    occurrences = Counter(
        type(module)
        for module in model.modules()
        if module is not model and not _is_leaf(module) and not _is_list(module)
    )

    def is_block(module: nn.Module) -> bool:
        """Whether its class is repeated, and it is no stage: that holds blocks in series."""
        held = {module, *module.children()} - beside
        return occurrences[type(module)] > 1 and not any(map(_holds_blocks, held))

    def stays_whole(module: nn.Module) -> bool:
        if _is_leaf(module) or is_block(module):
            return True
        hidden = branches | {module}
        descendants = [inner for inner in module.modules() if inner not in hidden]
        if any(is_block(inner) and _weights(inner) > 1 for inner in descendants):
            return False
        return not (open_lists and any(_is_list(inner) for inner in [module, *descendants]))

    return stays_whole


def _matching(called: set[str], globs: Sequence[str]) -> set[str]:
    """The names that match one of the globs, which all match some."""
    names = sorted(called - {""})
    chosen: set[str] = set()
    for glob in globs:
        pattern = re.escape(glob).replace(r"\*", r"[^.]*").replace(r"\?", r"[^.]")
        found = [name for name in names if re.fullmatch(pattern, name)]
        if not found:
            as_deep = [name for name in names if name.count(".") == glob.count(".")]
            what = f"`units={glob}`: matches no module that the forward calls"
            known = (as_deep or names)[:12]
            raise unknown(what, glob, known, code="no-such-unit", option="units")
        chosen.update(found)
    return chosen


def _holds_blocks(module: nn.Module) -> bool:
    """Whether the module is a list of which two or more are blocks of one class."""
    blocks = [
        type(child)
        for child in module.children()
        if not _is_leaf(child) and not _is_list(child) and _weights(child) > 1
    ]
    return isinstance(module, _LISTS) and len(set(blocks)) < len(blocks)


def _weights(module: nn.Module) -> int:
    """Weights of the module that are matrices or larger: one in a convolution with its norm."""
    return sum(parameter.dim() > 1 for parameter in module.parameters())


def _children(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    prefix = f"{name}." if name else ""
    return ((f"{prefix}{child_name}", child) for child_name, child in module.named_children())


def _is_inside(name: str, names: set[str]) -> bool:
    """Whether one of `names` lies inside the module `name`."""
    return any(not name or other.startswith(f"{name}.") for other in names - {name})


def _is_leaf(module: nn.Module) -> bool:
    return next(module.children(), None) is None


def _is_list(module: nn.Module) -> bool:
    return type(module) in _LISTS


# --- branches -------------------------------------------------------------------------------------


def find_branching(model: nn.Module, inputs: Inputs) -> set[str]:
    """Names of the lists of blocks of which no block takes what another made.

    Two or more of its blocks are called; which of them lie in series is seen in one forward.
    """
    modules = model.named_modules()
    lists = {name: [*module.children()] for name, module in modules if _holds_blocks(module)}
    if not lists:
        return set()
    origins = _Origins([block for blocks in lists.values() for block in blocks])
    with remove_after(origins.attach()), torch.no_grad(), origins:
        run_forward(model, inputs)
    return {name for name, blocks in lists.items() if origins.lie_beside(blocks)}


class _Origins(Watch):
    """Which of `blocks` went into what they take.

    Sets of blocks are sums of their `numbers`, which are powers of two.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.numbers = {block: 1 << place for place, block in enumerate(dict.fromkeys(blocks))}
        self.taken: dict[nn.Module, int] = {}
        self._origins = StorageMap()

    def attach(self) -> list[Any]:
        """Hooks that note what goes into the blocks, and that what comes out is theirs."""

        def enter(block: nn.Module, args: Any, kwargs: Any) -> None:
            self.taken[block] = self.taken.get(block, 0) | self._of([args, kwargs])

        def leave(block: nn.Module, _args: Any, output: Any) -> None:
            self._add(output, self.numbers[block])

        entries = [
            block.register_forward_pre_hook(enter, with_kwargs=True) for block in self.numbers
        ]
        return [*entries, *(block.register_forward_hook(leave) for block in self.numbers)]

    def lie_beside(self, blocks: Sequence[nn.Module]) -> bool:
        """Whether two or more of these were called, and none took what another made."""
        numbers = sum(self.numbers[block] for block in set(blocks))
        called = [block for block in blocks if block in self.taken]
        others = [numbers & ~self.numbers[block] & self.taken[block] for block in called]
        return len(called) > 1 and not any(others)

    def before(self, call: Operation) -> None:
        """Note what went into what is read, which may be written to."""
        self._read = self._of([call.arguments, call.options])

    def after(self, call: Operation) -> None:
        """What went into what it read goes into what it makes."""
        if self._read:
            self._add([call.result, call.written], self._read)

    def _of(self, value: Any) -> int:
        origins = 0
        for tensor in storages_in(value):
            origins |= self._origins.get(tensor) or 0
        return origins

    def _add(self, value: Any, origins: int) -> None:
        for tensor in storages_in(value):
            self._origins.set(tensor, (self._origins.get(tensor) or 0) | origins)


# --- large units ----------------------------------------------------------------------------------


def split_large_units(
    model: nn.Module, inputs: Inputs, loss_fn: Loss | None, units: list[str], calls: Sequence[str]
) -> list[str]:
    """The units with the large ones split; `calls` names the modules that a forward calls."""
    counts = Counter(calls)
    leaves = [name for name in counts if counts[name] == 1 and not _is_inside(name, set(counts))]

    def may_split(name: str) -> bool:
        module = model.get_submodule(name)
        parent = model.get_submodule(name.rpartition(".")[0]) if name else model
        alike = sum(type(child) is type(module) for child in parent.children())
        alone = not isinstance(parent, _LISTS) or alike == 1
        return alone and counts[name] == 1 and not _is_leaf(module)

    work = _Work.of(model, inputs, loss_fn, units)
    large = [name for layer, name in enumerate(work.names) if work.share([layer]) > LARGE_SHARE]
    parts = {
        unit: [name for name in leaves if _is_inside(unit, {name})]
        for unit in filter(may_split, large)
    }
    if not parts:
        return units
    opened = [name for unit in units for name in parts.get(unit, [unit])]
    work = _Work.of(model, inputs, loss_fn, opened)
    pieces = {unit: work.pieces(set(names)) for unit, names in parts.items()}
    return [
        name
        for unit in units
        for name in (pieces[unit] if len(pieces.get(unit, ())) > 1 else [unit])
    ]


@dataclass(frozen=True)
class _Work:
    """The layers of one forward, their operations, and the layers whose results cross every cut."""

    names: list[str]
    flops: list[int]
    crossing: list[int]  # cut c lies before layer c

    @classmethod
    def of(cls, model: nn.Module, inputs: Inputs, loss_fn: Loss | None, units: list[str]) -> _Work:
        """What one forward shows of these units."""
        tracker = Tracker(model, units)
        recorder = Recorder(model, tracker, inputs)
        with torch.no_grad(), tracker.discover(recorder.enter), recorder:
            run_loss(model, inputs, loss_fn)
        layers, tensors = range(len(tracker.layers)), recorder.tensors()
        crossing = [
            len({t.producer for t in tensors if t.producer < cut <= max(t.consumers)})
            for cut in layers
        ]
        names = [key.name for key in tracker.layers]
        return cls(names, [recorder.flops[layer] for layer in layers], crossing)

    def share(self, layers: Sequence[int]) -> float:
        """The share of these layers in the operations of the whole forward."""
        return sum(self.flops[layer] for layer in layers) / (sum(self.flops) or 1)

    def pieces(self, leaves: set[str]) -> list[str]:
        """The names of the pieces of a unit that is made of these layers."""
        parts: list[list[int]] = []  # parted where one layer's results cross, none of them slight
        for layer in (layer for layer, name in enumerate(self.names) if name in leaves):
            if not parts or (self.crossing[layer] == 1 and self.share(parts[-1]) >= SLIGHT_SHARE):
                parts.append([])
            parts[-1].append(layer)
        if len(parts) > 1 and self.share(parts[-1]) < SLIGHT_SHARE:
            slight = parts.pop()
            parts[-1] += slight
        names, held = list[str](), list[int]()
        for part in parts:
            if not held or self.share([*held, *part]) > LARGE_SHARE:
                names.append(self.names[part[0]])
                held = []
            held = [*held, *part]
        return names
