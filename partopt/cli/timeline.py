"""Timelines on pages and in files, as the verbs that draw them do."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import click

from partopt.cli.terminal import ascii_only
from partopt.errors import PartoptError


class PageStyle(NamedTuple):
    """What a page may contain."""

    ascii_only: bool
    colour: bool


def page_style() -> PageStyle:
    """The style of pages on standard output: in colours on a terminal."""
    context = click.get_current_context()
    colour = sys.stdout.isatty() if context.color is None else context.color
    return PageStyle(ascii_only(), colour)


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


def parse_window(output: str | None, window: str | None) -> tuple[float, float] | None:
    """The seconds of `--window`, which goes with a figure alone."""
    from partopt.report.pictures import FORMS
    from partopt.units import parse_seconds

    if window is None:
        return None
    if output is None or Path(output).suffix.lower().removeprefix(".") not in FORMS:
        raise PartoptError(
            "--window: goes with a figure", "add -o timeline.svg", code="unused-option"
        )
    begin, comma, end = window.partition(",")
    hint = 'write it as --window "0.2 s,0.4 s"'
    try:
        found = parse_seconds(begin), parse_seconds(end)
    except PartoptError as error:
        raise PartoptError(f"--window: {error.message}", hint, code="invalid-option") from None
    if not comma or not 0 <= found[0] < found[1]:
        raise PartoptError(f"--window: {window} is no stretch of time", hint, code="invalid-option")
    return found
