"""What is measured and how: the options of measuring, checked where they enter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from partopt import documents
from partopt.documents.profile import Count, Model
from partopt.errors import PartoptError, did_you_mean
from partopt.printable import printable
from partopt.profiler.device import Clock, choose_device, choose_dtype
from partopt.profiler.group import RankGroup
from partopt.profiler.tensors import Inputs, Loss

# microbatch size, steps done, steps to do (0: being prepared)
Progress = Callable[[int, int, int], None]
GRANULARITIES = ("auto", "block", "leaf")
AUTOCASTS = ("bfloat16", "float16")


@dataclass(frozen=True)
class Settings:
    """How to measure: sizes, device, number format, layers, steps, and how progress is reported.

    Each size occurs once, the smallest first.
    """

    microbatch_sizes: tuple[int, ...]
    device: torch.device
    dtype: torch.dtype
    granularity: str = "auto"
    units: tuple[str, ...] = ()
    steps: int | None = None
    progress: Progress = lambda _size, _done, _steps: None
    autocast: torch.dtype | None = None
    compiled: bool = False

    @classmethod
    def of(
        cls,
        microbatch_sizes: Iterable[int],
        device: str,
        dtype: str,
        granularity: str = "auto",
        units: Sequence[str] = (),
        steps: int | None = None,
        progress: Progress | None = None,
        autocast: str | None = None,
        compile: bool = False,
    ) -> Settings:
        """The settings of these options. Raises PartoptError for an invalid one."""
        if steps is not None:
            documents.check_option("steps", steps, Count, "10 steps show the spread")
        if granularity not in GRANULARITIES:
            what = "not a granularity that partopt knows"
            hint = did_you_mean(str(granularity), GRANULARITIES)
            raise invalid_option("granularity", granularity, what, hint)
        if autocast is not None and autocast not in AUTOCASTS:
            what = "not a dtype that autocast runs in"
            raise invalid_option("autocast", autocast, what, did_you_mean(str(autocast), AUTOCASTS))
        if autocast is not None and dtype != "float32":
            what = f"autocast runs over float32 weights, and `dtype={dtype}` casts them"
            raise invalid_option("autocast", autocast, what, "leave one of the two out")
        return cls(
            _check_sizes(microbatch_sizes),
            choose_device(device),
            choose_dtype(dtype),
            granularity,
            _check_units(units),
            steps,
            check_callable("progress", progress) or cls.progress,
            None if autocast is None else choose_dtype(autocast),
            bool(compile),
        )

    @property
    def dtype_name(self) -> str:
        """The number format as a profile has it."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def autocast_name(self) -> str | None:
        """The number format of autocast as a profile has it."""
        return None if self.autocast is None else str(self.autocast).removeprefix("torch.")


@dataclass(frozen=True)
class Subject:
    """A model with its inputs and its loss, how, with which clock and by which ranks measured."""

    model: nn.Module
    example_inputs: Callable[[int], Inputs]
    loss_fn: Loss | None
    settings: Settings
    clock: Clock
    group: RankGroup = field(default_factory=RankGroup)


def check_model(model: object, example_inputs: object, loss_fn: object) -> None:
    """Raise PartoptError unless these are a model, its inputs and its loss."""
    if not isinstance(model, nn.Module):
        raise PartoptError(
            f"the model is of type {type(model).__name__}, not an nn.Module",
            "give an instance of nn.Module; `measure_source` takes a file that builds one",
            code="not-a-module",
            type=type(model).__name__,
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
        raise invalid_option("name", name, "not a name", "give a short text, or leave it out")
    for fault in Model(name=name).faults():
        raise invalid_option("name", printable(name), fault.message, fault.hint)
    return name


def check_arguments(arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    """The arguments of the build function.

    Raises PartoptError for arguments that a profile could not record.
    """
    given = dict(arguments or {}) if isinstance(arguments, Mapping | None) else None
    what, hint = "not a mapping of names to values", 'give a dictionary such as {"layers": 12}'
    if given is not None and all(isinstance(key, str) for key in given):
        fault = next(iter(Model(name="model", arguments=given).faults()), None)
        if fault is None:
            return given
        what = fault.message.removeprefix("arguments.")
        hint = "give numbers, text, lists or mappings, which the profile records"
    raise PartoptError(
        f"`arguments`: {what}", hint, code="invalid-option", option="arguments", value=arguments
    )


def check_callable(option: str, given: Any) -> Any:
    """The function that is given, if any. Raises PartoptError for anything else."""
    if given is not None and not callable(given):
        what = f"of type {type(given).__name__}, not a function"
        raise invalid_option(option, given, what, "give a function, or leave it out")
    return given


def invalid_option(option: str, value: object, what: str, hint: str) -> PartoptError:
    """The error of an option with an invalid value."""
    return PartoptError(
        f"`{option}={value}`: {what}", hint, code="invalid-option", option=option, value=value
    )


def _check_sizes(given: Iterable[int]) -> tuple[int, ...]:
    """The sizes, each once, the smallest first."""
    hint = "list whole numbers from 1, such as 1, 2, 4, 8"
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise invalid_option("microbatch_sizes", given, "not a list of sizes", hint)
    sizes = list(given)
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            what = f"{size!r} is not a microbatch size"
            raise invalid_option("microbatch_sizes", sizes, what, hint)
    if not sizes:
        raise invalid_option("microbatch_sizes", sizes, "no size given", hint)
    return tuple(sorted(set(sizes)))


def _check_units(units: Sequence[str]) -> tuple[str, ...]:
    hint = 'list patterns of module names, such as "transformer.h.*"'
    if isinstance(units, str) or not isinstance(units, Iterable):
        raise invalid_option("units", units, "not a list of patterns", hint)
    for unit in units:
        if not isinstance(unit, str) or not unit:
            raise invalid_option("units", unit, "not a pattern", hint)
    return tuple(units)
