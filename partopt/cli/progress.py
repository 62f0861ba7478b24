"""A progress bar on a terminal for work that takes more than a second; nothing elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

_PATIENCE_S = 1.0


@contextlib.contextmanager
def shown() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function to call with what is being done, how much is done, and how much there is."""
    if not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    began = time.monotonic()
    bar = Progress(console=Console(stderr=True), transient=True)
    task = bar.add_task("", total=None)

    def tell(what: str, done: int, total: int) -> None:
        if time.monotonic() - began > _PATIENCE_S:
            bar.start()
        bar.update(task, description=what, completed=done, total=total)

    try:
        yield tell
    finally:
        bar.stop()
