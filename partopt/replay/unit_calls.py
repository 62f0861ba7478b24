"""Taking over the calls of units, and seeing what modules inside of them return."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from partopt.errors import PartoptError, unknown
from partopt.profiler.layers import LayerKey


def number_calls(modules: Sequence[str]) -> list[LayerKey]:
    """The layers of a plan, whose stages name modules: the n-th of a name is its n-th call."""
    calls: Counter[str] = Counter()
    layers = []
    for name in modules:
        layers.append(LayerKey(name, calls[name]))
        calls[name] += 1
    return layers


class LayerOrder:
    """The layers of a plan, as a forward calls them one after the other; `entered` of them."""

    def __init__(self, layers: Sequence[LayerKey]) -> None:
        self._layers = list(layers)
        self.entered = 0

    @property
    def current(self) -> int:
        """The layer entered last; before the first one, the first."""
        return max(self.entered - 1, 0)

    def enter(self, name: str) -> int:
        """The layer that begins with a call of the unit `name`; PartoptError for another one."""
        layer = self.entered
        known = [unit.name for unit in self._layers[layer : layer + 1]]
        if known != [name]:
            expected = f'calls "{known[0]}" there' if known else "has no more layers"
            message = f'the model calls "{name}" as layer {layer}, the plan {expected}'
            raise _calls_differ(name, message)
        self.entered += 1
        return layer

    def check_all_called(self) -> None:
        """Raise PartoptError where a layer was not called."""
        if self.entered < len(self._layers):
            name, call = self._layers[self.entered]
            where = f'layer {self.entered} "{name}" (call {call})'
            raise _calls_differ(name, f"{where} is not called by the model")


def _calls_differ(name: str, message: str) -> PartoptError:
    return PartoptError(
        message,
        "give the model, its arguments and its inputs as the profile of the plan has them",
        code="calls-differ",
        layers=[name],
    )


class TakenUnits:
    """The context in which calls of units go to `called(name, forward, *args, **kwargs)`."""

    def __init__(self, model: nn.Module, names: Sequence[str], called: Callable[..., Any]) -> None:
        self._taken: list[tuple[dict[str, Any], Any]] = []  # attributes, the forward in its place
        self._replaced: list[Any] = []  # forwards that were attributes, not the class's
        for name in dict.fromkeys(names):
            module = _find(model, name)
            self._taken.append((module.__dict__, partial(called, name, module.forward)))
            self._replaced.append(module.__dict__.get("forward"))

    def __enter__(self) -> None:
        for attributes, taken in self._taken:
            attributes["forward"] = taken

    def __exit__(self, *_: object) -> None:
        for (attributes, _), forward in zip(self._taken, self._replaced, strict=True):
            if forward is None:
                attributes.pop("forward", None)
            else:
                attributes["forward"] = forward


def _find(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        raise unknown(
            f'the model has no module "{name}", which the plan names',
            name,
            [known for known, _ in model.named_modules() if known],
            code="no-such-unit",
        ) from error


@contextlib.contextmanager
def observe_hooked(names: dict[nn.Module, str]) -> Iterator[list[tuple[str, Any]]]:
    """Names and results of the modules with forward hooks that run in this context."""
    seen: list[tuple[str, Any]] = []

    def note(module: nn.Module, _inputs: Any, output: Any) -> None:
        if module._forward_hooks and module in names:
            seen.append((names[module], output))

    handle = register_module_forward_hook(note)
    try:
        yield seen
    finally:
        handle.remove()


def fire_hooks(module: nn.Module, output: Any) -> None:
    """Call a module's forward hooks, as if it had run and returned `output`."""
    for number, hook in list(module._forward_hooks.items()):
        if number in module._forward_hooks_with_kwargs:
            hook(module, (), {}, output)
        else:
            hook(module, (), output)
