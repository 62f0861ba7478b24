"""The list of mutations is kept up to date with the code; `benchmarks/mutations.py` runs them."""

import importlib.util
import sys

import pytest

from tests.helpers import ROOT

SPEC = importlib.util.spec_from_file_location("mutations", ROOT / "benchmarks/mutations.py")
module = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(module)
MUTATIONS = module.mutations()


def test_what_a_mutation_changes_is_there_once():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
    for mutation in MUTATIONS:
        path = module.place_of(mutation, ROOT)
        compile(path.read_text().replace(mutation.old, mutation.new), path, "exec")
        assert mutation.old != mutation.new
        paths = [each for each in mutation.tests.split() if each.startswith("tests/")]
        assert all((ROOT / each).exists() for each in paths), mutation


@pytest.fixture
def checkout(tmp_path):
    """A package of one function, and its test."""
    (tmp_path / "partopt").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "partopt/__init__.py").touch()
    (tmp_path / "partopt/code.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "tests/test_code.py").write_text(
        "from partopt.code import double\ndef test_double():\n    assert double(2) == 4\n"
    )
    return tmp_path


def mutation(old, new):
    return module.Mutation("m", "code.py", old, new, "tests/test_code.py")


def test_a_mutation_is_killed_or_survives_and_is_taken_back(checkout, capsys):
    killed, alive = mutation("2 * x", "3 * x"), mutation("2 * x", "x + 2")
    assert module._table([killed, alive], checkout) == 1
    assert (checkout / "partopt/code.py").read_text().count("2 * x") == 1
    printed = capsys.readouterr().out
    assert "tests/test_code.py::test_double" in printed and "1 of 2 survived" in printed


def test_a_text_that_is_not_there_once_is_refused(checkout):
    with pytest.raises(ValueError, match=r"m: found 0 times in partopt/code.py: 4 \* x"):
        module.place_of(mutation("4 * x", ""), checkout)
    with pytest.raises(ValueError, match="found 2 times"):
        module.place_of(mutation("x", ""), checkout)
    assert list(module.faults([mutation("4 * x", "")], checkout)) == [
        "m: found 0 times in partopt/code.py: 4 * x"
    ]


def test_tests_that_fail_without_a_mutation_are_refused(checkout):
    (checkout / "partopt/code.py").write_text("def double(x):\n    return 2 * x + 1\n")
    assert list(module.faults([mutation("2 * x", "3 * x")], checkout)) == [
        "fails without any mutation: tests/test_code.py::test_double"
    ]


def test_the_list_is_printed(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(sys, "argv", ["mutations.py", "--list", "--only", "bus-carries-one-way"])
    assert module.main() == 0
    assert capsys.readouterr().out.startswith("bus-carries-one-way")
