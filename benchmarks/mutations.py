"""Small faults in the product, one at a time, and whether the tests notice them.

    python benchmarks/mutations.py [--only NAME] [--list]
    python benchmarks/mutations.py --draw N [--seed S] [--package P] [--each] [--map FILE]

The faults are in `mutations.toml`, or are drawn (`drawn_faults.py`). Each is made in a temporary
copy of the checkout, where pytest runs the tests that have to notice it, first without any fault.
Of a drawn one these are the tests that mirror its package and run its line (`covering_tests.py`);
those that fail without any fault are left out. The exit code is 1 if a fault survives, 2 where it
cannot be made, or where the tests of the list fail without it.
"""

from __future__ import annotations

import argparse
import compileall
import os
import py_compile
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from covering_tests import CoveringTests
from drawn_faults import Fault, draw, equivalents, packages_of
from forked_tests import ENVIRONMENT, KERNELS, NOTHING_TO_RUN, first_error, workers

ROOT = Path(__file__).resolve().parent.parent
LIST = Path(__file__).with_suffix(".toml")
LIMIT_S = 900  # for the tests of one mutation: a fault may keep a search from ending
SIMULATED = [f"cli/test_{page}.py" for page in ("simulate", "what_if", "own_order", "variation")]
# of parts of the package whose tests are not, or not only, of the same name in tests/
MIRRORS = {
    "__init__": ["test_library.py"],
    "cli": ["test_options.py"],
    "documents": [
        *(
            f"test_{kind}.py"
            for kind in (
                *("documents", "plan", "profile", "topology", "device", "groups", "shipped"),
                "recorded",
            )
        ),
        *("profiler/test_repeat.py", "importers/test_run.py", "importers/test_hugging_face.py"),
    ],
    "html_report": ["report/test_web.py"],
    "links": ["links/test_links.py", "cli/test_measure_links.py"],
    "options": ["test_job.py", "cli/test_plan.py"],
    "printable": ["test_units.py"],
    "profiler": ["cli/test_doctor.py", "gpu/test_profile.py"],
    "runtime": [
        *("cli/test_measure_links.py", "cli/test_doctor.py"),
        *(f"gpu/test_{part}.py" for part in ("backends", "links", "processes", "rules", "run")),
    ],
    "search": ["cli/test_compare.py"],
    "simulation": ["test_library.py", "what_if/test_conditions.py", *SIMULATED],
    "simulator": SIMULATED,
    "what_if": SIMULATED,
    "transformer": ["trainers/test_transformer.py", "cli/test_plan_transformer.py"],
}
SURVIVED, PREPARED_WRONGLY = 1, 2  # exit codes
_LEFT_OUT = shutil.ignore_patterns("__pycache__", ".*", "demo")


class Mutation(NamedTuple):
    """`old`, which stands once in a part of the package, made `new`; and the tests to run."""

    name: str
    part: str
    old: str
    new: str
    tests: str


def mutations() -> list[Mutation]:
    """All mutations, in the order of the list."""
    return [Mutation(**entry) for entry in tomllib.loads(LIST.read_text())["mutation"]]


def place_of(mutation: Mutation, root: Path) -> Path:
    """The file to change. Raises ValueError where `old` is not there, or more than once."""
    part = root / "partopt" / mutation.part
    files = [part] if part.is_file() else sorted(part.rglob("*.py"))
    found = [path for path in files for _ in range(path.read_text().count(mutation.old))]
    if len(found) != 1:
        raise ValueError(
            f"{mutation.name}: found {len(found)} times in partopt/{mutation.part}: {mutation.old}"
        )
    return found[0]


def first_failure(tests: str, root: Path, limit_s: float = LIMIT_S) -> str | None:
    """The first test that fails, None where all pass, or none is left to run."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    own = {"NUMBA_CACHE_DIR": str(root / KERNELS), "PYTHONPATH": str(root)}
    # bytecode is kept by the second and the size of its source, which a mutation may share
    own["PYTHONDONTWRITEBYTECODE"] = "1"
    try:
        done = subprocess.run(
            [*command, *shlex.split(tests)],
            cwd=root,
            env=os.environ | ENVIRONMENT | own,
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        return f"no end within {limit_s:.0f} s"
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if failed is None and done.returncode not in (0, NOTHING_TO_RUN):
        return f"pytest: exit code {done.returncode}"
    return None if failed is None else failed[1]


def killed_by(mutation: Mutation, root: Path) -> str | None:
    """The test in a copy of the checkout that notices the mutation, None where it survives."""
    path = place_of(mutation, root)
    content = path.read_text()
    path.write_text(content.replace(mutation.old, mutation.new))
    try:
        return first_failure(mutation.tests, root)
    finally:
        path.write_text(content)


def faults(chosen: list[Mutation], root: Path) -> Iterator[str]:
    """What is wrong with the list, or with the tests where nothing is mutated."""
    for mutation in chosen:
        try:
            place_of(mutation, root)
        except ValueError as error:
            yield str(error)
    for tests in dict.fromkeys(mutation.tests for mutation in chosen):
        failed = first_failure(tests, root)
        if failed:
            yield f"fails without any mutation: {failed}"


def tests_of(fault: Fault, root: Path) -> list[str]:
    """The files of tests that mirror the package at fault, those named as its file first."""
    tests, names = root / "tests", [f"test_{fault.package}.py", *MIRRORS.get(fault.package, [])]
    files = [*(tests / fault.package).rglob("test_*.py"), *(tests / name for name in names)]
    found = {path.relative_to(root).as_posix() for path in files if path.exists()}
    stem = Path(fault.path).stem
    return sorted(found, key=lambda name: (stem not in Path(name).stem, name))


def noticed_by(fault: Fault, tests: dict[str, float]) -> str | None:
    """In a worker: the test that notices a fault, of these, which usually take so many seconds.

    None where none does.
    """
    path = Path("partopt", fault.path)
    content = path.read_text()
    with _kernels_kept() if "@compiled" in content else nullcontext():
        path.write_text(fault.content)
        try:
            return first_error(tests)
        finally:
            path.write_text(content)


@contextmanager
def _kernels_kept() -> Iterator[None]:
    """What numba has compiled is in the end as it was before."""
    kernels, kept = Path(KERNELS), Path(".kept")
    kernels.mkdir(exist_ok=True)
    shutil.copytree(kernels, kept)
    try:
        yield
    finally:
        shutil.rmtree(kernels)
        kept.rename(kernels)


def main() -> int:
    """Print the table."""
    from machine import describe

    parser = _parser()
    arguments = parser.parse_args()
    if arguments.draw:
        packages = arguments.package or packages_of(ROOT / "partopt")
        groups = [[package] for package in packages] if arguments.each else [packages]
        draws = (draw(ROOT / "partopt", arguments.draw, arguments.seed, group) for group in groups)
        drawn = [*chain(*draws)]
        if arguments.list:
            print("\n".join(fault.place for fault in drawn))
            return 0
        print(describe(), flush=True)
        with _checkout() as root:
            return _table_of_drawn(drawn, root, arguments.map, arguments.workers)
    chosen = [each for each in mutations() if each.name in (arguments.only or [each.name])]
    if not chosen:
        parser.error(f"no mutation is named {' or '.join(arguments.only)}: see --list")
    if arguments.list:
        print("\n".join(f"{each.name:42}{each.part:12}{each.old}" for each in chosen))
        return 0
    print(describe(), flush=True)
    with _checkout() as root:
        wrong = list(faults(chosen, root))
        if wrong:
            print(*wrong, sep="\n", file=sys.stderr)
            return PREPARED_WRONGLY
        return _table(chosen, root)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="NAME", action="append", help="this mutation alone")
    parser.add_argument("--list", action="store_true", help="name the mutations, run nothing")
    parser.add_argument("--draw", metavar="N", type=int, help="draw so many faults instead")
    parser.add_argument("--seed", metavar="S", type=int, default=0, help="of the draw")
    parser.add_argument("--package", metavar="P", action="append", help="draw in this one alone")
    parser.add_argument("--each", action="store_true", help="draw so many in each package")
    cores = os.cpu_count() or 1
    parser.add_argument("--workers", metavar="W", type=int, default=cores, help="default: cores")
    parser.add_argument(
        "--map", metavar="FILE", type=Path, help="keeps which tests run which lines"
    )
    return parser


@contextmanager
def _checkout() -> Iterator[Path]:
    """A temporary copy, compiled."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        root = Path(folder) / "checkout"
        shutil.copytree(ROOT, root, ignore=_LEFT_OUT)
        compile_checked(root)
        yield root


def compile_checked(root: Path) -> None:
    """Compile a checkout to bytecode that is checked against the text of its sources."""
    checked = py_compile.PycInvalidationMode.CHECKED_HASH
    compileall.compile_dir(root / "partopt", quiet=2, invalidation_mode=checked)


def _table(chosen: list[Mutation], root: Path) -> int:
    """A row a mutation. The exit code."""
    survived = 0
    print(f"\n{'mutation':42}killed by")
    for mutation in chosen:
        test = killed_by(mutation, root)
        survived += test is None
        print(f"{mutation.name:42}{test or 'SURVIVED'}", flush=True)
    print(f"\n{survived} of {len(chosen)} survived")
    return SURVIVED if survived else 0


def _table_of_drawn(drawn: list[Fault], root: Path, kept: Path | None, count: int) -> int:
    """Two lines a fault, and the shares that are noticed. The exit code."""
    reasons = equivalents()
    changing = [fault for fault in drawn if fault.change not in reasons]
    files = [tests_of(fault, root) for fault in changing]
    try:
        covering = CoveringTests(kept or root.with_name("map"), root)
    except ValueError as error:
        print(error, file=sys.stderr)
        return PREPARED_WRONGLY
    with workers(root, count) as pool:
        covering.record(chain(*files), pool)
        for failure in covering.failures(set(chain(*files))):
            print(f"left out, fails without any fault: {failure}", file=sys.stderr)
        found = pool.map(noticed_by, changing, map(covering.tests_for, changing, files))
        noticed, run = Counter[str](), Counter[str]()
        for fault in drawn:
            print(f"\n{fault.place}", flush=True)
            if why := reasons.get(fault.change):
                print(f"    changes nothing: {why}")
                continue
            test = next(found)
            run[fault.package] += 1
            noticed[fault.package] += test is not None
            print(f"    {test or 'SURVIVED'}", flush=True)
    _print_shares(noticed, run)
    return SURVIVED if noticed.total() < run.total() else 0


def _print_shares(noticed: Counter[str], run: Counter[str]) -> None:
    print()
    for package, count in run.items():
        print(f"{package:12}{noticed[package]:4} of {count:3}{noticed[package] / count:6.0%}")
    print(f"{'all':12}{noticed.total():4} of {run.total():3} noticed")


if __name__ == "__main__":
    sys.exit(main())
