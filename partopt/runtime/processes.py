"""What Linux says of a process: whether it is stopped, and what it has computed."""

from __future__ import annotations

import os
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def is_stopped(pid: int | None) -> bool:
    """Whether a process is stopped by a signal; False where nobody tells."""
    return _stat(pid)[:1] in (["T"], ["t"])


def cpu_s(pid: int | None) -> float:
    """Seconds of processor time of a process and its living descendants; 0 where nobody tells."""
    fields = _stat(pid)
    own = sum(map(int, fields[11:13])) / _TICKS_PER_S  # utime and stime
    return own + sum(map(cpu_s, _children(pid)))


def _stat(pid: int | None) -> list[str]:
    """The fields of `/proc/PID/stat` behind the name, from the state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _children(pid: int | None) -> list[int]:
    try:
        lists = [each.read_text() for each in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:  # a thread that has ended meanwhile
        return []
    return [int(child) for each in lists for child in each.split()]
