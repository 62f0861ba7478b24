"""The partitions next to one: a cut moved, a replica given away, a stage split, merged, shifted."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from partopt.cost.problem import CONTIGUOUS, FREE, NONE, Assignment, Partition, Problem
from partopt.schedules import schedule
from partopt.search.cuts import Tables

# S, s   stages, and which one; r_s its replicas
# P      devices

_STEPS = (1, 2, 3, 5, 8, 13, 21)  # boundaries by which a cut moves

_EVERY = 20  # devices up to which all replicas of two or three stages are starts

Counts = tuple[int, ...]


@dataclass(frozen=True)
class Shape:
    """A partition whose stages lie on consecutive ranks, one after the other.

    `bounds` are its S + 1 boundaries; `idle` the idle ranks before each stage; `recompute` is as in
    `Assignment`.
    """

    bounds: Counts
    replicas: Counts
    idle: Counts
    recompute: tuple[bool | None, ...]

    @property
    def ranks(self) -> list[range]:
        """The ranks of each stage."""
        ends = accumulate(i + r for i, r in zip(self.idle, self.replicas, strict=True))
        return [range(end - r, end) for end, r in zip(ends, self.replicas, strict=True)]

    def partition(self) -> Partition:
        """The stages on their ranks."""
        return Partition(
            CONTIGUOUS,
            tuple(map(Assignment, self.bounds, self.bounds[1:], self.ranks, self.recompute)),
        )


def frozen(partition: Partition) -> Partition:
    """The partition with stages and ranks that can be looked up; consecutive ranks as a range."""
    return replace(
        partition,
        stages=tuple(replace(stage, ranks=_run(stage.ranks)) for stage in partition.stages),
    )


def _run(ranks: Sequence[int]) -> Sequence[int]:
    run = range(ranks[0], ranks[0] + len(ranks))
    return run if list(run) == list(ranks) else tuple(ranks)


def shape_of(partition: Partition) -> Shape | None:
    """The shape of a partition; None where some stage lies on ranks apart, or they are not in
    order.
    """
    at, idle = 0, []
    for stage in partition.stages:
        if not isinstance(stage.ranks, range) or stage.ranks.start < at:
            return None
        idle.append(stage.ranks.start - at)
        at = stage.ranks.stop
    return Shape(
        (0, *(stage.stop for stage in partition.stages)),
        tuple(len(stage.ranks) for stage in partition.stages),
        tuple(idle),
        tuple(stage.recompute for stage in partition.stages),
    )


class Moves:
    """The steps that a request allows."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.tables = problem, Tables(problem)
        self.bounds, self.P = self.tables.bounds, problem.topology.devices
        self.alike = problem.replication != FREE or not schedule(problem.schedule).uneven
        self.flag = None if not problem.recompute_per_stage else False

    def allows(self, replicas: Sequence[int]) -> bool:
        """Whether stages may have so many replicas."""
        asked = self.problem.stages
        return (
            0 < len(replicas) < len(self.bounds)
            and min(replicas) > 0
            and sum(replicas) <= self.P
            and asked in (None, len(replicas))
            and (not self.alike or len(set(replicas)) == 1)
            and (self.problem.replication != NONE or replicas[0] == 1)
        )

    def around(self, partition: Partition) -> Iterator[Partition]:
        """The partitions one step away, some of them more than once."""
        yield from self._moved(partition)
        yield from self._recomputing(partition)
        shape = shape_of(partition)
        if shape is None:
            return
        for changed in filter(None, map(self.settle, self._replicated(shape))):
            yield changed.partition()
            yield from self.balanced(changed)
        yield from self.balanced(shape)
        if sum(shape.replicas) < self.P and len(self.problem.topology.levels) > 1:
            yield from (other.partition() for other in self._shifted(shape))

    def balanced(self, shape: Shape) -> Iterator[Partition]:
        """The same replicas with the cuts of least bottleneck, where there are any that fit."""
        if self.tables.able:
            modes = [self.problem.recompute if own is None else own for own in shape.recompute]
            for cuts in self.tables.cuts(tuple(shape.ranks), tuple(modes)):
                yield replace(shape, bounds=tuple(cuts)).partition()

    def starts(self) -> Iterator[Partition]:
        """Partitions of many kinds of replicas: equal stages, and any two or three.

        None where there are no tables for their cuts.
        """
        if not self.tables.able:
            return
        P, most = self.P, min(self.P, len(self.bounds) - 1)
        kinds = [(r,) * S for S in range(1, most + 1) for r in dict.fromkeys((P // S, 1))]
        if not self.alike:
            kinds += [(P // S + 1,) * (P % S) + (P // S,) * (S - P % S) for S in range(2, most + 1)]
            kinds += [(P - k, k) for k in range(1, P) if min(k, P - k) <= _EVERY]
            few = range(1, P) if P <= _EVERY else (1,)
            kinds += [(k, P - k - last, last) for k in few for last in few]
            kinds += [(k, k, P - 2 * k) for k in few] + [(P - 2 * k, k, k) for k in few]
        for replicas in dict.fromkeys(kinds):
            if self.allows(replicas):
                S = len(replicas)
                yield from self.balanced(Shape((), replicas, (0,) * S, (self.flag,) * S))

    def _moved(self, partition: Partition) -> Iterator[Partition]:
        """Each cut by one or more boundaries."""
        stages = list(partition.stages)
        for c in range(1, len(stages)):
            at = bisect.bisect_left(self.bounds, stages[c].start)
            for step in (sign * step for step in _STEPS for sign in (1, -1)):
                if 0 < at + step < len(self.bounds) - 1:
                    cut = self.bounds[at + step]
                    if stages[c - 1].start < cut < stages[c].stop:
                        yield replace(
                            partition,
                            stages=(
                                *stages[: c - 1],
                                replace(stages[c - 1], stop=cut),
                                replace(stages[c], start=cut),
                                *stages[c + 1 :],
                            ),
                        )

    def _recomputing(self, partition: Partition) -> Iterator[Partition]:
        """One stage, or all, that recomputes or not, where that is left to the partition."""
        if not self.problem.recompute_per_stage or self.problem.memory_bytes is None:
            return
        stages = tuple(partition.stages)
        for s, stage in enumerate(stages):
            other = replace(stage, recompute=not stage.recompute)
            yield replace(partition, stages=(*stages[:s], other, *stages[s + 1 :]))
        for every in (False, True):
            alike = tuple(replace(stage, recompute=every) for stage in stages)
            yield replace(partition, stages=alike)

    def settle(self, shape: Shape) -> Shape | None:
        """The shape with no more idle ranks than there are; None where its replicas may not be."""
        if not self.allows(shape.replicas):
            return None
        return replace(shape, idle=self._trim(shape))

    def _trim(self, shape: Shape) -> Counts:
        """The idle ranks before each stage, no more than there are."""
        left, idle = self.P - sum(shape.replicas), []
        for own in shape.idle:
            idle.append(min(own, left))
            left -= idle[-1]
        return tuple(idle)

    def _shifted(self, shape: Shape) -> Iterator[Shape]:
        """One idle rank before another stage, or behind the last, or all before one."""
        S, left = len(shape.replicas), self.P - sum(shape.replicas)
        gaps = [*shape.idle, left - sum(shape.idle)]
        for source in range(S + 1):
            for to in range(S + 1):
                if gaps[source] > 0 and to != source:
                    other = list(gaps)
                    other[source] -= 1
                    other[to] += 1
                    yield replace(shape, idle=tuple(other[:S]))
        for to in range(S):
            yield replace(shape, idle=tuple(left if s == to else 0 for s in range(S)))

    def _replicated(self, shape: Shape) -> Iterator[Shape]:
        """Other replicas, allowed or not, on the same cuts as far as the stages are the same."""
        r, S = shape.replicas, len(shape.replicas)
        if self.alike:
            yield from (replace(shape, replicas=(r[0] + more,) * S) for more in (1, -1))
        else:
            for s in range(S):
                yield replace(shape, replicas=_plus(r, s, 1))
                yield replace(shape, replicas=_plus(r, s, -1))
                for to in range(S):
                    if to != s:
                        yield replace(shape, replicas=_plus(_plus(r, s, -1), to, 1))
                        swapped = list(r)
                        swapped[s], swapped[to] = r[to], r[s]
                        yield replace(shape, replicas=tuple(swapped))
        for s in range(S):
            yield from self.split(shape, s)
        for s in range(S - 1):
            yield from self.merge(shape, s)

    def split(self, shape: Shape, s: int) -> Iterator[Shape]:
        """Stage s in two, which share its replicas or take one of another stage.

        Alike, both have as many as it had.
        """
        r, own = shape.replicas, shape.replicas[s]
        parts = [(r, own, own)] if self.alike else []
        parts += [
            (r, first, own - first) for first in sorted({*range(1, 5), own // 2, own - 2, own - 1})
        ]
        parts += [(r, 1, own), (r, own, 1)]
        parts += [
            (_plus(r, donor, -1), *pair)
            for donor in range(len(r))
            if donor != s and r[donor] > 1
            for pair in ((1, own), (own, 1))
        ]
        for others, first, second in dict.fromkeys(part for part in parts if min(part[1:]) > 0):
            cut = self._between(
                shape.bounds[s], shape.bounds[s + 1], first / max(1, first + second)
            )
            if cut is not None:
                yield Shape(
                    (*shape.bounds[: s + 1], cut, *shape.bounds[s + 1 :]),
                    (*others[:s], first, second, *others[s + 1 :]),
                    (*shape.idle[: s + 1], 0, *shape.idle[s + 1 :]),
                    (*shape.recompute[: s + 1], *shape.recompute[s:]),
                )

    def _between(self, start: int, stop: int, share: float) -> int | None:
        """The boundary before which about a `share` of the compute of [start, stop) lies."""
        inside = [bound for bound in self.bounds if start < bound < stop]
        whole = self.problem.chain.compute_s(start, stop)
        return min(
            inside,
            key=lambda cut: abs(self.problem.chain.compute_s(start, cut) - share * whole),
            default=None,
        )

    def merge(self, shape: Shape, s: int) -> Iterator[Shape]:
        """Stages s and s + 1 as one, with the replicas of both or, alike, of one."""
        r = shape.replicas
        for both in dict.fromkeys((r[s] if self.alike else r[s] + r[s + 1], r[s])):
            yield Shape(
                (*shape.bounds[: s + 1], *shape.bounds[s + 2 :]),
                (*r[:s], both, *r[s + 2 :]),
                (*shape.idle[: s + 1], *shape.idle[s + 2 :]),
                (*shape.recompute[: s + 1], *shape.recompute[s + 2 :]),
            )


def _plus(replicas: Counts, s: int, more: int) -> Counts:
    return (*replicas[:s], replicas[s] + more, *replicas[s + 1 :])
