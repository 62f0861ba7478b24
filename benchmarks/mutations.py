"""Small faults in the product, one at a time, and whether the tests notice them.

    python benchmarks/mutations.py [--only NAME] [--list]

The faults are in `mutations.toml`. Each is made in a temporary copy of the checkout, where pytest
runs the tests that have to notice it, first without any fault. The exit code is 1 if one survives,
2 where a fault cannot be made or the tests fail without one.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LIST = Path(__file__).with_suffix(".toml")
LIMIT_S = 900  # for the tests of one mutation: a fault may keep a search from ending
# a module's bytecode is kept by the second and the size of its source, which a mutation may share
ENVIRONMENT = {"PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "400"}
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


def first_failure(tests: str, root: Path) -> str | None:
    """The first test that fails, None where all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [*command, "--hypothesis-seed=0", *tests.split()],
            cwd=root,
            env=os.environ | ENVIRONMENT | {"PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return f"no end within {LIMIT_S} s"
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if failed is None and done.returncode:
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


def main() -> int:
    """Print the table."""
    from machine import describe

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="NAME", action="append", help="this mutation alone")
    parser.add_argument("--list", action="store_true", help="name the mutations, run nothing")
    arguments = parser.parse_args()
    chosen = [each for each in mutations() if each.name in (arguments.only or [each.name])]
    if not chosen:
        parser.error(f"no mutation is named {' or '.join(arguments.only)}: see --list")
    if arguments.list:
        print("\n".join(f"{each.name:42}{each.part:12}{each.old}" for each in chosen))
        return 0
    print(describe(), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "checkout"
        shutil.copytree(ROOT, root, ignore=_LEFT_OUT)
        wrong = list(faults(chosen, root))
        if wrong:
            print(*wrong, sep="\n", file=sys.stderr)
            return PREPARED_WRONGLY
        return _table(chosen, root)


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


if __name__ == "__main__":
    sys.exit(main())
