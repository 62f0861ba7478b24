from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from partopt.documents import profile as documents
from partopt.documents.profile import Measurement, Profile
from partopt.errors import PartoptError
from partopt.profiler import ProfilingStopped, measure, measure_source
from partopt.profiler.measuring import summarize
from partopt.profiler.observation import Structure
from partopt.profiler.step import LayerTimes
from tests.profiler.helpers import EXAMPLES, Parts, linear, needs_transformers, structure


def vectors(size: int) -> Tensor:
    return torch.randn(size, 4)


class Full(nn.Linear):
    """Runs out of memory at some microbatch sizes, in the way given."""

    def __init__(self, sizes: set[int], error: Callable[[], Exception]) -> None:
        super().__init__(4, 4)
        self.sizes, self.error = sizes, error

    def forward(self, x: Tensor) -> Tensor:
        if len(x) in self.sizes:
            raise self.error()
        return super().forward(x)


OUT_OF_MEMORY = {
    "cuda": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "host": lambda: RuntimeError(
        "[enforce fail at alloc_cpu.cpp:118] . DefaultCPUAllocator: can't allocate "
        "memory: you tried to allocate 9 bytes"
    ),
    "python": lambda: MemoryError(),
    "cublas": lambda: RuntimeError(
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    ),
    "cudnn": lambda: RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "cudnn backend": lambda: RuntimeError(
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"
    ),
    "engine": lambda: RuntimeError("GET was unable to find an engine to execute this computation"),
}


@pytest.mark.parametrize("error", OUT_OF_MEMORY.values(), ids=OUT_OF_MEMORY.keys())
def test_the_sizes_from_the_first_that_runs_out_of_memory_are_recorded_as_such(
    error: Callable[[], Exception],
) -> None:
    profile = structure(
        nn.Sequential(Full({2}, error), linear()), vectors, microbatch_sizes=[1, 2, 4]
    )
    assert [(each.microbatch_size, each.out_of_memory) for each in profile.measurements] == [
        (1, False),
        (2, True),
        (4, True),
    ]
    assert profile.measurements[1] == Measurement(microbatch_size=2, out_of_memory=True)
    assert list(profile.faults()) == []


def test_sizes_larger_than_one_that_does_not_fit_are_not_run() -> None:
    asked: list[int] = []

    def inputs(size: int) -> Tensor:
        asked.append(size)
        return vectors(size)

    structure(
        nn.Sequential(Full({2}, OUT_OF_MEMORY["cuda"]), linear()),
        inputs,
        microbatch_sizes=[1, 2, 4, 8],
    )
    assert asked == [1, 2]


def test_when_no_size_fits_the_answer_is_no() -> None:
    with pytest.raises(PartoptError) as caught:
        structure(Full({2, 4}, OUT_OF_MEMORY["cuda"]), vectors, microbatch_sizes=[2, 4])
    assert caught.value.message == "every microbatch size ran out of memory"
    assert caught.value.hint == "try a smaller size: `microbatch_sizes=[1]`"
    assert caught.value.exit_code == 1


def test_an_optimizer_that_does_not_fit_leaves_the_layers_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries = []

    def full(*arguments: object, **options: object) -> None:
        tries.append(arguments)
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(torch.optim, "AdamW", full)
    measurements = structure(linear(), vectors, microbatch_sizes=[1, 2]).measurements
    assert [measurement.optimizer_s for measurement in measurements] == [None, None]
    assert all(measurement.step_s is not None for measurement in measurements)
    assert len(tries) == 1


def test_sizes_are_measured_once_each_the_smallest_first() -> None:
    profile = structure(linear(), vectors, microbatch_sizes=[4, 1, 4, 2])
    assert [each.microbatch_size for each in profile.measurements] == [1, 2, 4]


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"microbatch_sizes": [2, 0]}, "=[2, 0]`: 0 is not a microbatch size", "from 1"),
        ({"microbatch_sizes": [2.0]}, "=[2.0]`: 2.0 is not a microbatch size", "from 1"),
        ({"microbatch_sizes": [True]}, "=[True]`: True is not a microbatch size", "from 1"),
        ({"microbatch_sizes": []}, "=[]`: no size given", "from 1"),
        ({"microbatch_sizes": "1,2"}, "=1,2`: not a list of sizes", "from 1"),
        ({"microbatch_sizes": 4}, "=4`: not a list of sizes", "from 1"),
        ({"steps": 0}, "=0`: expected a whole number >= 1", "10 steps"),
        ({"steps": 2.5}, "=2.5`: expected a whole number, found a number", "10 steps"),
        (
            {"granularity": "blok"},
            "=blok`: not a granularity that partopt knows",
            'did you mean "block"?',
        ),
        (
            {"dtype": "float3"},
            "=float3`: not a dtype that partopt measures",
            'did you mean "float32"?',
        ),
        ({"dtype": None}, "=None`: not a dtype that partopt measures", "known: float32"),
        ({"device": "gpu"}, "=gpu`: not a device that partopt measures", 'did you mean "cpu"?'),
        ({"units": "h.*"}, "=h.*`: not a list of patterns", "list patterns"),
        ({"units": [3]}, "=3`: not a pattern", "list patterns"),
        ({"units": ["h.*"]}, "=h.*`: matches no module that the forward calls", "known: none"),
        ({"progress": 3}, "=3`: of type int, not a function", "leave it out"),
        ({"loss_fn": 3}, "=3`: of type int, not a function", "leave it out"),
        ({"name": ""}, "=`: not a name", "short text"),
        (
            {"name": "\x1b[31m"},
            "=\\x1b[31m`: name: has the control character '\\x1b'",
            "printable characters",
        ),
    ],
)
def test_options_that_cannot_be(options: dict[str, object], message: str, hint: str) -> None:
    [option] = options
    with pytest.raises(PartoptError) as caught:
        measure(linear(), vectors, **{"device": "cpu", "steps": 1, **options})
    assert caught.value.message == f"`{option}{message}"
    assert hint in caught.value.hint
    assert (caught.value.exit_code, caught.value.fields["option"]) == (2, option)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(
        PartoptError, match=r"the model is of type str, not an nn\.Module"
    ) as caught:
        measure("gpt.py", vectors)
    assert caught.value.code == "not-a-module"


def test_inputs_that_are_no_function_are_refused() -> None:
    with pytest.raises(PartoptError, match="example_inputs is of type Tensor, not a function"):
        measure(linear(), vectors(1))


def test_a_source_takes_the_options_of_a_model() -> None:
    of_model, of_source = (inspect.signature(each).parameters for each in (measure, measure_source))
    options = {name: each for name, each in of_model.items() if each.kind is each.KEYWORD_ONLY}
    del options["loss_fn"]  # the source has its own
    assert options == {name: of_source[name] for name in options}
    assert set(of_source) - set(options) == {"source", "arguments"}


def frozen() -> nn.Module:
    return linear().requires_grad_(False)


MODELS = {
    "no parameters": (nn.ReLU, {}, "the model has no parameters"),
    "all frozen": (frozen, {}, "no parameter of the model requires a gradient"),
    "output of no tensor": (
        lambda: Parts(lambda self, x: "text", a=linear()),
        {},
        "the model returned str: no .loss and no floating tensor in it",
    ),
    "loss of many": (
        linear,
        {"loss_fn": lambda output, inputs: output},
        "loss_fn returned a tensor of shape [1, 4], not a single number",
    ),
    "loss of none": (
        linear,
        {"loss_fn": lambda output, inputs: None},
        "loss_fn returned NoneType, not a single number",
    ),
    "detached": (
        linear,
        {"loss_fn": lambda output, inputs: output.detach().sum()},
        "the loss depends on no parameter that requires a gradient",
    ),
    "wrong inputs": (
        lambda: linear(5),
        {},
        "the training step raised RuntimeError: mat1 and mat2 shapes cannot be multiplied",
    ),
}


@pytest.mark.parametrize(("build", "options", "message"), MODELS.values(), ids=MODELS.keys())
def test_models_that_cannot_be_measured(
    build: Callable[[], nn.Module], options: dict[str, object], message: str
) -> None:
    with pytest.raises(PartoptError) as caught:
        structure(build(), vectors, **options)
    assert caught.value.message.startswith(message)
    assert caught.value.hint
    assert caught.value.exit_code == 2


def test_errors_of_the_model_name_its_file(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\nmodel = torch.nn.ReLU()\ndef example_inputs(batch_size): return "
        "torch.zeros(1)\n"
    )
    with pytest.raises(PartoptError, match=r"net\.py: the model has no parameters"):
        measure_source(tmp_path / "net.py", device="cpu")


def test_errors_of_options_name_no_file() -> None:
    with pytest.raises(PartoptError, match=r"^`units=h`: matches no module"):
        measure_source(EXAMPLES / "mlp.py", units=["h"], steps=1, device="cpu")


def test_nan_is_no_problem() -> None:
    [measurement] = structure(
        linear(), lambda size: torch.full((size, 4), float("nan"))
    ).measurements
    assert measurement.step_s is not None


def test_the_loss_of_an_output_is_its_own() -> None:
    class Output(dict):
        loss: Tensor

    def forward(self: Parts, x: Tensor) -> Output:
        output = Output(logits=self.a(x))
        output.loss = self.b(output["logits"]).sum()
        return output

    profile = structure(Parts(forward, a=linear(), b=linear()), vectors)
    assert all(layer.backward_s > 0 for layer in profile.measurements[0].layers)


@pytest.mark.parametrize(
    "inputs",
    [
        lambda size: (torch.ones(size, 4), torch.ones(size, 4)),
        lambda size: {"y": torch.ones(size, 4), "x": torch.ones(size, 4)},
    ],
)
def test_inputs_may_be_a_tuple_or_a_dict(inputs: Callable[[int], object]) -> None:
    class Two(nn.Linear):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(x + y)

    assert len(structure(Two(4, 4), inputs).layers) == 1


def test_cuda_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(PartoptError) as caught:
        structure(linear(), vectors, device="cuda")
    assert caught.value.message.startswith("`device=cuda`: ")
    assert "`device=cpu`" in caught.value.hint


def test_a_model_whose_calls_depend_on_the_size_is_refused() -> None:
    model = Parts(lambda self, x: self.a(x) if len(x) == 1 else self.a(self.a(x)), a=linear())
    with pytest.raises(
        ProfilingStopped, match="at microbatch size 2 the model calls other layers than at 1"
    ) as caught:
        structure(model, vectors, microbatch_sizes=[1, 2])
    assert isinstance(caught.value.error, PartoptError)
    assert "`granularity=block`" in caught.value.error.hint


def test_an_interrupt_keeps_the_sizes_that_are_finished() -> None:
    with pytest.raises(ProfilingStopped) as caught:
        structure(
            nn.Sequential(Full({4}, KeyboardInterrupt), linear()),
            vectors,
            microbatch_sizes=[1, 2, 4],
        )
    assert caught.value.profile is not None
    assert caught.value.error is None
    assert [each.microbatch_size for each in caught.value.profile.measurements] == [1, 2]
    assert list(caught.value.profile.faults()) == []


def test_an_error_at_a_later_size_keeps_the_sizes_that_are_finished() -> None:
    with pytest.raises(ProfilingStopped) as caught:
        structure(
            nn.Sequential(Full({4}, lambda: RuntimeError("no kernel")), linear()),
            vectors,
            microbatch_sizes=[1, 2, 4],
        )
    assert caught.value.profile is not None
    assert isinstance(caught.value.error, PartoptError)
    assert caught.value.error.message.startswith("the training step raised RuntimeError: no kernel")
    assert [each.microbatch_size for each in caught.value.profile.measurements] == [1, 2]


def test_an_interrupt_before_anything_is_finished_keeps_nothing() -> None:
    with pytest.raises(ProfilingStopped) as caught:
        structure(nn.Sequential(Full({1}, KeyboardInterrupt), linear()), vectors)
    assert caught.value.profile is None


def test_threads_are_one_while_measuring_and_restored_after() -> None:
    seen = []

    def loss_fn(output: Tensor, inputs: Tensor) -> Tensor:
        seen.append(torch.get_num_threads())
        return output.sum()

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        structure(linear(), vectors, loss_fn=loss_fn)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {1}


def test_progress_is_told_size_by_size() -> None:
    told: list[tuple[int, int, int]] = []
    structure(
        linear(),
        vectors,
        microbatch_sizes=[1, 2],
        steps=2,
        progress=lambda *step: told.append(step),
    )
    assert told == [
        *[(1, 0, 0), (1, 0, 2), (1, 1, 2), (1, 2, 2)],
        *[(2, 0, 0), (2, 0, 2), (2, 1, 2), (2, 2, 2)],
    ]


def test_a_profile_says_what_was_measured() -> None:
    profile = measure_source(
        EXAMPLES / "mlp.py",
        arguments={"layers": 2, "width": 8},
        name="small",
        microbatch_sizes=[1],
        steps=2,
        device="cpu",
    )
    assert (profile.model.name, profile.model.arguments, profile.dtype) == (
        "small",
        {"layers": 2, "width": 8},
        "float32",
    )
    assert profile.model.entry.endswith("examples/mlp.py:build")
    assert (profile.device.type, profile.environment.torch) == ("cpu", str(torch.__version__))
    assert profile.measurements[0].optimizer_s is not None
    assert Profile.parse(documents_bytes(profile)) == profile


def documents_bytes(profile: documents.Profile) -> bytes:
    from partopt.documents import encode

    return encode(profile)


def summary(bare_s: float, instrumented_s: float) -> Measurement:
    half = instrumented_s / 2
    layers = structure(linear(), vectors).layers
    return summarize(
        1,
        Structure(layers, {}, {}, [], [], {}, {}, set()),
        [bare_s],
        [LayerTimes([half], [half])],
        None,
        None,
    )


def test_layer_times_are_brought_back_to_the_bare_step_above_five_percent() -> None:
    slight, clear, strong = summary(100.0, 104.0), summary(100.0, 110.0), summary(100.0, 125.0)
    assert [each.overhead for each in (slight, clear, strong)] == [1.04, 1.1, 1.25]
    assert [each.layers[0].forward_s for each in (slight, clear, strong)] == pytest.approx(
        [52.0, 50.0, 50.0]
    )
    assert [each.coverage for each in (slight, clear, strong)] == pytest.approx([1.04, 1.0, 1.0])
    assert [each.overhead_bound for each in (slight, clear, strong)] == [False, False, True]


@needs_transformers
# transformers and torchvision warn of their own affairs while they are imported
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "layers"), [("gpt2", 7), ("bert", 5)])
def test_transformers_examples(name: str, layers: int) -> None:
    profile = measure_source(
        EXAMPLES / f"{name}.py",
        arguments={"layers": 2, "width": 8, "heads": 2, "context": 8, "vocabulary": 64},
        microbatch_sizes=[1],
        steps=1,
        device="cpu",
    )
    assert len(profile.layers) == layers
    assert sum(layer.type in ("GPT2Block", "BertLayer") for layer in profile.layers) == 2
    assert profile.layers[0].shared_parameters == profile.layers[-1].shared_parameters != []


@needs_transformers
@pytest.mark.filterwarnings("ignore")
def test_the_llama_example() -> None:
    arguments = {"layers": 2, "width": 8, "heads": 2, "ffn": 16, "context": 8, "vocabulary": 64}
    profile = measure_source(
        EXAMPLES / "llama.py", arguments=arguments, microbatch_sizes=[1], steps=1, device="cpu"
    )
    block = 4 * 8 * 8 + 3 * 8 * 16 + 2 * 8
    assert [layer.type for layer in profile.layers].count("LlamaDecoderLayer") == 2
    assert profile.parameter_bytes() == 4 * (2 * block + 2 * 64 * 8 + 8)


def test_measure_takes_a_plain_module() -> None:
    profile = measure(
        nn.Sequential(linear(), linear()), vectors, microbatch_sizes=[1], steps=1, device="cpu"
    )
    assert (profile.model.name, len(profile.layers)) == ("Sequential", 2)
