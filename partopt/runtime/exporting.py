"""One forward and loss of a model as a graph, by `torch.export`, without weights or values.

The loss is a part of the graph, so that nothing crosses a cut that it does not need. Beside what
`partopt.runtime.marks` refuses, so are a forward that counts or draws numbers in Python: a graph
would have those of its first time for ever.
"""

from __future__ import annotations

import contextlib
import io
import logging
import pickle
import random
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind

from partopt.errors import PartoptError
from partopt.profiler.fake import (
    fake_buffers,
    fake_parameter,
    memoize,
    real_buffers,
    replace_tensors,
    without_log,
)
from partopt.profiler.foreign_errors import describe
from partopt.profiler.step import Loss, run_loss
from partopt.profiler.tracker import LayerKey
from partopt.runtime.buffers import buffer_slots
from partopt.runtime.input_form import InputForm
from partopt.runtime.marks import ENTER, LEAVE, cannot_export, is_mark, marking
from partopt.runtime.random_state import RandomState
from partopt.runtime.units import LayerOrder, TakenUnits

MODEL = "model."  # what an exported graph has before the names of the model

_KINDS = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "attribute",
}
_LIFTED = "lifted_tensor_"  # what torch.export calls a tensor that the forward finds or writes out
_LIFTS = {torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default}


class Source(NamedTuple):
    """Where a value comes from that a graph is given.

    `kind` is parameter, buffer, attribute, literal or input; `name` is that in the model, of an
    input its number among the tensors of the inputs.
    """

    kind: str
    name: str


class Exported(NamedTuple):
    """A graph with marks, where each of its placeholders comes from, and its constants.

    These are literals, and tensors that are attributes of modules.
    """

    module: fx.GraphModule
    sources: dict[fx.Node, Source]
    constants: dict[str, Tensor]


@contextlib.contextmanager
def without_memory(model: nn.Module, mode: Any, device: torch.device) -> Iterator[None]:
    """The context in which a model has fakes of its parameters and buffers, on `device`."""
    form = next((each.dtype for each in model.parameters()), torch.float32)
    fake = memoize(lambda each: fake_parameter(mode, each, device))
    with (
        without_log(),
        replace_tensors(model, fake),
        real_buffers(model, device, form),
        fake_buffers(model, mode),
    ):
        yield


def export(
    model: nn.Module,
    form: InputForm,
    tensors: Sequence[Tensor],
    loss_fn: Loss | None,
    layers: Sequence[LayerKey],
) -> Exported:
    """The graph of a microbatch with inputs of this form.

    Raises PartoptError with the reason why torch.export, or what it would lose, forbids it.
    """
    before = RandomState(tensors[0].device if tensors else torch.device("cpu"))
    try:
        with _quiet():
            step = _Step(model, form, loss_fn, layers)
            program = torch.export.export(step, tuple(tensors), strict=False)
    except PartoptError:
        raise
    except Exception as error:
        raise cannot_export(f"torch.export {describe(error)}") from error
    finally:
        before.restore()
    if program.graph_signature.buffers_to_mutate:
        raise cannot_export(f"torch.export of torch {torch.__version__} writes to no buffer")
    constants = {name.removeprefix(MODEL): each for name, each in program.constants.items()}
    module = program.graph_module
    module.graph.eliminate_dead_code(lambda node: node.is_impure() or is_mark(node))
    return Exported(module, _sources(program), constants)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch.export warns of, logs and prints, whole graphs among it."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def _sources(program: torch.export.ExportedProgram) -> dict[fx.Node, Source]:
    placeholders = program.graph.find_nodes(op="placeholder")
    sources: dict[fx.Node, Source] = {}
    inputs = 0
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        if spec.kind is InputKind.USER_INPUT:
            sources[node] = Source("input", str(inputs))
            inputs += 1
            continue
        if spec.kind not in _KINDS or spec.target is None:
            raise cannot_export("the forward reads what is no tensor of torch's")
        kind = _KINDS[spec.kind]
        if kind == "attribute" and spec.target.rpartition(".")[2].startswith(_LIFTED):
            kind = "literal"
            if not all(each.target in _LIFTS for each in node.users):
                raise cannot_export(
                    "the forward reads a tensor that is no input and not the model's"
                )
        sources[node] = Source(kind, spec.target.removeprefix(MODEL))
    return sources


class _Step(nn.Module):
    """The loss of a microbatch, given the tensors of its inputs."""

    def __init__(
        self, model: nn.Module, form: InputForm, loss_fn: Loss | None, layers: Sequence[LayerKey]
    ) -> None:
        super().__init__()
        self.model = model
        self._loss_fn = (loss_fn,)  # a loss that is a module is none of the model's
        self._form = form
        self._layers = layers
        self._inside = False

    def forward(self, *tensors: Tensor) -> Tensor:
        """The loss; what the model does is marked."""
        inputs = self._form.fill(tensors)
        numbers, drawn = _numbers(self.model), _random_numbers()
        buffers = [(*slot, slot[0][slot[1]]) for slot in buffer_slots(self.model)]
        order = LayerOrder(self._layers)

        def call(name: str, forward: Any, args: Any, kwargs: Any) -> Any:
            if self._inside:
                return forward(*args, **kwargs)
            ENTER(order.enter(name))
            self._inside = True
            try:
                return forward(*args, **kwargs)
            finally:
                self._inside = False
                LEAVE()

        with TakenUnits(self.model, [key.name for key in self._layers], call), marking():
            loss = run_loss(self.model, inputs, self._loss_fn[0])
            for holder, key, name, buffer in buffers:
                _write_replaced(holder, key, name, buffer)
        order.check_all_called()
        changed = sorted(dict(_numbers(self.model).items() ^ numbers.items()))
        if changed or _random_numbers() != drawn:
            counts = (
                f'changes "{changed[0]}"' if changed else "draws or seeds random numbers in Python"
            )
            raise cannot_export(f"the forward {counts}, which a graph has only once")
        return loss


def _write_replaced(
    holder: dict[str, Tensor | None], key: str, name: str, before: Tensor | None
) -> None:
    """Write to a buffer what has replaced it: torch.export would forget that."""
    now = holder[key]
    if now is before:
        return
    if now is None or before is None or (now.shape, now.dtype) != (before.shape, before.dtype):
        raise cannot_export(f'the forward gives the buffer "{name}" another form')
    with torch.no_grad():
        before.copy_(now)
    holder[key] = before


def _numbers(model: nn.Module) -> dict[str, float]:
    """The numbers that modules have as attributes, by their names."""
    return {
        f"{name}.{key}" if name else key: value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if type(value) in (int, float)  # a flag may say that something has been made ready
    }


def _random_numbers() -> bytes:
    """Where random numbers stand: those of torch, too, from which nothing is drawn meanwhile."""
    numpy: Any = sys.modules.get("numpy")
    drawn = torch.get_rng_state().tolist(), random.getstate(), numpy and numpy.random.get_state()
    return pickle.dumps(drawn)
