"""Text in pictures: drawn as it is, and never wider than there is room for."""

from __future__ import annotations

from collections.abc import Sequence

from partopt.printable import printable

_INCH = 72  # points
_HINTED = 1.02  # pixels round the widths of letters
_GAP = ".."
_LONGEST = 300  # characters: longer texts are shortened before they are measured


def text_width(text: str, size: float) -> float:
    """Inches of a line of text whose letters have `size` points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(size=size)
    width, _, _ = text_to_path.get_text_width_height_descent(text, font, ismath=False)
    return float(width) * _HINTED / _INCH


def fit(text: str, inches: float, size: float) -> str:
    """The text, literally, its middle left out where it is wider than `inches`.

    Empty where not even three characters and the gap have room.
    """
    text = printable(text)
    text = text if len(text) <= _LONGEST else _leave_out_middle(text, _LONGEST)
    if text_width(text, size) <= inches:
        return text
    low, high = 3, len(text)  # characters that are kept: fewer than `low` tell nothing
    while low < high:
        kept = (low + high) // 2
        low, high = (kept + 1, high) if _fits(text, kept, inches, size) else (low, kept)
    return _leave_out_middle(text, low - 1) if low > 3 else ""


def _fits(text: str, kept: int, inches: float, size: float) -> bool:
    return text_width(_leave_out_middle(text, kept), size) <= inches


def _leave_out_middle(text: str, kept: int) -> str:
    head = kept - kept // 2
    return f"{text[:head]}{_GAP}{text[len(text) - kept // 2 :]}"


def pack(parts: Sequence[str], inches: float, size: float) -> list[str]:
    """The parts with commas between them, in as few lines as hold them.

    A part that is wider than a line is shortened.
    """
    lines: list[str] = []
    for part in (fit(each, inches - 0.05, size) for each in parts if each):
        longer = f"{lines[-1]}, {part}" if lines else ""
        if longer and text_width(longer, size) <= inches - 0.05:
            lines[-1] = longer
        else:
            lines[-1:] = [f"{lines[-1]},", part] if lines else [part]
    return lines
