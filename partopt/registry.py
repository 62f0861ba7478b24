"""Registries: the names of schedules, planners and importers, and what these stand for.

The built-in names come first. After them come those of installed packages, which announce what they
add by entry points of the group `partopt.schedules`, `partopt.planners` or `partopt.importers`.
Nothing is imported before it is needed, and looking up a built-in name does not search the
installed packages.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from partopt.errors import PartoptError, unknown

Entry = TypeVar("Entry")


class Registry(Mapping[str, Entry], Generic[Entry]):
    """The entries of one group, by name: the built-in ones, then those of installed packages.

    Those of `builtin` are in its order, the installed ones in the order of their names. `what`
    names an entry in errors, and `partopt.<what>s` its group of entry points; `kind` is the class
    of every entry. `builtin` has entries, or says where one is: `module:attribute`.
    """

    def __init__(self, what: str, kind: Any, builtin: dict[str, Entry | str]) -> None:
        self.what = what
        self.kind = kind
        self.builtin = builtin

    @property
    def group(self) -> str:
        """The group of entry points whose names are installed ones."""
        return f"partopt.{self.what}s"

    def __getitem__(self, name: str) -> Entry:
        """The entry `name`.

        Raises KeyError where there is none, PartoptError where a package's entry cannot be loaded.
        """
        if name not in self.builtin:
            return self._load(self.installed[name])
        found = self.builtin[name]
        if isinstance(found, str):
            module, _, attribute = found.partition(":")
            found = self.builtin[name] = getattr(importlib.import_module(module), attribute)
        return found

    def __contains__(self, name: object) -> bool:
        return name in self.builtin or name in self.installed

    def __iter__(self) -> Iterator[str]:
        yield from self.builtin
        yield from self.installed

    def __len__(self) -> int:
        return len(self.builtin) + len(self.installed)

    def lookup(self, name: str) -> Entry:
        """The entry `name`. PartoptError where there is none, with the nearest name."""
        if name not in self:
            what = f'unknown {self.what} "{name}"'
            raise unknown(what, name, self, code=f"unknown-{self.what}", name=name)
        return self[name]

    @cached_property
    def installed(self) -> dict[str, EntryPoint]:
        """The entry points of the group by name, in the order of names.

        PartoptError where one takes the name of a built-in entry or of another package's.
        """
        found: dict[str, EntryPoint] = {}
        for point in sorted(entry_points(group=self.group), key=lambda point: point.name):
            owner = "partopt" if point.name in self.builtin else None
            if point.name in found and found[point.name].value != point.value:
                owner = _package(found[point.name])
            if owner is not None:
                raise PartoptError(
                    f'{self.what} "{point.name}" of {_package(point)}: {owner} has this name',
                    "uninstall one of the packages, or rename its entry point",
                    code="duplicate-entry-point",
                    name=point.name,
                    group=self.group,
                )
            found[point.name] = point
        return found

    def _load(self, point: EntryPoint) -> Entry:
        try:
            entry: Entry = point.load()
        except Exception as error:
            raise self._broken(point, f"{type(error).__name__}: {error}") from error
        if not isinstance(entry, self.kind):
            raise self._broken(point, f"{point.value} is not a {self.kind.__name__}")
        name = getattr(entry, "name", point.name)
        if name != point.name:
            raise self._broken(point, f'{point.value} has the name "{name}"')
        return entry

    def _broken(self, point: EntryPoint, why: str) -> PartoptError:
        return PartoptError(
            f'{self.what} "{point.name}" of {_package(point)}: {why}',
            "update that package, or uninstall it",
            code="broken-entry-point",
            name=point.name,
            group=self.group,
        )


def _package(point: EntryPoint) -> str:
    """The package that an entry point belongs to."""
    return f"the package {point.dist.name}" if point.dist is not None else point.value
