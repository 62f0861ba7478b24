"""Timelines on pages and in files, as the verbs that draw them do."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

import click

from partopt.cli import options
from partopt.errors import PartoptError


class PageStyle(NamedTuple):
    """What a page may contain."""

    ascii_only: bool
    colour: bool


def page_style() -> PageStyle:
    """The style of pages on standard output: in colours on a terminal."""
    context = click.get_current_context()
    colour = sys.stdout.isatty() if context.color is None else context.color
    return PageStyle(options.ascii_only(), colour)


def check_output(output: str | None, force: bool, as_json: bool) -> None:
    """Refuse an output that could not be written, or of an unknown form, before any work."""
    import partopt
    from partopt import documents

    if output == "-" and as_json:
        raise PartoptError(
            "-o - --json: both print on standard output", "choose one of them", code="usage"
        )
    if output:
        partopt.Simulation.form_of(output)
        documents.check_writable(output, force)


def name_files(files: Sequence[str]) -> str:
    """The files that were written; of many the first, the last but one and the last."""
    return ", ".join(files) if len(files) < 3 else f"{files[0]} .. {files[-2]}, {files[-1]}"
