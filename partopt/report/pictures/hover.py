"""What marks say when they are pointed at: in SVG, unseen boxes with a title each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple
from xml.sax.saxutils import escape

from partopt.printable import printable

_POINTS = 72  # of an inch
_NARROWEST = 1.0  # points of a box: what is thinner cannot be pointed at


class Spot(NamedTuple):
    """A box in inches from the lower left corner of a sheet, and what it says."""

    left: float
    bottom: float
    right: float
    top: float
    text: str


def add_titles(svg: bytes, spots: Iterable[Spot], height: float) -> bytes:
    """The SVG of a sheet of `height` inches with the boxes above all that it shows."""
    shown = [_box(own, height) for own in spots if (own.right - own.left) * _POINTS >= _NARROWEST]
    if not shown:
        return svg
    group = "\n".join(['<g fill="none" pointer-events="all">', *shown, "</g>\n</svg>"])
    return group.encode().join(svg.rsplit(b"</svg>", 1))


def _box(spot: Spot, height: float) -> str:
    places = spot.left, height - spot.top, spot.right - spot.left, spot.top - spot.bottom
    x, y, wide, high = (f"{_POINTS * place:.2f}" for place in places)
    text = escape(printable(spot.text))
    return f'<rect x="{x}" y="{y}" width="{wide}" height="{high}"><title>{text}</title></rect>'
