"""A profile as a picture: what each layer takes and holds, and what crosses the cuts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from partopt.cost.chain import Chain, chain_of
from partopt.documents.profile import Profile
from partopt.report.actions import COLOURS
from partopt.report.basis import basis_text
from partopt.report.pictures.axes import Place, bytes_axis, draw_bars, seconds_axis, stack_labels
from partopt.report.pictures.folding import Columns, columns_of
from partopt.report.pictures.lettering import fit, text_width
from partopt.report.pictures.look import COLUMN, FULL, GREY, SMALL, Heading, Sheet, legend_height
from partopt.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = NDArray[np.float64]

_LEFT, _RIGHT, _COLUMN = 0.65, 0.1, 0.4  # inches beside the panels, and of a column at most
_HEIGHTS = {"time": 1.3, "held": 0.9, "sent": 0.7}
_GAP, _NAMES, _MARK = 0.1, 1.1, 0.13  # inches between panels, of names at most, of lines of marks
_LETTERS = 5.5  # points of a layer's name
WEIGHTS, STASH = "#0072B2", "#F0E442"
_LABELS = {
    "forward": COLOURS["F"],
    "backward": COLOURS["B"],
    "weights": WEIGHTS,
    "stash": STASH,
}
_CUT, _RANGE = "bytes over the cut after a layer", "least and most of the repeats"


def heading(profile: Profile) -> Heading:
    """The model, its layers, and what a microbatch takes of which device."""
    chain = chain_of(profile)
    weights = format_bytes(profile.parameter_bytes())
    parts = (
        profile.model.name,
        f"{chain.layers} layer{'s' if chain.layers > 1 else ''}",
        f"{weights} of {profile.dtype}",
        profile.device.name,
        f"microbatch {chain.microbatch_size}: {format_seconds(chain.compute_s(0, chain.layers))}",
    )
    basis = "" if profile.estimated_for is None else f" {basis_text(profile.estimated_for)}."
    best = _cheapest_cut(chain)
    cut = "" if best is None else f" Fewest bytes cross the cut after layer {best - 1}."
    about = (
        "The layers of a model from left to right: their times, what they hold and what they send."
    )
    return Heading(parts, f"{about} {', '.join(parts)}.{cut}{basis}")


def draw(profile: Profile, heading: Heading) -> Sheet:
    """Forward above and backward below the axis, weights above stash, and bytes at the cuts."""
    chain, columns = chain_of(profile), columns_of(profile)
    width = min(FULL - _LEFT - _RIGHT, max(COLUMN, _COLUMN * len(columns.layers)))
    marks, names = _marks(columns, width), _names(profile, columns, width)
    labels = [*_LABELS, *([_CUT] if chain.layers > 1 else [])]
    labels += [_RANGE] if columns.folds else []
    whole = width + _LEFT + _RIGHT
    below = legend_height(labels, whole) + 0.1
    below += max(text_width(name, _LETTERS) for name in names.values())
    above = _MARK * max([row + 1 for row in marks if row is not None], default=0)
    shown = list(_HEIGHTS) if chain.layers > 1 else ["time", "held"]
    panels = sum(_HEIGHTS[name] + _GAP for name in shown) - _GAP
    sheet = Sheet(whole, below + panels + above + 0.05, heading)
    axes = _panels(sheet, shown, below, width)
    for own, drawn in zip(axes, (_draw_times, _draw_held, _draw_sent), strict=False):
        drawn(own, chain, columns)
        own.set_xlim(-0.5, len(columns.layers) - 0.5)
        own.tick_params(axis="x", bottom=False, labelbottom=False)
    axes[-1].tick_params(axis="x", bottom=True, labelbottom=True, pad=1)
    axes[-1].set_xticks(list(names), list(names.values()), rotation=90, fontsize=_LETTERS)
    _draw_folds(axes[0], columns, marks)
    for place, layers in enumerate(columns.layers):
        text = _describe(profile, chain, layers)
        for panel in axes:
            sheet.tell(panel, place - 0.5, place + 0.5, text)
    sheet.legend(_handles(labels))
    return sheet


def _panels(sheet: Sheet, shown: list[str], below: float, width: float) -> list[Axes]:
    """The axes of the panels that are `shown`, from the top."""
    axes: list[Axes] = []
    for name in reversed(shown):
        axes.insert(0, sheet.axes(_LEFT, below, width, _HEIGHTS[name]))
        axes[0].yaxis.set_label_coords(-0.5 / width, 0.5)
        below += _HEIGHTS[name] + _GAP
    return axes


def _cheapest_cut(chain: Chain) -> int | None:
    """The cut that fewest bytes cross; None of one layer."""
    return int(np.argmin(chain.a[1:-1])) + 1 if chain.layers > 1 else None


def _handles(labels: list[str]) -> dict[str, Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: dict[str, Any] = {
        label: Patch(facecolor=colour, edgecolor=GREY, linewidth=0.3)
        for label, colour in _LABELS.items()
    }
    handles[_CUT] = Line2D([], [], color="black", linewidth=1.0)
    handles[_RANGE] = Line2D([], [], color=GREY, linewidth=0.5, marker="|", markersize=4)
    return {label: handles[label] for label in labels}


def _describe(profile: Profile, chain: Chain, layers: list[int]) -> str:
    """The first layer of a column, and of how many more it is."""
    n = layers[0]
    parts = [
        f"layer {n} {profile.layers[n].name}",
        *([f"and {len(layers) - 1} like it"] if len(layers) > 1 else []),
        f"forward {format_seconds(chain.f[n])}",
        f"backward {format_seconds(chain.g[n])}",
        f"weights {format_bytes(chain.parameter_bytes(n, n + 1))}",
        f"stash {format_bytes(chain.stash_bytes(n, n + 1))}",
        f"sends {format_bytes(chain.a[n + 1])}",
    ]
    return ", ".join(parts)


def _spread(values: Floats, columns: Columns) -> tuple[Floats, Floats, Floats]:
    """Mean, least and most of each column's layers, shape (columns,)."""
    each = [values[layers] for layers in columns.layers]
    return tuple(np.array([form(own) for own in each]) for form in (np.mean, np.min, np.max))  # type: ignore[return-value]


def _draw_bars(axes: Axes, values: Floats, columns: Columns, colour: str) -> None:
    """A bar for each column; a line from the least to the most of its layers."""
    mean, least, most = _spread(values, columns)
    places = np.arange(len(mean))
    line = 0.3 if len(places) <= 120 else 0.0
    draw_bars(axes, places, mean, 0.8, facecolor=colour, edgecolor=GREY, linewidth=line)
    ranged = np.abs(most - least) > 0.02 * np.abs(mean)
    axes.vlines(places[ranged], least[ranged], most[ranged], color=GREY, linewidth=0.5)


def _draw_times(axes: Axes, chain: Chain, columns: Columns) -> None:
    _draw_bars(axes, chain.f, columns, COLOURS["F"])
    _draw_bars(axes, -chain.g, columns, COLOURS["B"])
    axes.axhline(0, color="black", linewidth=0.5)
    axes.spines["bottom"].set_visible(False)
    seconds_axis(axes, "time")


def _draw_held(axes: Axes, chain: Chain, columns: Columns) -> None:
    alone = range(chain.layers)
    weights = np.array([chain.parameter_bytes(layer, layer + 1) for layer in alone])
    stash = np.array([chain.stash_bytes(layer, layer + 1) for layer in alone])
    _draw_bars(axes, weights, columns, WEIGHTS)
    _draw_bars(axes, -stash, columns, STASH)
    axes.axhline(0, color="black", linewidth=0.5)
    axes.spines["bottom"].set_visible(False)
    bytes_axis(axes, "held")


def _draw_sent(axes: Axes, chain: Chain, columns: Columns) -> None:
    """The bytes over the cut after each column as a step line, the fewest with a dot."""
    sent = chain.a[1:]
    mean, _, _ = _spread(sent, columns)
    cuts = np.arange(len(mean)) + 0.5
    axes.step(cuts[:-1], mean[:-1], where="mid", color="black", linewidth=1.0)
    best = _cheapest_cut(chain)
    if best is not None:
        column = next(c for c, layers in enumerate(columns.layers) if best - 1 in layers)
        axes.plot(cuts[min(column, len(cuts) - 1)], sent[best - 1], "o", color="black", ms=3)
    axes.set_ylim(0, max(1.0, float(mean.max(initial=0.0))) * 1.1)
    bytes_axis(axes, "sent")


def _names(profile: Profile, columns: Columns, width: float) -> dict[int, str]:
    """The number and the name of each column's first layer, or of every so many columns'."""
    step = max(1, int(np.ceil(0.1 * len(columns.layers) / width)))
    firsts = {place: own[0] for place, own in list(enumerate(columns.layers))[::step]}
    return {
        place: fit(f"{first} {profile.layers[first].name}", _NAMES, _LETTERS)
        for place, first in firsts.items()
    }


def _marks(columns: Columns, width: float) -> list[int | None]:
    """On which line the mark of each block is, None where it has no room."""
    each = width / len(columns.layers)
    places = [Place((own.first + own.size / 2) * each, f"x {own.times}") for own in columns.folds]
    return stack_labels(places, SMALL)


def _draw_folds(axes: Axes, columns: Columns, marks: list[int | None]) -> None:
    """Above each block that stands for several a line, and how many these are."""
    high = axes.get_ylim()[1]
    inch = (high - axes.get_ylim()[0]) / _HEIGHTS["time"]
    for own, row in zip(columns.folds, marks, strict=True):
        left, right = own.first - 0.3, own.first + own.size - 0.7
        axes.plot([left, right], [high + 0.02 * inch] * 2, color="black", lw=0.8, clip_on=False)
        if row is not None:
            middle, up = (left + right) / 2, high + inch * (0.04 + _MARK * row)
            axes.text(middle, up, f"x {own.times}", size=SMALL, ha="center", va="bottom")
    axes.set_ylim(top=high)
