"""Model files: what is found in them, and how faults of theirs are told."""

import sys

import pytest
import torch
from torch import nn

from partopt.errors import PartoptError
from partopt.profiler import find_model
from tests.forked import run_forked
from tests.helpers import ROOT
from tests.profiler.helpers import needs_torchvision, needs_transformers

INPUTS = """import torch
from torch import nn
def example_inputs(batch_size): return torch.zeros(batch_size, 2)
"""


@pytest.fixture
def write(tmp_path):
    """Writes a model file, by default of `INPUTS` and what is given, and gives its path."""

    def write(content, name="net.py", before=INPUTS):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(before + content)
        return str(path)

    return write


def refusal(target, **arguments):
    with pytest.raises(PartoptError) as caught:
        find_model(target, arguments).build()
    return caught.value


def width(path, **arguments):
    return find_model(path, arguments).build().out_features


def test_build_comes_before_create_model_and_model(write):
    path = write(
        "model = nn.Linear(2, 5)\ndef create_model(): return nn.Linear(2, 4)\n"
        "def build(): return nn.Linear(2, 3)\n"
    )
    assert find_model(path).entry == f"{path}:build"
    assert [width(path), width(f"{path}:create_model"), width(f"{path}:model")] == [3, 4, 5]
    # an edited file is read anew
    path = write("def build(**options): return nn.Linear(2, options['width'])\n")
    assert width(path, width=9) == 9
    path = write("def build(width): return nn.Linear(2, width)\n")
    assert width(path, width=9) == 9


def test_a_sole_module_needs_no_name_and_two_must_be_told_apart(write):
    path = write("network = nn.Linear(2, 7)\n")
    assert find_model(path).entry == f"{path}:network"
    path = write(
        "class Net(nn.Linear):\n    def __init__(self, width=2): super().__init__(width, width)\n"
    )
    assert width(path, width=6) == 6
    error = refusal(write("a = nn.Linear(2, 2)\nb = nn.Linear(2, 2)\n"))
    assert "has 2 modules: a, b" in error.message
    assert error.hint.endswith("net.py:a")


def test_a_dotted_module_is_imported():
    source = find_model("tests.profiler.dotted")
    assert source.name == "dotted"
    assert isinstance(source.build(), nn.Linear)
    assert source.example_inputs(3).shape == (3, 2)


def test_a_file_may_import_what_lies_beside_it_and_leaves_nothing_behind(write, tmp_path):
    for folder, outputs in (("one", 3), ("two", 4)):
        write(f"WIDTH = {outputs}\n", f"{folder}/beside.py", before="")
        build = "def build():\n    import beside\n    return nn.Linear(2, beside.WIDTH)\n"
        assert width(write(build, f"{folder}/net.py")) == outputs
    assert "beside" not in sys.modules
    assert str(tmp_path / "one") not in sys.path


CORRECT, BUILD = "correct the model file", "build(**options)"


@pytest.mark.parametrize(
    ("content", "message", "hint"),
    [
        ("raise ValueError('no')\n", "raised ValueError: no (net.py, line 4)", CORRECT),
        ("import sys\nsys.exit(3)\n", "raised SystemExit: 3 (net.py, line 5)", CORRECT),
        ("def build(:\n", "raised SyntaxError", CORRECT),
        ("import no_such\n", "needs no_such, which is not installed", "pip install no_such"),
        ("", "has no build function and no model", BUILD),
        ("build = 5\n", "is an int, neither a function nor an nn.Module", BUILD),
        ("def build(): return 'model'\n", "returned a str, not an nn.Module", BUILD),
        (
            "def build(): return nn.Linear(2, -1)\n",
            "build: raised RuntimeError: Trying to create tensor with negative dimension",
            CORRECT,
        ),
        (
            "def build(depth): return nn.Linear(2, depth)\n",
            'needs the argument "depth"',
            "add depth=... to `arguments`",
        ),
    ],
)
def test_a_file_that_breaks_the_contract(write, content, message, hint):
    error = refusal(write(content))
    assert message in error.message
    assert "net.py" in error.message
    assert hint in error.hint
    assert error.exit_code == 2


def test_a_file_without_inputs(write):
    error = refusal(write("from torch import nn\nbuild = nn.ReLU\n", before=""))
    assert "has no example_inputs" in error.message
    assert "example_inputs = lambda batch_size: torch.randn(batch_size, 512)" in error.hint


@pytest.mark.parametrize(
    "layers",
    ["nn.Linear(6, 2)", "nn.Embedding(9, 4), nn.Linear(4, 2)", "nn.Conv2d(3, 4, 3)"],
)
def test_a_model_without_inputs_runs_with_those_of_the_hint(write, layers):
    bare = f"model = nn.Sequential(nn.Identity(), {layers})\n"
    error = refusal(write(f"from torch import nn\n{bare}", before=""))
    code = error.hint.partition("such as: ")[2]
    source = find_model(write(f"from torch import nn\n{bare}{code}\n", before=""))
    assert len(source.build()(source.example_inputs(2))) == 2


def test_a_cache_of_keys_and_values_is_switched_off(write):
    config = "from types import SimpleNamespace as Config\n"
    made = (
        "def build():\n    model = nn.Sequential(nn.Linear(2, 2))\n"
        "    model.config = Config(use_cache=True)\n"
        "    model[0].config = Config(use_cache=True)\n    return model\n"
    )
    model = find_model(write(config + made)).build()
    assert [module.config.use_cache for module in model.modules()] == [False, False]


def test_a_missing_extra_names_it(write, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    error = refusal(write("def build():\n    from transformers import GPT2Config\n"))
    assert "needs transformers, which is not installed" in error.message
    assert error.hint == "in a clone of partopt: pip install '.[examples]'"


def test_what_is_not_there_is_answered_with_the_nearest(write, tmp_path):
    path = write("def build(layers=1): return nn.Linear(2, 2)\nmodel = nn.Linear(2, 2)\n")
    error = refusal(f"{path}:buid")
    assert 'has no "buid"' in error.message
    assert error.hint == 'did you mean "build"?'
    error = refusal(path, layer=3)
    assert error.message.startswith("`arguments`: ")
    assert error.hint == 'did you mean "layers"?'
    assert "takes no arguments" in refusal(f"{path}:model", layers=3).message
    error = refusal(str(tmp_path / "nt.py"))
    assert error.message.endswith("nt.py: no such file")
    assert error.hint == 'did you mean "net.py"?'
    assert "no such file or module" in refusal("no.such.module").message


def test_an_error_is_placed_in_the_file_once_and_an_options_never(write):
    source = find_model(write("def build(): ...\ndef example_inputs(size): ...\n"))
    there = PartoptError("no such layer")
    placed = source.locate(there)
    assert placed.message == f"{source.place}: no such layer"
    assert source.locate(placed).message == placed.message
    assert source.locate(PartoptError("`steps=0`", option="steps")).message == "`steps=0`"


def test_running_out_of_memory_passes_through(write):
    with pytest.raises(torch.OutOfMemoryError):
        find_model(write("def build(): raise torch.OutOfMemoryError('full')\n")).build()


@pytest.mark.parametrize("source", [None, 3, ""])
def test_what_is_no_source_is_refused(source):
    with pytest.raises(PartoptError, match="not a file or a dotted module") as caught:
        find_model(source)
    assert caught.value.fields["option"] == "source"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["layers"], "not a mapping of names to values"),
        ({3: 4}, "not a mapping of names to values"),
        ({"depth": float("nan")}, "depth: nan is not a finite number"),
        ({"title": "\x1b"}, "title: has the control character"),
    ],
)
def test_arguments_that_a_profile_could_not_record_are_refused(write, arguments, message):
    path = write("def build(**options): return nn.Linear(2, 2)\n")
    with pytest.raises(PartoptError) as caught:
        find_model(path, arguments)
    assert caught.value.message.startswith(f"`arguments`: {message}")


@pytest.mark.slow
@needs_torchvision
@needs_transformers
@pytest.mark.parametrize(
    "model",
    [
        "from torchvision.models import resnet18 as build",
        "from transformers import LlamaForCausalLM as model\nbuild = lambda: torch.nn.Identity()",
        "def build():\n    from transformers import LlamaForCausalLM\n    return nn.Identity()",
    ],
)
def test_torchvision_is_imported_beside_a_torch_that_it_was_not_built_for(write, tmp_path, model):
    """By a process in which nobody has declared its operators yet."""
    script = tmp_path / "script.py"
    script.write_text(
        "import warnings\nwarnings.simplefilter('ignore')\n"
        "from partopt.profiler import find_model\n"
        f"find_model({write(model)!r}).build()\n"
    )
    done = run_forked(str(script), cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


def test_other_errors_of_the_model_file_are_not_tried_again(write):
    error = refusal(write("print('once')\nraise RuntimeError('operator other::nms is missing')\n"))
    assert "operator other::nms is missing (net.py, line 5)" in error.message
