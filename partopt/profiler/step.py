"""One training step as it is measured: forward, loss, backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from partopt.errors import PartoptError
from partopt.profiler.foreign_errors import describe
from partopt.profiler.memory import is_out_of_memory
from partopt.profiler.tensors import tensors_in

Inputs = Any  # a tensor, a sequence of arguments, or a mapping of keyword arguments
Loss = Callable[[Any, Inputs], Tensor]


def run_forward(model: nn.Module, inputs: Inputs) -> Any:
    """The model's output for `inputs`.

    A tuple or list of inputs is spread over its arguments, a mapping over its keywords.
    """
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


def run_loss(model: nn.Module, inputs: Inputs, loss_fn: Loss | None) -> Tensor:
    """Run the forward and compute the loss.

    It is what `loss_fn` returns, else the output's `.loss`, else the sum of its floating tensors.
    """
    output = run_forward(model, inputs)
    return default_loss(output) if loss_fn is None else loss_fn(output, inputs)


def zero_gradients(model: nn.Module) -> None:
    """Set the gradients that there are to zero; memory that several share, once."""
    gradients = {id(weight.grad): weight.grad for weight in model.parameters()}
    for gradient in gradients.values():
        if gradient is not None:
            gradient.zero_()


def default_loss(output: Any) -> Tensor:
    """The `.loss` of an output that has one, else the sum of its floating tensors.

    Raises PartoptError where it holds none.
    """
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    floating = [tensor for tensor in tensors_in(output) if tensor.is_floating_point()]
    if not floating:
        raise PartoptError(
            f"the model returned {type(output).__name__}: no .loss and no floating tensor in it",
            "return tensors, or give loss_fn(output, inputs)",
            code="no-loss",
        )
    return (
        torch.stack([tensor.sum() for tensor in floating]).sum()
        if len(floating) > 1
        else floating[0].sum()
    )


def loss_of_output(output: Any, _inputs: Inputs) -> Tensor:
    """`default_loss`, as a loss function."""
    return default_loss(output)


def check_step(model: nn.Module, inputs: Inputs, loss_fn: Loss | None) -> None:
    """Run one step, to explain what is wrong with it before anything is timed.

    Raises PartoptError; running out of memory passes through.
    """
    if not any(True for _ in model.parameters()):
        raise PartoptError(
            "the model has no parameters: there is nothing to train",
            "measure a model with parameters",
            code="nothing-to-train",
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise PartoptError(
            "no parameter of the model requires a gradient: there is no backward to measure",
            "unfreeze some of it",
            code="nothing-to-train",
        )
    try:
        loss = run_loss(model, inputs, loss_fn)
        _check_loss(loss)
        loss.backward()  # type: ignore[no-untyped-call]
    except PartoptError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        hint = "are example_inputs what the model takes?"
        raise PartoptError(
            f"the training step {describe(error)}", hint, code="model-code-failed"
        ) from error


def _check_loss(loss: object) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = (
            f"a tensor of shape {list(loss.shape)}"
            if isinstance(loss, Tensor)
            else type(loss).__name__
        )
        raise PartoptError(
            f"loss_fn returned {found}, not a single number",
            "return a scalar tensor, such as a mean",
            code="invalid-loss",
        )
    if not loss.requires_grad:
        raise PartoptError(
            "the loss depends on no parameter that requires a gradient",
            "does loss_fn detach it, or the forward?",
            code="invalid-loss",
        )
