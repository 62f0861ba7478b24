"""A picture as it is drawn: where its letters stand, and whether its panels show anything."""

from __future__ import annotations

import itertools
from typing import Any


class Drawn:
    """The texts and panels of a document, drawn by Agg."""

    def __init__(self, picture: Any, monkeypatch: Any) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.text import Text

        from partopt.report.pictures.sheet import style

        texts: list[Any] = []
        original = Text.draw

        def draw(text: Any, renderer: Any) -> None:
            if text.get_visible() and text.get_text().strip():
                texts.append(text)
            original(text, renderer)

        with style():
            sheet = picture.draw(picture.heading)
            self.figure = sheet.finish()
            canvas = FigureCanvasAgg(self.figure)
            with monkeypatch.context() as patched:
                patched.setattr(Text, "draw", draw)
                canvas.draw()
            renderer = canvas.get_renderer()
            found = {id(text): text for text in texts}.values()
            self.boxes = [(each.get_text(), each.get_window_extent(renderer)) for each in found]

    @property
    def overlaps(self) -> list[tuple[str, str]]:
        """Texts that have more than two of 300 pixels an inch of each other's place."""
        return [
            (first, second)
            for (first, one), (second, other) in itertools.combinations(self.boxes, 2)
            if min(one.x1, other.x1) - max(one.x0, other.x0) > 2
            and min(one.y1, other.y1) - max(one.y0, other.y0) > 2
        ]

    @property
    def outside(self) -> list[str]:
        """Texts that leave the figure."""
        whole = self.figure.bbox
        return [
            text
            for text, box in self.boxes
            if box.x0 < -1 or box.y0 < -1 or box.x1 > whole.x1 + 1 or box.y1 > whole.y1 + 1
        ]

    @property
    def empty(self) -> int:
        """Panels in which nothing is drawn but their axes."""
        return sum(
            not axes.patches
            and not axes.collections
            and not any(len(line.get_xdata()) for line in axes.lines)
            for axes in self.figure.axes
        )
