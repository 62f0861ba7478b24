"""Recurrent layers of an estimate, against unrolled ones, sums by hand and sizes of cuDNN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.flop_counter import FlopCounterMode

from partopt.errors import PartoptError
from partopt.profiler.estimate import estimate
from partopt.profiler.estimating.clock import RooflineClock
from partopt.profiler.estimating.kernels import kernels_of
from partopt.profiler.fake import fake_parameters
from tests.profiler.helpers import Parts, device, linear, structure

CPU, FLOAT = torch.device("cpu"), torch.float32
STEPS, SAMPLES, INPUT, HIDDEN = 5, 3, 16, 8  # t, b, i, h
GATES = {"lstm": 4, "gru": 3, "rnn": 1}
MODULES: dict[str, Callable[..., nn.RNNBase]] = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}


def clocked(module: nn.RNNBase, backward: bool = True, **changes: Any) -> RooflineClock:
    """The clock after a fake of the module has run, and its backward where that is asked for."""
    with FakeTensorMode() as mode, kernels_of("cuda"), fake_parameters(module, mode, CPU, FLOAT):
        x = torch.empty(STEPS, SAMPLES, INPUT, requires_grad=True)
        with RooflineClock(device(**changes)) as clock:
            output = module(x)[0]
            if backward:
                output.backward(torch.empty_like(output))
    return clock


def unrolled(module: nn.RNNBase, x: Tensor) -> Tensor:
    """The products of a recurrent module, step by step; what they are made of does not matter."""
    directions, weights = 1 + module.bidirectional, iter(module.all_weights)
    for _ in range(module.num_layers):
        outputs = []
        for _ in range(directions):
            own = [each for each in next(weights) if each.dim() == 2]
            w_ih, w_hh, w_hr = (*own, None)[:3] if len(own) == 2 else own
            h = torch.zeros(SAMPLES, w_hh.shape[1], requires_grad=True)
            steps = []
            for step in x:
                gates = functional.linear(step, w_ih) + functional.linear(h, w_hh)
                h = gates.unflatten(1, (-1, module.hidden_size)).sum(1)
                h = h if w_hr is None else functional.linear(h, w_hr)
                steps.append(h)
            outputs.append(torch.stack(steps))
        x = torch.cat(outputs, -1)
    return x


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("options", [{}, {"num_layers": 2}, {"bidirectional": True}])
def test_as_many_operations_as_unrolled(kind: str, options: dict[str, Any]) -> None:
    module = MODULES[kind](INPUT, HIDDEN, **options)
    x = torch.randn(STEPS, SAMPLES, INPUT, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        unrolled(module, x).sum().backward()  # type: ignore[no-untyped-call]
    assert clocked(module).flops["matmul"] == counter.get_total_flops()


def test_as_many_operations_as_unrolled_with_a_projection() -> None:
    module = nn.LSTM(INPUT, HIDDEN, num_layers=2, proj_size=6, bidirectional=True)
    x = torch.randn(STEPS, SAMPLES, INPUT, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        unrolled(module, x).sum().backward()  # type: ignore[no-untyped-call]
    assert clocked(module).flops["matmul"] == counter.get_total_flops()


@pytest.mark.parametrize("kind", MODULES)
def test_operations_by_hand(kind: str) -> None:
    module = MODULES[kind](INPUT, HIDDEN)
    forward = 2 * STEPS * SAMPLES * (INPUT + HIDDEN) * GATES[kind] * HIDDEN
    assert clocked(module, backward=False).flops["matmul"] == forward
    assert clocked(module).flops["matmul"] == 3 * forward


def test_the_time_of_a_layer_by_hand() -> None:
    """Two states of zeros, the product of all inputs, then five steps of two kernels each."""
    t, b, i, h = STEPS, SAMPLES, INPUT, HIDDEN
    module = nn.LSTM(i, h, bias=False)
    reserve, output = 5 * t * b * h, t * b * h
    product = t * b * i + i * 4 * h + t * b * 4 * h
    steps = t * 4 * h * h + 2 * reserve + 2 * output  # the weights again in each step
    moved = 4 * (2 * b * h + product + steps)
    clock = clocked(module, backward=False, launch_s=1.0)
    assert clock.bytes == moved
    assert clock.launches == 2 + 1 + 2 * t
    assert clock.now_s == pytest.approx(moved / 1e6 + clock.launches)
    computing = clocked(
        module, backward=False, peaks_flops={"float32": 1.0}, bandwidth_bytes_per_s=1e12
    )
    assert computing.now_s == pytest.approx(2 * t * b * (i + h) * 4 * h)


def test_steps_of_both_directions_and_of_all_layers_follow_one_another() -> None:
    def launches(**options: Any) -> int:
        module = nn.GRU(INPUT, HIDDEN, **options)
        return clocked(module, backward=False).launches - 1  # the states of zeros

    one = 1 + 2 * STEPS
    assert launches() == one
    assert launches(bidirectional=True) == 2 * one
    assert launches(num_layers=3) == 3 * one
    assert launches(num_layers=3, dropout=0.1) == 3 * one + 2


def test_float32_is_multiplied_as_torch_tells_cudnn() -> None:
    peaks = {"float32": 1.0, "tfloat32": 2.0}
    seconds = []
    before = torch.backends.cudnn.allow_tf32
    for allowed in (False, True):
        torch.backends.cudnn.allow_tf32 = allowed
        module = nn.LSTM(INPUT, HIDDEN)
        seconds.append(clocked(module, peaks_flops=peaks, bandwidth_bytes_per_s=1e12).now_s)
    torch.backends.cudnn.allow_tf32 = before
    assert seconds[0] == pytest.approx(2 * seconds[1])
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_and_gradients_have_the_shapes_of_real_ones(
    kind: str, batch_first: bool, dtype: torch.dtype
) -> None:
    options = {"num_layers": 2, "bidirectional": True, "dropout": 0.1, "batch_first": batch_first}
    module = MODULES[kind](INPUT, HIDDEN, **options).to(dtype)

    def run() -> list[Tensor]:
        x = torch.zeros(STEPS, SAMPLES, INPUT, dtype=dtype, requires_grad=True)
        output, states = module(x)
        output.sum().backward()
        found = [output, *(states if isinstance(states, tuple) else [states]), x.grad]
        found += [each.grad for each in module.parameters()]
        module.zero_grad()
        return found

    real = run()
    with FakeTensorMode(allow_non_fake_inputs=True), kernels_of("cuda"):
        fake = run()
    assert [(each.shape, each.dtype) for each in fake] == [
        (each.shape, each.dtype) for each in real
    ]


@pytest.mark.parametrize("kind, size_bytes", [("lstm", 736_000_000), ("gru", 864_000_000)])
def test_as_much_is_kept_as_cudnn_has_asked_for(kind: str, size_bytes: int) -> None:
    """Sizes printed in pytorch/pytorch issue 2895, for 25,000 samples times steps (inferred)."""
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with FakeTensorMode(), kernels_of("cuda"):
        module = MODULES[kind](123, 320, num_layers=4)
        x, h = torch.empty(500, 50, 123), torch.empty(4, 50, 320)
        with saved_tensors_hooks(note, lambda tensor: tensor):
            output = module(x, (h, h) if kind == "lstm" else h)[0]
        held = [x, h, output, *module.parameters()]
        known = {each.untyped_storage()._cdata for each in held}
    assert sum(size for storage, size in kept.items() if storage not in known) == size_bytes


def tagger(kind: str, **options: Any) -> nn.Module:
    def forward(parts: Parts, ids: Tensor) -> Tensor:
        output: Tensor = parts.recurrent(parts.table(ids))[0]
        return parts.head(output)  # type: ignore[no-any-return]

    width = HIDDEN * (1 + options.get("bidirectional", False))
    return Parts(
        forward,
        table=nn.Embedding(32, INPUT),
        recurrent=MODULES[kind](INPUT, HIDDEN, batch_first=True, **options),
        head=linear(width, 32),
    )


def sentences(size: int) -> Tensor:
    return torch.randint(32, (size, STEPS))


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "dropout": 0.1, "bidirectional": True}])
def test_all_but_time_and_stash_is_as_measured(kind: str, options: dict[str, Any]) -> None:
    real = structure(tagger(kind, **options), sentences)
    made = estimate(
        tagger(kind, **options), sentences, "h100", microbatch_sizes=[1], dtype="float32"
    )
    assert [each.name for each in made.layers] == ["table", "recurrent", "head"]
    assert made.layers == real.layers
    [mine], [its] = made.measurements, real.measurements
    assert mine.tensors == its.tensors
    assert [each.output_bytes for each in mine.layers] == [each.output_bytes for each in its.layers]
    assert made.estimated is not None
    assert made.estimated.without_rule == []


def test_what_a_layer_keeps_and_the_operations_of_its_forward() -> None:
    [made] = estimate(
        tagger("lstm"), sentences, "h100", microbatch_sizes=[2], dtype="bfloat16"
    ).measurements
    rows = 2 * STEPS
    assert made.layers[1].forward_flops == 2 * rows * (INPUT + HIDDEN) * 4 * HIDDEN
    states, reserve = 2 * 2 * HIDDEN * 2, 5 * rows * HIDDEN * 2
    kept = {tuple(group.layers): group.bytes for group in made.stash_groups}
    # the head keeps a copy of the output: a batch comes first there, and last in cuDNN's
    assert kept[(1,)] == states + reserve + rows * (INPUT + HIDDEN) * 2
    assert kept[(2,)] == rows * HIDDEN * 2


def test_the_backward_for_the_input_leaves_the_weights_out() -> None:
    [made] = estimate(
        tagger("lstm"), sentences, "h100", microbatch_sizes=[2], dtype="bfloat16"
    ).measurements
    layer = made.layers[1]
    assert layer.backward_input_s is not None
    launch_s = 4e-6
    # two products and two sums of rows for the weights, and the accumulation of four gradients
    saved_s = layer.backward_s - layer.backward_input_s
    assert saved_s == pytest.approx(8 * launch_s, rel=0.01)


def test_a_gradient_of_a_weight_alone_can_be_asked_for() -> None:
    with FakeTensorMode(), kernels_of("cuda"):
        module = nn.LSTM(INPUT, HIDDEN)
        output = module(torch.empty(STEPS, SAMPLES, INPUT))[0].sum()
        weight = module.weight_hh_l0
        assert torch.autograd.grad(output, [weight])[0].shape == weight.shape


def test_autocast_runs_it_in_its_format() -> None:
    def forward(parts: Parts, x: Tensor) -> Tensor:
        output: Tensor = parts.recurrent(parts.first(x))[0]
        assert output.dtype is torch.bfloat16
        return output.float()

    model = Parts(forward, first=linear(INPUT, INPUT), recurrent=nn.LSTM(INPUT, HIDDEN))
    inputs = lambda size: torch.randn(STEPS, size, INPUT)  # noqa: E731
    made = estimate(model, inputs, "h100", microbatch_sizes=[1], autocast="bfloat16")
    assert made.estimated is not None
    assert made.estimated.without_rule == []


def test_a_cell_of_an_lstm_is_one_kernel_beside_its_products() -> None:
    with FakeTensorMode(), kernels_of("cuda"):
        cell = nn.LSTMCell(INPUT, HIDDEN)
        x, h = torch.empty(SAMPLES, INPUT), torch.empty(SAMPLES, HIDDEN)
        with RooflineClock(device()) as clock:
            assert [each.shape for each in cell(x, (h, h))] == [h.shape, h.shape]
    assert clock.launches == 3
    assert clock.flops["matmul"] == 2 * SAMPLES * (INPUT + HIDDEN) * 4 * HIDDEN


def test_sequences_of_several_lengths_are_refused() -> None:
    def forward(parts: Parts, x: Tensor) -> Tensor:
        packed = pack_padded_sequence(parts.first(x), torch.tensor([STEPS]))
        return parts.recurrent(packed)[0].data  # type: ignore[no-any-return]

    model = Parts(forward, first=linear(INPUT, INPUT), recurrent=nn.LSTM(INPUT, HIDDEN))
    with pytest.raises(PartoptError, match="packs sequences of several lengths") as failed:
        estimate(model, lambda size: torch.randn(STEPS, size, INPUT), "h100", microbatch_sizes=[1])
    assert failed.value.code == "reads-values"
