"""Tables in files: as their documents or as pictures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from partopt.cli.terminal import say

if TYPE_CHECKING:
    from partopt.documents.tables import Comparison, GroupComparison, Scaling


def check(output: str, force: bool) -> None:
    """Refuse, before any work is done, a file in which a table could not be written."""
    from partopt import documents
    from partopt.report import pictures

    if Path(output).suffix.lower() == ".json":
        documents.check_writable(output, force)
    else:
        pictures.check(output, force, beside=["json"])


def write(table: Comparison | GroupComparison | Scaling, output: str, force: bool) -> None:
    """Write a table as its document (`.json`) or as a picture of it."""
    import partopt

    if Path(output).suffix.lower() == ".json":
        table.save(output, force)
    else:
        partopt.draw(table, output, force=force)
    say(f"Wrote {output}", err=True)
