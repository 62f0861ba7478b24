"""Text of others made fit for a line: short, with nothing in it that a terminal obeys or hides."""

from __future__ import annotations

import re

_NUMBER = re.compile("[0-9]+")
_CUT = 60  # characters of one word of others in an error
_LONG = re.compile(rf"'[^'\n]{{{_CUT - 1},}}'|\"[^\"\n]{{{_CUT - 1},}}\"|\S{{{_CUT + 1},}}")


def printable(text: str) -> str:
    """The text with its control and format characters, newlines too, written as escapes.

    These are the control characters, changes of direction, zero-width characters, line separators
    and halves of a character: all that `str.isprintable` refuses.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def cut(text: str) -> str:
    """The text with the middles of what it quotes, and of words, left out beyond 60 characters."""
    return _LONG.sub(lambda match: shorten(match[0], _CUT), text)


def without_numbers(name: str) -> str:
    """The name with `#` in place of its numbers, equal for those of repeated layers."""
    return _NUMBER.sub("#", name)


def shorten(text: str, width: int) -> str:
    """`text`, its middle left out where it is wider than `width`."""
    if len(text) <= width:
        return text
    head = (width - 2) // 2
    return f"{text[:head]}..{text[len(text) - (width - 2 - head) :]}"
