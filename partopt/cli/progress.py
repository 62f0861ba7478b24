"""How far long work is: a bar on a terminal, for work that takes more than a second."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from partopt.cli.terminal import say
from partopt.printable import printable

_PATIENCE_S = 1.0
_MINUTES_FROM_S = 100.0


Tell = Callable[[str, int, int], None]  # what is done, how much of it, and how much there is


@contextlib.contextmanager
def shown() -> Iterator[Tell]:
    """Yield a function to call with what is being done, how much is done, and how much there is."""
    if not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress

    began = time.monotonic()
    bar = Progress(console=Console(stderr=True), transient=True)
    task = bar.add_task("", total=None)

    def tell(what: str, done: int, total: int) -> None:
        if time.monotonic() - began > _PATIENCE_S:
            bar.start()
        bar.update(task, description=escape(printable(what)), completed=done, total=total)

    try:
        yield tell
    finally:
        bar.stop()


@contextlib.contextmanager
def of_sizes(sizes: Sequence[object]) -> Iterator[Callable[[int, int, int], None]]:
    """Yield what `partopt.measure` calls with a microbatch size, steps done and steps to do.

    On a terminal every step moves the bar; elsewhere a line says that a size is done.
    """
    watch = SizeWatch(sizes, time.monotonic)
    with shown() as show:

        def tell(size: int, done: int, steps: int) -> None:
            text = watch.describe(size, done, steps)
            show(text, done, steps or 1)
            if 0 < steps == done and not sys.stderr.isatty():
                say(text, err=True)

        yield tell


class SizeWatch:
    """Says what is measured, and about how long the rest takes.

    A larger size is taken to need as much longer as it is larger, preparing it as well.
    """

    def __init__(self, sizes: Sequence[object], now: Callable[[], float]) -> None:
        self.sizes = sorted({size for size in sizes if isinstance(size, int)})
        self.now = now
        self._began = self._timed_from = 0.0

    def describe(self, size: int, done: int, steps: int) -> str:
        """`microbatch 4 (3 of 4), step 6 of 10, about 40 s left`."""
        where = f"microbatch {size} ({self.sizes.index(size) + 1} of {len(self.sizes)})"
        if not steps:
            self._began = self.now()
            return f"{where}, preparing"
        if not done:
            self._timed_from = self.now()
            return f"{where}, step 1 of {steps}"
        step_s = (self.now() - self._timed_from) / done
        whole_s = self._timed_from - self._began + step_s * steps
        later = sum(other for other in self.sizes if other > size)
        left_s = step_s * (steps - done) + whole_s * later / size
        if done < steps:
            return f"{where}, step {done + 1} of {steps}, {_about(left_s)} left"
        taken = f"{where}, {steps} steps in {whole_s:.0f} s"
        return f"{taken}, {_about(left_s)} left" if later else taken


def _about(seconds: float) -> str:
    if seconds < _MINUTES_FROM_S:
        return f"about {max(seconds, 1):.0f} s"
    return f"about {seconds / 60:.0f} min"
