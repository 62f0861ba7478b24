"""Importers: profiles measured by other programs. One file each, and one line in the registry here.

An importer's file has one function, `read(content: str, where: str, name: str, microbatch_size:
int) -> Profile`.
"""

from __future__ import annotations

IMPORTERS: dict[str, str] = {
    "pipedream": "partopt.importers.pipedream",
}
