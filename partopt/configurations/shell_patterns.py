"""Patterns of bash: what they match, and what is cut off or replaced by them, in bounded time."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Sequence
from contextlib import suppress

from partopt.configurations.marks import as_several, mark, show_marks

# blocks and stages, `[0]*3+[1]*58`, `(tt|)*16`, `M-M*-M-`, or a list behind a flag, `--x=[1,2]`
_LIST = re.compile(
    r"[\w.+-]+=\[[\d.,]*\]|(?:[\w.+-]+=)?\(*\[[\d,]+\](?:[()]*[*+][()]*(?:\[[\d,]+\]|\d+))+\)*"
    r"|[-\w=*()|,'\"]*\|[-\w=*()|,'\"]*|(?=.*M)[MDEG*-]*[MDEG-]|[ME*-]{6,}"
)
_CLASSES = {
    "digit": "0-9", "alpha": "a-zA-Z", "alnum": "a-zA-Z0-9", "upper": "A-Z", "lower": "a-z",
    "xdigit": "0-9a-fA-F", "space": " \t\n\r\f\v", "blank": " \t", "word": "a-zA-Z0-9_",
    "punct": "{-~:-@!-/[-`",
}  # fmt: skip
PATTERNED = 1000  # letters of a pattern, and of what it is compared with
_WAYS = 200_000  # of a match, of which every one is tried


def matches(text: str, pattern: str) -> bool:
    """Whether a text matches a pattern; one that is too long is taken as it is."""
    if max(len(text), len(pattern)) > PATTERNED:
        return text == pattern
    return fnmatch.fnmatchcase(text, _glob(pattern))


def escape(text: str) -> str:
    """A text as a pattern that matches itself."""
    return re.sub(r"([*?\[])", r"[\1]", text)


def _spell_classes(pattern: str) -> str:
    """A pattern with the letters of `[:digit:]` and others in their place."""
    return re.sub(r"\[:(\w+):\]", lambda found: _CLASSES.get(found[1], found[0]), pattern)


def _glob(pattern: str) -> str:
    """A pattern of bash as one of fnmatch."""
    return _spell_classes(pattern).replace("[^", "[!")


def match_files(pieces: Sequence[tuple[str, bool]]) -> str:
    """A word of pieces, some of which are quoted; what a pattern in it matches is not known.

    It is itself where it is a list of blocks: no file is called so.
    """
    text = "".join(piece for piece, _ in pieces)
    shape = "".join("_" * len(piece) if quoted else piece for piece, quoted in pieces)
    bracket = shape.find("[", 0, max(shape.rfind("]"), 0))
    begins = [place for place in (shape.find("*"), shape.find("?"), bracket) if place >= 0]
    if not begins or (len(text) <= PATTERNED and _LIST.fullmatch(text)):
        return text
    return text[: min(begins)] + as_several(mark(show_marks(text)))


def trim(value: str, how: str, pattern: str) -> str:
    """A value without what matches a pattern at its begin or end, `how` in `${X##*/}`."""
    cuts = [*range(len(value) + 1)] if len(value) <= PATTERNED else []
    if (how[0] == "#") == (len(how) == 2):  # the longest of what is cut off
        cuts.reverse()
    parts = ((value[:n], value[n:]) for n in cuts)
    cut, left = (0, 1) if how[0] == "#" else (1, 0)
    return next((part[left] for part in parts if matches(part[cut], pattern)), value)


def substitute(value: str, pattern: str, text: str, every: bool) -> str:
    """A value with a text for what first matches a pattern, or for every such."""
    kind = pattern[0] if pattern[:1] in ("#", "%") and not every else ""
    body = fnmatch.translate(_glob(pattern.removeprefix(kind)))[4:-3]
    found = f"{'^' * (kind == '#')}(?:{body}){'$' * (kind == '%')}"
    return re.sub(found, lambda _: text, value, count=not every)


def search(text: str, expression: str) -> bool | None:
    """Whether a regular expression matches in a text; None where it has too many ways to."""
    ways = len(re.findall(r"[*+?{|]", expression))
    simple = math.comb(len(text) + ways, ways + 1) < _WAYS
    with suppress(re.error):
        if simple and not re.search(r"\)[*+{]", expression):
            return re.search(_spell_classes(expression), text) is not None
    return None
