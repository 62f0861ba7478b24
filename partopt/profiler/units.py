"""Choosing the units of planning: which modules of a model become the layers of its profile.

The rule, in plain words, for each granularity:

`auto`   A repeated block is one unit: a module that has children and whose class occurs more than
         once (a transformer block, a Bottleneck). A stage, that is a repeated module which itself
         holds a list of two or more blocks of one class, is opened instead, down to its blocks.
         Plain lists (Sequential, ModuleList, ModuleDict) are always opened, so that each child of
         VGG's `features` is a unit. What is left is covered by the largest modules that hold
         neither a block nor a list: an embedding, a final norm, a head. One of them that does much
         of the work is split, see `partopt.profiler.splitting`.
         A module with one weight, such as a convolution with its norm, is no block that opens what
         holds it: an Inception block stays whole. Nor are modules that stand beside each other in a
         list, such as the experts of a router (`partopt.profiler.branches`).
`block`  The same, except that a list of modules without a block in it stays one unit.
`leaf`   Every module that calls no other.
GLOBs    Exactly the modules whose names match, the outermost where one lies in another; what is
         left is covered by the largest modules that hold none of them. `*` stays within one part of
         a dotted name: `transformer.h.*` does not match `transformer.h.0.mlp`.

A module that is never called (a ModuleList, or one whose parts are used on their own) is opened
whatever the rule says. Units never lie in one another. What runs outside of every unit belongs to
the unit entered last, see `partopt.profiler.tracker`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from partopt.errors import PartoptError, did_you_mean
from partopt.profiler.step import Inputs, run_forward

GRANULARITIES = ("auto", "block", "leaf")
_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def choose_units(
    model: nn.Module,
    calls: Iterable[str],
    granularity: str = "auto",
    globs: Sequence[str] = (),
    branching: Iterable[str] = (),
) -> list[str]:
    """Names of the modules that become layers, in the order of the module tree.

    `calls` names those that the forward calls, `branching` the lists whose modules stand beside
    each other. Raises PartoptError where a glob matches no module that is called.
    """
    called = set(calls)
    if globs:
        return list(_cover(model, "", _matching(called, globs), called))
    if granularity == "leaf":
        return [
            name
            for name, _ in model.named_modules()
            if name in called and not is_inside(name, called)
        ]
    rule = _Rule(model, called, set(branching), open_lists=granularity == "auto")
    return [unit for name, child in _children("", model) for unit in rule.units(name, child)] or [
        ""
    ]


def called_modules(model: nn.Module, inputs: Inputs) -> list[str]:
    """Names of the modules that one forward calls, in the order of the calls."""
    called: list[str] = []
    handles = [
        module.register_forward_pre_hook(lambda _module, _inputs, name=name: called.append(name))
        for name, module in model.named_modules()
    ]
    try:
        with torch.no_grad():
            run_forward(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return called


def check_calls(forwards: Sequence[list[str]], units: Sequence[str]) -> None:
    """Raise PartoptError unless every one of `forwards` calls the same units in the same order.

    Each is what `called_modules` found.
    """
    counts = [Counter(name for name in called if name in set(units)) for called in forwards]
    varied = [unit for unit in units if len({count[unit] for count in counts}) > 1]
    orders = {tuple(name for name in called if name in set(units)) for called in forwards}
    if len(orders) > 1:
        raise calls_vary(varied or list(units))


def calls_vary(names: Sequence[str]) -> PartoptError:
    """The error of a model that calls the layers `names` in some forwards and not in others."""
    return PartoptError(
        "the model calls other layers from one forward to the next: not every forward calls "
        f"{name_some(names)}",
        "switch off what skips layers at random, such as layer drop, or choose larger units, whose "
        "calls do not vary: `granularity=block`, or `units`",
        code="calls-vary",
        layers=list(names),
    )


def name_some(names: Sequence[str], most: int = 3) -> str:
    """The first of the names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(name or "the model" for name in names[:most]) + more


class _Rule:
    """The automatic rule for one model."""

    def __init__(
        self, model: nn.Module, called: set[str], branching: set[str], open_lists: bool
    ) -> None:
        inner = [
            module
            for module in model.modules()
            if module is not model and not is_leaf(module) and not _is_list(module)
        ]
        self.occurrences = Counter(type(module) for module in inner)
        self.branching = {model.get_submodule(name) for name in branching}
        self.branches = {module for own in self.branching for module in own.modules()}
        self.called = called
        self.open_lists = open_lists

    def units(self, name: str, module: nn.Module) -> Iterator[str]:
        """Units that cover `module`."""
        if not self._stays_whole(module) or name not in self.called:
            for child_name, child in _children(name, module):
                yield from self.units(child_name, child)
        else:
            yield name

    def _stays_whole(self, module: nn.Module) -> bool:
        if is_leaf(module) or self._is_block(module):
            return True
        hidden = self.branches | {module}
        descendants = [inner for inner in module.modules() if inner not in hidden]
        if any(self._is_block(inner) and _weights(inner) > 1 for inner in descendants):
            return False
        return not (self.open_lists and any(_is_list(inner) for inner in [module, *descendants]))

    def _is_block(self, module: nn.Module) -> bool:
        return self.occurrences[type(module)] > 1 and not self._is_stage(module)

    def _is_stage(self, module: nn.Module) -> bool:
        """Whether the module is, or holds directly, a list of blocks in series."""
        held = {module, *module.children()} - self.branching
        return any(holds_blocks(inner) for inner in held)


def holds_blocks(module: nn.Module) -> bool:
    """Whether the module is a list of which two or more are blocks of one class."""
    blocks = [
        type(child)
        for child in module.children()
        if not is_leaf(child) and not _is_list(child) and _weights(child) > 1
    ]
    return isinstance(module, _LISTS) and len(set(blocks)) < len(blocks)


def _weights(module: nn.Module) -> int:
    """Weights of the module that are matrices or larger: one in a convolution with its norm."""
    return sum(parameter.dim() > 1 for parameter in module.parameters())


def _cover(module: nn.Module, name: str, chosen: set[str], called: set[str]) -> Iterator[str]:
    """The chosen units inside `module`, and the largest called modules that hold none."""
    if name in chosen or (name in called and not is_inside(name, chosen)):
        yield name
        return
    for child_name, child in _children(name, module):
        yield from _cover(child, child_name, chosen, called)


def is_inside(name: str, names: set[str]) -> bool:
    """Whether one of `names` lies inside the module `name`."""
    return any(not name or other.startswith(f"{name}.") for other in names - {name})


def _matching(called: set[str], globs: Sequence[str]) -> set[str]:
    names = sorted(called - {""})
    chosen: set[str] = set()
    for glob in globs:
        found = [name for name in names if re.fullmatch(_as_regex(glob), name)]
        if not found:
            raise PartoptError(
                f"`units={glob}`: matches no module that the forward calls",
                did_you_mean(glob, _near(names, glob)),
                code="no-such-unit",
                option="units",
                value=glob,
            )
        chosen.update(found)
    return chosen


def _as_regex(glob: str) -> str:
    return re.escape(glob).replace(r"\*", r"[^.]*").replace(r"\?", r"[^.]")


def _near(names: list[str], glob: str) -> list[str]:
    """The names worth offering: those as deep as the glob, at most twelve."""
    same_depth = [name for name in names if name.count(".") == glob.count(".")]
    return (same_depth or names)[:12]


def _children(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    prefix = f"{name}." if name else ""
    return ((f"{prefix}{child_name}", child) for child_name, child in module.named_children())


def is_leaf(module: nn.Module) -> bool:
    """Whether the module holds no other."""
    return next(module.children(), None) is None


def _is_list(module: nn.Module) -> bool:
    return type(module) in _LISTS
