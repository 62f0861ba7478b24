"""The advice of a simulation, as people read it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

import click

from partopt.documents.simulation import Finding
from partopt.report.table import WIDTH

_INDENT = " " * 9


def render(findings: Sequence[Finding], spell: Callable[[str], str] = str) -> str:
    """Each finding and, below it, what to change, with options and verbs as `spell` writes them."""
    if not findings:
        return "advice   nothing to point at"
    lines = [_finding(finding, spell) for finding in findings]
    return "\n".join([click.style("ADVICE", bold=True), *lines])


def _finding(finding: Finding, spell: Callable[[str], str]) -> str:
    text = _wrap(f"{spell(finding.text)}.", f"{finding.severity:9}")
    return f"{text}\n{_wrap(spell(finding.change), _INDENT + '-> ')}"


def _wrap(text: str, begin: str) -> str:
    """The text after `begin`, in lines of 80 columns.

    Options and names are broken only where they are longer than a line.
    """
    rest = _INDENT if begin.strip() != "->" else " " * len(begin)
    return textwrap.fill(
        text, WIDTH, initial_indent=begin, subsequent_indent=rest, break_on_hyphens=False
    )
