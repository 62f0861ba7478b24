"""Profiles and topologies that come with partopt, and the names that they go by."""

from __future__ import annotations

from pathlib import Path

from partopt.errors import PartoptError, did_you_mean

_SUFFIXES = {"profiles": ".json", "topologies": ".yaml"}


def folder(kind: str) -> Path:
    """The folder of `kind`, "profiles" or "topologies": in the installed package, or beside it in a checkout."""
    package = Path(__file__).parent
    installed = package / "shipped" / kind
    return installed if installed.is_dir() else package.parent / kind


def names(kind: str) -> list[str]:
    """The shipped names of `kind`, sorted."""
    suffix = _SUFFIXES[kind]
    return sorted(path.name.removesuffix(suffix) for path in folder(kind).glob(f"*{suffix}"))


def find(given: str, kind: str) -> str:
    """The path of `given`: a file, `-`, or a shipped name. Raises PartoptError, with the nearest shipped name, where it is neither."""
    if given == "-" or Path(given).exists():
        return given
    if given in names(kind):
        return str(folder(kind) / f"{given}{_SUFFIXES[kind]}")
    raise PartoptError(f"{given}: no such file, and no shipped {_SINGULAR[kind]} of that name", did_you_mean(given, names(kind)))


_SINGULAR = {"profiles": "profile", "topologies": "topology"}
