"""What variables of a shell have: texts, and arrays, of which elements may not be known."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from partopt.configurations.marks import UNKNOWN, UNSET, as_several, is_unset, mark

Value = str | tuple[str, ...]  # a text, or the elements of an array

BREAK = "\ue002"  # between the elements of an array, which part words even in quotes
HOLE = "\ue003"  # in the place of an element that is not set
EMPTY = mark("''", UNSET)  # behind what is set nowhere in quotes, which is a word
_WITHIN = re.compile(
    rf"(?:[{UNKNOWN}{UNSET}][^{UNKNOWN}{UNSET}]*[{UNKNOWN}{UNSET}]|'[^']*'|\"[^\"]*\"|\\.|\S)+",
    re.S,
)
_OVERRIDE = re.compile(r"\+{0,2}([a-zA-Z_]\w*(?:\.\w+)+)=(.*)", re.S)  # of Hydra


def as_text(value: Value) -> str:
    """A text, or the elements of an array with blanks between them."""
    return value if isinstance(value, str) else " ".join(elements_of(value))


def elements_of(value: tuple[str, ...]) -> tuple[str, ...]:
    """The elements of an array that are set."""
    return tuple(element for element in value if element != HOLE)


def as_word(text: str) -> str:
    """A text that is a word, though it may have nothing but what is set nowhere."""
    return text.replace(EMPTY, "") + EMPTY if is_unset(text) else text


def unknown_array(name: str) -> tuple[str, ...]:
    """An array of elements that are not known, nor how many."""
    return (as_several(mark(name), True),)


def present_words(words: Sequence[str]) -> list[str]:
    """The words that bash passes: unquoted variables that are set nowhere give none."""
    return [word for word in words if EMPTY in word or not is_unset(word)]


def merge_values(values: Sequence[Value | None], unknown: str) -> Value:
    """What a variable is that may have several values: unknown, or what their flags agree in."""
    words = [
        [*elements_of(value)] if isinstance(value, tuple) else (value or "").split()
        for value in values
    ]
    if not any(word.startswith("--") for one in words for word in one):
        return unknown
    flags = [flag_words(one) for one in words]
    heads = {tuple(itertools.takewhile(lambda word: word[:2] != "--", one)) for one in words}
    found = list(heads.pop()) if len(heads) == 1 else [unknown]
    for flag in dict.fromkeys(flag for one in flags for flag in one):
        said = [one.get(flag) for one in flags]
        agreed = said[0] if all(one == said[0] for one in said) else None
        found += [f"--{flag}", *([unknown] if agreed is None else agreed)]
    return tuple(found) if any(isinstance(value, tuple) for value in values) else " ".join(found)


def flag_words(words: Sequence[str]) -> dict[str, list[str]]:
    """The words of every `--flag`, up to the next; those within quoted words, too.

    So are values of Hydra, `model.seq_length=4096`.

    Words of variables that are set nowhere are left out behind others, as bash does.
    """
    flat = list[str]()
    for word in (word.replace(EMPTY, "") for word in words):
        inside = [word]
        if re.search(r"(^|\s)--\w", word) and re.search(r"\s", word):
            inside = [re.sub(r"(['\"])(.*?)\1", r"\2", part[0]) for part in _WITHIN.finditer(word)]
        flat += inside
    found: dict[str, list[str]] = {}
    flag = None
    for word in flat:
        if override := _OVERRIDE.fullmatch(word):
            found[override[1]] = [override[2]]
        elif re.match(r"--\w", word):
            flag, equals, value = word[2:].partition("=")
            found[flag] = [value] if equals else []
        elif flag is not None and not (word.endswith(".py") and found[flag]):
            found[flag] += [word] * (not found[flag] or not is_unset(word))
        else:  # the program, behind the flags of what starts it
            flag = None
    return found
