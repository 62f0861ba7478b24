"""Text of others made fit for a line of a page: nothing in it that a terminal obeys or hides."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text with its control and format characters, newlines too, written as escapes.

    These are the control characters, changes of direction, zero-width characters, line separators
    and halves of a character: all that `str.isprintable` refuses.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
