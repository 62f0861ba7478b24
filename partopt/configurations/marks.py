"""What is not known of a value carries a mark with its name, as a part of the text."""

from __future__ import annotations

import re
from collections.abc import Iterable

UNKNOWN, UNSET = "\ue000", "\ue001"  # on both sides of a name: of what is not known, never set
_SHOWN = 80  # letters of the name of a mark
_MARKED = re.compile(f"[{UNKNOWN}{UNSET}]([^{UNKNOWN}{UNSET}]*)[{UNKNOWN}{UNSET}]")
# letters that mean something to a shell, as others in the name of a mark
_HIDE = {ord(c): 0xE100 + ord(c) for c in map(chr, range(128)) if not (c.isalnum() or c == "_")}
_SHOW = {hidden: chr(letter) for letter, hidden in _HIDE.items()}
_SEVERAL = "\ue004"  # in the mark of what may be several words, or none
_SHOW[ord(_SEVERAL)] = ""


def mark(name: str, of: str = UNKNOWN) -> str:
    """The mark of a value that is not known, `name` says which."""
    return f"{of}{' '.join(name[:_SHOWN].split()).translate(_HIDE)}{of}"


def marks_of(text: str) -> list[str]:
    """The marks of a value alone."""
    return [found[0] for found in _MARKED.finditer(text)]


def strip_marks(text: str) -> str:
    """A value without what is not known of it."""
    return _MARKED.sub("", text)


def show_marks(text: str) -> str:
    """A value with `$NAME` in place of what is not known of it, `$(..)` of what commands print."""
    return _MARKED.sub(
        lambda found: f"${found[1] if re.fullmatch(r'[A-Za-z0-9_]+', found[1]) else '(..)'}",
        as_one(text),
    )


def unknown_names(text: str) -> list[str]:
    """The names of what is not known in a value."""
    return [*dict.fromkeys(name.translate(_SHOW) for name in _MARKED.findall(text))]


def as_several(text: str, of_variables: bool = False) -> str:
    """A value whose commands may print several words, or none; so may variables be, if so."""

    def spread(found: re.Match[str]) -> str:
        is_one = found[1].isidentifier() or found[1].isdecimal()
        named = found[0][0] == UNSET or (is_one and not of_variables)
        return found[0] if named else f"{UNKNOWN}{as_one(found[1])}{_SEVERAL}{UNKNOWN}"

    return _MARKED.sub(spread, text) if UNKNOWN in text else text


def as_one(text: str) -> str:
    """A value as one word, as it is in quotes."""
    return text.replace(_SEVERAL, "")


def may_be_several(words: Iterable[str]) -> bool:
    """Whether it is not known how many words there are."""
    return any(_SEVERAL in word for word in words)


def without_unset(text: str) -> str:
    """A value without variables that are set nowhere, which bash leaves out."""
    return re.sub(f"{UNSET}[^{UNSET}]*{UNSET}", "", text) if UNSET in text else text


def is_unset(text: str) -> bool:
    """Whether a word has nothing but variables that are set nowhere."""
    return bool(text) and not without_unset(text)
