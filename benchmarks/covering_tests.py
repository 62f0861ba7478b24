"""Which tests run which lines of the package: a map that is made once for sources and tests.

coverage notes the lines of each test, also in the processes that it forks or starts. Every file of
tests runs in a process of its own, so that no other fills its caches. Tests of one file share them:
what a fixture or a cache computes in the first, others check. So where a test runs a line, the
other tests of its file come after it.
"""

from __future__ import annotations

import ast
import hashlib
import os
import sqlite3
import sys
from collections import Counter
from collections.abc import Collection, Iterable
from concurrent.futures import Executor
from contextlib import closing, suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from coverage import Coverage, CoverageData
from coverage.exceptions import DataError
from coverage.numbits import nums_to_numbits, register_sqlite_functions
from drawn_faults import Fault
from forked_tests import Outcome, run_tests

_TEST = "COVERING_TEST"  # names the test to the processes that it starts
_SETTINGS = """
[run]
context = ${{{test}}}
data_file = {folder}/lines
disable_warnings = already-imported, no-data-collected
parallel = true
patch = _exit
source = {root}/partopt
"""
_TABLES = """
create table made_of (digest text);
create table test (name text primary key, file text, seconds real, error text);
"""
_RUNNING = """
select context from context
join line_bits on line_bits.context_id = context.id
join file on file.id = line_bits.file_id
where file.path = ? and numbits_any_intersection(line_bits.numbits, ?)
"""


class CoveringTests:
    """The map of a checkout, in a data file of coverage with tables of its own."""

    def __init__(self, path: Path, root: Path) -> None:
        """Open the map, and begin it anew where it is of another checkout.

        Raises ValueError for a file that is no map.
        """
        self.path, self.root = path, root
        digest = _digest(root)
        try:
            if path.exists() and self._rows("select digest from made_of") != [(digest,)]:
                path.unlink()
            if not path.exists():
                with closing(sqlite3.connect(path)) as database, database:
                    database.executescript(_TABLES)
                    database.execute("insert into made_of values (?)", [digest])
        except sqlite3.DatabaseError as error:
            raise ValueError(f"{path} cannot be the map of lines to tests: {error}") from error

    def record(self, files: Iterable[str], pool: Executor) -> None:
        """Run those of the files that are not in the map, and say how far it is."""
        known = {file for (file,) in self._rows("select file from test")}
        missing = sorted(set(files) - known)
        for n, (outcomes, folder) in enumerate(pool.map(_record, missing)):
            self._add(missing[n], outcomes, folder)
            seconds = sum(outcome.seconds for outcome in outcomes)
            how = f"{len(outcomes):4} tests {seconds:6.1f} s"
            print(f"{n + 1:4} of {len(missing)} {how}  {missing[n]}", file=sys.stderr)

    def _add(self, file: str, outcomes: list[Outcome], folder: Path) -> None:
        lines = CoverageData(str(self.path))
        lines.read()  # what is not read is erased
        for part in folder.glob("lines.*"):
            with suppress(DataError):  # of a process that was killed
                lines.update(CoverageData(str(part)), lambda path: path.rpartition("/partopt/")[2])
        lines.close()
        rows = [(outcome.name, file, outcome.seconds, outcome.error) for outcome in outcomes]
        with closing(sqlite3.connect(self.path)) as database, database:
            database.executemany("insert or replace into test values (?, ?, ?, ?)", rows)

    def failures(self, files: Collection[str]) -> list[str]:
        """What fails without any fault."""
        rows = self._rows("select file, name, seconds, error from test where error != ''")
        return [Outcome(*row).text for file, *row in rows if file in files]

    def tests_for(self, fault: Fault, files: Collection[str]) -> dict[str, float]:
        """The tests in some files that can notice a fault, and the seconds that each takes.

        First come those that run its line, else its function, else its file; then the others of
        their files, or of all, where the map does not see who runs the line. The quickest file and
        its quickest test are first: tests of a file share fixtures, and stay together.
        """
        rows = self._rows("select name, file, seconds from test where error = ''")
        file_of = {name: file for name, file, _ in rows if file in files}
        levels = lines_around((self.root / "partopt" / fault.path).read_text(), fault.line)
        covering = (self._running(fault.path, lines) & file_of.keys() for lines in levels)
        first = next(filter(None, covering), set[str]())
        near = {file_of[name] for name in first} if len(levels) > 1 and first else {*files}
        rows = [row for row in rows if row[1] in near]
        file_s = Counter[tuple[bool, str]]()
        for name, file, seconds in rows:
            file_s[name in first, file] += seconds
        rows.sort(key=lambda row: (row[0] not in first, file_s[row[0] in first, row[1]], *row[1:]))
        return {name: seconds for name, _, seconds in rows}

    def _running(self, path: str, lines: set[int]) -> set[str]:
        return {name for (name,) in self._rows(_RUNNING, path, nums_to_numbits(lines))}

    def _rows(self, query: str, *values: object) -> list[Any]:
        with closing(sqlite3.connect(self.path)) as database:
            register_sqlite_functions(database)
            return database.execute(query, values).fetchall()


def lines_around(source: str, line: int) -> list[set[int]]:
    """The lines of the statement at a line, of its function, and of all functions of its file.

    Only the last where nobody sees which test runs the line: statements of modules and classes run
    while something is imported, and compiled functions run without Python.
    """
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    file = set[int]().union(*map(_body, functions))
    around = [function for function in functions if _holds(function, line)]
    decorators = [node for function in around for node in function.decorator_list]
    if not around or any(ast.unparse(node).startswith("compiled(") for node in decorators):
        return [file]
    function = max(around, key=lambda node: node.lineno)
    return [_statement(function, line), _body(function), file]


def _statement(function: ast.FunctionDef, line: int) -> set[int]:
    """The lines of the innermost statement at a line: of one that holds others its beginning."""
    nodes = [node for part in function.body for node in ast.walk(part)]
    around = [node for node in nodes if isinstance(node, ast.stmt) and _holds(node, line)]
    if not around:  # the function's own beginning
        return set()
    innermost = max(around, key=lambda node: node.lineno)
    inside = getattr(innermost, "body", None)
    last = inside[0].lineno - 1 if inside else innermost.end_lineno
    return {line, *range(innermost.lineno, last + 1)} if line <= last else {line}


def _holds(node: ast.stmt, line: int) -> bool:
    assert node.end_lineno is not None
    return node.lineno <= line <= node.end_lineno


def _body(function: ast.FunctionDef) -> set[int]:
    assert function.end_lineno is not None
    return set(range(function.body[0].lineno, function.end_lineno + 1))


def _digest(root: Path) -> str:
    """Of all sources and tests, and what the tests read beside them."""
    digest = hashlib.sha256()
    for path in sorted([*(root / "partopt").rglob("*.py"), *(root / "tests").rglob("*")]):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _record(file: str) -> tuple[list[Outcome], Path]:
    """In a worker: run a file of tests. The folder holds the lines of each of its processes."""
    root = Path.cwd()
    folder = Path(mkdtemp(prefix="lines-", dir=root.parent))
    settings = folder / "settings"
    settings.write_text(_SETTINGS.format(test=_TEST, folder=folder, root=root))
    return run_tests([file], plugins=[_Recorder(settings)]), folder


class _Recorder:
    """A plugin that records the lines of each test, and lets all its processes do so."""

    def __init__(self, settings: Path) -> None:
        self.settings = settings

    def pytest_sessionstart(self) -> None:
        self.coverage = Coverage(config_file=str(self.settings))
        self.coverage.start()
        os.environ["COVERAGE_PROCESS_START"] = str(self.settings)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        os.environ[_TEST] = nodeid
        self.coverage.switch_context(nodeid)

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        self.coverage.save()
