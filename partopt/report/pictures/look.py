"""The look that all pictures share: forms, style, the heading, and a sheet measured in inches.

Sheets are made within `style`, which sets aside the settings of the person, so that the same
document gives the same bytes.
"""

from __future__ import annotations

import importlib.util
import io
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from xml.sax.saxutils import escape

from partopt.documents import check_form
from partopt.errors import PartoptError
from partopt.printable import printable
from partopt.report.pictures.compact import compact
from partopt.report.pictures.hover import Spot, add_titles
from partopt.report.pictures.lettering import pack, text_width

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMS = ("svg", "pdf", "png")
COLUMN, FULL = 3.5, 7.2  # inches of one column of a paper, and of two
SIZE, SMALL, TITLE = 7.0, 6.0, 7.5  # points of text
GREY, FAINT, RED = "#4D4D4D", "#EFEFEF", "#C00000"
_NEAR = 0.06  # inches from a point, where it says what it is
_MARGIN, _LINE = 0.08, 0.14  # inches beside and above the heading, and of a line of it
_STYLE: Any = {
    "figure.dpi": 300,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Arial"],  # each text of an SVG names them all
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
    "hatch.linewidth": 0.35,
    "text.parse_math": False,  # names may have dollar signs
    "svg.hashsalt": "partopt",
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
}
# how legends are laid out, below what they are of
LEGEND: Any = {
    "loc": "lower center",
    "frameon": False,
    "handlelength": 1.3,
    "handletextpad": 0.4,
    "columnspacing": 1.0,
    "labelspacing": 0.3,
    "borderpad": 0.0,
}
# with the keys of a title and of a description
_UNDATED: dict[str, tuple[dict[str, str | None], str, str]] = {
    "svg": ({"Date": None, "Creator": "partopt"}, "Title", "Description"),
    "pdf": ({"CreationDate": None, "Creator": "partopt", "Producer": None}, "Title", "Subject"),
    "png": ({"Software": None}, "Title", "Description"),
}


class Heading(NamedTuple):
    """What stands above a picture, in `parts`, and a sentence or two for who cannot see it."""

    parts: tuple[str, ...]
    description: str

    @property
    def title(self) -> str:
        """The parts in one line."""
        return printable(", ".join(self.parts))


class Sheet:
    """A figure of `width` inches, with `height` inches below its heading to draw on."""

    def __init__(self, width: float, height: float, heading: Heading):
        from matplotlib.figure import Figure

        lines = pack(heading.parts, width - 2 * _MARGIN, TITLE)
        self.width, self.height = width, height + _MARGIN / 2 + _LINE * len(lines)
        self.figure: Figure = Figure(figsize=(self.width, self.height))
        self.spots: list[Spot] = []
        for number, line in enumerate(lines):
            self.text(_MARGIN, self.height - _MARGIN / 2 - _LINE * number, line, size=TITLE)

    def axes(self, left: float, bottom: float, width: float, height: float) -> Axes:
        """Axes at a place of the sheet, in inches from its lower left corner."""
        return self.figure.add_axes(
            (left / self.width, bottom / self.height, width / self.width, height / self.height)
        )

    def text(self, left: float, top: float, text: str, **settings: Any) -> None:
        """A line of text whose upper left corner is at a place of the sheet, in inches."""
        place = left / self.width, top / self.height
        self.figure.text(*place, printable(text), **{"ha": "left", "va": "top"} | settings)

    def tell(self, axes: Axes, left: float, right: float, text: str) -> None:
        """What the axes say when they are pointed at between two of their values.

        Once all is drawn, for by then they have their limits.
        """
        (x0, y0), (x1, y1) = axes.get_window_extent().get_points().tolist()
        begin, end = (float(axes.transData.transform((at, 0))[0]) for at in (left, right))
        dpi = self.figure.dpi
        left, right = max(x0, begin) / dpi, min(x1, end) / dpi
        self.spots.append(Spot(left, y0 / dpi, right, y1 / dpi, text))

    def tell_point(self, axes: Axes, x: float, y: float, text: str) -> None:
        """What a point of axes says when it is pointed at. As `tell`."""
        middle, up = (float(at) / self.figure.dpi for at in axes.transData.transform((x, y)))
        self.spots.append(Spot(middle - _NEAR, up - _NEAR, middle + _NEAR, up + _NEAR, text))

    def legend(self, handles: Mapping[str, Any]) -> None:
        """What marks mean, in `legend_height` inches at the bottom of the sheet."""
        self.figure.legend(
            list(handles.values()),
            list(handles),
            ncols=_legend_columns(handles, self.width),
            fontsize=SIZE,
            borderaxespad=0.3,
            **LEGEND,
        )


def legend_height(labels: Collection[str], width: float) -> float:
    """Inches of the legend of a sheet of `width` inches."""
    return 0.1 + _LINE * -(-len(labels) // _legend_columns(labels, width))


def _legend_columns(labels: Collection[str], width: float) -> int:
    widest = max(text_width(label, SIZE) for label in labels) + 0.35
    return max(1, min(len(labels), int((width - 0.2) / widest)))


def form_of(path: str, beside: Sequence[str] = ()) -> str:
    """The form that the extension of `path` chooses.

    Raises PartoptError for others than FORMS; its hint names those `beside` them, too.
    """
    hint = f"choose {', '.join('.' + each for each in (*beside, *FORMS))}"
    return check_form(path, [f".{form}" for form in FORMS], hint).removeprefix(".")


def _known(form: str) -> str:
    if form not in FORMS:
        raise PartoptError(
            f"unsupported format '.{form}' of a figure",
            f"choose {', '.join('.' + each for each in FORMS)}",
            code="unsupported-format",
            form=form,
        )
    return form


class Picture(NamedTuple):
    """A heading, and what draws a sheet under it, within `style`."""

    heading: Heading
    draw: Callable[[Heading], Sheet]

    def render(self, form: str) -> bytes:
        """The picture in one of FORMS; the same bytes for the same.

        Raises PartoptError for other forms, and without matplotlib.
        """
        undated, title, description = _UNDATED[_known(form)]
        heading = self.heading
        about = {title: heading.title, description: printable(heading.description)}
        content = io.BytesIO()
        with style():
            sheet = self.draw(heading)
            sheet.figure.savefig(content, format=form, metadata=undated | about)
        if form != "svg":
            return content.getvalue()
        svg = _describe(compact(content.getvalue()), heading)
        return add_titles(svg, sheet.spots, sheet.height)


def require_matplotlib() -> None:
    """Refuse to draw without matplotlib, and do not import it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise PartoptError(
            "a figure needs matplotlib",
            "in a clone of partopt: pip install '.[figures]'",
            code="missing-package",
            package="matplotlib",
        )


@contextmanager
def style() -> Iterator[None]:
    """What sheets are made and written under; raises PartoptError without matplotlib."""
    require_matplotlib()
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        # a name in letters that the font lacks is drawn as boxes; viewers of SVG have others
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def _describe(svg: bytes, heading: Heading) -> bytes:
    """The SVG as an image to screen readers: with a role, and a description after its title."""
    description = f"</title>\n <desc>{escape(printable(heading.description))}</desc>"
    marked = svg.replace(b"<svg ", b'<svg role="img" ', 1)
    return marked.replace(b"</title>", description.encode(), 1)
