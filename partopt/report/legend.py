"""The legend of a figure: what its colours mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from partopt.report.actions import WORDS
from partopt.report.basis import basis_lines
from partopt.report.cells import FAINT, HATCHES, IDLE, cells, shade
from partopt.report.page import Page
from partopt.schedules.order import KINDS, A, U
from partopt.simulator.slots import exchanges
from partopt.simulator.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Legend(NamedTuple):
    """The kinds of actions, the labels of these and of idle time, and how they are laid out.

    `title` are the lines above the labels.
    """

    kinds: list[int]
    labels: list[str]
    title: list[str]
    columns: int

    @property
    def rows(self) -> int:
        """Lines of the title and of labels."""
        return len(self.title) + -(-len(self.labels) // self.columns)


def legend_of(timeline: Timeline, page: Page, estimated: str | None = None) -> Legend:
    """What the colours mean, of those that can be seen, in as many columns as there is room for.

    `estimated` is the device that the times were estimated for, if they were.
    """
    kinds = {kind for kind, _ in cells(page)}
    for starts, ends in (exchanges(timeline, rank) for rank in page.ranks):
        seen = (
            (starts < page.end)
            & (ends > page.begin)
            & ((ends - starts) * page.points_per_second > 0.2)
        )
        kinds |= {A} if seen.any() else set()
    labels = [*(WORDS[KINDS[kind]] for kind in sorted(kinds)), "idle"]
    remarks = [page.note, "a rank's stages from light to dark" if page.chunks > 1 else ""]
    title = ["; ".join(filter(None, remarks)), *(text for _, text in basis_lines(estimated))]
    columns = min(len(labels), max(1, int(page.width / (0.4 + 0.052 * max(map(len, labels))))))
    if sum(0.4 + 0.052 * len(label) for label in labels) < page.width:
        columns = len(labels)
    return Legend(sorted(kinds), labels, [*filter(None, title)], columns)


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
        [*swatches, (Patch(facecolor=IDLE),)],
        legend.labels,
        title="\n".join(legend.title) or None,
        title_fontsize=6.5,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0.0)},
        loc="lower center",
        ncols=legend.columns,
        frameon=False,
        fontsize=6.5,
        handlelength=1.3,
        handletextpad=0.4,
        columnspacing=1.0,
        labelspacing=0.3,
        borderpad=0.0,
        borderaxespad=0.2,
    )
