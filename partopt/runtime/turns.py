"""Ranks of a host that do what takes much memory at once, or one after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from partopt.profiler.free_memory import HEADROOM, free_host_bytes
from partopt.runtime.context import Context

Made = TypeVar("Made")


def in_turns(context: Context, size_bytes: float, make: Callable[[], Made]) -> Made:
    """What `make` makes, which takes `size_bytes` of the host's memory meanwhile.

    Every rank calls it. Where some host has no room for that of all its ranks at once, the ranks of
    every host take turns.
    """
    found = context.gather((context.host, free_host_bytes()))
    hosts = [host for host, _ in found]
    ranks = Counter(hosts)
    if all(HEADROOM * ranks[host] * size_bytes <= free_bytes for host, free_bytes in found):
        return make()
    own = hosts[: context.rank].count(context.host)
    made: list[Made] = []
    for turn in range(max(ranks.values())):
        if turn == own:
            made.append(make())
        context.barrier()
    return made[0]
