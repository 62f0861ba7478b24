"""How wide a page is: 80 columns, or what whoever prints it says once for all that is rendered."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_DEFAULT = 80
_NARROWEST = 8  # columns of a text that has to make room
_COLUMNS = ContextVar("columns", default=_DEFAULT)


def columns() -> int:
    """Columns of the pages that are rendered in this context."""
    return _COLUMNS.get()


@contextlib.contextmanager
def page_width(wide: int) -> Iterator[None]:
    """Render pages of so many columns in this context."""
    token = _COLUMNS.set(wide)
    try:
        yield
    finally:
        _COLUMNS.reset(token)


def stretch(room: int, share: float = 1.0, least: int = _NARROWEST) -> int:
    """Columns of a text that has `room` on a page of 80: more or less by its `share` of the rest.

    It never has less than `least`.
    """
    return max(least, room + round((columns() - _DEFAULT) * share))
