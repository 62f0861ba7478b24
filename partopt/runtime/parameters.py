"""The parameters of a stage: their names and their values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor, nn

from partopt.runtime.events import Record
from partopt.runtime.random_state import RandomState


def own_parameter_names(record: Record, start: int, stop: int) -> list[str]:
    """The parameters that layers [start, stop) need, each by the first of its names."""
    own = range(start, stop)
    return [name for name, layers in record.holders.items() if any(e in own for e in layers)]


def shared_parameters(record: Record, starts: Sequence[int]) -> dict[str, list[int]]:
    """The parameters that several stages need, and which; `starts` are the stages' first layers."""
    stops = [*starts[1:], len(record.layers)]
    spans = [range(start, stop) for start, stop in zip(starts, stops, strict=True)]
    users = {
        name: [s for s, span in enumerate(spans) if any(layer in span for layer in layers)]
        for name, layers in record.holders.items()
    }
    return {name: stages for name, stages in users.items() if len(stages) > 1}


def build_whole(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """What `build` makes after `torch.manual_seed(seed)`; random numbers go on as they were."""
    random = RandomState(torch.device("cpu"))
    torch.manual_seed(seed)
    whole = build()
    random.restore()
    return whole


def materialise(
    model: nn.Module,
    names: Collection[str],
    whole: nn.Module,
    device: torch.device | None = None,
) -> None:
    """Give the parameters `names` of `model`, and all its other tensors, the values of `whole`.

    They are copies. The other parameters of `model` are on the meta device afterwards, frozen. Tied
    parameters stay tied, and number formats as they were.
    """
    values = dict(whole.named_parameters(remove_duplicate=False))
    buffers = dict(whole.named_buffers(remove_duplicate=False))
    modules = dict(whole.named_modules())
    made: dict[int, nn.Parameter] = {}
    keep = set(names)
    firsts = {id(each): name for name, each in model.named_parameters()}
    for module, prefix in _modules(model):
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in made:
                own = firsts[id(parameter)] in keep
                value = values[prefix + name] if own else None
                made[id(parameter)] = _parameter(parameter, value, device)
            setattr(module, name, made[id(parameter)])  # an RNN keeps a list of its own, too
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                filled = buffers[prefix + name]
                module._buffers[name] = filled.to(device or filled.device, buffer.dtype, copy=True)
        for name, value in vars(modules[prefix.removesuffix(".")]).items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                vars(module)[name] = value.to(device or value.device, copy=True)


def _modules(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for name, module in model.named_modules():
        yield module, f"{name}." if name else ""


def _parameter(
    like: nn.Parameter, value: Tensor | None, device: torch.device | None
) -> nn.Parameter:
    if value is None:
        empty = torch.empty(like.shape, dtype=like.dtype, device="meta")
        return nn.Parameter(empty, requires_grad=False)
    given = value.detach().to(device or value.device, like.dtype, copy=True)
    return nn.Parameter(given, requires_grad=like.requires_grad)
