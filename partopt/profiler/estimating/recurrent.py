"""LSTM, GRU and plain recurrent layers as cuDNN runs them, for tensors without values.

For each layer and direction one product serves the inputs of all steps. Then the steps follow one
another: each is a product of the hidden state with the recurrent weights and a kernel for the gates
(Appleyard, Kocisky and Blunsom, "Optimizing Performance of Recurrent Neural Networks on GPUs",
2016). Layers and directions run one after the other here; cuDNN may let them overlap, and has
kernels for small layers in float16 that keep the recurrent weights on the chip.
"""

# t   time steps                 g   gates of the cell
# b   samples                    d   directions, 1 or 2
# i   width of the input         h   width of the hidden state
# p   width of the output of a direction: h, or `proj_size`

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from partopt.errors import PartoptError
from partopt.profiler.estimating.recurrent_steps import (
    recurrent_steps,
    recurrent_steps_backward,
)


class Cell(NamedTuple):
    """What tells the kinds of cells apart: `kept` is what cuDNN reserves for the backward.

    In numbers for each sample, step and unit of the hidden state. cuDNN does not document it. Of
    LSTM and GRU it is inferred from sizes that it asked for (pytorch/pytorch issue 2895, in
    float32: 736,000,000 and 864,000,000 bytes; its counts of parameters are those of 4 layers of
    320 units): 5 and 6 numbers a layer and the outputs of all layers but the last explain both, for
    25,000 samples times steps, which the issue's text as we have it does not say. Of a plain cell,
    of a projection and of dropout it is assumed.
    """

    gates: int
    kept: int


LSTM, GRU, PLAIN = Cell(4, 5), Cell(3, 6), Cell(1, 1)


@dataclass(frozen=True)
class Call:
    """One call of a recurrent module. `biases` and `projected` say which weights a layer has."""

    cell: Cell
    biases: bool
    projected: bool
    layers: int
    dropout: float
    directions: int
    batch_first: bool

    def parts(self, weights: Sequence[Any]) -> list[list[list[Any]]]:
        """The weights, or what belongs to each of them, of every layer and direction."""
        size = 2 + 2 * self.biases + self.projected
        groups = [list(weights[at : at + size]) for at in range(0, len(weights), size)]
        step = self.directions
        return [groups[at : at + step] for at in range(0, len(groups), step)]

    def time_first(self, x: Tensor) -> Tensor:
        """A tensor (t, b, ..) of one that is laid out as the caller's."""
        return (x.transpose(0, 1) if self.batch_first else x).contiguous()

    def as_given(self, x: Tensor) -> Tensor:
        """A tensor laid out as the caller's of one (t, b, ..): a view, as cuDNN's results are."""
        return x.transpose(0, 1) if self.batch_first else x


def layers_of(cell: Cell) -> Callable[..., tuple[Tensor, ...] | None]:
    """Output and states of `torch.lstm`, `torch.gru` and the like; None for packed sequences."""

    def run(
        x: Tensor,
        states: Any,
        weights: Any,
        biases: Any,
        layers: int,
        dropout: float,
        training: bool,
        bidirectional: bool,
        batch_first: Any = False,
    ) -> tuple[Tensor, ...] | None:
        # packed, the sizes of the batches come before the states
        if isinstance(states if cell is LSTM else weights, Tensor):
            return None
        hx, cx = states if cell is LSTM else (states, None)
        projected = cx is not None and hx.shape[-1] != cx.shape[-1]
        directions = 1 + bidirectional
        call = Call(
            cell, bool(biases), projected, layers, dropout * training, directions, batch_first
        )
        made: tuple[Tensor, ...] = _run(call, x, hx, cx, weights)
        return made if cell is LSTM else made[:2]

    return run


def lstm_cell(
    x: Tensor,
    states: Any,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Two products and CUDA's fused kernel; None where it has no kernel for fakes."""
    if b_ih is None or torch.is_autocast_enabled(x.device.type):
        return None
    hx, cx = states
    fused = torch.ops.aten._thnn_fused_lstm_cell
    h, c, _ = fused(x @ w_ih.t(), hx @ w_hh.t(), cx, b_ih, b_hh)
    return h, c


def refuse_packing(*_arguments: Any) -> NoReturn:
    """Raise PartoptError: how much a step computes depends on the lengths."""
    raise PartoptError(
        "the model packs sequences of several lengths: what it computes depends on the values of "
        "the lengths, and an estimate has none",
        "give it padded sequences, as long as they are on average, without "
        "`pack_padded_sequence`, or measure the model: leave out `estimate`",
        code="reads-values",
        operation="aten._pack_padded_sequence",
    )


def _run(call: Call, x: Tensor, hx: Tensor, cx: Tensor | None, weights: Sequence[Tensor]) -> Any:
    """Output, hidden and cell states; cast before, where autocast is on."""
    tensors = [x, hx, cx, *weights]
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        tensors = [None if each is None else each.to(dtype) for each in tensors]
    return _Recurrence.apply(call, *tensors)  # type: ignore[no-untyped-call]


class _Recurrence(torch.autograd.Function):
    """All layers of one call, in one node, as `aten._cudnn_rnn` is: it has no kernel for fakes."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, given: Tensor, hx: Tensor, cx: Tensor | None, *weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        x, kept = call.time_first(given), []
        for layer, parts in enumerate(call.parts(weights)):
            mask = None
            if layer and call.dropout:
                x, mask = torch.native_dropout(x, call.dropout, True)
            y, reserve = _layer_forward(call, x, parts, hx.shape[-1])
            kept += [x if layer else None, mask, reserve, y]
            x = y
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(given, hx, cx, *weights, *kept)
        return call.as_given(x), torch.empty_like(hx), None if cx is None else torch.empty_like(cx)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, _dh: Any, _dc: Any) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        of_weights = len(ctx.needs_input_grad) - 4
        given, hx, cx, *rest = ctx.saved_tensors
        weights, kept = rest[:of_weights], rest[of_weights:]
        # a backward for the gradients of inputs alone leaves those of the weights out, as cuDNN's
        wanted = [_runs(node) for node, _ in ctx.next_functions[-of_weights:]]
        gradient = torch.zeros_like(kept[-1]) if dy is None else call.time_first(dy)
        gradients: list[Tensor | None] = []
        of_layers = list(zip(call.parts(weights), call.parts(wanted), strict=True))
        for layer in reversed(range(len(of_layers))):
            x, mask, reserve, y = kept[4 * layer : 4 * layer + 4]
            x = call.time_first(given) if x is None else x
            dx, own = _layer_backward(call, x, y, gradient, reserve, *of_layers[layer])
            if mask is not None:
                scale = 1 / (1 - call.dropout)
                dx = torch.ops.aten.native_dropout_backward(dx, mask, scale)
            gradient, gradients = dx, own + gradients
        dcx = None if cx is None else torch.empty_like(cx)
        return None, call.as_given(gradient), torch.empty_like(hx), dcx, *gradients


def _layer_forward(
    call: Call, x: Tensor, parts: Sequence[Sequence[Tensor]], width: int
) -> tuple[Tensor, Tensor]:
    """The output (t, b, d p) of one layer, and what is kept for its backward."""
    hidden = parts[0][0].shape[0] // call.cell.gates
    rows = x.shape[0] * x.shape[1]
    kept = call.cell.kept + call.projected  # the state before it is projected
    reserve = x.new_empty(call.directions, kept * rows * hidden)
    with _cudnn_precision():
        for direction, part in enumerate(parts):
            gates = _gates(call, reserve[direction], rows, hidden)
            torch.mm(x.flatten(0, 1), part[0].t(), out=gates)
        y = recurrent_steps(
            reserve, _recurrent(call, parts), x.shape[0], x.shape[1], call.directions * width
        )
    return y, reserve


def _layer_backward(
    call: Call,
    x: Tensor,
    y: Tensor,
    dy: Tensor,
    reserve: Tensor,
    parts: Sequence[Sequence[Tensor]],
    wanted: Sequence[Sequence[bool]],
) -> tuple[Tensor, list[Tensor | None]]:
    """The gradient of the input of one layer, and those of its weights that are wanted."""
    hidden = parts[0][0].shape[0] // call.cell.gates
    inputs, outputs, slopes = (each.flatten(0, 1) for each in (x, y, dy))
    rows, width = inputs.shape[0], y.shape[-1] // call.directions
    dx, gradients = torch.empty_like(inputs), []
    with _cudnn_precision():
        # the gradients of the gates take their place
        recurrent_steps_backward(reserve, _recurrent(call, parts), dy)
        for direction, part in enumerate(parts):
            gates = _gates(call, reserve[direction], rows, hidden)
            if direction:
                torch.addmm(dx, gates, part[0], out=dx)
            else:
                torch.mm(gates, part[0], out=dx)
            here = slice(direction * width, (direction + 1) * width)
            factors: list[tuple[Tensor, Tensor | None]] = [
                (gates, inputs),
                (gates, outputs[:, here]),
            ]
            if call.biases:
                factors += [(gates, None), (gates, None)]
            if call.projected:
                states = reserve[direction, -rows * hidden :].view(rows, hidden)
                factors.append((slopes[:, here], states))
            gradients += [
                _of_weight(*pair) if asked else None
                for pair, asked in zip(factors, wanted[direction], strict=True)
            ]
    return dx.view_as(x), gradients


def _of_weight(slopes: Tensor, inputs: Tensor | None) -> Tensor:
    """The gradient of a weight, or of a bias where there are no inputs."""
    return slopes.sum(0) if inputs is None else slopes.t() @ inputs


def _gates(call: Call, reserve: Tensor, rows: int, hidden: int) -> Tensor:
    """The place (t b, g h) of the gates in what one direction of a layer keeps."""
    size = call.cell.gates * hidden
    return reserve[: rows * size].view(rows, size)


def _recurrent(call: Call, parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The weights that are read in each step."""
    return [each for part in parts for each in [part[1], *(part[-1:] if call.projected else [])]]


def _runs(node: Any) -> bool:
    """Whether the backward that runs comes to this node."""
    if node is None:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # a weight whose gradient is asked for by `torch.autograd.grad`
        return True


@contextlib.contextmanager
def _cudnn_precision() -> Iterator[None]:
    """Products in this context are in the precision that torch has set for cuDNN."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if torch.backends.cudnn.allow_tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
