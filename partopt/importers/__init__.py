"""Importers: profiles measured by other programs. One file each, and one line in the registry here.

An importer is a function `read(content: str, where: str, name: str, microbatch_size: int) ->
Profile`, imported when it is first used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from partopt.registry import Registry

if TYPE_CHECKING:
    from partopt.documents.profile import Profile

Importer: TypeAlias = "Callable[[str, str, str, int], Profile]"

IMPORTERS: Registry[Importer] = Registry(
    "importer", Callable, {"pipedream": "partopt.importers.pipedream:read"}
)
