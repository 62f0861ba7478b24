"""Being told to stop: SIGTERM ends long work as Ctrl-C does, so that what is finished is kept."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

_WORDS: dict[int, str] = {signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}


def stopped_by_signals() -> contextlib.AbstractContextManager[None]:
    """Raise KeyboardInterrupt in this context on SIGINT, SIGTERM, SIGHUP; its argument says which.

    A shell has its background jobs ignore SIGINT: here it counts all the same. SIGHUP does not
    where `nohup` has it ignored.
    """
    return _handle(_stop)


def not_stopped() -> contextlib.AbstractContextManager[None]:
    """Ignore these signals in this context, in which something short is written."""
    return _handle(signal.SIG_IGN)


@contextlib.contextmanager
def _handle(handler: Any) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handled = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        handled.append(signal.SIGHUP)
    before = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def exit_code(interrupt: BaseException | None) -> int:
    """128 and the number of the signal, as shells have it: 130 after Ctrl-C, 143 after SIGTERM."""
    return 128 + _number(interrupt)


def describe(why: BaseException | None) -> str:
    """What stopped the work, in a word or two."""
    if isinstance(why, Exception):
        return "stopped by an error"
    return _WORDS.get(_number(why), "interrupted")


def _number(interrupt: BaseException | None) -> int:
    known = interrupt.args if interrupt is not None else ()
    return int(known[0]) if known else int(signal.SIGINT)


def _stop(number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt(number)
