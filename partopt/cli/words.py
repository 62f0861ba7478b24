"""Library words to flags."""

from __future__ import annotations

import re

_OPTION = re.compile(r"`([a-z_]+)(?:=([^`]*))?`")
_FLAGS = {"microbatch_sizes": "--microbatch", "arguments": "--set", "units": "--unit"}


def as_flags(text: str) -> str:
    def flag(match: re.Match[str]) -> str:
        name, value = match[1], match[2]
        spelled = _FLAGS.get(name, f"--{name.replace('_', '-')}")
        return spelled if value is None else f"{spelled} {value}"

    return _OPTION.sub(flag, text)
