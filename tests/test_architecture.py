"""The arrows of the design: which part may know of which, read from the imports and tried in a
process of its own.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import partopt
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
    "schedules": {"errors", "registry"},
    "cost": DOCUMENTS | {"schedules"},
    "options": DOCUMENTS | {"schedules"},
    "job": PLANNING | {"options"},
    "planners": PLANNING | {"registry"},
    "importers": PLANNING | {"registry"},  # a step that ends a backward is taken off it
    "profiler": DOCUMENTS | {"cost"},  # what ranks exchange while a layer runs takes time, too
    "simulator": PLANNING | {"options"},
    "search": PLANNING | {"options", "job", "planners", "simulator"},
    "links": DOCUMENTS | {"cost", "options"},
    "report": PLANNING | {"simulator", "links"},
    "trainers": PLANNING | {"registry", "simulator", "options", "job", "planners", "search"},
    "runtime": PLANNING | {"profiler", "simulator", "links", "options"},
    "html_report": DOCUMENTS | {"simulation", "simulator", "report"},
    "simulation": PLANNING | {"options", "simulator", "report"},
    "trials": PLANNING | {"options", "job", "planners", "simulator", "simulation"},
}
MAY_IMPORT["__init__"] = set(MAY_IMPORT)
MAY_IMPORT["cli"] = set(MAY_IMPORT)
MAY_IMPORT["__main__"] = {"cli"}
IMPORTS_TORCH = {"profiler", "runtime"}
MODULES = sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """The dotted names of everything that a module imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_follow_the_arrows(path):
    own = part_of(path)
    known = {name.split(".")[1] for name in imported(path) if name.startswith("partopt.")}
    public = {*partopt.__all__} if own == "cli" else {"__version__"}
    assert known - public <= MAY_IMPORT[own] | {own}


def test_only_the_profiler_and_the_runtime_import_torch():
    importers = {
        part_of(path)
        for path in MODULES
        if any(name.split(".")[0] == "torch" for name in imported(path))
    }
    assert importers <= IMPORTS_TORCH


def test_the_arrows_themselves_have_no_cycle():
    order: list[str] = []
    while len(order) < len(MAY_IMPORT):
        ready = [
            part
            for part, others in MAY_IMPORT.items()
            if part not in order and others <= set(order)
        ]
        assert ready, f"a cycle among {MAY_IMPORT.keys() - set(order)}"
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
late = {"torch", "matplotlib", "networkx", "partopt.profiler", "partopt.runtime"}
print(sorted(late & sys.modules.keys()))
"""


def test_planning_imports_neither_torch_nor_matplotlib(tmp_path):
    uniform_profile(4).save(str(tmp_path / "p.json"))
    script = SCRIPT.replace("PROFILE", repr(str(tmp_path / "p.json"))).replace(
        "PLAN", repr(str(tmp_path / "plan.json"))
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.splitlines()[-1] == "[]"
    assert (tmp_path / "plan.json").exists()
