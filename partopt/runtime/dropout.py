"""Dropout switched off in a model that trains."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

from torch import Tensor, nn
from torch.nn import functional

from partopt.profiler.weightless import replace_attribute

# torch's functions that drop: the name of their probability, and its place among the arguments
_PROBABILITIES = {
    "dropout": ("p", 1),
    "dropout1d": ("p", 1),
    "dropout2d": ("p", 1),
    "dropout3d": ("p", 1),
    "alpha_dropout": ("p", 1),
    "feature_alpha_dropout": ("p", 1),
    "scaled_dot_product_attention": ("dropout_p", 4),
}


@contextlib.contextmanager
def without_dropout(*models: nn.Module) -> Iterator[None]:
    """In this context torch's functions drop nothing, nor do its layers, which call them.

    They are replaced, since `model.eval()` would change other layers, too. Of recurrent layers it
    is those of the `models`.
    """
    recurrent = [
        module for model in models for module in model.modules() if isinstance(module, nn.RNNBase)
    ]
    with contextlib.ExitStack() as stack:
        for module in recurrent:
            stack.enter_context(replace_attribute(module, "dropout", 0.0))
        for name in _PROBABILITIES:
            function = _with_zero(getattr(functional, name), *_PROBABILITIES[name])
            stack.enter_context(replace_attribute(functional, name, function))
        yield


def _with_zero(function: Callable[..., Tensor], name: str, place: int) -> Callable[..., Tensor]:
    """The function, with probability 0 whatever it is given."""

    @functools.wraps(function)
    def called(*arguments: object, **options: object) -> Tensor:
        if len(arguments) <= place:
            return function(*arguments, **options | {name: 0.0})
        return function(*arguments[:place], 0.0, *arguments[place + 1 :], **options)

    return called
