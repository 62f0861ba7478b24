"""Signals that end a run: which of its processes heeds them, and when."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

ENDING = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


def leave_to_parent() -> None:
    """Have a child not heed what its parent gets too, which then ends all: Ctrl-C, a hang-up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Within the context, signals wait: nothing is left half-started or half-ended."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """Within the context, a signal ends this process even while it waits for a message.

    A handler of Python's would wait for the message, too. What is ignored stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in ENDING}
    heeded = [number for number in ENDING if before[number] is not signal.SIG_IGN]
    for number in heeded:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number in heeded:
            signal.signal(number, before[number])
