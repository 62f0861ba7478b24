from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from partopt.documents import encode
from partopt.documents.profile import Measurement, Profile
from partopt.errors import PartoptError
from partopt.profiler import ProfilingStopped, measure, measure_source
from partopt.profiler.measuring import TimedSteps, summarize
from partopt.profiler.observation import Structure
from partopt.profiler.step import LayerTimes
from partopt.profiler.tensors import tokens_per_sample
from tests.profiler.helpers import EXAMPLES, Parts, linear, needs_transformers, structure


def vectors(size):
    return torch.randn(size, 4)


class Full(nn.Linear):
    """Fails at some microbatch sizes."""

    def __init__(self, sizes, error):
        super().__init__(4, 4)
        self.sizes, self.error = sizes, error

    def forward(self, x):
        if len(x) in self.sizes:
            raise self.error
        return super().forward(x)


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    MemoryError(),
    *map(
        RuntimeError,
        [
            "[enforce fail at alloc_cpu.cpp:118] . DefaultCPUAllocator: can't allocate "
            "memory: you tried to allocate 9 bytes",
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
            "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
            "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
            "GET was unable to find an engine to execute this computation",
        ],
    ),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=str)
def test_the_sizes_from_the_first_that_runs_out_of_memory_are_recorded_as_such(error):
    asked = []

    def inputs(size):
        asked.append(size)
        return vectors(size)

    model = nn.Sequential(Full({2}, error), linear())
    profile = structure(model, inputs, microbatch_sizes=[4, 1, 4, 2])  # each once, in order
    assert profile.measurements[1:] == [
        Measurement(microbatch_size=size, out_of_memory=True) for size in (2, 4)
    ]
    assert asked == [1, 2]
    assert list(profile.faults()) == []


def test_when_no_size_fits_the_answer_is_no():
    with pytest.raises(PartoptError) as caught:
        structure(Full({2, 4}, MemoryError()), vectors, microbatch_sizes=[2, 4])
    assert caught.value.message == "every microbatch size ran out of memory"
    assert caught.value.hint == "try a smaller size: `microbatch_sizes=[1]`"
    assert caught.value.exit_code == 1


def test_an_optimizer_that_does_not_fit_leaves_the_layers_measured(monkeypatch):
    tries = []

    def full(*arguments, **options):
        tries.append(arguments)
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(torch.optim, "AdamW", full)
    measured = structure(linear(), vectors, microbatch_sizes=[1, 2]).measurements
    assert [each.optimizer_s for each in measured] == [None, None]
    assert all(each.step_s is not None for each in measured)
    assert len(tries) == 1


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
        ({"granularity": "blok"}, "=blok`: not a granularity that partopt knows", "block"),
        ({"dtype": "float3"}, "=float3`: not a dtype that partopt measures", '"float32"?'),
        ({"dtype": None}, "=None`: not a dtype that partopt measures", "known: float32"),
        ({"device": "gpu"}, "=gpu`: not a device that partopt measures", 'did you mean "cpu"?'),
        ({"units": "h.*"}, "=h.*`: not a list of patterns", "list patterns"),
        ({"units": [3]}, "=3`: not a pattern", "list patterns"),
        ({"units": ["h.*"]}, "=h.*`: matches no module that the forward calls", "known: none"),
        ({"progress": 3}, "=3`: of type int, not a function", "leave it out"),
        ({"loss_fn": 3}, "=3`: of type int, not a function", "leave it out"),
        ({"name": ""}, "=`: not a name", "short text"),
        ({"name": "\x1b"}, "=\\x1b`: name: has the control character '\\x1b'", "printable"),
    ],
)
def test_options_that_cannot_be(options, message, hint):
    [option] = options
    with pytest.raises(PartoptError) as caught:
        measure(linear(), vectors, **{"device": "cpu", "steps": 1, **options})
    assert caught.value.message == f"`{option}{message}"
    assert hint in caught.value.hint
    assert (caught.value.exit_code, caught.value.fields["option"]) == (2, option)


def test_what_is_no_model_and_inputs_that_are_no_function_are_refused():
    with pytest.raises(PartoptError, match="the model is of type str") as caught:
        measure("gpt.py", vectors)
    assert caught.value.code == "not-a-module"
    with pytest.raises(PartoptError, match="example_inputs is of type Tensor, not a function"):
        measure(linear(), vectors(1))


MODELS = [
    (nn.ReLU(), None, "the model has no parameters"),
    (linear().requires_grad_(False), None, "no parameter of the model requires a gradient"),
    (
        Parts(lambda self, x: "text", a=linear()),
        None,
        "the model returned str: no .loss and no floating tensor in it",
    ),
    (
        linear(),
        lambda output, inputs: output,
        "loss_fn returned a tensor of shape [1, 4], not a single number",
    ),
    (linear(), lambda output, inputs: None, "loss_fn returned NoneType, not a single number"),
    (
        linear(),
        lambda output, inputs: output.detach().sum(),
        "the loss depends on no parameter that requires a gradient",
    ),
    (
        linear(5),
        None,
        "the training step raised RuntimeError: mat1 and mat2 shapes cannot be multiplied",
    ),
]


@pytest.mark.parametrize(("model", "loss_fn", "message"), MODELS)
def test_models_that_cannot_be_measured(model, loss_fn, message):
    with pytest.raises(PartoptError) as caught:
        structure(model, vectors, loss_fn)
    assert caught.value.message.startswith(message)
    assert caught.value.hint
    assert caught.value.exit_code == 2


def test_errors_of_the_model_name_its_file_and_those_of_options_do_not(tmp_path):
    (tmp_path / "net.py").write_text(
        "import torch\nmodel = torch.nn.ReLU()\n"
        "def example_inputs(batch_size): return torch.zeros(1)\n"
    )
    with pytest.raises(PartoptError, match=r"net\.py: the model has no parameters"):
        measure_source(tmp_path / "net.py", device="cpu")
    with pytest.raises(PartoptError, match=r"^`units=h`: matches no module"):
        measure_source(EXAMPLES / "mlp.py", units=["h"], steps=1, device="cpu")


def test_the_loss_of_an_output_is_its_own():
    class Output(dict):
        loss: Tensor

    def forward(self, x):
        output = Output(logits=self.a(x))
        output.loss = self.b(output["logits"]).sum()
        return output

    profile = structure(Parts(forward, a=linear(), b=linear()), vectors)
    assert all(layer.backward_s > 0 for layer in profile.measurements[0].layers)


@pytest.mark.parametrize(
    "inputs",
    [
        lambda size: (torch.ones(size, 4), torch.ones(size, 4)),
        lambda size: {"y": torch.ones(size, 4), "x": torch.full((size, 4), float("nan"))},
    ],
)
def test_inputs_may_be_a_tuple_or_a_dict(inputs):
    class Two(nn.Linear):
        def forward(self, x, y):
            return super().forward(x + y)

    profile = structure(Two(4, 4), inputs)
    assert profile.measurements[0].step_s is not None


def test_cuda_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(PartoptError, match="`device=cuda`: ") as caught:
        structure(linear(), vectors, device="cuda")
    assert "`device=cpu`" in caught.value.hint


def test_a_model_whose_calls_depend_on_the_size_is_refused():
    model = Parts(lambda self, x: self.a(x) if len(x) == 1 else self.a(self.a(x)), a=linear())
    told = "at microbatch size 2 the model calls other layers than at 1"
    with pytest.raises(ProfilingStopped, match=told) as caught:
        structure(model, vectors, microbatch_sizes=[1, 2])
    assert "make one module" in caught.value.error.hint  # larger units alone do not help
    assert "granularity" not in caught.value.error.hint


@pytest.mark.slow
@pytest.mark.parametrize("fault", [KeyboardInterrupt(), RuntimeError("no kernel")], ids=str)
def test_an_interrupt_or_an_error_keeps_the_sizes_that_are_finished(fault):
    with pytest.raises(ProfilingStopped) as caught:
        model = nn.Sequential(Full({4}, fault), linear())
        structure(model, vectors, microbatch_sizes=[1, 2, 4])
    assert [each.microbatch_size for each in caught.value.profile.measurements] == [1, 2]
    assert list(caught.value.profile.faults()) == []
    if isinstance(fault, RuntimeError):
        raised = "the training step raised RuntimeError: no kernel"
        assert caught.value.error.message.startswith(raised)
    else:
        assert caught.value.error is None
        with pytest.raises(ProfilingStopped) as caught:
            structure(nn.Sequential(Full({1}, fault), linear()), vectors)
        assert caught.value.profile is None


def test_threads_are_one_while_measuring_and_restored_after():
    seen, before = set(), torch.get_num_threads()

    def loss_fn(output, inputs):
        seen.add(torch.get_num_threads())
        return output.sum()

    torch.set_num_threads(2)
    try:
        structure(linear(), vectors, loss_fn=loss_fn)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen == {1}


def test_progress_is_told_size_by_size():
    told = []
    options = {"microbatch_sizes": [1, 2], "steps": 2}
    structure(linear(), vectors, progress=lambda *step: told.append(step), **options)
    assert told == [(size, *done) for size in (1, 2) for done in ((0, 0), (0, 2), (1, 2), (2, 2))]


@pytest.mark.slow
def test_a_profile_says_what_was_measured():
    arguments = {"layers": 2, "width": 8}
    options = {"microbatch_sizes": [1], "steps": 2, "device": "cpu"}
    profile = measure_source(EXAMPLES / "mlp.py", arguments=arguments, name="small", **options)
    assert (profile.model.name, profile.model.arguments) == ("small", arguments)
    assert profile.model.entry.endswith("examples/mlp.py:build")
    assert (profile.dtype, profile.device.type) == ("float32", "cpu")
    assert profile.environment.torch == str(torch.__version__)
    assert profile.measurements[0].optimizer_s is not None
    assert Profile.parse(encode(profile)) == profile
    assert measure(linear(), vectors, **options).model.name == "Linear"


def summary(bare_s, instrumented_s):
    half = instrumented_s / 2
    found = Structure(structure(linear(), vectors).layers, {}, {}, [], [], {}, {}, [])
    return summarize(1, found, TimedSteps([bare_s], [LayerTimes([half], [half])]), None, None)


@pytest.mark.slow
def test_layer_times_are_brought_back_to_the_bare_step_above_five_percent():
    each = [summary(100.0, instrumented_s) for instrumented_s in (104.0, 110.0, 125.0)]
    assert [one.overhead for one in each] == [1.04, 1.1, 1.25]
    assert [one.layers[0].forward_s for one in each] == pytest.approx([52.0, 50.0, 50.0])
    assert [one.coverage for one in each] == pytest.approx([1.04, 1.0, 1.0])
    assert [one.overhead_bound for one in each] == [False, False, True]


@pytest.mark.slow
@needs_transformers
# transformers and torchvision warn of their own affairs while they are imported
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "layers", "block"),
    [
        ("gpt2", 7, "GPT2Block"),
        ("bert", 5, "BertLayer"),
        ("llama", 6, "LlamaDecoderLayer"),
        ("t5", 13, "T5Block"),
    ],
)
def test_transformers_examples(name, layers, block):
    arguments = {"layers": 2, "width": 8, "heads": 2, "context": 4, "vocabulary": 64}
    arguments |= {"ffn": 16} if name in ("llama", "t5") else {}
    options = {"microbatch_sizes": [1], "steps": 1, "device": "cpu"}
    profile = measure_source(EXAMPLES / f"{name}.py", arguments=arguments, **options)
    assert len(profile.layers) == layers
    blocks = [index for index, layer in enumerate(profile.layers) if layer.type == block]
    assert len(blocks) == (4 if name == "t5" else 2)
    if name == "llama":
        numbers = 4 * 8 * 8 + 3 * 8 * 16 + 2 * 8
        assert profile.parameter_bytes() == 4 * (2 * numbers + 2 * 64 * 8 + 8)
    elif name == "t5":  # both blocks of the decoder read what the encoder made
        assert any(
            each.producer < blocks[2] and {*blocks[2:]} <= {*each.consumers} and each.bytes == 128
            for each in profile.measurements[0].tensors
        )
    else:
        assert profile.layers[0].shared_parameters == profile.layers[-1].shared_parameters != []


def ids(*shape, dtype=torch.int64):
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("inputs", "size", "tokens"),
    [
        (ids(4, 128), 4, 128),
        ({"input_ids": ids(4, 128), "labels": ids(4, 64)}, 4, 128),
        ((torch.zeros(4, 3, 8, 8), ids(4, 7, dtype=torch.int32)), 4, 7),
        (ids(1, 128), 1, 128),
        (torch.zeros(4, 128), 4, None),
        (ids(4), 4, None),
        (ids(4, 1), 4, None),
        (ids(8, 128), 4, None),
        (ids(4, 128, dtype=torch.bool), 4, None),
    ],
)
def test_tokens_of_a_sample_are_the_length_of_the_first_integers(inputs, size, tokens):
    assert tokens_per_sample(inputs, size) == tokens


@pytest.mark.slow
def test_a_profile_says_tokens_where_the_inputs_are_token_ids():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4))
    profile = structure(model, lambda size: ids(size, 6), microbatch_sizes=[1, 2])
    assert profile.model.tokens_per_sample == 6
    assert structure(linear(), vectors).model.tokens_per_sample is None
