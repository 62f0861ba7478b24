"""What one operation does: floating-point operations, and bytes that it moves.

An operation of eager PyTorch is a kernel: it reads its arguments and writes its results. Views are
free. What indexes a table reads as much of it as it returns, and an element that is repeated by a
stride of 0 is read once. Operations of `aten` whose arithmetic is not counted wait for memory; of
any other nothing is known but its bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from partopt.profiler.dataflow import storages_in
from partopt.profiler.flops import count_flops

_ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
# the table, the first argument, is read at the places that are asked for
_GATHERS = {"embedding", "gather", "index", "index_select", "nll_loss_forward", "take"}
# the first argument is written at the places that are given
_SCATTERS = {"index_add_", "index_copy_", "index_put_", "scatter_", "scatter_add_"}
# in place, but what was there is not read
_FILLS = {"bernoulli_", "copy_", "fill_", "normal_", "random_", "uniform_", "zero_"}
# of aten, with arithmetic that neither a formula nor bytes tell
_UNCOUNTED = ("_cdist", "_cudnn_rnn", "_fft", "_linalg", "_pdist", "cholesky", "linalg", "mkldnn")


class Work(NamedTuple):
    """What an operation does; `kind` says which of a device's efficiencies it has.

    `has_rule` is False where nothing is known of it but its bytes.
    """

    kind: str
    flops: int
    bytes: int
    dtype: torch.dtype
    has_rule: bool = True


def work_of(
    func: Any, arguments: Sequence[Any], options: Mapping[str, Any], result: Any
) -> Work | None:
    """What one call of the operator `func` does; None where no kernel runs."""
    name = str(func._schema.name).rpartition("::")[2]
    read, made = list(storages_in([arguments, options])), list(storages_in(result))
    if name in _ALLOCATES or not (func._schema.is_mutable or _new(made, read)):
        return None
    flops = count_flops(func, arguments, options, result)
    kind = _kind(name) if flops else "memory"
    if kind.startswith("attention") and argument_of(func, arguments, options, "is_causal"):
        flops //= 2  # the formula is that of the whole square
    floating = [each.dtype for each in [*read, *made] if each.is_floating_point()]
    return Work(
        kind,
        flops,
        _moved(func, name, arguments, read, made),
        floating[0] if floating else torch.float32,
        bool(flops) or (func.namespace == "aten" and not name.startswith(_UNCOUNTED)),
    )


def _kind(name: str) -> str:
    if "attention" in name:
        return "attention_backward" if "backward" in name else "attention_forward"
    return "convolution" if "convolution" in name else "matmul"


def _moved(
    func: Any, name: str, arguments: Sequence[Any], read: list[Tensor], made: list[Tensor]
) -> int:
    """Bytes that are read and written."""
    results = sum(map(_extent, _new(made, read)))
    if name.startswith("new_") or name.endswith("_like"):
        return results  # the shape of the argument is read, and no more
    written = [
        arguments[position]
        for position, argument in enumerate(func._schema.arguments)
        if argument.is_write and position < len(arguments)
    ]
    targets = {id(each) for each in storages_in(written)}
    others = {id(each): _extent(each) for each in read if id(each) not in targets}
    held = sum(_extent(each) for each in storages_in(written))
    if name in _GATHERS:
        table = id(arguments[0])
        others[table] = min(others.get(table, 0), results)
    elif name in _SCATTERS:
        held = min(held, max(others.values(), default=0))
    return results + sum(others.values()) + held * (1 if name in _FILLS else 2)


def _new(made: list[Tensor], read: list[Tensor]) -> list[Tensor]:
    """The results that are no views of arguments."""
    if not read:
        return made
    known = {each.untyped_storage()._cdata for each in read}
    return [each for each in made if each.untyped_storage()._cdata not in known]


def _extent(tensor: Tensor) -> int:
    """Bytes of the distinct elements of a tensor."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, stride in sizes if stride) * tensor.element_size()


def argument_of(
    func: Any, arguments: Sequence[Any], options: Mapping[str, Any], wanted: str
) -> object:
    """The value of an argument by its name; None where it was not given."""
    if wanted in options:
        return options[wanted]
    return next(
        (
            value
            for value, argument in zip(arguments, func._schema.arguments, strict=False)
            if argument.name == wanted
        ),
        None,
    )
