"""Measures the links between the ranks of a run, level by level; every rank takes part.

No clock is compared with another host's: one way is half of a round trip. On GPUs trips are
launched one behind the other, and timed by an event before and one behind all of them: the host has
no part in them.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from partopt.documents.links import (
    AllReduceSample,
    FittedLinks,
    LevelSamples,
    LinkMeasurement,
    MessageSample,
)
from partopt.errors import invalid
from partopt.profiler.device import describe_device
from partopt.runtime.context import Context, Direction, lost_connections
from partopt.runtime.link_fit import MeasuredLevel, fit_links, levels_of
from partopt.runtime.processes import (
    choose_backend,
    is_under_torchrun,
    ranks_of_host,
    run_ranks,
)

# before a small message: one behind the other takes a third of what one takes that comes out of a
# pause, as those of a training do, when the other end sleeps and caches hold other things
PAUSE_S = 0.003
PAUSED_BYTES = 500_000  # up to there
_DEFAULT_RANKS = 4  # where there are no GPUs
SIZES = {  # bytes, by backend
    "gloo": (4_000, 64_000, 1_000_000, 4_000_000, 16_000_000),
    "nccl": (4_000, 64_000, 1_000_000, 4_000_000, 16_000_000, 64_000_000, 256_000_000),
}
_SMALLEST, _LARGEST = 4, 2**32  # bytes of a message: all-reduces add numbers of 4 bytes
_MANY_BYTES, _MOST_TIMES = 4 * 10**6, 10
_WARM_UP = 5  # the part of the repetitions that warms up is one of so many
_ROUNDS = 3  # over all sizes, so that a burst of other work is in one of them
ReportProgress = Callable[[str], None]


@dataclass(frozen=True)
class LinkRun:
    """Ranks, in servers of `per_server`, that measure the links between them.

    Messages have `sizes` bytes. Large ones are repeated `repetitions` times in a round, the warm-up
    with them, small ones more often. The backend is `gloo` or `nccl`.
    """

    ranks: int
    per_server: int
    sizes: tuple[int, ...]
    backend: str
    repetitions: int

    def fit(self, name: str, report_progress: ReportProgress) -> FittedLinks:
        """Measure, and fit the topology `name`; as `measure`."""
        return fit_links(self.measure(report_progress), name, self.per_server)

    def measure(self, report_progress: ReportProgress) -> LinkMeasurement:
        """Measure: as a rank that `torchrun` started, or with processes that it starts.

        Rank 0 calls `report_progress` with what is measured next. Raises PartoptError where a rank
        fails; no process is left in any case.
        """
        return run_ranks(partial(_measure, self, report_progress), self.ranks, self.backend)


def prepare_links(
    sizes: Sequence[int] | None = None,
    ranks: int | None = None,
    per_server: int | None = None,
    backend: str = "auto",
    repetitions: int = 10,
) -> LinkRun:
    """The run of these options; PartoptError for what cannot be measured.

    By default there is a rank for every GPU, or without any four, or as many as there are cores, in
    one server. Under `torchrun` there are as many as it started, in its servers. `sizes` are those
    of `SIZES` by default.
    """
    if is_under_torchrun():
        if ranks is not None:
            raise invalid("ranks", ranks, "torchrun says how many ranks there are", "leave it out")
        ranks = int(os.environ["WORLD_SIZE"])
        here = ranks_of_host() or ranks
    else:
        if ranks is None:
            devices = torch.cuda.device_count() if backend != "gloo" else 0
            ranks = max(2, devices or min(_DEFAULT_RANKS, os.cpu_count() or 2))
        here = ranks
    per_server = here if per_server is None else per_server
    levels_of(ranks, per_server)
    backend = choose_backend(backend, here)
    different = tuple(sorted(set(SIZES[backend] if sizes is None else sizes)))
    for size in different:
        if not _SMALLEST <= size <= _LARGEST:
            what = f"a message has {_SMALLEST} bytes to {_LARGEST // 2**30} GiB"
            raise invalid("sizes", size, what, "choose sizes in between")
    if len(different) < 2:
        what = "latency and bandwidth need two sizes"
        raise invalid("sizes", ", ".join(map(str, different)), what, "give two or more")
    return LinkRun(ranks, per_server, different, backend, repetitions)


def _measure(run: LinkRun, report_progress: ReportProgress, context: Context) -> LinkMeasurement:
    """Measure every level; every rank of the run calls it and gets the same.

    Seconds are medians over repetitions and rounds.
    """
    cores = os.cpu_count() or 1
    # of the host that has the most for a core, before there is any of this run
    load, cores = max(context.gather((os.getloadavg()[0] / cores, cores)))
    levels = levels_of(context.ranks, run.per_server)
    ranks = _Ranks(run, context, report_progress if context.rank == 0 else lambda _: None)
    ranks.make_groups(levels)
    device = describe_device(context.device)
    memory = device.memory_bytes
    if memory is not None and context.device.type == "cpu":
        memory //= run.per_server  # the ranks of a host share what it has
    return LinkMeasurement(
        device=device.name,
        memory_bytes=memory,
        backend=run.backend,
        ranks=context.ranks,
        hosts=tuple(context.gather(context.host)),
        load=load,
        cores=cores,
        levels=tuple(ranks.measure_level(level) for level in levels),
        whole=ranks.measure_allreduces(range(context.ranks)) if len(levels) > 1 else (),
    )


class _Medians(NamedTuple):
    """Medians of one rank: of a message, and of the call that begins to send it."""

    message: float
    send: float = 0.0


_Measure = Callable[[int, int], _Medians | None]  # of a size, so many times


class _Ranks:
    """All ranks of the run, from one of them: what they time together and tell one another."""

    def __init__(self, run: LinkRun, context: Context, report_progress: ReportProgress) -> None:
        self.run, self.context, self.report_progress = run, context, report_progress

    def make_groups(self, levels: Sequence[MeasuredLevel]) -> None:
        """Make and use all process groups first: every rank has to, in one order."""
        for level in levels:
            for ranks in level.allreduces:
                self.context.group(ranks)
            for pair in sorted({level.pair, *level.ports}):
                self._group(*pair)
                self._group(*pair[::-1])
        self.context.group(range(self.context.ranks))
        self.context.connect()

    @property
    def _launches(self) -> bool:
        """Whether the host only launches what the devices do."""
        return self.context.backend == "nccl"

    def _group(self, source: int, destination: int) -> Any:
        """NCCL keeps the order of a group, so every direction has one; gloo has tags."""
        if not self._launches:
            return None
        return self.context.channel(Direction(source, destination))

    def measure_level(self, level: MeasuredLevel) -> LevelSamples:
        """Everything that is measured on one level."""
        self.report_progress(f"{level.name}: messages")
        messages = self._messages(partial(self._trips, pairs=[level.pair]))
        reduced = [timed for ranks in level.allreduces for timed in self.measure_allreduces(ranks)]
        self.report_progress(f"{level.name}: messages at once")
        both = self._messages(partial(self._exchange, pair=level.pair))
        ports = self._messages(partial(self._trips, pairs=level.ports)) if level.ports else ()
        return LevelSamples(level.name, level.size, messages, tuple(reduced), both, ports)

    def _messages(self, measure: _Measure) -> tuple[MessageSample, ...]:
        return tuple(MessageSample(size, *seconds) for size, seconds in self._in_rounds(measure))

    def measure_allreduces(self, ranks: Sequence[int]) -> tuple[AllReduceSample, ...]:
        """All-reduces of every size over `ranks`; the mean of what its ranks saw."""
        self.report_progress(f"all-reduce of {len(ranks)}")
        group, device = self.context.group(ranks), self.context.device

        def time_allreduces(size: int, count: int) -> _Medians | None:
            if self.context.rank not in ranks:
                return None
            numbers = torch.zeros(size // 4, device=device)

            def reduce(_: int) -> None:
                with lost_connections():
                    dist.all_reduce(numbers, group=group)

            return _Medians(self._time(reduce, count))

        timed = self._in_rounds(time_allreduces)
        return tuple(AllReduceSample(len(ranks), size, seen.message) for size, seen in timed)

    def _time(self, run: Callable[[int], None], count: int) -> float:
        """Seconds of one of `count` runs, which are given their numbers.

        On CPUs it is their median. GPUs are launched all of them behind a warm-up, and what is
        between two events is parted evenly.
        """
        warm_up = count // _WARM_UP
        if self._launches:
            for turn in range(warm_up):
                run(turn)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            for turn in range(warm_up, warm_up + count):
                run(turn)
            end.record()
            torch.cuda.synchronize()
            return float(begin.elapsed_time(end)) * 1e-3 / count
        seconds = []
        for turn in range(count):
            began = time.perf_counter()
            run(turn)
            seconds.append(time.perf_counter() - began)
        return _median(seconds)

    def _in_rounds(self, measure: _Measure) -> list[tuple[int, _Medians]]:
        """For every size the median over rounds of what `measure(size, repetitions)` gives.

        Of a round it is the mean over the ranks that saw anything.
        """
        rounds: list[list[_Medians]] = []
        for _ in range(_ROUNDS):
            rounds.append([])
            for size in self.run.sizes:
                times = max(1, min(_MOST_TIMES, _MANY_BYTES // size))
                self.context.barrier()
                seen = self.context.gather(measure(size, self.run.repetitions * times))
                means = zip(*(of_rank for of_rank in seen if of_rank is not None), strict=True)
                rounds[-1].append(_Medians(*map(statistics.fmean, means)))
        found = []
        for size, seconds in zip(self.run.sizes, zip(*rounds, strict=True), strict=True):
            medians = map(statistics.median, zip(*seconds, strict=True))
            found.append((size, _Medians(*medians)))
        return found

    def _trips(self, size: int, count: int, pairs: Sequence[tuple[int, int]]) -> _Medians | None:
        """Half round trips of all `pairs` at once, as their first ranks see them."""
        for first, second in pairs:
            if self.context.rank == first:
                return self._ping(second, size, count)
            if self.context.rank == second:
                self._pong(first, size, count)
        return None

    def _exchange(self, size: int, count: int, pair: tuple[int, int]) -> _Medians | None:
        """Messages of a pair in both directions at once."""
        if self.context.rank not in pair:
            return None
        (other,) = set(pair) - {self.context.rank}
        message = torch.zeros(size, dtype=torch.uint8, device=self.context.device)

        def exchange(turn: int) -> None:
            # in one order of groups on both ranks, so that one queue of the hardware does
            works = [
                self._send(other, message, turn)
                if source == self.context.rank
                else self._receive(other, size, turn)
                for source in pair
            ]
            for work in works:
                self._wait(work)

        return _Medians(self._time(exchange, count))

    def _ping(self, other: int, size: int, count: int) -> _Medians:
        """Half round trips as the rank that begins them; on CPUs receives are posted before."""
        message = torch.zeros(size, dtype=torch.uint8, device=self.context.device)
        if self._launches:

            def trip(turn: int) -> None:
                self._send(other, message, turn)
                self._wait(self._receive(other, size, turn))

            return _Medians(self._time(trip, count) / 2)
        trips, sends = [], []
        reply = self._receive(other, size, 0)
        for turn in range(count):
            if size <= PAUSED_BYTES:
                time.sleep(PAUSE_S)
            began = time.perf_counter()
            sending = self._send(other, message, turn)
            sent = time.perf_counter()
            self._wait(reply)
            ended = time.perf_counter()
            self._wait(sending)
            if turn + 1 < count:
                reply = self._receive(other, size, turn + 1)
            trips.append((ended - began) / 2)
            sends.append(sent - began)
        return _Medians(_median(trips), _median(sends))

    def _pong(self, other: int, size: int, count: int) -> None:
        """The other end of `_ping`."""
        message = torch.zeros(size, dtype=torch.uint8, device=self.context.device)
        if self._launches:
            for turn in range(count // _WARM_UP + count):
                self._wait(self._receive(other, size, turn))
                self._send(other, message, turn)
            torch.cuda.synchronize()
            return
        work = self._receive(other, size, 0)
        for turn in range(count):
            following = self._receive(other, size, turn + 1) if turn + 1 < count else None
            self._wait(work)
            self._wait(self._send(other, message, turn))
            work = following

    def _send(self, other: int, message: Tensor, turn: int) -> Any:
        """Begin to send; `turn` counts the messages, so that no two at once have one tag."""
        group = self._group(self.context.rank, other)
        with lost_connections():
            return dist.isend(message, other, group=group, tag=turn % 2)

    def _receive(self, other: int, size: int, turn: int) -> Any:
        """Post a receive, into new memory as in a run: a system pays for it when it is written."""
        message = torch.empty(size, dtype=torch.uint8, device=self.context.device)
        group = self._group(other, self.context.rank)
        with lost_connections():
            return dist.irecv(message, other, group=group, tag=turn % 2)

    def _wait(self, work: Any) -> None:
        """Wait until a message is sent or there; a GPU does, in the stream that is current."""
        with lost_connections():
            work.wait()


def _median(seconds: list[float]) -> float:
    """The median without the warm-up, the first of them."""
    return statistics.median(seconds[len(seconds) // _WARM_UP :])
