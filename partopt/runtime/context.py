"""What a process of a run knows of the others: its rank, their groups, and what they note."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from partopt.errors import ANSWER_IS_NO, PartoptError
from partopt.runtime.progress import MEETING, OUTSIDE, Writer


@dataclass
class Context:
    """A process of a run: one rank of `ranks`, after the process group was made."""

    rank: int
    ranks: int
    device: torch.device
    progress: Writer
    tell: Callable[[], None] = lambda: None  # the others of what this rank does, at once
    host: str = field(default_factory=socket.gethostname)
    groups: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def group(self, ranks: Sequence[int], name: str = "") -> Any:
        """The process group of `ranks`, made once for each name.

        Every process of the run must ask for the same groups in the same order.
        """
        key = (*sorted(ranks), name)
        if key not in self.groups:
            with lost_connections():
                self.groups[key] = dist.new_group(sorted(ranks))
        return self.groups[key]

    def barrier(self) -> None:
        """Wait until all ranks have come here."""
        with self._meeting():
            dist.barrier()

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in their order, on each of them."""
        values: list[Any] = [None] * self.ranks
        with self._meeting():
            dist.all_gather_object(values, value)
        return values

    @contextlib.contextmanager
    def _meeting(self) -> Iterator[None]:
        """Note that the rank waits for all, where it was outside of the schedule."""
        outside = self.progress.state == OUTSIDE
        if outside:
            self.progress.note(MEETING)
        with lost_connections():
            yield
        if outside:
            self.progress.note(OUTSIDE)


@contextlib.contextmanager
def lost_connections() -> Iterator[None]:
    """Raise PartoptError where another process is gone: what torch says names only a socket."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if "onnection" not in text and "Broken pipe" not in text and "timeout" not in text:
            raise
        raise PartoptError(
            f"lost the connection to another rank ({text.splitlines()[0]})",
            "the rank that failed first says why",
            ANSWER_IS_NO,
            code="lost-connection",
        ) from error
