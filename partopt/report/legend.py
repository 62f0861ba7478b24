"""The legend of a figure: what its colours mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from partopt.report.actions import WORDS
from partopt.report.basis import basis_lines
from partopt.report.cells import FAINT, HATCHES, IDLE, cells, shade
from partopt.report.memory_panel import Part
from partopt.report.page import LEFT, RIGHT, Page
from partopt.report.pictures.look import LEGEND
from partopt.schedules.order import KINDS, A, U
from partopt.simulator.slots import exchanges
from partopt.simulator.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Legend(NamedTuple):
    """The kinds of actions, the parts of memory, the labels of these and of idle time.

    `title` are the lines above the labels, which are in `columns`.
    """

    kinds: list[int]
    memory: list[Part]
    labels: list[str]
    title: list[str]
    columns: int

    @property
    def rows(self) -> int:
        """Lines of the title and of labels."""
        return len(self.title) + -(-len(self.labels) // self.columns)


def legend_of(
    timeline: Timeline, pages: Sequence[Page], memory: Sequence[Part], estimated: str | None
) -> Legend:
    """What the colours mean, of those that can be seen, in as many columns as there is room for.

    `memory` are the parts of memory that are drawn; `estimated` is the device that the times were
    estimated for, if they were.
    """
    kinds = {kind for page in pages for kind, _ in cells(page)}
    if any(_seen_exchanges(timeline, page) for page in pages):
        kinds |= {A}
    labels = [*(WORDS[KINDS[kind]] for kind in sorted(kinds)), "idle", *(p.name for p in memory)]
    remarks = [
        pages[0].note,
        "a rank's stages from light to dark" if pages[0].chunks > 1 else "",
        "the beginning, the middle and the end are shown" if len(pages) > 1 else "",
    ]
    title = ["; ".join(filter(None, remarks)), *(text for _, text in basis_lines(estimated))]
    width = LEFT + pages[0].width * len(pages) + RIGHT
    columns = min(len(labels), max(1, int(width / (0.4 + 0.052 * max(map(len, labels))))))
    if sum(0.4 + 0.052 * len(label) for label in labels) < width:
        columns = len(labels)
    return Legend(sorted(kinds), list(memory), labels, [*filter(None, title)], columns)


def _seen_exchanges(timeline: Timeline, page: Page) -> bool:
    """Whether an all-reduce is wide enough to be seen."""
    for starts, ends in (exchanges(timeline, rank) for rank in page.ranks):
        wide = (ends - starts) * page.points_per_second > 0.2
        if ((starts < page.end) & (ends > page.begin) & wide).any():
            return True
    return False


def add_legend(figure: Figure, page: Page, legend: Legend) -> None:
    """The legend, below the axis."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    swatches: list[Any] = [
        tuple(
            Patch(
                facecolor=shade(KINDS[kind], chunk, page.chunks),
                edgecolor=FAINT,
                linewidth=0,
                hatch=HATCHES.get(KINDS[kind]),
            )
            for chunk in range(1 if kind in (A, U) else page.chunks)
        )
        for kind in legend.kinds
    ]
    figure.legend(
        [
            *swatches,
            (Patch(facecolor=IDLE),),
            *((Patch(facecolor=part.colour),) for part in legend.memory),
        ],
        legend.labels,
        title="\n".join(legend.title) or None,
        title_fontsize=6.5,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0.0)},
        ncols=legend.columns,
        fontsize=6.5,
        borderaxespad=0.2,
        **LEGEND,
    )
