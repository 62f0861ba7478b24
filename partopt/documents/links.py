"""The links of a cluster as measured, the topology fitted to them, and how far that is off."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from partopt.documents.reading import Note
from partopt.documents.topology import Topology
from partopt.units import format_bytes

POOR = 0.15  # a fit with a larger error anywhere is called poor
_WIDTH = 98  # of comments in the file


@dataclass(frozen=True)
class MessageSample:
    """A message of a level: its seconds, and those until the call that sends it returns."""

    size_bytes: int
    seconds: float
    send_s: float


@dataclass(frozen=True)
class AllReduceSample:
    """An all-reduce over `ranks` ranks, all on different members of the level."""

    ranks: int
    size_bytes: int
    seconds: float


@dataclass(frozen=True)
class LevelSamples:
    """Everything measured on one level.

    `both` are messages of the same pair in both directions at once, `ports` those of all pairs of
    two servers, or of the ranks of one, at once; none where there is a single pair.
    """

    name: str
    size: int
    messages: tuple[MessageSample, ...]
    allreduces: tuple[AllReduceSample, ...]
    both: tuple[MessageSample, ...] = ()
    ports: tuple[MessageSample, ...] = ()


@dataclass(frozen=True)
class LinkMeasurement:
    """The levels of a cluster, innermost first, and what they were measured on."""

    device: str
    memory_bytes: int | None  # of one rank's device
    backend: str
    ranks: int
    hosts: tuple[str, ...]  # by rank
    load: float  # runnable processes a core of the busiest host, before
    cores: int  # of that host
    levels: tuple[LevelSamples, ...]
    whole: tuple[AllReduceSample, ...] = ()  # over all ranks, where there are several levels


@dataclass(frozen=True)
class FitComparison:
    """One measured figure beside what the topology says, and the time of the whole message.

    That is the same, but for what a message takes of its sender.
    """

    level: str
    what: str
    size_bytes: int
    measured_s: float
    fitted_s: float
    whole_s: float

    @property
    def error(self) -> float:
        """What the topology says relative to what was measured; positive where it is more."""
        return self.fitted_s / self.measured_s - 1

    @property
    def off(self) -> float:
        """The size of the error, relative to what was measured or, if less, the whole message."""
        return min(abs(self.error), abs(self.fitted_s - self.measured_s) / self.whole_s)

    @property
    def is_poor(self) -> bool:
        """Whether the topology is too far off here."""
        return self.off > POOR


@dataclass(frozen=True)
class FittedLinks:
    """A measurement, the topology fitted to it, and how far off that is, size by size.

    `notes` say what makes the figures doubtful.
    """

    measurement: LinkMeasurement
    topology: Topology
    comparisons: Sequence[FitComparison]
    notes: Sequence[Note]

    @property
    def worst(self) -> FitComparison:
        """Where the fit is furthest off."""
        return max(self.comparisons, key=lambda comparison: comparison.off)

    @property
    def quality(self) -> str:
        """`good fit: ...` or `POOR FIT: ...`, with the sizes at which it fails."""
        worst = self.worst
        where = f"{worst.level}, {worst.what}, {format_bytes(worst.size_bytes)}"
        largest = f"largest error {worst.off:.0%} ({where})"
        failing: dict[str, list[str]] = {}
        for comparison in self.comparisons:
            if comparison.is_poor:
                sizes = failing.setdefault(f"{comparison.level}, {comparison.what}", [])
                sizes.append(format_bytes(comparison.size_bytes))
        if not failing:
            return f"good fit: {largest}"
        places = "; ".join(f"{place}: {', '.join(sizes)}" for place, sizes in failing.items())
        return f"POOR FIT: {largest}; over {POOR:.0%} off at {places}"

    @property
    def text(self) -> str:
        """The file of the cluster, which `Topology.parse` reads: how good it is, in comments."""
        notes = [*(note.text for note in self.notes), self.quality]
        head = [f"# {line}\n" for note in notes for line in textwrap.wrap(note, _WIDTH)]
        return "".join([*head, self.topology.dump().rstrip("\n"), "\n"])

    @property
    def document(self) -> dict[str, Any]:
        """All figures, as JSON has them (`partopt.links/1`)."""
        return {
            "schema": "partopt.links/1",
            "topology": self.topology,
            "is_poor": self.worst.is_poor,
            "comparisons": [
                asdict(comparison) | {"error": comparison.error} for comparison in self.comparisons
            ],
            "measurement": self.measurement,
            "notes": self.notes,
        }
