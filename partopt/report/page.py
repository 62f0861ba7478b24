"""What a figure shows of a timeline, and its size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from partopt.errors import PartoptError
from partopt.report.pictures.look import COLUMN, FULL
from partopt.schedules.order import A, U
from partopt.simulator.slots import Slots, drawn_ranks, slots
from partopt.simulator.timeline import Timeline

LEFT, RIGHT = 0.35, 0.1  # inches beside the rows
GAP = 0.08  # of a row, above and below its cells
POINTS = 72  # of an inch
DIGIT = 0.62  # width of a digit, of its size
_ROWS = 64
_MOST_DRAWN = 1_000_000
_MOST_NUMBERS = 3_000
_SMALLEST, _LARGEST = 4.5, 6.0  # points of a microbatch's number


@dataclass(frozen=True)
class Page:
    """Ranks and their actions from `begin` to `end` seconds.

    The rows are `width` inches wide and together `height` inches high.
    """

    ranks: list[int]
    note: str
    rows: dict[int, Slots]
    begin: float
    end: float
    width: float
    height: float

    @property
    def points_per_second(self) -> float:
        """Points, 1/72 inch each, to a second."""
        return self.width * POINTS / (self.end - self.begin)

    @property
    def outlined(self) -> bool:
        """Whether most cells are wide enough for a line between them."""
        seconds = np.concatenate([own.end - own.start for own in self.rows.values()])
        return float(np.quantile(seconds, 0.2)) * self.points_per_second > 2

    @property
    def cells(self) -> int:
        """Actions that are drawn."""
        return sum(len(own.kind) for own in self.rows.values())

    @property
    def paired(self) -> bool:
        """Whether two actions run at once somewhere."""
        return any(bool(own.pair.any()) for own in self.rows.values())

    @property
    def chunks(self) -> int:
        """The most stages that a rank holds."""
        return 1 + max(int(own.chunk.max(initial=0)) for own in self.rows.values())


def page_of(timeline: Timeline, window: tuple[float, float] | None) -> Page:
    """The page of the timeline, or of the seconds of it in `window`.

    One column wide where the numbers of the microbatches fit their cells there, otherwise two.
    Raises PartoptError where there is nothing or too much to draw.
    """
    begin, end = window or (0.0, float(timeline.makespan))
    ranks, note = drawn_ranks(timeline.order, _ROWS)
    rows = {rank: _within(slots(timeline, rank), begin, end) for rank in ranks}
    cells = sum(len(own.kind) for own in rows.values())
    if not cells or end <= begin:
        raise PartoptError(
            "there is nothing to draw",
            "choose a window in which something happens",
            code="nothing-to-draw",
        )
    if cells > _MOST_DRAWN:
        raise PartoptError(
            f"a figure of {cells:,} actions is more than anyone can see",
            "simulate fewer `microbatches`",
            code="too-many-actions",
            actions=cells,
            limit=_MOST_DRAWN,
        )
    paired = any(bool(own.pair.any()) for own in rows.values())
    row = max(0.065, min(0.26 if paired else 0.17, 2.6 / len(ranks)))
    page = Page(ranks, note, rows, begin, end, COLUMN - LEFT - RIGHT, row * len(ranks))
    if number_size(page) == 0:
        page = Page(ranks, note, rows, begin, end, FULL - LEFT - RIGHT, row * len(ranks))
    return page


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
