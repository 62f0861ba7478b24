"""What a figure shows of a timeline, and its size."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from partopt.errors import PartoptError
from partopt.report.phases import Phases, phases_of
from partopt.report.pictures.look import COLUMN, FULL
from partopt.schedules.order import A, U
from partopt.simulator.slots import Slots, drawn_ranks, slots
from partopt.simulator.timeline import Timeline

LEFT, RIGHT = 0.42, 0.86  # inches beside the rows, for ranks, and for what they take
BREAK = 0.14  # inches between the parts of a long timeline
GAP = 0.08  # of a row, above and below its cells
POINTS = 72  # of an inch
DIGIT = 0.62  # width of a digit, of its size
_ROWS = 64
_MOST_DRAWN = 1_000_000
_MOST_NUMBERS = 3_000
_SMALLEST, _LARGEST = 4.5, 6.0  # points of a microbatch's number
_READABLE, _NARROWEST = 1.5, 1.0  # points of cells in a whole timeline, and in a part of a long one
_FEWEST = 20  # cells of a part
_THIRD = (FULL - LEFT - RIGHT - 2 * BREAK) / 3


@dataclass(frozen=True)
class Page:
    """Ranks and their actions from `begin` to `end` seconds.

    The rows are `width` inches wide and together `height` inches high. `chunks` are the most stages
    that a rank holds, and `paired` tells whether two actions run at once somewhere.
    """

    ranks: list[int]
    note: str
    rows: dict[int, Slots]
    begin: float
    end: float
    width: float
    height: float
    chunks: int
    paired: bool

    @property
    def points_per_second(self) -> float:
        """Points, 1/72 inch each, to a second."""
        return self.width * POINTS / (self.end - self.begin)

    @property
    def outlined(self) -> bool:
        """Whether most cells are wide enough for a line between them."""
        return self.typical_s * self.points_per_second > 1.7

    @property
    def typical_s(self) -> float:
        """Seconds that most cells take at the least."""
        seconds = np.concatenate([own.end - own.start for own in self.rows.values()])
        return float(np.quantile(seconds, 0.2)) if len(seconds) else 0.0

    @property
    def step(self) -> int:
        """Of how many rows one is labelled, so that the labels have room."""
        row = self.height / len(self.ranks)
        return next(step for step in (1, 2, 4, 8, 16, 32) if row * step >= 0.11)

    @property
    def cells(self) -> int:
        """Actions that are drawn."""
        return sum(len(own.kind) for own in self.rows.values())


def pages_of(timeline: Timeline, window: tuple[float, float] | None) -> list[Page]:
    """The timeline, or the seconds of it in `window`, as one page or as three side by side.

    One column wide where the numbers of the microbatches fit their cells there, otherwise two.
    Where cells would be too narrow to be told apart, the beginning, the middle and the end are
    shown, all at one scale. Raises PartoptError where there is nothing or too much to draw.
    """
    begin, end = window or (0.0, float(timeline.makespan))
    ranks, note = drawn_ranks(timeline.order, _ROWS)
    every = {rank: slots(timeline, rank) for rank in ranks}
    paired = any(bool(own.pair.any()) for own in every.values())
    chunks = 1 + max(int(own.chunk.max(initial=0)) for own in every.values())
    height = len(ranks) * max(0.065, min(0.26 if paired else 0.17, 2.6 / len(ranks)))

    def page(begin: float, end: float, inches: float) -> Page:
        rows = {rank: _within(own, begin, end) for rank, own in every.items()}
        return Page(ranks, note, rows, begin, end, inches, height, chunks, paired)

    whole = page(begin, end, COLUMN - LEFT - RIGHT)
    if not whole.cells or end <= begin:
        raise PartoptError(
            "there is nothing to draw",
            "choose a window in which something happens",
            code="nothing-to-draw",
        )
    if number_size(whole) == 0:
        whole = replace(whole, width=FULL - LEFT - RIGHT)
    pages = [page(*part, _THIRD) for part in _parts(whole, phases_of(timeline))] or [whole]
    cells = sum(each.cells for each in pages)
    if cells > _MOST_DRAWN:
        raise PartoptError(
            f"a figure of {cells:,} actions is more than anyone can see",
            "simulate fewer `microbatches`",
            code="too-many-actions",
            actions=cells,
            limit=_MOST_DRAWN,
        )
    return pages


def _parts(whole: Page, phases: Phases) -> list[tuple[float, float]]:
    """Begin and end of the three parts that are shown of a page; none where it is shown whole."""
    typical = whole.typical_s
    if not 0 < typical * whole.points_per_second < _READABLE:
        return []
    begin, end = whole.begin, whole.end
    long = max(phases.fill_end - begin, end - phases.drain_begin, _FEWEST * typical)
    span = min(1.1 * long, _THIRD * POINTS * typical / _NARROWEST)
    if span > (end - begin) / 3:
        return []
    middle = (begin + end) / 2
    return [
        (begin, begin + span),
        (middle - span / 2, middle + span / 2),
        (end - span, end),
    ]


def _within(own: Slots, begin: float, end: float) -> Slots:
    """The actions that take time in [begin, end], without all-reduces.

    All-reduces are drawn while they are exchanged, not while a rank waits for them.
    """
    inside = (own.end > begin) & (own.start < end) & (own.end > own.start) & (own.kind != A)
    return Slots._make(column[inside] for column in own)


def number_size(page: Page) -> float:
    """Points of the numbers that fit the cells of most microbatches.

    0 where they would be too small to read.
    """
    numbered = [own.kind != U for own in page.rows.values()]
    seconds = np.concatenate(
        [
            (own.end - own.start)[which]
            for own, which in zip(page.rows.values(), numbered, strict=True)
        ]
    )
    widest = len(str(max(int(own.microbatch.max(initial=0)) for own in page.rows.values())))
    if not len(seconds) or len(seconds) > _MOST_NUMBERS:
        return 0.0
    room = float(np.quantile(seconds, 0.1)) * page.points_per_second - 0.8
    height = page.height * POINTS / len(page.ranks) * (1 - 2 * GAP) / (2 if page.paired else 1)
    size = min(_LARGEST, room / (DIGIT * widest), height * 0.85)
    return size if size >= _SMALLEST else 0.0
