"""The list of mutations is kept up to date with the code; `benchmarks/mutations.py` runs them."""

import importlib
import sys

import pytest

from tests.helpers import ROOT

sys.path.append(str(ROOT / "benchmarks"))
module = importlib.import_module("mutations")
drawn_faults = importlib.import_module("drawn_faults")
covering_tests = importlib.import_module("covering_tests")
forked_tests = importlib.import_module("forked_tests")
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
    monkeypatch.setattr(forked_tests, "PRELOADED", ["pytest"])
    root = tmp_path / "checkout"
    (root / "partopt").mkdir(parents=True)
    (root / "tests").mkdir()
    (root / "partopt/__init__.py").touch()
    (root / "partopt/code.py").write_text("def double(x):\n    return 2 * x\n")
    (root / "tests/test_code.py").write_text(
        "from partopt.code import double\ndef test_double():\n    assert double(2) == 4\n"
    )
    module.compile_checked(root)
    return root


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


def fault(before, after, line=2):
    return drawn_faults.Fault("code.py", line, before, after, f"def double(x):\n    {after}\n")


@pytest.mark.slow
def test_a_drawn_fault_is_noticed_survives_or_changes_nothing(checkout, monkeypatch, capsys):
    alike = {("code.py", "return 2 * x", "return x * 2"): "they commute"}
    monkeypatch.setattr(module, "equivalents", lambda: alike)
    with (checkout / "tests/test_code.py").open("a") as file:
        print("def test_wrong():\n    assert double(2) == 5", file=file)
    drawn = [fault("return 2 * x", f"return {after}") for after in ("3 * x", "x + 2", "x * 2")]
    assert module._table_of_drawn(drawn, checkout, None, 1) == 1
    out, err = capsys.readouterr()
    assert (
        out
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
    assert "1 of 1    2 tests" in err
    assert "left out, fails without any fault: tests/test_code.py::test_wrong\n" in err


COVERED = {
    "partopt/code.py": """
def double(x):
    return 2 * x
def half(x):
    return x / 2
def both(x): return (
    half(double(x)))
LIMIT = 3
""",
    "tests/test_code.py": """
from partopt import code
def test_double():
    assert code.double(2) == 4
def test_half():
    assert code.half(2) == 1
""",
    "tests/test_other.py": """
from partopt import code
def test_both():
    assert code.both(3) == 3
def test_limit():
    assert code.LIMIT == 3
""",
    "tests/test_processes.py": """
import multiprocessing, os, pytest, subprocess, sys
from partopt import code
def fork():
    if (child := os.fork()) == 0:
        code.double(2)
        os._exit(0)
    os.waitpid(child, 0)
def start(method):
    process = multiprocessing.get_context(method).Process(target=code.double, args=(2,))
    process.start()
    process.join()
def run():
    subprocess.run([sys.executable, "-c", "from partopt.code import double; double(2)"])
@pytest.mark.parametrize("how", ["fork", "spawn", "os.fork", "run"])
def test_process(how):
    {"os.fork": fork, "run": run}.get(how, lambda: start(how))()
def test_nothing():
    pass
""",
}


def write(root, contents):
    for name, content in contents.items():
        (root / name).write_text(content)


@pytest.mark.slow
def test_the_tests_that_run_a_line_come_before_the_others_of_their_files(checkout, tmp_path):
    write(checkout, COVERED)
    names = [f"tests/test_{name}.py" for name in ("code", "other", "processes")]
    covering = covering_tests.CoveringTests(tmp_path / "map", checkout)
    with forked_tests.workers(checkout, 1) as pool:
        covering.record(names[:2], pool)

        def ordered(line, files=names[:2]):
            tests = covering.tests_for(fault("", "", line), files)
            return [name.partition("::test_")[2] for name in tests]

        assert ordered(3, names[:1]) == ["double", "half"]
        assert ordered(5, names[:1]) == ["half", "double"]
        assert set(ordered(3)[:2]) == {"double", "both"} and len(ordered(3)) == 4
        for line in (6, 7):  # the beginning of a function, and the end of its statement
            assert ordered(line) == ["both", "limit"]
        # whoever imports it runs the last line
        assert set(ordered(8)[:3]) == {"double", "half", "both"} and ordered(8)[3] == "limit"

        covering.record(names, pool)
        *first, last = ordered(3, names[2:])
        assert {f"process[{how}]" for how in ("fork", "spawn", "os.fork", "run")} == {*first}
        assert last == "nothing"


@pytest.mark.slow
def test_a_map_is_used_again_until_sources_or_tests_differ(checkout, tmp_path, capsys):
    recorded = "   1 of 1    1 tests    0.0 s  tests/test_code.py\n"
    source, test = checkout / "partopt/code.py", checkout / "tests/test_code.py"
    with forked_tests.workers(checkout, 1) as pool:
        for changed, printed in [
            (None, recorded),
            (None, ""),
            (source, recorded),
            (test, recorded),
            (None, ""),
        ]:
            if changed:
                changed.write_text(changed.read_text() + "\n")
            covering = covering_tests.CoveringTests(tmp_path / "map", checkout)
            covering.record(["tests/test_code.py"], pool)
            assert capsys.readouterr().err == printed
            tests = covering.tests_for(fault("", ""), ["tests/test_code.py"])
            assert [*tests] == ["tests/test_code.py::test_double"]


def test_a_file_that_is_no_map_is_left_alone(tmp_path, checkout):
    (tmp_path / "notes").write_text("of something else")
    with pytest.raises(ValueError, match="notes cannot be the map of lines to tests: file is not"):
        covering_tests.CoveringTests(tmp_path / "notes", checkout)
    assert (tmp_path / "notes").read_text() == "of something else"


LINES = """
SIZE = 3
def outer(
    x=1,
):
    if (x and
        SIZE):
        y = [
            x,
        ]
    def inner(): return 1
    return y
@compiled(inline=True)
def kernel(x):
    return x
"""


def test_lines_around_a_line():
    body, file = {*range(6, 13)}, {*range(6, 13), 15}
    for line, statement in [(3, set()), (4, set()), (6, {6, 7}), (9, {8, 9, 10}), (12, {12})]:
        assert covering_tests.lines_around(LINES, line) == [statement, body, file], line
    assert covering_tests.lines_around(LINES, 11) == [{11}, {11}, file]
    assert covering_tests.lines_around(LINES, 2) == [file]
    assert covering_tests.lines_around(LINES, 15) == [file]


def test_the_first_test_of_a_file_has_the_time_of_the_longest_whose_fixtures_it_may_need():
    usual_s = {"a.py::short": 1.0, "b.py::alone": 2.0, "a.py::next": 3.0, "a.py::long": 5.0}
    limits = forked_tests._limits([*usual_s][:3], usual_s)
    assert limits == {"a.py::short": 18.0, "b.py::alone": 12.0, "a.py::next": 9.0}


@pytest.mark.slow
def test_tests_run_in_their_order_until_one_fails_or_has_no_end(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setattr(forked_tests, "GRACE_S", 1)
    write(
        tmp_path,
        {
            "test_a.py": "def test_pass(): pass\ndef test_fail(): assert False\n"
            "def test_hang():\n    while True: pass\ndef test_end(): import os; os._exit(3)",
            "test_b.py": "1 / 0",
        },
    )

    def outcomes(*names, files=("test_a.py",)):
        chosen = {f"test_a.py::test_{name}": 0.0 for name in names}
        return [
            (found.name.removeprefix("test_a.py::test_"), found.error)
            for found in forked_tests.run_tests(files, chosen)
        ]

    assert outcomes("fail", "pass") == [("fail", "failed")]
    assert outcomes("pass", "hang", "fail") == [("pass", ""), ("hang", "no end")]
    assert outcomes("pass", "end") == [("pass", ""), ("end", "exit code 3")]
    assert outcomes("pass", files=["test_b.py"])[0] == ("test_b.py", "cannot be collected")
    assert forked_tests.first_error({"test_a.py::test_end": 0.0}) == (
        "test_a.py::test_end: exit code 3"
    )
    assert forked_tests.first_error({}) is None


@pytest.mark.slow
def test_what_changes_nothing_is_still_drawn():
    known = drawn_faults.equivalents()
    for path in {path for path, _, _ in known}:
        source = (ROOT / "partopt" / path).read_text()
        drawn = {
            (each.path, each.before, each.after) for each in drawn_faults.faults_in(source, path)
        }
        assert {key for key in known if key[0] == path} <= drawn
