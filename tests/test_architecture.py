"""What modules may say and know: which part imports which, read from the imports and tried in a
process of its own; that every error has a code; that only the command line speaks in flags.
"""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import partopt
from tests.conftest import LONGEST, TESTS
from tests.helpers import ROOT, uniform_profile

PACKAGE = ROOT / "partopt"

# A part may import those named after it, and itself. Every part may import `partopt` for its
# version.
BASE = {"units", "errors", "printable"}
DOCUMENTS = BASE | {"documents"}
PLANNING = DOCUMENTS | {"schedules", "cost"}
MAY_IMPORT = {
    "errors": {"printable"},
    "printable": set(),
    "units": {"errors"},
    "registry": {"errors"},
    "documents": BASE,
    "schedules": {"errors", "registry", "documents"},  # a plan has a placement
    "cost": DOCUMENTS | {"schedules"},
    "transformer": DOCUMENTS,
    "options": DOCUMENTS | {"schedules"},
    "job": PLANNING | {"options", "transformer"},
    "planners": PLANNING | {"registry"},
    "importers": PLANNING | {"registry"},  # a step that ends a backward is taken off it
    "configurations": {"errors"},
    "profiler": DOCUMENTS | {"cost"},  # what ranks exchange while a layer runs takes time, too
    "simulator": PLANNING | {"options"},
    "report": DOCUMENTS,  # a page computes nothing
    "trainers": PLANNING | {"registry", "options", "transformer", "configurations", "importers"},
    "search": PLANNING
    | {"options", "job", "planners", "simulator", "transformer"}
    | {"configurations", "trainers"},
    "replay": DOCUMENTS | {"profiler"},
    "runtime": PLANNING | {"profiler", "replay", "simulator", "options", "what_if"},
    "what_if": PLANNING | {"options", "job", "planners", "simulator", "report"},
}
MAY_IMPORT["__init__"] = set(MAY_IMPORT)
MAY_IMPORT["cli"] = set(MAY_IMPORT)
MAY_IMPORT["__main__"] = {"cli"}
IMPORTS_TORCH = {"profiler", "replay", "runtime"}
MODULES = sorted(PACKAGE.rglob("*.py"))


def part_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def tree_of(path):
    return ast.parse(path.read_text())


def imported(path):
    """The dotted names of everything that a module imports, wherever in it."""
    names = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.slow
def test_imports_follow_the_arrows():
    for path in MODULES:
        own = part_of(path)
        known = {name.split(".")[1] for name in imported(path) if name.startswith("partopt.")}
        public = {*partopt.__all__} if own == "cli" else {"__version__"}
        assert known - public <= MAY_IMPORT[own] | {own}, path
        torch = any(name.split(".")[0] == "torch" for name in imported(path))
        assert not torch or own in IMPORTS_TORCH, path


def test_the_arrows_themselves_have_no_cycle():
    order = []
    while len(order) < len(MAY_IMPORT):
        left = MAY_IMPORT.keys() - order
        ready = [part for part in left if MAY_IMPORT[part] <= set(order)]
        assert ready, f"a cycle among {left}"
        order += ready


SCRIPT = """
import contextlib, sys
import partopt.cli
for arguments in (
    ["plan", PROFILE, "--topology", "v100-pcie", "-o", PLAN],
    ["compare", PROFILE, "--topology", "v100-pcie"],
    ["simulate", PLAN],
    ["show", PLAN],
    ["show", PROFILE],
    ["topology", "list"],
    ["schema", "plan"],
):
    with contextlib.suppress(SystemExit):
        partopt.cli.main(arguments)
late = {"torch", "matplotlib", "networkx", "partopt.profiler", "partopt.replay", "partopt.runtime"}
print(sorted(late & sys.modules.keys()))
"""


@pytest.mark.slow
def test_planning_imports_neither_torch_nor_matplotlib(tmp_path):
    profile, plan = (str(tmp_path / name) for name in ("p.json", "plan.json"))
    uniform_profile(4).save(profile)
    script = SCRIPT.replace("PROFILE", repr(profile)).replace("PLAN", repr(plan))
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "[]"
    assert Path(plan).exists()


FLAG = re.compile(r"(?<![\w-])--[a-z]")
VERBS = "plan|simulate|compare|profile|show|import|export|topology|schema"
COMMAND = re.compile(rf"\bpartopt ({VERBS})\b")


def calls_of(path, name):
    calls = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)]
    return [each for each in calls if isinstance(each.func, ast.Name) and each.func.id == name]


@pytest.mark.slow
def test_every_error_has_a_code():
    missing = [
        f"{path}:{call.lineno}"
        for path in MODULES
        for call in calls_of(path, "PartoptError") + calls_of(path, "unknown")
        if not any(keyword.arg == "code" for keyword in call.keywords)
    ]
    assert missing == []


def spoken(path):
    """Strings and parts of strings that are not docstrings, with their lines."""
    nodes = list(ast.walk(tree_of(path)))
    documented = {
        id(node.body[0].value)
        for node in nodes
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    texts = [
        node for node in nodes if isinstance(node, ast.Constant) and id(node) not in documented
    ]
    return [(node.lineno, node.value) for node in texts if isinstance(node.value, str)]


# the command line, and those of trainers
OF_FLAGS = {"cli", "trainers"}


@pytest.mark.slow
def test_only_the_command_line_speaks_in_flags():
    found = [
        f"{path}:{line}: {text}"
        for path in MODULES
        if not OF_FLAGS & {*path.parts}
        for line, text in spoken(path)
        if FLAG.search(text) or COMMAND.search(text)
    ]
    assert found == []


NOBODYS = 320  # times that `own` and `each` stand in the program, at most


def test_words_that_are_nobodys_only_become_fewer():
    """A name says what it is: `stage`, `candidate`, `layout`. Whoever writes fewer lowers this."""
    found = sum(len(re.findall(r"\b(?:own|each)\b", path.read_text())) for path in MODULES)
    assert found <= NOBODYS


def test_the_files_of_tests_that_start_first_are_there():
    assert [name for name in sorted(LONGEST) if not (TESTS / name).is_file()] == []
