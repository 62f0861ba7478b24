"""What commands print that need no more than their words: echo, printf, seq."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from contextlib import suppress

from partopt.configurations.marks import mark, marks_of

_LETTERS = dict(zip("abefnrtvE\\'\"?", "\a\b\x1b\f\n\r\t\v\x1b\\'\"?", strict=True))


def unescape(text: str) -> str:
    """A text with what its backslashes stand for, as in `$'..'`."""

    def spell(found: re.Match[str]) -> str:
        octal, hexadecimal, letter = found.groups()
        if octal or hexadecimal:
            return chr(int(octal or hexadecimal, 8 if octal else 16) % 256)
        return _LETTERS.get(letter, found[0])

    return re.sub(r"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{1,2})|(.))", spell, text, flags=re.S)


def print_form(form: str, words: Sequence[str]) -> str | None:
    """What `printf` prints of a form that takes all words once; None where that is not known."""
    places = re.findall("%0?[0-9]{0,2}[sd]", form)
    known = len(places) == len(words) and not any(map(marks_of, [form, *words]))
    if not known or form.count("%") != len(places):
        return None
    pairs = zip(places, words, strict=True)
    with suppress(ValueError):
        values = [int(word, 10) if place[-1] == "d" else word for place, word in pairs]
        return unescape(form) % tuple(values)
    return None


def print_words(name: str, words: Sequence[str]) -> str | None:
    """What a command prints that needs no more than its words; None for all others."""
    if name == "echo":
        flags = len([*itertools.takewhile(lambda word: re.fullmatch("-[neE]+", word), words)])
        letters, text = "".join(words[:flags]), " ".join(words[flags:])
        text = unescape(text) if letters.rfind("e") > letters.rfind("E") else text
        return text + "\n" * ("n" not in letters)
    if name == "seq" and words and all(re.fullmatch("[0-9]{1,4}", text) for text in words):
        first, step = (*map(int, words[:-1]), 1, 1)[:2] if len(words) > 1 else (1, 1)
        return "".join(f"{n}\n" for n in range(first, int(words[-1]) + 1, step or 1))
    if name != "printf":
        return None
    printed = print_form(words[0], words[1:]) if words else None
    return mark("printf") if printed is None else printed
