"""Stages of a pipeline as texts of trainers say them, and what is refused of these."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Sequence

from partopt.configurations.marks import unknown_names
from partopt.configurations.program import Called
from partopt.configurations.settings import Settings
from partopt.errors import PartoptError
from partopt.trainers.parts import BLOCK, Part, count_blocks

_NUMBERS = re.compile(r"[\[(]?\s*[0-9]{1,9}(\s*,\s*[0-9]{1,9})*\s*,?\s*[\])]?")


def find_value(settings: Settings, name: str) -> object:
    """The value of a setting; None where it has none. PartoptError where it is computed."""
    value = settings.value(name)
    if _has_unknown(value):
        raise PartoptError(
            f"{name} is computed, and nothing is executed here",
            "print it, and give what is printed",
            code="computed-layout",
        )
    return value


def read_literal(text: str) -> object:
    """The value of a text that is a literal of Python; None where it is none."""
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


def read_numbers(settings: Settings, name: str, example: str) -> list[int]:
    """The numbers of a text that are all of it, or the value of `name` in it.

    Raises PartoptError for a text without numbers.
    """
    stripped = settings.text.strip()
    value: object = stripped if _NUMBERS.fullmatch(stripped) else find_value(settings, name)
    if isinstance(value, list) and all(isinstance(word, str) for word in value):
        value = " ".join(value)
    if isinstance(value, str) and _NUMBERS.fullmatch(value.strip()):
        value = [int(found) for found in re.findall(r"[0-9]+", value)]
    if isinstance(value, int):
        value = [value]
    if isinstance(value, list | tuple) and value and all(type(number) is int for number in value):
        return list(value)
    neither = f"neither numbers nor a text with {name}"
    raise malformed(f"{name} is {value!r}" if value is not None else neither, example)


def cuts_of_blocks(counts: Sequence[int], parts: Sequence[Part]) -> list[int]:
    """The cuts of stages with so many blocks. PartoptError unless these are all blocks."""
    check_stages(counts, "blocks", count_blocks(parts))
    return [parts.index(Part(BLOCK, n)) for n in itertools.accumulate(counts[:-1])]


def check_stages(counts: Sequence[int], what: str, there: int) -> None:
    """Raise PartoptError for a stage without any, or unless they are all that are `there`."""
    for s, count in enumerate(counts):
        if count < 1:
            raise PartoptError(
                f"stage {s} has no {what}, and a stage of a plan has some",
                "leave it out, or give it some",
                code="empty-stage",
            )
    check_count(sum(counts), what, there)


def check_count(said: int, what: str, there: int) -> None:
    """Raise PartoptError unless a layout has as many blocks or layers as are `there`."""
    if said != there:
        raise PartoptError(
            f"the layout has {said} {what}, the profile {there}",
            "give the profile of the same model",
            code="other-layers",
        )


def _has_unknown(value: object) -> bool:
    if isinstance(value, list):
        return any(map(_has_unknown, value))
    return isinstance(value, Called) or (isinstance(value, str) and bool(unknown_names(value)))


def malformed(what: str, example: str) -> PartoptError:
    """The error of a text that is no layout."""
    return PartoptError(what, f"write {example}", code="malformed-layout")
