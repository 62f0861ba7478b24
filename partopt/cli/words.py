"""The words of the library as the command line spells them: options as flags, functions as verbs."""

from __future__ import annotations

import re

_OPTION = re.compile(r"`([a-z_]+)(?:=([^`]*))?`")
_CALL = re.compile(r"`(solve|simulate|compare|measure|verify)((?: [a-z_]+=[^ `]+)*)`")
_FLAGS = {"microbatch_sizes": "--microbatch", "arguments": "--set", "units": "--unit"}
_VERBS = {
    "solve": "partopt plan",
    "simulate": "partopt simulate",
    "compare": "partopt compare",
    "measure": "partopt profile",
    "verify": "partopt show --verify",
}


def as_flags(text: str) -> str:
    """`text` with the library's words, in backquotes, as the command line spells them.

    `` `microbatches=64` `` becomes `--microbatches 64`, and `` `solve stages=2` `` becomes
    `partopt plan --stages 2`.
    """
    return _OPTION.sub(_spell_option, _CALL.sub(_spell_call, text))


def _spell_call(match: re.Match[str]) -> str:
    options = [_spell_option(option) for option in re.finditer(r"([a-z_]+)=(\S+)", match[2])]
    return " ".join([_VERBS[match[1]], *options])


def _spell_option(match: re.Match[str]) -> str:
    name, value = match[1], match[2]
    flag = _FLAGS.get(name, f"--{name.replace('_', '-')}")
    return flag if value is None else f"{flag} {value}"
