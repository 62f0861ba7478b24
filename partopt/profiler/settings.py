"""What is measured and how: the options of measuring, checked where they enter."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from partopt import documents
from partopt.documents.profile import Count, Model, Profile
from partopt.errors import PartoptError, invalid, unknown_value
from partopt.printable import printable
from partopt.profiler.device import Clock, choose_device, choose_dtype
from partopt.profiler.group import RankGroup
from partopt.profiler.tensors import Inputs, Loss

# microbatch size, steps done, steps to do (0: being prepared)
Progress = Callable[[int, int, int], None]
GRANULARITIES = ("auto", "block", "leaf")
AUTOCASTS = ("bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class ProfileSettings:
    """How to measure: the options of `measure` and of `estimate`. PartoptError for an invalid one.

    `granularity` and `units` choose the layers, see `partopt.profiler.layer_choice`. `autocast` is
    the dtype of an autocast over forward and loss, `compile` compiles every layer first; a model
    that comes compiled is measured so as well. `steps` bare and as many instrumented steps are
    timed (default: 10, and 5 where one takes more than a second), and `progress(size, done, steps)`
    is called after every pair, with 0 steps while a size is prepared. `blocks` are lists of blocks,
    such as transformer.h, of which a few stand for more: the optimizer is timed on the second block
    of every list alone, so that its state is that of no more. In a group of ranks `keep` is called
    with the profile of the sizes so far after every size: a rank may end with another.
    """

    microbatch_sizes: Collection[int] = (1, 2, 4, 8)
    device: str = "auto"
    dtype: str = "float32"
    granularity: str = "auto"
    units: Sequence[str] = ()
    steps: int | None = None
    autocast: str | None = None
    compile: bool = False
    progress: Progress | None = None
    blocks: Collection[str] = ()
    keep: Callable[[Profile], None] | None = None

    def __post_init__(self) -> None:
        if self.steps is not None:
            documents.check_option("steps", self.steps, Count, "10 steps show the spread")
        if self.granularity not in GRANULARITIES:
            what = "not a granularity that partopt knows"
            raise unknown_value("granularity", self.granularity, GRANULARITIES, what)
        if self.autocast is not None and self.autocast not in AUTOCASTS:
            what = "not a dtype that autocast runs in"
            raise unknown_value("autocast", self.autocast, AUTOCASTS, what)
        if self.autocast is not None and self.dtype != "float32":
            what = f"autocast runs over float32 weights, and `dtype={self.dtype}` casts them"
            raise invalid("autocast", self.autocast, what, "leave one of the two out")
        _check_sizes(self.microbatch_sizes)
        choose_device(self.device)
        choose_dtype(self.dtype)
        _check_units("units", self.units)
        _check_units("blocks", self.blocks)
        check_callable("progress", self.progress)
        check_callable("keep", self.keep)

    @property
    def sizes(self) -> list[int]:
        """The microbatch sizes, every one once, the smallest first."""
        return sorted(set(self.microbatch_sizes))

    @property
    def torch_device(self) -> torch.device:
        """The device that is measured."""
        return choose_device(self.device)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The number format of the weights."""
        return choose_dtype(self.dtype)

    def report(self, size: int, done: int, steps: int) -> None:
        """Tell whoever wants to know how far the measurement is."""
        if self.progress is not None:
            self.progress(size, done, steps)


@dataclass(frozen=True)
class Subject:
    """A model with its inputs and its loss, how, with which clock and by which ranks measured."""

    model: nn.Module
    example_inputs: Callable[[int], Inputs]
    loss_fn: Loss | None
    settings: ProfileSettings
    clock: Clock
    group: RankGroup = field(default_factory=RankGroup)


def check_model(model: object, example_inputs: object, loss_fn: object) -> None:
    """Raise PartoptError unless these are a model, its inputs and its loss."""
    if not isinstance(model, nn.Module):
        raise PartoptError(
            f"the model is of type {type(model).__name__}, not an nn.Module",
            "give an instance of nn.Module; `measure_source` takes a file that builds one",
            code="not-a-module",
        )
    if not callable(example_inputs):
        raise PartoptError(
            f"example_inputs is of type {type(example_inputs).__name__}, not a function",
            "give a function of the microbatch size that returns the inputs of one microbatch",
            code="invalid-option",
            option="example_inputs",
            value=example_inputs,
        )
    check_callable("loss_fn", loss_fn)


def check_name(name: str | None) -> str | None:
    """The name of the profile's model. Raises PartoptError where it could not be written."""
    if name is None:
        return None
    if not isinstance(name, str) or not name:
        raise invalid("name", name, "not a name", "give a short text, or leave it out")
    for fault in Model(name=name).faults():
        raise invalid("name", printable(name), fault.message, fault.hint)
    return name


def check_callable(option: str, given: Any) -> Any:
    """The function that is given, if any. Raises PartoptError for anything else."""
    if given is not None and not callable(given):
        what = f"of type {type(given).__name__}, not a function"
        raise invalid(option, given, what, "give a function, or leave it out")
    return given


def _check_sizes(given: Collection[int]) -> None:
    hint = "list whole numbers from 1, such as 1, 2, 4, 8"
    if isinstance(given, str) or not isinstance(given, Collection):
        raise invalid("microbatch_sizes", given, "not a list of sizes", hint)
    sizes = list(given)
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            what = f"{size!r} is not a microbatch size"
            raise invalid("microbatch_sizes", sizes, what, hint)
    if not sizes:
        raise invalid("microbatch_sizes", sizes, "no size given", hint)


def _check_units(option: str, units: Collection[str]) -> None:
    hint = 'list patterns of module names, such as "transformer.h.*"'
    if isinstance(units, str) or not isinstance(units, Collection):
        raise invalid(option, units, "not a list of patterns", hint)
    for unit in units:
        if not isinstance(unit, str) or not unit:
            raise invalid(option, unit, "not a pattern", hint)
