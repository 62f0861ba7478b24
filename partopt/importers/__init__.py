"""Importers: profiles measured by other programs. One file each, and one line in the registry here.

An importer is a function `read(content: str, where: str, name: str, microbatch_size: int) ->
Profile`, imported when it is first used.
"""

from __future__ import annotations

from collections.abc import Callable

from partopt.documents.profile import Profile
from partopt.registry import Registry

Importer = Callable[[str, str, str, int], Profile]

IMPORTERS: Registry[Importer] = Registry(
    "importer", Callable, {"pipedream": "partopt.importers.pipedream:read"}
)
