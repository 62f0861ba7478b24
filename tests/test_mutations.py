"""The list of mutations is kept up to date with the code; `benchmarks/mutations.py` runs them."""

import importlib
import sys

import pytest

from tests.helpers import ROOT

sys.path.append(str(ROOT / "benchmarks"))
module = importlib.import_module("mutations")
drawn_faults = importlib.import_module("drawn_faults")
MUTATIONS = module.mutations()


@pytest.mark.slow
def test_what_a_mutation_changes_is_there_once():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
    for mutation in MUTATIONS:
        path = module.place_of(mutation, ROOT)
        compile(path.read_text().replace(mutation.old, mutation.new), path, "exec")
        assert mutation.old != mutation.new
        paths = [each for each in mutation.tests.split() if each.startswith("tests/")]
        assert all((ROOT / each).exists() for each in paths), mutation


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A package of one function, and its test, which needs no plugin of pytest."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
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


@pytest.mark.slow
def test_a_mutation_is_killed_or_survives_and_is_taken_back(checkout, capsys):
    killed, alive = mutation("2 * x", "3 * x"), mutation("2 * x", "x + 2")
    assert module._table([killed, alive], checkout) == 1
    assert (checkout / "partopt/code.py").read_text().count("2 * x") == 1
    printed = capsys.readouterr().out
    assert "tests/test_code.py::test_double" in printed and "1 of 2 survived" in printed


@pytest.mark.slow
def test_a_text_that_is_not_there_once_is_refused(checkout):
    with pytest.raises(ValueError, match=r"m: found 0 times in partopt/code.py: 4 \* x"):
        module.place_of(mutation("4 * x", ""), checkout)
    with pytest.raises(ValueError, match="found 2 times"):
        module.place_of(mutation("x", ""), checkout)
    assert list(module.faults([mutation("4 * x", "")], checkout)) == [
        "m: found 0 times in partopt/code.py: 4 * x"
    ]


@pytest.mark.slow
def test_tests_that_fail_without_a_mutation_are_refused(checkout):
    (checkout / "partopt/code.py").write_text("def double(x):\n    return 2 * x + 1\n")
    assert list(module.faults([mutation("2 * x", "3 * x")], checkout)) == [
        "fails without any mutation: tests/test_code.py::test_double"
    ]


def test_the_list_is_printed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["mutations.py", "--list", "--only", "bus-carries-one-way"])
    assert module.main() == 0
    assert capsys.readouterr().out.startswith("bus-carries-one-way")


DECIDING = """
Counts = dict[int, int | None]
MANY = 10**9
def most(counts, least=0, *, strict=True):
    '''At most 3 of them.'''
    if not counts:
        raise ValueError(f"{1 + 1} things")
    return max(each - 1 for each in counts if each > least and strict)
"""


def test_what_decides_is_changed_and_what_speaks_is_not():
    drawn = list(drawn_faults.faults_in(DECIDING, "code.py"))
    changes = {(fault.before, fault.after) for fault in drawn}
    assert changes >= {
        ("if not counts:", "if counts:"),
        (
            "def most(counts, least=0, *, strict=True):",
            "def most(counts, least=1, *, strict=True):",
        ),
    }
    last = "return max(each - 1 for each in counts if each > least and strict)"
    for old, new in [
        ("max", "min"),
        ("each - 1", "(each + 1)"),
        ("each - 1", "each"),
        ("- 1", "- 2"),
        ("each > least", "(each >= least)"),
        ("each > least and strict", "(each > least or strict)"),
        ("each > least and strict", "strict"),
    ]:
        assert (last, last.replace(old, new)) in changes
    for fault in drawn:
        compile(fault.content, "code.py", "exec")
        assert fault.before != fault.after
        assert fault.content.splitlines()[fault.line - 1].strip() == fault.after
    texts = " ".join(after for _, after in changes)
    assert "things" not in texts and "of them" not in texts and "Counts" not in texts
    assert "MANY" not in texts


def test_a_draw_is_its_seeds_and_its_packages(checkout):
    (checkout / "partopt/other.py").write_text("MANY, FEW = 3, 1\nLIMIT = [3]\n")
    first, again = (drawn_faults.draw(checkout / "partopt", 5, 7, []) for _ in range(2))
    assert first == again and {fault.path for fault in first} == {"code.py", "other.py"}
    assert {fault.path for fault in drawn_faults.draw(checkout / "partopt", 5, 7, ["other"])} == {
        "other.py"
    }


@pytest.mark.slow
def test_a_drawn_fault_is_noticed_survives_or_changes_nothing(checkout, monkeypatch, capsys):
    def fault(before, after):
        return drawn_faults.Fault("code.py", 2, before, after, f"def double(x):\n    {after}\n")

    alike = {("code.py", "return 2 * x", "return x * 2"): "they commute"}
    monkeypatch.setattr(module, "equivalents", lambda: alike)
    drawn = [fault("return 2 * x", f"return {after}") for after in ("3 * x", "x + 2", "x * 2")]
    assert module._table_of_drawn(drawn, checkout) == 1
    assert (
        capsys.readouterr().out
        == """
code.py:2  return 2 * x  ->  return 3 * x
    tests/test_code.py::test_double

code.py:2  return 2 * x  ->  return x + 2
    SURVIVED

code.py:2  return 2 * x  ->  return x * 2
    changes nothing: they commute

code           1 of   2   50%
all            1 of   2 noticed
"""
    )
    assert (checkout / "partopt/code.py").read_text() == "def double(x):\n    return 2 * x\n"


@pytest.mark.slow
def test_what_changes_nothing_is_still_drawn():
    known = drawn_faults.equivalents()
    for path in {path for path, _, _ in known}:
        source = (ROOT / "partopt" / path).read_text()
        drawn = {
            (each.path, each.before, each.after) for each in drawn_faults.faults_in(source, path)
        }
        assert {key for key in known if key[0] == path} <= drawn
