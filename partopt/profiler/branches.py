"""Lists whose modules stand beside each other: experts to which a router sends parts of the data.

Modules of a list usually run in series, each on what the one before made. A cut between two that do
not is crossed by all that they read and made, and helps no pipeline. Whether they do is seen in one
forward: a dispatch mode notes which of them went into each storage. A sum over experts depends on
all of them, yet none of them on another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from partopt.profiler.dataflow import StorageMap, storages_in, written_arguments
from partopt.profiler.step import Inputs, run_forward
from partopt.profiler.units import holds_blocks


def find_branching(model: nn.Module, inputs: Inputs) -> set[str]:
    """Names of the lists of blocks of which no block takes what another made.

    Two or more of its blocks are called; which of them lie in series is seen in one forward.
    """
    lists = {name: module for name, module in model.named_modules() if holds_blocks(module)}
    blocks = {name: [*module.children()] for name, module in lists.items()}
    if not blocks:
        return set()
    origins = _Origins(model, inputs, [block for each in blocks.values() for block in each])
    return {
        name
        for name, each in blocks.items()
        if sum(block in origins.taken for block in each) > 1
        and not any(
            origins.taken.get(block, 0) & origins.numbers[other]
            for block in each
            for other in each
            if other is not block
        )
    }


class _Origins(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Which of `blocks` went into what each of them takes, in one forward.

    Sets of blocks are sums of their `numbers`, which are powers of two; `taken` holds what each
    block that was called took.
    """

    def __init__(self, model: nn.Module, inputs: Inputs, blocks: list[nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers = {block: 1 << place for place, block in enumerate(dict.fromkeys(blocks))}
        self.taken: dict[nn.Module, int] = {}
        self._origins = StorageMap()
        handles = [*self._hooks()]
        try:
            with torch.no_grad(), self:
                run_forward(model, inputs)
        finally:
            for handle in handles:
                handle.remove()

    def _hooks(self) -> Iterator[Any]:
        for block in self.numbers:
            yield block.register_forward_pre_hook(self._enter, with_kwargs=True)
            yield block.register_forward_hook(self._leave)

    def _enter(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        self.taken[block] = self.taken.get(block, 0) | self._of([args, kwargs])

    def _leave(self, block: nn.Module, _args: Any, output: Any) -> None:
        self._add(output, self.numbers[block])

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation; what went into what it read goes into what it makes."""
        options = kwargs or {}
        origins, result = self._of([args, options]), func(*args, **options)
        if origins:
            self._add([result, written_arguments(func, args)], origins)
        return result

    def _of(self, value: Any) -> int:
        origins = 0
        for tensor in storages_in(value):
            origins |= self._origins.get(tensor) or 0
        return origins

    def _add(self, value: Any, origins: int) -> None:
        for tensor in storages_in(value):
            before = self._origins.get(tensor) or 0
            if before | origins != before:
                self._origins.set(tensor, before | origins)
