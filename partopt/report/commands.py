"""Commands in lines of a page, which a shell takes as they are copied."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def command_lines(words: Iterable[str], begin: str, rest: str, wide: int) -> Iterator[str]:
    """Lines of at most `wide` columns, where no word is longer, the first after `begin`.

    The words are as a shell takes them; values stay beside their options. Every line but the last
    ends in a backslash, every line but the first begins with `rest`.
    """
    line, empty = begin, True
    for part in _parts(words, wide - len(rest) - 2):
        if not empty and len(line) + len(part) + 2 > wide:
            yield f"{line}\\"
            line = rest
        line, empty = f"{line}{part} ", False
    yield line.rstrip()


def _parts(words: Iterable[str], room: int) -> Iterator[str]:
    """The words, an option and its value together where there is room."""
    option = ""
    for word in words:
        if option and not word.startswith("-") and len(option) + 1 + len(word) <= room:
            yield f"{option} {word}"
            option = ""
            continue
        if option:
            yield option
        option = word if word.startswith("-") else ""
        if not option:
            yield word
    if option:
        yield option
