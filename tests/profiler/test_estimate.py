"""Estimates against counters and formulas of others, and what an estimate says of itself."""

import pytest
import torch
from msgspec.structs import replace
from torch import distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from partopt import documents
from partopt.documents.device import Roofline
from partopt.errors import PartoptError
from partopt.profiler.estimating import RooflineClock, estimate, estimate_source
from partopt.profiler.weightless import fake_parameter, kernels_of
from tests.profiler.helpers import (
    EXAMPLES,
    Parts,
    device,
    example,
    linear,
    needs_transformers,
    structure,
)

TINY = {"layers": 5, "width": 32, "heads": 4, "context": 16, "vocabulary": 64}


def clocked(run, **changes):
    """The clock after a step whose forward is `run`; its gradients are new."""
    with RooflineClock(device(**changes)) as clock:
        run().backward()
    return clock


def patches():
    first, second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2, groups=2)
    layers = first, nn.BatchNorm2d(8), nn.ReLU(), second, nn.Flatten(), nn.Linear(8 * 3 * 3, 5)
    return nn.Sequential(*layers)


COUNTED = {
    "perceptron": lambda: (nn.Sequential(linear(4, 8), nn.GELU(), linear(8, 3)), torch.randn(5, 4)),
    "convolutions": lambda: (patches(), torch.randn(2, 3, 8, 8)),
    "gpt": lambda: (example("gpt", **TINY).build(), torch.randint(64, (2, 16))),
    "encoder": lambda: (nn.TransformerEncoderLayer(8, 2, 16, 0.0), torch.randn(5, 3, 8)),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", COUNTED)
def test_operations_are_those_that_torch_counts(name):
    model, inputs = COUNTED[name]()
    with FlopCounterMode(display=False) as counter:
        clock = clocked(lambda: model(inputs).sum())
    counted = {str(each): n for each, n in counter.get_flop_counts()["Global"].items()}
    products = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm")
    assert clock.flops["matmul"] == sum(counted.get(each, 0) for each in products) > 0
    convolutions = sum(flops for each, flops in counted.items() if "convolution" in each)
    assert clock.flops["convolution"] == convolutions


def test_attention_by_hand():
    b, h, t, w = 2, 3, 16, 8
    q, k, v = (torch.randn(b, h, t, w, requires_grad=True) for _ in range(3))
    square = 2 * b * h * t * t * w  # one product of the five
    attend = functional.scaled_dot_product_attention
    for causal, part in ((False, 1), (True, 2)):
        clock = clocked(lambda causal=causal: attend(q, k, v, is_causal=causal).sum())
        assert clock.flops["attention_forward"] == 2 * square // part
        assert clock.flops["attention_backward"] == 5 * square // part


def test_products_in_groups_by_hand():
    tokens, width, out = 6, 16, 8
    rows = torch.randn(tokens, width, dtype=torch.bfloat16, requires_grad=True)
    experts = torch.randn(2, width, out, dtype=torch.bfloat16, requires_grad=True)
    ends = torch.tensor([2, tokens], dtype=torch.int32)
    clock = clocked(lambda: torch._grouped_mm(rows, experts, offs=ends).square().sum())
    # whatever expert a row belongs to: one product forward, and two of its size backward
    assert clock.flops["matmul"] == 3 * 2 * tokens * width * out


def test_a_linear_layer_by_hand():
    b, i, o = 5, 4, 3
    layer, x = linear(i, o), torch.randn(b, i)
    layer.weight.grad = torch.zeros_like(layer.weight)
    clock = clocked(lambda: layer(x).sum())
    assert clock.flops["matmul"] == 4 * b * i * o  # no gradient of the input
    product = b * i + i * o + b * o
    # the sum reads its input; its gradient is one number that is expanded, and never written
    gradient = 1 + b * i + i * o
    accumulated = 3 * i * o
    assert clock.bytes == 4 * (product + (b * o + 1) + 1 + gradient + accumulated)


def test_bytes_of_views_tables_and_writes_in_place():
    x, y, table, ids = torch.randn(4, 6), torch.randn(4, 6), torch.randn(1000, 8), torch.arange(3)
    with RooflineClock(device(launch_s=1.0)) as clock:
        x.t().reshape(2, 12)[0].detach()
        torch.empty(1000)
        torch.empty_like(x)
    assert clock.launches == 1  # the reshape of a transposed matrix copies it
    assert clock.bytes == 2 * x.nbytes
    for run, size in (
        (lambda: functional.embedding(ids, table), ids.nbytes + 2 * 3 * 8 * 4),
        (lambda: x.add_(y), 3 * x.nbytes),
        (lambda: x.copy_(y), 2 * x.nbytes),
        (x.zero_, x.nbytes),
    ):
        with RooflineClock(device()) as clock:
            run()
        assert clock.bytes == size


def test_the_longer_of_work_and_bytes_and_the_launch():
    x, y = torch.randn(100, 100), torch.randn(100, 100)
    flops, moved = 2 * 100**3, 3 * 4 * 100 * 100
    for peak, bandwidth, expected in ((1e3, 1e12, flops / (1e3 * 0.5)), (1e15, 1e3, moved / 1e3)):
        changes = {"matmul": 0.5, "bandwidth_bytes_per_s": bandwidth, "launch_s": 7.0}
        with RooflineClock(device(peaks_flops={"float32": peak}, **changes)) as clock:
            x @ y
        assert clock.now_s == pytest.approx(expected + 7)


def test_float32_is_multiplied_as_torch_is_told():
    x, before = torch.randn(8, 8), torch.get_float32_matmul_precision()
    numbers = device(peaks_flops={"float32": 1.0, "tfloat32": 2.0}, bandwidth_bytes_per_s=1e12)
    for precision, seconds in (("highest", 1024.0), ("high", 512.0)):
        torch.set_float32_matmul_precision(precision)
        with RooflineClock(numbers) as clock:
            x @ x
        assert clock.now_s == seconds
    torch.set_float32_matmul_precision(before)


class Recorded(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


FLASH, EFFICIENT = (f"aten._scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient"))


@pytest.mark.parametrize(
    ("dtype", "mask", "kernel"),
    [
        (torch.bfloat16, None, FLASH),
        (torch.float32, None, EFFICIENT),
        *(
            (dtype, torch.empty(*shape, dtype=held), EFFICIENT)
            for dtype in (torch.bfloat16, torch.float32)
            for held in (torch.bool, dtype)
            for shape in ([16, 16], [2, 1, 1, 16], [2, 3, 16, 16])
        ),
    ],
)
def test_a_gpu_has_its_own_kernels(dtype, mask, kernel):
    attend = functional.scaled_dot_product_attention
    with FakeTensorMode() as mode, kernels_of("cuda"), Recorded() as recorded:
        q, k, v = (torch.empty(2, 3, 16, 8, dtype=dtype, requires_grad=True) for _ in range(3))
        mask = None if mask is None else mode.from_tensor(mask)
        mixed = attend(q, k, v, attn_mask=mask, dropout_p=0.1)
        functional.dropout(mixed, 0.1).sum().backward()
        wide = torch.empty(2, 6, 16, 8, dtype=dtype)
        assert attend(wide, k, v, enable_gqa=True).shape == wide.shape
    assert mixed.shape == q.shape
    assert {kernel, f"{kernel}_backward", "aten.native_dropout"} <= set(recorded.names)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_runs_the_kernels_of_a_gpu_again(reentrant):
    attend, options = functional.scaled_dot_product_attention, {"dtype": torch.bfloat16}
    with FakeTensorMode(), kernels_of("cuda"), Recorded() as recorded:
        q, k, v = (torch.empty(2, 3, 16, 8, requires_grad=True, **options) for _ in range(3))
        checkpoint(attend, q, k, v, use_reentrant=reentrant).sum().backward()
    kernels = [name for name in recorded.names if "attention" in name]
    assert kernels == [FLASH, FLASH, f"{FLASH}_backward"]


def of_gpt(**options):
    given = {"arguments": TINY, "microbatch_sizes": [1, 2], "dtype": "bfloat16", **options}
    return estimate_source(EXAMPLES / "gpt.py", "h100", **given)


def of(model, device="h100", inputs=lambda size: torch.randn(size, 4), **options):
    return estimate(model, inputs, device, **{"microbatch_sizes": [1], **options})


@pytest.mark.slow
def test_everything_but_time_is_as_measured():
    source = example("gpt", **TINY)
    real = structure(source.build(), source.example_inputs, source.loss_fn, granularity="auto")
    made = of_gpt(microbatch_sizes=[1], dtype="float32")
    assert made.layers == real.layers
    [mine], [its] = made.measurements, real.measurements
    assert mine.tensors == its.tensors
    assert [each.output_bytes for each in mine.layers] == [each.output_bytes for each in its.layers]


@pytest.mark.slow
def test_the_layers_tile_the_step():
    """A step under the clock takes what the layers of its estimate take together."""
    source = example("gpt", **TINY)
    model, inputs = source.build(), source.example_inputs(2)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    numbers = Roofline.load("h100")
    with RooflineClock(replace(numbers, type="cpu")) as clock:
        source.loss_fn(model(inputs), inputs).backward()
    [made] = of_gpt(microbatch_sizes=[2], dtype="float32").measurements
    total_s = sum(layer.forward_s + layer.backward_s for layer in made.layers)
    # the kernel of attention is another one, with as much work
    assert total_s == pytest.approx(clock.now_s, rel=0.02)


def test_the_input_part_of_a_chain_of_linear_layers():
    model = nn.Sequential(*(linear(64, 64) for _ in range(3)))
    made = of(model, "a100", lambda size: torch.randn(size * 64, 64), granularity="leaf")
    first, second, third = made.measurements[0].layers
    assert first.backward_input_s == 0.0  # nobody asks for the gradient of the model's inputs
    # a product for the input's gradient; one for the weight's, and its accumulation
    assert second.backward_input_s < second.backward_s / 2
    assert third.backward_input_s is not None


def test_the_optimizer_moves_every_trained_number():
    model = nn.Sequential(linear(64, 64).requires_grad_(False), linear(64, 64))
    [made] = of(model, "a100", lambda size: torch.randn(size, 64)).measurements
    assert made.optimizer_s == pytest.approx(28 * 64 * 64 / (0.85 * 2039e9))


@pytest.mark.slow
def test_a_known_step_scales_all_times_and_an_estimate_says_what_it_is():
    small = {"arguments": {**TINY, "layers": 1}}
    plain, again, scaled = of_gpt(**small), of_gpt(**small), of_gpt(**small, calibrate=0.5)
    assert documents.encode(again) == documents.encode(plain)
    assert scaled.estimated.calibrated_s == 0.5
    first = scaled.measurements[0].layers
    assert sum(each.forward_s + each.backward_s for each in first) == pytest.approx(0.5)
    scale = scaled.estimated.scale
    for one, other in zip(plain.measurements, scaled.measurements, strict=True):
        assert other.optimizer_s == pytest.approx(one.optimizer_s * scale)
        for mine, its in zip(one.layers, other.layers, strict=True):
            for name in ("forward_s", "backward_s", "backward_input_s"):
                assert getattr(its, name) == pytest.approx(getattr(mine, name) * scale)
    assert plain.device.name == "H100-80GB (estimated)"
    assert plain.estimated.sha256 == Roofline.load("h100").sha256
    assert [note.code for note in plain.notes] == ["estimated"]
    assert structure(linear()).estimated is None


@pytest.mark.slow
@needs_transformers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "more", "kernel"),
    [
        ("mixtral", {"kv_heads": 2, "ffn": 64, "experts": 4}, FLASH),
        ("t5", {"ffn": 64}, EFFICIENT),  # its bias of positions is a mask
    ],
)
def test_transformers_examples(name, more, kernel, monkeypatch):
    names, after = set(), RooflineClock.after

    def note(clock, call):
        names.add(str(call.func.overloadpacket))
        after(clock, call)

    monkeypatch.setattr(RooflineClock, "after", note)
    options = {"arguments": {**TINY, "layers": 1, **more}, "microbatch_sizes": [1]}
    made = estimate_source(EXAMPLES / f"{name}.py", "h100", dtype="bfloat16", **options)
    assert made.estimated.without_rule == []
    assert {each for each in names if "attention" in each} == {kernel, f"{kernel}_backward"}


def reading(module, x):
    y = module.part(x)
    return y * (2.0 if y.sum().item() > 0 else 1.0)


def routing(module, x):
    y = module.part(x)
    return y[(y[:, 0] > 0).nonzero()[:, 0]]


@pytest.mark.parametrize("forward", [reading, routing])
def test_values_are_not_there_to_be_read(forward):
    with pytest.raises(PartoptError) as failed:
        of(nn.Sequential(linear(), Parts(forward, part=linear())))
    assert failed.value.code == "reads-values"
    assert failed.value.fields["module"] == '"1"'
    assert "test_estimate.py, line" in failed.value.message


@pytest.mark.slow
def test_other_faults_of_the_model_are_explained_as_ever():
    with pytest.raises(PartoptError, match="the training step raised RuntimeError"):
        of(linear(5))
    with pytest.raises(PartoptError, match="no parameter of the model requires a gradient"):
        of(linear().requires_grad_(False))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_measured_not_estimated(kind):
    model = Parts(lambda parts, x: parts.recurrent(x)[0], recurrent=kind(4, 4))
    with pytest.raises(PartoptError, match="recurrent layers") as failed:
        of(model, inputs=lambda size: torch.randn(3, size, 4))
    assert failed.value.code == "no-rule"


@torch.library.custom_op("partopt_tests::halve", mutates_args=())
def halve(x: torch.Tensor) -> torch.Tensor:
    return x / 2


halve.register_fake(torch.empty_like)
halve.register_autograd(lambda _context, gradient: gradient / 2)


@pytest.mark.slow
def test_an_operation_without_a_rule_is_listed_or_refused():
    def halved(width):
        with torch.device("meta"):
            parts = [
                Parts(lambda self, x: halve(self.part(x)), part=linear(width, width))
                for _ in range(6)
            ]
        inputs = lambda size: torch.empty(size * width, width)  # noqa: E731
        return of(nn.Sequential(*parts), "a100", inputs, dtype="bfloat16")

    made = halved(8192)
    [listed] = made.estimated.without_rule
    assert listed.operation == "partopt_tests.halve"
    step_s = sum(each.forward_s + each.backward_s for each in made.measurements[0].layers)
    once_s = 2 * 2 * 8192**2 / (0.85 * 2039e9) + 4e-6
    assert listed.share == pytest.approx(6 * once_s / step_s)
    with pytest.raises(PartoptError, match=r"partopt_tests\.halve computes but its bytes"):
        halved(8)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"dtype": "bfloat16"}, "unsupported-dtype"),
        ({"autocast": "bfloat16"}, "unsupported-dtype"),
        ({"calibrate": 0.0}, "invalid-option"),
        ({"calibrate": "1"}, "invalid-option"),
        ({"microbatch_sizes": []}, "invalid-option"),
    ],
)
def test_options_are_checked(options, code):
    with pytest.raises(PartoptError) as failed:
        of(linear(), "v100", **options)
    assert failed.value.code == code


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "options", "dtype"),
    [
        ("h100", {}, "bfloat16"),
        ("h100", {"dtype": "float32"}, "float32"),
        ("h100", {"autocast": "bfloat16"}, "float32"),
        ("v100", {}, "float32"),
    ],
)
def test_the_usual_number_format(device, options, dtype):
    assert of(linear(), device, **options).dtype == dtype


def test_a_format_that_the_device_lacks_inside_the_model():
    model = linear().double()
    with pytest.raises(PartoptError, match="Round has no peak for it"), RooflineClock(device()):
        model(torch.randn(1, 4, dtype=torch.float64))


@pytest.fixture
def mesh():
    """Two ranks, of which this is the first; nothing passes between them."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_the_fake_of_an_uneven_shard_is_of_the_whole_parameter(mesh):
    """Five rows of four numbers, three of them here; what was noted on it stays."""
    shard = {"shape": torch.Size([5, 4]), "stride": (4, 1), "run_check": False}
    parameter = nn.Parameter(DTensor.from_local(torch.ones(3, 4), mesh, [Shard(0)], **shard))
    parameter.shared = True
    fake = fake_parameter(FakeTensorMode(), parameter, dtype=torch.bfloat16)
    assert (tuple(fake.shape), fake.stride()) == ((5, 4), (4, 1))
    assert (tuple(fake.to_local().shape), fake.dtype) == ((3, 4), torch.bfloat16)
    assert (fake.placements, fake.shared, fake.requires_grad) == ((Shard(0),), True, True)
