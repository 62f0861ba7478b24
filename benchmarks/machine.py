"""The machine that a table was measured on."""

from __future__ import annotations

import os
import platform
import resource
import time
from collections.abc import Callable
from pathlib import Path

import numba
import numpy


def describe() -> str:
    """Processor, cores, system and the versions that matter, in a line."""
    cpuinfo = Path("/proc/cpuinfo")
    names = (
        [
            line.partition(":")[2].strip()
            for line in cpuinfo.read_text().splitlines()
            if line.startswith("model name")
        ]
        if cpuinfo.exists()
        else []
    )
    processor = names[0] if names else platform.processor() or platform.machine()
    versions = (
        f"Python {platform.python_version()}, numpy {numpy.__version__}, numba {numba.__version__}"
    )
    return f"{processor}, {os.cpu_count()} cores, {platform.system()}; {versions}"


def watch_others() -> Callable[[], float | None]:
    """Watch from now on; the result says what share of the cores other programs have taken since.

    It counts as their own what this process and its children that have ended took. None where the
    system does not tell.
    """
    began, busy_s, own_s = time.perf_counter(), _busy_s(), _own_s()

    def share() -> float | None:
        now_s = _busy_s()
        if busy_s is None or now_s is None:
            return None
        others_s = now_s - busy_s - (_own_s() - own_s)
        return max(0.0, others_s) / ((time.perf_counter() - began) * (os.cpu_count() or 1))

    return share


def _busy_s() -> float | None:
    """Seconds of all cores that were not idle, nor waited for a disk, since the machine started."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    user, nice, system, _, _, *others = map(int, stat.read_text().split("\n")[0].split()[1:9])
    return (user + nice + system + sum(others)) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    """Processor seconds of this process, and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)
