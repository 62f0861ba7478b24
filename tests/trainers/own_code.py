"""Trainers' own code in a test: skipped where a trainer is missing, all ranks in one process."""

from __future__ import annotations

import ast
import contextlib
import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist


def installed(package: str) -> bool:
    """Whether the package is there, which is not imported."""
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skips the tests of a file where one of the packages is missing."""
    missing = [package for package in packages if not installed(package)]
    return pytest.mark.skipif(
        bool(missing), reason=f"{', '.join(missing)} not installed (`make test-exporters`)"
    )


@contextlib.contextmanager
def as_rank(rank: int, ranks: int) -> Iterator[None]:
    """A process group in which this process is `rank` of `ranks`; nothing is sent to the others."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def defined(package: str, file: str, *names: str, **others: Any) -> Any:
    """The last of the functions and classes `names` of a package's file, run alone.

    It is for packages that do not import without all that they depend on: of the file's imports,
    those of other packages are done where they can be, and `others` stand for its own.
    """
    path = Path(str(importlib.metadata.distribution(package).locate_file(file)))
    tree = ast.parse(path.read_text(encoding="utf-8"))
    unread = ast.parse("from __future__ import annotations").body  # types name more than is there
    space: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom) and not _is_own(node, path):
            with contextlib.suppress(ImportError):
                _run([node], path, space)
    space |= others
    chosen = [node for node in tree.body if getattr(node, "name", None) in names]
    _run([*unread, *chosen], path, space)
    return space[names[-1]]


def _is_own(node: ast.Import | ast.ImportFrom, path: Path) -> bool:
    """Whether the import is of the package that the file is in."""
    of = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
    relative = isinstance(node, ast.ImportFrom) and node.level > 0
    return relative or any(name.partition(".")[0] in path.parts for name in of)


def _run(body: list[ast.stmt], path: Path, space: dict[str, Any]) -> None:
    exec(compile(ast.Module(body, type_ignores=[]), str(path), "exec", dont_inherit=True), space)
