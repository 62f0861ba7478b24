"""Importers: profiles that other programs measured, and configurations of transformers.

A program whose profiles are read has a file, and a line in the registry here. An importer is a
function `read(content: str, where: str, name: str, microbatch_size: int | None) -> Profile`,
imported when it is first used.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from msgspec.structs import replace

from partopt.documents.files import read_bytes
from partopt.errors import PartoptError
from partopt.registry import Registry

if TYPE_CHECKING:
    from partopt.documents.profile import Profile

Importer: TypeAlias = "Callable[[str, str, str, int | None], Profile]"

IMPORTERS: Registry[Importer] = Registry(
    "importer", Callable, {"pipedream": "partopt.importers.pipedream:read"}
)


def import_profile(
    form: str,
    path: str,
    *,
    name: str | None = None,
    microbatch_size: int | None = None,
    device: str | None = None,
) -> Profile:
    """The profile in the file `path` (`-` is standard input), as another program wrote it.

    `form` is a name from `IMPORTERS`; `name` is what to call the model, by default the file's name;
    `microbatch_size` the samples that were measured at once and `device` the name of the device,
    where the file does not say. Raises PartoptError for an unknown format and, with its place, for
    what cannot be read in the file.
    """
    read = IMPORTERS.lookup(form)
    try:
        content = read_bytes(path).decode()
    except UnicodeDecodeError:
        raise PartoptError(
            f"{path}: not text",
            "is this the file that the profiler wrote?",
            code="malformed-document",
            path=path,
        ) from None
    profile = read(content, path, name or Path(path).stem, microbatch_size)
    return replace(profile, device=replace(profile.device, name=device)) if device else profile
