"""The advice of a simulation, as people read it."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Callable, Iterator, Sequence

import click

from partopt.documents.simulation import Finding
from partopt.report.commands import command_lines
from partopt.report.width import columns

_INDENT = " " * 9
_FURTHER = " " * 12  # of what stands below an arrow


def render(
    findings: Sequence[Finding],
    spell: Callable[[str], str] = str,
    command: Callable[[Finding], Sequence[str]] | None = None,
) -> str:
    """Each finding and, below it, what a change brings and the `command` that makes it.

    Options and verbs are as `spell` writes them.
    """
    if not findings:
        return "advice   nothing to point at"
    lines = [line for finding in findings for line in _finding(finding, spell, command)]
    return "\n".join([click.style("ADVICE", bold=True), *lines])


def _finding(
    finding: Finding,
    spell: Callable[[str], str],
    command: Callable[[Finding], Sequence[str]] | None,
) -> Iterator[str]:
    yield _wrap(f"{spell(finding.text)}.", f"{finding.severity:9}", _INDENT)
    if finding.verb:
        yield _wrap(f"{spell(finding.change)}:", f"{_INDENT}-> ", _FURTHER)
        if command is not None:
            words = map(shlex.quote, command(finding))
            yield from command_lines(words, _FURTHER, _FURTHER, columns())


def _wrap(text: str, begin: str, rest: str) -> str:
    """The text after `begin`, in lines of the page's width.

    Options and names are broken only where they are longer than a line.
    """
    return textwrap.fill(
        text, columns(), initial_indent=begin, subsequent_indent=rest, break_on_hyphens=False
    )
