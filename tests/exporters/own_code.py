"""Trainers' own code in a test: skipped where a trainer is missing, all ranks in one process."""

from __future__ import annotations

import ast
import contextlib
import importlib.metadata
from collections.abc import Iterator, Mapping
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


def defined(package: str, file: str, name: str, names: Mapping[str, Any]) -> Any:
    """The function or class `name` of a package's file, run with these `names` and no others.

    It is for packages that do not import as a whole without all that they depend on.
    """
    path = importlib.metadata.distribution(package).locate_file(file)
    tree = ast.parse(Path(str(path)).read_text(encoding="utf-8"))
    unread = ast.parse("from __future__ import annotations").body  # types name more than is there
    tree.body = unread + [node for node in tree.body if getattr(node, "name", None) == name]
    space = dict(names)
    exec(compile(tree, str(path), "exec", dont_inherit=True), space)
    return space[name]
