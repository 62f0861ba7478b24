"""Profiles, topologies and devices that come with partopt, and the names that they go by."""

from __future__ import annotations

import os
from pathlib import Path

from partopt.documents.files import PathLike
from partopt.errors import PartoptError, did_you_mean

_SUFFIXES = {"profiles": ".json", "topologies": ".yaml", "devices": ".yaml"}
_SINGULAR = {"profiles": "profile", "topologies": "topology", "devices": "device"}


def folder(kind: str) -> Path:
    """The folder of `kind`, "profiles", "topologies" or "devices".

    It lies in the installed package or, in a checkout, next to the package.
    """
    package = Path(__file__).parent.parent
    installed = package / "shipped" / kind
    return installed if installed.is_dir() else package.parent / kind


def names(kind: str) -> list[str]:
    """The shipped names of `kind`, sorted."""
    suffix = _SUFFIXES[kind]
    return sorted(path.name.removesuffix(suffix) for path in folder(kind).glob(f"*{suffix}"))


def find(given: PathLike, *kinds: str) -> str:
    """The path of `given`: a file, `-`, or a shipped name of one of `kinds`.

    Raises PartoptError, with the nearest name, otherwise.
    """
    given = os.fspath(given)
    if given == "-" or os.path.exists(given):  # noqa: PTH110 (unlike Path.exists it never raises)
        return given
    for kind in kinds:
        if given in names(kind):
            return str(folder(kind) / f"{given}{_SUFFIXES[kind]}")
    known = [name for kind in kinds for name in names(kind)]
    *others, last = (_SINGULAR[kind] for kind in kinds)
    what = f"{', '.join(others)} or {last}" if others else last
    raise PartoptError(
        f"{given}: no such file, and no shipped {what} of that name",
        did_you_mean(given, known),
        code="no-such-file",
        path=given,
    )
