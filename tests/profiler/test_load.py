from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from partopt.errors import PartoptError
from partopt.profiler import find_model

INPUTS = (
    "import torch\nfrom torch import nn\ndef example_inputs(batch_size): return "
    "torch.zeros(batch_size, 2)\n"
)


def write(folder: Path, content: str, name: str = "net.py") -> str:
    (folder / name).write_text(content)
    return str(folder / name)


def refusal(target: str, **arguments: object) -> PartoptError:
    with pytest.raises(PartoptError) as caught:
        find_model(target, arguments).build()
    return caught.value


def test_build_comes_before_create_model_and_model(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        INPUTS
        + (
            "model = nn.Linear(2, 5)\ndef create_model(): return nn.Linear(2, 4)\ndef "
            "build(): return nn.Linear(2, 3)\n"
        ),
    )
    assert find_model(path).entry == f"{path}:build"
    assert find_model(path).build().out_features == 3
    assert find_model(f"{path}:create_model").build().out_features == 4
    assert find_model(f"{path}:model").build().out_features == 5


def test_a_sole_module_needs_no_name(tmp_path: Path) -> None:
    path = write(tmp_path, INPUTS + "network = nn.Linear(2, 7)\n")
    assert find_model(path).entry == f"{path}:network"
    path = write(
        tmp_path,
        INPUTS
        + (
            "class Net(nn.Linear):\n    def __init__(self, width=2): "
            "super().__init__(width, width)\n"
        ),
    )
    assert find_model(path, {"width": 6}).build().in_features == 6


def test_two_modules_must_be_told_apart(tmp_path: Path) -> None:
    error = refusal(write(tmp_path, INPUTS + "a = nn.Linear(2, 2)\nb = nn.Linear(2, 2)\n"))
    assert "has 2 modules: a, b" in error.message
    assert error.hint.endswith("net.py:a")
    assert error.exit_code == 2


def test_a_dotted_module_is_imported() -> None:
    source = find_model("tests.profiler.dotted")
    assert source.name == "dotted"
    assert isinstance(source.build(), nn.Linear)
    assert source.example_inputs(3).shape == (3, 2)


def test_a_file_may_import_what_lies_beside_it_and_leaves_nothing_behind(tmp_path: Path) -> None:
    for folder, width in (("one", 3), ("two", 4)):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder, f"WIDTH = {width}\n", "beside.py")
        path = write(
            tmp_path / folder,
            INPUTS + "def build():\n    import beside\n    return nn.Linear(2, beside.WIDTH)\n",
        )
        assert find_model(path).build().out_features == width
    assert "beside" not in sys.modules
    assert str(tmp_path / "one") not in sys.path


def test_an_edited_file_is_read_anew(tmp_path: Path) -> None:
    find_model(write(tmp_path, INPUTS + "def build(): return nn.Linear(2, 3)\n"))
    assert (
        find_model(write(tmp_path, INPUTS + "def build(): return nn.Linear(2, 33)\n"))
        .build()
        .out_features
        == 33
    )


@pytest.mark.parametrize(
    ("content", "message", "hint"),
    [
        (
            "raise ValueError('no GPU today')\n",
            "raised ValueError: no GPU today (net.py, line 1)",
            "correct the model file",
        ),
        (
            "import sys\nsys.exit(3)\n",
            "raised SystemExit: 3 (net.py, line 2)",
            "correct the model file",
        ),
        ("def build(:\n", "raised SyntaxError", "correct the model file"),
        (
            "import no_such_library\n",
            "needs no_such_library, which is not installed",
            "pip install no_such_library",
        ),
        ("import torch\n", "has no build function and no model", "build(**options)"),
        (
            "from torch import nn\ndef build(): return nn.Linear(2, 2)\n",
            "has no example_inputs",
            "example_inputs(batch_size)",
        ),
        (
            INPUTS + "build = 5\n",
            "is an int, neither a function nor an nn.Module",
            "build(**options)",
        ),
        (
            INPUTS + "def build(): return 'model'\n",
            "returned a str, not an nn.Module",
            "build(**options)",
        ),
        (
            INPUTS + "def build(): return nn.Linear(2, -1)\n",
            "build: raised RuntimeError: Trying to create tensor with negative dimension",
            "correct the model file",
        ),
        (
            INPUTS + "def build(depth): return nn.Linear(2, depth)\n",
            'needs the argument "depth"',
            "add depth=... to `arguments`",
        ),
    ],
)
def test_a_file_that_breaks_the_contract(
    tmp_path: Path, content: str, message: str, hint: str
) -> None:
    error = refusal(write(tmp_path, content))
    assert message in error.message
    assert "net.py" in error.message
    assert hint in error.hint
    assert error.exit_code == 2


def test_a_missing_extra_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    error = refusal(
        write(tmp_path, INPUTS + "def build():\n    from transformers import GPT2Config\n")
    )
    assert "needs transformers, which is not installed" in error.message
    assert error.hint == "in a clone of partopt: pip install '.[examples]'"


def test_a_wrong_attribute_is_answered_with_the_nearest(tmp_path: Path) -> None:
    error = refusal(
        write(tmp_path, INPUTS + "def build_large(): return nn.Linear(2, 2)\n") + ":build_lage"
    )
    assert 'has no "build_lage"' in error.message
    assert error.hint == 'did you mean "build_large"?'


def test_an_unknown_argument_is_answered_with_the_nearest(tmp_path: Path) -> None:
    error = refusal(
        write(tmp_path, INPUTS + "def build(layers=1): return nn.Linear(2, 2)\n"), layer=3
    )
    assert error.message.startswith("`arguments`: ")
    assert error.hint == 'did you mean "layers"?'


def test_a_module_already_built_takes_no_arguments(tmp_path: Path) -> None:
    assert (
        "takes no arguments"
        in refusal(write(tmp_path, INPUTS + "model = nn.Linear(2, 2)\n"), layers=3).message
    )


def test_build_may_take_any_argument(tmp_path: Path) -> None:
    path = write(tmp_path, INPUTS + "def build(**options): return nn.Linear(2, options['width'])\n")
    assert find_model(path, {"width": 9}).build().out_features == 9


def test_files_and_modules_that_are_not_there(tmp_path: Path) -> None:
    write(tmp_path, INPUTS, "network.py")
    error = refusal(str(tmp_path / "netwrk.py"))
    assert error.message.endswith("netwrk.py: no such file")
    assert error.hint == 'did you mean "network.py"?'
    assert "no such file or module" in refusal("no.such.module").message


def test_running_out_of_memory_passes_through(tmp_path: Path) -> None:
    path = write(tmp_path, INPUTS + "def build(): raise torch.OutOfMemoryError('full')\n")
    with pytest.raises(torch.OutOfMemoryError):
        find_model(path).build()


@pytest.mark.parametrize("source", [None, 3, ""])
def test_what_is_no_source_is_refused(source: object) -> None:
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
def test_arguments_that_a_profile_could_not_record_are_refused(
    tmp_path: Path, arguments: object, message: str
) -> None:
    path = write(tmp_path, INPUTS + "def build(**options): return nn.Linear(2, 2)\n")
    with pytest.raises(PartoptError) as caught:
        find_model(path, arguments)
    assert caught.value.message.startswith(f"`arguments`: {message}")
