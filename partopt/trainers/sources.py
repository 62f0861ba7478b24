"""What says the facts of trainers, from the file beside this one."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

_FILE = Path(__file__).with_suffix(".yaml")


class Sources(Mapping[str, str]):
    """Sources of shipped trainers by the fact, the last before others; loaded when asked for."""

    def __init__(self, *trainers: str) -> None:
        self._trainers = trainers

    @functools.cached_property
    def _found(self) -> dict[str, str]:
        shipped = msgspec.yaml.decode(_FILE.read_bytes(), type=dict[str, dict[str, str]])
        return {fact: said for name in self._trainers for fact, said in shipped[name].items()}

    def __getitem__(self, fact: str) -> str:
        return self._found[fact]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)
