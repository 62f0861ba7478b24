"""The operations of a step as they run: what they read, write and make, and their arithmetic.

`Watch` is the one place where torch's dispatch is listened to; what is to be known of a step is a
subclass that says what it notes. Tensors are told apart by their storages, which views share. A
value given to a storage dies with it: a recycled address is never taken for an old tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils.flop_counter import flop_registry

from partopt.profiler.tensors import local_tensors

# the attention kernels of the CPU do the same work as those whose formulas torch knows
_SAME_WORK = {
    f"aten.{name}_for_cpu{part}": getattr(torch.ops.aten, f"{name}{part}")
    for name in ["_scaled_dot_product_flash_attention"]
    for part in ("", "_backward")
}


@dataclass(slots=True)
class Operation:
    """One call of an operator; `result` is there once it has run."""

    func: Any
    arguments: Sequence[Any]
    options: Mapping[str, Any]
    result: Any = None

    @property
    def read(self) -> Iterator[Tensor]:
        """The tensors that it is given."""
        return storages_in([self.arguments, self.options])

    @property
    def written(self) -> list[Any]:
        """Those of its arguments that it writes to."""
        return [
            value
            for value, argument in zip(self.arguments, self.func._schema.arguments, strict=False)
            if argument.is_write
        ]

    @property
    def made(self) -> list[Tensor]:
        """What it returns that is no view of what it was given."""
        given = {tensor.untyped_storage()._cdata for tensor in self.read}
        results = storages_in(self.result)
        return [tensor for tensor in results if tensor.untyped_storage()._cdata not in given]

    @property
    def flops(self) -> int:
        """Floating-point operations of products, convolutions and attention; 0 of all others.

        A multiply-add counts as two.
        """
        operator = getattr(self.func, "overloadpacket", self.func)
        if str(operator) == "aten._grouped_mm":
            # rows, or columns of a shared axis, belong to one group: (m, k) by (g, k, n),
            # (m, k) by (k, n), and (g, m, k) by (g, k, n)
            first, second = self.arguments[:2]
            groups = first.shape[0] if first.dim() == second.dim() == 3 else 1
            return int(2 * groups * first.shape[-2] * first.shape[-1] * second.shape[-1])
        formula = flop_registry.get(_SAME_WORK.get(str(operator), operator))
        if formula is None:
            return 0
        return int(formula(*self.arguments, **self.options, out_val=self.result))

    def argument(self, wanted: str) -> Any:
        """The value of an argument by its name; None where it was not given."""
        names = [argument.name for argument in self.func._schema.arguments]
        return dict(zip(names, self.arguments, strict=False), **self.options).get(wanted)


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation that runs while it is active, on what this rank holds.

    An operation on tensors that wrap others, such as DTensors, is told to `wrapped`, and then seen
    as those on what they wrap.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation between `before` and `after`."""
        call = Operation(func, args, kwargs or {})
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            self.note_wrapped(call)
            return NotImplemented
        if func.namespace == "prim":  # a question to a fake tensor: where does it lie?
            return func(*args, **call.options)
        self.before(call)
        call.result = func(*args, **call.options)
        self.after(call)
        return call.result

    def note_wrapped(self, call: Operation) -> None:
        """Note an operation on tensors that wrap others."""

    def before(self, call: Operation) -> None:
        """Note an operation that is about to run."""

    def after(self, call: Operation) -> None:
        """Note an operation that has run."""


class StorageMap:
    """Values keyed by storage, forgotten when the storage is freed; `freed` is then told them."""

    def __init__(self, freed: Callable[[Any], None] = lambda _value: None) -> None:
        self._values: dict[int, tuple[weakref.ref[Any], Any]] = {}
        self._freed = freed

    def get(self, tensor: Tensor) -> Any:
        """The value of the storage of `tensor`, or None."""
        entry = self._values.get(tensor.untyped_storage()._cdata)
        return entry[1] if entry else None

    def values(self) -> list[Any]:
        """The values of the storages that live."""
        return [value for _, value in self._values.values()]

    def set(self, tensor: Tensor, value: Any) -> None:
        """Give the storage of `tensor` a value."""
        storage = tensor.untyped_storage()
        key = storage._cdata

        def forget(dead: weakref.ref[Any]) -> None:
            if key in self._values and self._values[key][0] is dead:
                self._freed(self._values.pop(key)[1])

        self._values[key] = (weakref.ref(storage, forget), value)


def storages_in(value: Any) -> Iterator[Tensor]:
    """The tensors in `value` with memory, theirs or another's; of a sparse one, its parts."""
    for tensor in local_tensors(value):
        sparse = tensor.layout is torch.sparse_coo
        for part in (tensor._indices(), tensor._values()) if sparse else (tensor,):
            if part.layout is torch.strided and part.untyped_storage().nbytes() > 0:
                yield part
