"""The sheet that pictures are drawn on: forms, style, heading, legend, and what marks say.

A sheet is measured in inches and grows downwards. It is made within `style`, which sets aside the
settings of the person, so that the same document gives the same bytes.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Self
from xml.sax.saxutils import escape

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.textpath import text_to_path
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from partopt.printable import printable
from partopt.report.looks import tick_label
from partopt.report.phrases import basis_text
from partopt.units import format_bytes

Floats = NDArray[Any]
Spot = tuple[float, float, float, float, str]  # left, bottom, right, top in inches, and a text
COLUMN, FULL = 3.5, 7.2  # inches of one column of a paper, and of two
LEFT, RIGHT = 0.65, 0.1  # inches beside panels
PANEL = FULL - LEFT - RIGHT
SIZE, SMALL, TITLE = 7.0, 6.0, 7.5  # points of text
GREY, FAINT, RED, BLUE = "#4D4D4D", "#EFEFEF", "#C00000", "#0072B2"
MIDDLE: Any = {"ha": "center", "va": "center_baseline"}
_INCH = 72  # points
_MARGIN, _LINE = 0.08, 0.14  # inches beside and above the heading, and of a line of it
_NEAR, _NARROWEST = 0.06, 1 / _INCH  # inches of what can be pointed at: from a point, at least
_ROWS, _APART = 3, 0.04  # lines of labels above each other, and inches between labels
_HINTED = 1.02  # pixels round the widths of letters
_LONGEST = 300  # characters: longer texts are shortened before they are measured
_STYLE: Any = {
    "figure.dpi": 300,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Arial"],  # every text of an SVG names them all
    "font.size": SIZE,
    "axes.linewidth": 0.5,
    "axes.labelsize": SIZE,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "xtick.major.size": 2.0,
    "ytick.major.size": 2.0,
    "xtick.major.width": 0.5,
    "ytick.major.width": 0.5,
    "legend.fontsize": SIZE,
    "legend.frameon": False,
    "legend.handlelength": 1.3,
    "legend.handletextpad": 0.4,
    "legend.columnspacing": 1.0,
    "legend.labelspacing": 0.3,
    "legend.borderpad": 0.0,
    "legend.borderaxespad": 0.3,
    "text.parse_math": False,  # names may have dollar signs
    "svg.hashsalt": "partopt",
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
}
# by form: metadata without dates, and the keys of a title and of a description
_METADATA: dict[str, tuple[dict[str, str | None], str, str]] = {
    "svg": ({"Date": None, "Creator": "partopt"}, "Title", "Description"),
    "pdf": ({"CreationDate": None, "Creator": "partopt", "Producer": None}, "Title", "Subject"),
    "png": ({"Software": None}, "Title", "Description"),
}
_FAR = 8  # times the most memory: a limit above that is not drawn
_PLACES = re.compile(rb' (?:d|x|y)="[^"]*"')
_DIGITS = re.compile(rb"(\.[0-9]{2})[0-9]+")  # more than the hundredths of a point


class Heading(NamedTuple):
    """What stands above a picture, in `parts`, and a sentence or two for who cannot see it."""

    parts: Sequence[str]
    description: str

    @classmethod
    def of(cls, parts: Sequence[str], about: str, estimated: str | None) -> Self:
        """A heading whose description is what a picture is about, its parts, and its basis."""
        basis = "" if estimated is None else f" {basis_text(estimated)}."
        return cls(parts, f"{about} {', '.join(parts)}.{basis}")

    @property
    def title(self) -> str:
        """The parts in one line."""
        return printable(", ".join(self.parts))


class Sheet:
    """A figure of `width` inches under its heading, which is `down` inches high so far."""

    def __init__(self, heading: Heading, width: float = FULL):
        self.width, self.down = width, _MARGIN / 2
        self.figure = Figure(figsize=(width, 1))
        self._place: list[Callable[[float], object]] = []  # of what is drawn, by the height
        self._spots: list[Callable[[], Spot]] = []
        for line in pack(heading.parts, width - 2 * _MARGIN, TITLE):
            self.text(_MARGIN, self.down, line, size=TITLE)
            self.down += _LINE

    @property
    def inside(self) -> float:
        """Inches of its panels, which have a vertical axis."""
        return self.width - LEFT - RIGHT

    def panel(self, height: float, width: float | None = None) -> Axes:
        """Axes with room for a vertical axis, below all that is there; as wide as that allows."""
        width = self.inside if width is None else width
        axes = self.axes(LEFT, width, height)
        axes.yaxis.set_label_coords(-0.5 / width, 0.5)
        return axes

    def axes(self, left: float, width: float, height: float) -> Axes:
        """Axes below all that is there."""
        axes, top = self.figure.add_axes((0, 0, 1, 1)), self.down
        self.down += height

        def place(whole: float) -> None:
            size = width / self.width, height / whole
            axes.set_position((left / self.width, 1 - (top + height) / whole, *size))

        self._place.append(place)
        return axes

    def text(self, left: float, down: float, text: str, **look: Any) -> None:
        """A line of text whose upper left corner is at a place of the sheet."""
        artist = self.figure.text(
            left / self.width, 0, printable(text), **{"ha": "left", "va": "top"} | look
        )
        self._place.append(lambda whole: artist.set_y(1 - down / whole))

    def line(self, places: Sequence[tuple[float, float]], **look: Any) -> None:
        """A line through places of the sheet, below all axes."""
        xs, downs = np.array(places).T
        artist = Line2D(xs / self.width, downs, zorder=0, **look)
        self.figure.add_artist(artist)
        self._place.append(lambda whole: artist.set_ydata(1 - downs / whole))

    def legend(self, handles: Mapping[str, Any]) -> None:
        """What marks mean, below all that is there."""
        widest = max(text_width(label, SIZE) for label in handles) + 0.35
        columns = max(1, min(len(handles), int((self.width - 0.2) / widest)))
        self.down += 0.1 + _LINE * -(-len(handles) // columns)
        look: Any = {"loc": "lower center", "ncols": columns}
        self.figure.legend(list(handles.values()), list(handles), **look)

    def add_tooltip(self, axes: Axes, left: float, right: float, text: str) -> None:
        """What the axes say when they are pointed at between two of their values."""

        def spot() -> Spot:
            (x0, y0), (x1, y1) = axes.get_window_extent().get_points() / self.figure.dpi
            begin, end = (axes.transData.transform((x, 0))[0] for x in (left, right))
            return max(x0, begin / self.figure.dpi), y0, min(x1, end / self.figure.dpi), y1, text

        self._spots.append(spot)

    def add_point_tooltip(self, axes: Axes, x: float, y: float, text: str) -> None:
        """What a point of axes says when it is pointed at."""

        def spot() -> Spot:
            at, up = axes.transData.transform((x, y)) / self.figure.dpi
            return at - _NEAR, up - _NEAR, at + _NEAR, up + _NEAR, text

        self._spots.append(spot)

    def finish(self) -> Figure:
        """The figure, as high as what is on it."""
        self.figure.set_size_inches(self.width, self.down)
        for place in self._place:
            place(self.down)
        return self.figure

    def titles(self) -> bytes:
        """Of SVG, unseen boxes that say what is pointed at; none that is too thin for that."""
        boxes = []
        for left, bottom, right, top, text in (spot() for spot in self._spots):
            if right - left >= _NARROWEST:
                places = left, self.down - top, right - left, top - bottom
                x, y, wide, high = (f"{_INCH * place:.2f}" for place in places)
                title = f"<title>{escape(printable(text))}</title>"
                boxes.append(f'<rect x="{x}" y="{y}" width="{wide}" height="{high}">{title}</rect>')
        group = ['<g fill="none" pointer-events="all">', *boxes, "</g>\n"] if boxes else []
        return "\n".join(group).encode()


class Picture(NamedTuple):
    """A heading, and what draws a sheet under it."""

    heading: Heading
    draw: Callable[[Heading], Sheet]

    def render(self, form: str) -> bytes:
        """The picture as "svg", "pdf" or "png"; the same bytes for the same."""
        undated, title, description = _METADATA[form]
        about = {title: self.heading.title, description: printable(self.heading.description)}
        content = io.BytesIO()
        with style():
            sheet = self.draw(self.heading)
            sheet.finish().savefig(content, format=form, metadata=undated | about)
            titles = sheet.titles() if form == "svg" else b""
        if form != "svg":
            return content.getvalue()
        svg = _PLACES.sub(lambda place: _DIGITS.sub(rb"\1", place[0]), content.getvalue())
        # an image to screen readers, with its description after its title
        told = f"</title>\n <desc>{escape(about[description])}</desc>".encode()
        svg = svg.replace(b"<svg ", b'<svg role="img" ', 1).replace(b"</title>", told, 1)
        return (titles + b"</svg>").join(svg.rsplit(b"</svg>", 1))


@contextmanager
def style() -> Iterator[None]:
    """What sheets are made and written under."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        # a name in letters that the font lacks is drawn as boxes; viewers of SVG have others
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def text_width(text: str, size: float) -> float:
    """Inches of a line of text whose letters have `size` points."""
    font = FontProperties(size=size)
    width, _, _ = text_to_path.get_text_width_height_descent(text, font, ismath=False)
    return float(width) * _HINTED / _INCH


def fit(text: str, inches: float, size: float) -> str:
    """The text, literally, its middle left out where it is wider than `inches`.

    Empty where not even three characters and the gap have room.
    """

    def short(kept: int) -> str:
        head = kept - kept // 2
        return f"{text[:head]}..{text[len(text) - kept // 2 :]}"

    text = printable(text)
    if len(text) > _LONGEST:
        text = short(_LONGEST)
    if text_width(text, size) <= inches:
        return text
    low, high = 3, len(text)  # characters that are kept: fewer than `low` tell nothing
    while low < high:
        kept = (low + high) // 2
        low, high = (kept + 1, high) if text_width(short(kept), size) <= inches else (low, kept)
    return short(low - 1) if low > 3 else ""


def first_fit(forms: Sequence[str], inches: float, size: float) -> str:
    """The first of several forms of a text that has room; empty where none has."""
    return next((form for form in forms if text_width(form, size) <= inches), "")


def pack(parts: Sequence[str], inches: float, size: float) -> list[str]:
    """The parts with commas between them, in as few lines as hold them.

    A part that is wider than a line is shortened.
    """
    lines: list[str] = []
    for part in (fit(text, inches - 0.05, size) for text in parts if text):
        longer = f"{lines[-1]}, {part}" if lines else ""
        if longer and text_width(longer, size) <= inches - 0.05:
            lines[-1] = longer
        else:
            lines[-1:] = [f"{lines[-1]},", part] if lines else [part]
    return lines


def stack_labels(places: Sequence[tuple[float, str]], size: float) -> list[int | None]:
    """The line of every label, from 0, such that none overlaps; None where it has no room.

    `places` are the middles of the labels, in inches, and their texts.
    """
    ends = [float("-inf")] * _ROWS
    rows: list[int | None] = []
    for middle, text in places:
        half = text_width(text, size) / 2
        row = next((n for n, end in enumerate(ends) if end + _APART <= middle - half), None)
        rows.append(row)
        if row is not None:
            ends[row] = middle + half
    return rows


def near_limit(limit: int | None, most: float) -> int | None:
    """The limit of a device beside the `most` that one holds; None of one that is far above."""
    return limit if limit is not None and limit <= _FAR * max(most, 1) else None


def axis_start(least: float, end: float) -> float:
    """Where an axis to `end` begins: at 0, unless the least value is in its farther half."""
    return max(0.0, least - (end - least) / 4) if least > end / 2 else 0.0


def seconds_axis(axes: Axes, label: str, most: int = 4) -> None:
    """At most `most` intervals in seconds on the vertical axis, without signs."""
    ticks(axes.yaxis, label, most, lambda value: tick_label(abs(value)))


def bytes_axis(axes: Axes, label: str, most: int = 4) -> None:
    """At most `most` intervals in bytes on the vertical axis, without signs."""
    ticks(axes.yaxis, label, most, lambda value: format_bytes(abs(value)))


def ticks(axis: Axis, label: str, most: int, form: Callable[[float], str]) -> None:
    """At most `most` intervals on an axis, their ends written as `form` does."""
    axis.set_major_locator(MaxNLocator(most))
    axis.set_major_formatter(FuncFormatter(lambda value, _: form(value)))
    axis.set_label_text(label)


def draw_boxes(axes: Axes, left: Any, right: Any, low: Any, high: Any, **look: Any) -> None:
    """Boxes from their sides; as one shape, for one by one hundreds are a megabyte."""
    left, right, low, high = np.broadcast_arrays(left, right, low, high)
    corners = [(left, low), (right, low), (right, high), (left, high), (left, low)]
    boxes: Any = np.stack([np.stack(corner, axis=-1) for corner in corners], axis=1)
    axes.add_patch(PathPatch(Path.make_compound_path_from_polys(boxes), **look))
    axes.autoscale_view()


def draw_bars(
    axes: Axes, places: Floats, heights: Floats, width: Any, bottom: Any = 0.0, **look: Any
) -> None:
    """Bars whose middles are at `places`."""
    draw_boxes(axes, places - width / 2, places + width / 2, bottom, bottom + heights, **look)
