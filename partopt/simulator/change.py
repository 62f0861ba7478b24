"""A change to a plan, in words and as data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Verb = Literal["solve", "simulate", "measure", "compare", ""]


class Change(NamedTuple):
    """A change in words, the library function that makes it, and the options to call it with.

    There are no options where their values are open.
    """

    text: str
    verb: Verb = ""
    options: Mapping[str, Any] = {}


def suggest(verb: Verb, more: str = "", **options: Any) -> Change:
    """The change that `verb` makes with `options`; `more` follows them in the text.

    A change of `simulate` names its options alone.
    """
    words = [] if verb == "simulate" else [f"`{verb}`"]
    words += [name_option(name, value) for name, value in options.items()]
    return Change(" ".join(words) + more, verb, options)


def name_option(name: str, value: Any) -> str:
    """An option and its value in backquotes.

    Examples: `cuts=[3, 5]`, `links={"cluster": 2}`, `comm=overlap`.
    """
    return f"`{name}={value if isinstance(value, str) else json.dumps(value)}`"
