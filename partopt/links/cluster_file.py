"""A fitted topology as the YAML file of a cluster, with the fit's errors beside each level."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from partopt.documents.topology import Topology
from partopt.links.errors import POOR, Comparison, worst
from partopt.units import format_bytes

_WIDTH = 110
_LEVEL = re.compile(r"- name: ")


def cluster_text(
    topology: Topology, comparisons: Sequence[Comparison], notes: Iterable[str]
) -> str:
    """The file; what is said in `notes` and the quality of the fit are its first comments.

    `Topology.parse` reads it.
    """
    lines = topology.dump().splitlines()
    head = [f"# {line}" for note in notes for line in textwrap.wrap(note, _WIDTH)]
    head += [f"# {line}" for line in textwrap.wrap(quality(comparisons), _WIDTH)]
    body: list[str] = []
    names = iter([level.name for level in topology.levels])
    for line in lines:
        if _LEVEL.match(line):
            body += _comments(next(names), comparisons)
        body.append(line)
    body += _comments("all", comparisons)
    return "\n".join([*head, *body]) + "\n"


def quality(comparisons: Sequence[Comparison]) -> str:
    """`good fit: ...` or `POOR FIT: ...`, with the sizes at which it fails."""
    far = worst(comparisons)
    largest = f"largest error {abs(far.error):.0%} ({far.level}, {far.what}, {_size(far)})"
    failing = [each for each in comparisons if each.is_poor]
    if not failing:
        return f"good fit: {largest}"
    places = "; ".join(
        f"{level}, {what}: {', '.join(_size(each) for each in rows)}"
        for (level, what), rows in grouped(failing)
    )
    return f"POOR FIT: {largest}; over {POOR:.0%} off at {places}"


def grouped(
    comparisons: Iterable[Comparison],
) -> Iterator[tuple[tuple[str, str], list[Comparison]]]:
    """The comparisons of each level and kind, in the order of their first."""
    found: dict[tuple[str, str], list[Comparison]] = {}
    for each in comparisons:
        found.setdefault((each.level, each.what), []).append(each)
    yield from found.items()


def _comments(name: str, comparisons: Iterable[Comparison]) -> Iterator[str]:
    """A comment for each kind of traffic of a level: fitted against measured, size by size."""
    for (level, what), rows in grouped(comparisons):
        if level == name:
            errors = ", ".join(f"{_size(each)} {each.error:+z.0%}" for each in rows)
            yield f"# {what}: {errors}"


def _size(comparison: Comparison) -> str:
    return format_bytes(comparison.size_bytes)
