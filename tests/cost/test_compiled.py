"""Kernels: what numba's cache on disk must hold for, and runs without it."""

import ast
import contextlib
import inspect
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partopt.errors import PartoptError
from partopt.planners import gpipe, kernels, pipedream
from partopt.simulator import kernel as engine
from partopt.simulator import memory, steady
from tests.examples import examples
from tests.helpers import ROOT
from tests.planners.problems import chain, problem, topology
from tests.simulator.cases import cases

MODULES = (engine, gpipe, kernels, memory, pipedream, steady)  # with kernels
SCRIPT = """
import numpy as np
from partopt.planners.gpipe import fill_row
row, best = np.full(3, np.inf), np.zeros(3, np.int32)
fill_row(np.array([0.0, 1.0, 3.0, 6.0]), np.array([0.0, np.inf, np.inf]), row, best)
print(*row)
stats = getattr(fill_row, "stats", None)
print(stats and stats.cache_path, stats and sum(stats.cache_hits.values()))
"""
SQUARES = ["1.0", "9.0", "36.0"]
COMPILING = {"NUMBA_DISABLE_JIT": "0"}  # where the tests run without it, too


def run(root: Path, script: str = SCRIPT, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=root,
        env=os.environ | COMPILING | {"PYTHONPATH": str(root)} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """A copy of the package in whose folders numba can write nothing."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    shutil.copytree(
        ROOT / "partopt", tmp_path / "partopt", ignore=shutil.ignore_patterns("__pycache__")
    )
    (tmp_path / "partopt/planners/__pycache__").write_text("no folder can be made here")
    return tmp_path


@pytest.mark.slow
def test_an_installation_that_cannot_be_written_caches_for_the_user(root):
    home = {"XDG_CACHE_HOME": str(root / "home"), "HOME": str(root)}
    *squares, folder, hits = run(root, **home)
    assert squares == SQUARES
    assert root / "home" in Path(folder).parents
    assert hits == "0"
    assert run(root, **home)[-1] == "1"


@pytest.mark.slow
def test_without_a_place_for_the_cache_kernels_are_compiled_without_it(root):
    (root / "home").write_text("nor here")
    home = {"XDG_CACHE_HOME": str(root / "home"), "HOME": str(root / "home")}
    assert run(root, **home) == [*SQUARES, "None", "0"]


@pytest.mark.slow
def test_without_jit_kernels_are_python_s():
    assert run(ROOT, NUMBA_DISABLE_JIT="1") == [*SQUARES, "None", "None"]


@pytest.mark.slow
def test_processes_that_compile_at_once_leave_a_cache_that_holds(tmp_path):
    own = {"PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": str(tmp_path)}
    environment = os.environ | COMPILING | own
    command = [sys.executable, "-c", SCRIPT]
    both = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [each.communicate()[0].split()[:3] for each in both] == [SQUARES] * 2
    *squares, _, hits = run(ROOT, NUMBA_CACHE_DIR=str(tmp_path))
    assert (squares, hits) == (SQUARES, "1")


def test_help_does_not_import_numba():
    script = (
        "import sys, contextlib, partopt.cli\n"
        "with contextlib.suppress(SystemExit): partopt.cli.main(['--help'])\n"
        "print('numba' in sys.modules)"
    )
    assert run(ROOT, script)[-1] == "False"


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_all_that_a_kernel_calls_stands_in_its_file(module):
    """Of other files a cached kernel uses numpy and the numbers of actions alone: numba's cache
    does not notice changes there. Those numbers are pinned below.
    """
    tree = ast.parse(inspect.getsource(module))
    imported = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("partopt.")
        for alias in node.names
    }
    kernels = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and "compiled" in map(_called, node.decorator_list)
    ]
    used = {
        name.id
        for kernel in kernels
        for statement in kernel.body
        for name in ast.walk(statement)
        if isinstance(name, ast.Name)
    }
    assert kernels
    assert used & imported <= set("FBIWRAU")


def _called(decorator: ast.expr) -> str:
    return getattr(getattr(decorator, "func", None), "id", "")


def test_the_numbers_of_actions_are_those_that_caches_hold():
    """A change here must change the text of `partopt.simulator.kernel` too, or its users' caches
    answer with the old numbers.
    """
    assert [getattr(engine, name) for name in "FBIAU"] == [0, 1, 2, 5, 6]


@pytest.mark.slow
@pytest.mark.skipif("NUMBA_DISABLE_JIT" in os.environ, reason="without JIT there are no signatures")
@examples(100)
@given(cases(), st.integers(1, 4))
def test_kernels_have_one_signature(case, layers):
    """Two that are compiled at the same time could be mixed up in numba's index."""
    with contextlib.suppress(PartoptError):  # a deadlock
        engine.simulate(case.order, case.work)
    model = chain([1] * layers, [0] * layers, [0] * (layers - 1), [0] * layers)
    for planner in (gpipe, pipedream):
        planner.plan(problem(model, topology((2, 1.0), (2, 1.0))))
    for kernel in (each for module in MODULES for each in vars(module).values()):
        if getattr(kernel, "targetoptions", {}).get("inline") == "never":
            assert len(kernel.nopython_signatures) <= 1, kernel
