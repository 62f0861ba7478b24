"""What a simulation points at, as people read it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import click

from partopt.report.table import WIDTH
from partopt.simulator.finding import Finding

_INDENT = " " * 9


def render(found: Sequence[Finding]) -> str:
    """Each finding and, below it, what to change."""
    if not found:
        return "advice   nothing to point at"
    return "\n".join([click.style("ADVICE", bold=True), *(_finding(each) for each in found)])


def _finding(finding: Finding) -> str:
    text = _wrapped(f"{finding.text}.", f"{finding.severity:9}")
    return f"{text}\n{_wrapped(finding.change, _INDENT + '-> ')}"


def _wrapped(text: str, begin: str) -> str:
    """The text after `begin`, in lines of 80 columns; flags and names are broken only where they
    are longer than a line.
    """
    rest = _INDENT if begin.strip() != "->" else " " * len(begin)
    return textwrap.fill(
        text, WIDTH, initial_indent=begin, subsequent_indent=rest, break_on_hyphens=False
    )
