"""The layouts of a question, a row each, and what all of them take at least, at once.

Blocks are computed by shape. What is said of rows is a bound from below of what
`partopt.transformer.iteration` estimates, however blocks are cut: rows that cannot be better than
what is known are not looked at.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple, get_args

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from partopt.documents.engine import Layout
from partopt.documents.stage import Shard
from partopt.transformer.block import Shape, Training
from partopt.transformer.faults import find_faults
from partopt.transformer.iteration import (
    CAPTURED,
    HOST_S,
    PASS_S,
    RESERVED,
    Degrees,
    buffer_bytes,
    logits_bytes,
    parameter_bytes,
    share_bytes,
    straggling,
    working_bytes,
)

# tried up to these
MOST_CONTEXT, MOST_MICROBATCH, EXPERTS_MOST = 16, 64, 8
FEW_CHUNKS = 8  # so many are tried whether or not stages have as many blocks then
OF_WAYS = ("shard", "modules", "recompute", "offload")  # parts that ways may not go with
SHARDS: tuple[Shard, ...] = get_args(Shard)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class Question(NamedTuple):
    """What layouts are asked for: of `batch` samples on `devices`, with the parts that are `fixed`.

    A device has `limit` bytes. A stage may make its blocks again `partly`. Those with experts take
    no more than `room` bytes where some fit so.
    """

    devices: int
    batch: int
    limit: float
    fixed: Layout
    partly: bool = False
    room: float | None = None


class Columns:
    """Layouts but for what they make again: t, c, e, etp, p, v, n, b, and what replicas share."""

    def __init__(self, rows: Ints, question: Question) -> None:
        self.rows, self._question = rows, question
        self.t, self.c, self.e, self.etp, self.p, self.v, self.n, self.b, self._shard = rows.T
        self.m = question.batch // (self.n * self.b)

    @classmethod
    def of(cls, work: Training, question: Question) -> Columns:
        """All that the trainer can run, with the parts of the question that are fixed."""
        devices, batch, _, fixed, *_ = question
        known, key = work.layouts, (devices, batch, fixed, work.engine.shard, work.rates.sizes)
        if key not in known:
            found = [*_rows(work, question)]
            known[key] = np.array(found, dtype=np.int64).reshape(len(found), 9)
        return cls(known[key], question)

    def take(self, which: Bools | Ints) -> Columns:
        """Some of them."""
        return Columns(self.rows[which], self._question)

    def layout(self, row: int) -> Layout:
        """That of a row."""
        t, c, e, etp, p, v, n, b, shard = self.rows[row].tolist()
        fixed = self._question.fixed
        return structs.replace(
            fixed,
            tp=t,
            cp=c,
            ep=e,
            etp=etp if etp > 1 else fixed.etp,
            pp=p,
            chunks=v,
            dp=n,
            microbatch=b,
            shard=SHARDS[shard],
            schedule=fixed.schedule or ("interleaved" if v > 1 else "1f1b"),
            recompute=None,
            modules=None,
        )

    @cached_property
    def _in_shares(self) -> Bools:
        return np.isin(self._shard, [SHARDS.index("gradients"), SHARDS.index("parameters")])

    @cached_property
    def _unique(self) -> tuple[list[tuple[Any, ...]], Ints]:
        """Every shape's b, t, c, e, etp and whether it is in shares; and the shape of every row."""
        columns = (self.b, self.t, self.c, self.e, self.etp, self._in_shares)
        return _distinct(columns)

    @cached_property
    def _cuts(self) -> tuple[list[tuple[Any, ...]], Ints]:
        """Every t, e and etp by which parameters are cut; and those of every row."""
        return _distinct((self.t, self.e, self.etp))

    def _by_shape(
        self, what: str, work: Training, way: Layout, values: Callable[[Shape], Sequence[float]]
    ) -> Any:
        """Numbers of the shape of every row which recompute so: a column each.

        They are found once for all trainings with such blocks.
        """
        again, (shapes, place) = Degrees.of(work, way, 1).shape, self._unique
        known, found = work.memo.columns.setdefault((what, way), {}), list[Sequence[float]]()
        for b, t, c, e, etp, fsdp in shapes or [(1, 1, 1, 1, 1, False)]:
            shape = Shape(b, t, c, e, again.recompute, fsdp, etp, again.modules, again.offload)
            if shape not in known:
                known[shape] = values(shape)
            found.append(known[shape])
        return np.array(found, dtype=np.float64)[place].T

    def allow(self, work: Training, way: Layout) -> Bools:
        """Which of them can recompute so; faults of a way see whether degrees are 1."""
        columns = (self.p > 1, self.v > 1, self.e * self.etp > 1, self._shard)
        code = ((columns[0] * 2 + columns[1]) * 2 + columns[2]) * len(SHARDS) + columns[3]
        rows, place = np.unique(code, return_index=True, return_inverse=True)[1:]
        batch = self._question.batch
        some = (with_way(self.layout(row), way) for row in rows)
        able = [not any(find_faults(work, layout, batch, OF_WAYS)) for layout in some]
        return np.array(able, dtype=bool)[place]

    def _again(self, work: Training, way: Layout, share: float) -> Floats | float:
        blocks = way.recomputation.blocks
        return np.minimum(1.0, blocks * self.p * self.v / work.model.blocks) if blocks else share

    def seconds(self, work: Training, way: Layout, share: float = 1.0) -> Floats:
        """Those of blocks, ends and host, with a `share` of whole blocks made again.

        With what passes of a pipeline take and the bubble of equal stages: others have no shorter.
        """

        def values(shape: Shape) -> tuple[float, float, float]:
            blocks = work.blocks(shape).values()
            forward_s, backward_s, again_s = work.mean_of(block[:3] for block in blocks)
            first = next(iter(blocks))  # of all kinds ends take as long
            return forward_s + backward_s, again_s, first.head_s + first.embedding_s

        plain_s, again_s, ends_s = self._by_shape("seconds", work, way, values)
        p, v, m = self.p, self.v, self.m
        blocks_s = plain_s + self._again(work, way, share) * again_s
        whole_s = m / p * (work.model.blocks * blocks_s + ends_s)
        idle = np.where((v > 1) | (m > p), (p - 1) / v / m, np.maximum(0, p / m - 1))
        whole_s = HOST_S + (1 + idle) * whole_s + 2 * m * v * PASS_S * (p > 1)
        return np.array((1 + straggling(self._question.devices)) * whole_s, dtype=np.float64)

    def state_bytes(self, work: Training) -> Floats:
        """Parameters, gradients and optimizer of a device, where all have as much of blocks."""
        pairs = zip(self._states(work), work.counts.values(), strict=True)
        found: Floats = np.sum([count * state / self.p for state, count in pairs], axis=0)
        return found

    def _states(self, work: Training) -> list[Floats]:
        """What a device holds of a block of every kind."""
        practice, shared = work.practice, self._shard == SHARDS.index("optimizer")
        stays, in_shares = self._shard == SHARDS.index("gradients"), self._in_shares
        copies = np.maximum(1, self.t * self.c * self.n // (self.e * self.etp))
        sharers = self.n * self.c
        if practice.shards == "server":
            within = np.maximum(1, np.minimum(work.rates.server // self.t, sharers))
            sharers = np.where(in_shares, within, sharers)
        sharers = np.where(shared | in_shares, sharers, 1)
        copies = np.where(shared | in_shares, copies, 1)
        whole_bytes, state_bytes = parameter_bytes(work)
        of_shares = 0.0 if practice.host_shards else share_bytes(work)
        gathered = RESERVED * np.where(stays, 2, 6 * (self.p > 1) * (not practice.flat_shards))
        if practice.flat_shards and of_shares:
            of_shares = of_shares - 2 * stays
        found = list[Floats]()
        cuts, place = self._cuts
        shapes = [Shape(t=t, e=e, etp=etp) for t, e, etp in cuts]
        for kind in work.counts:
            rows = [
                (
                    *work.trained_parameters(shape, kind),
                    *work.parameters(shape, kind),
                    work.frozen(shape, kind),
                )
                for shape in shapes
            ]
            dense, experts, *every, frozen = np.array(rows).reshape(-1, 5)[place].T
            whole = whole_bytes * (dense + experts) + 2 * frozen
            whole += state_bytes * (dense / sharers + experts / copies)
            shares = of_shares * (every[0] / sharers + every[1] / copies) + gathered * sum(every)
            found.append(np.where(in_shares, shares, whole))
        return found

    def bytes(self, work: Training, way: Layout, share: float = 1.0) -> Floats:
        """Those of the device that has most, with a `share` of whole blocks made again.

        Devices have no more in a mean of them, whatever their stages hold. Each weighs as much less
        as blocks take more there, because more microbatches are in flight: where all blocks are
        equal, none has more if all have as much.
        """
        model, practice, is_whole = work.model, work.practice, way.recomputation.is_whole

        def values(shape: Shape) -> list[float]:
            kept = [work.saved_bytes(shape, kind) for kind in work.counts]
            whole = [work.saved_bytes(shape.plain, kind) for kind in work.counts if is_whole]
            made = min(whole, default=0.0)
            rest = logits_bytes(work, shape), working_bytes(work, shape, 0.0), made
            return [*kept, *whole, *rest, buffer_bytes(work, shape)]

        *sizes, logits, at_work, made, buffers = self._by_shape("bytes", work, way, values)
        kept, again = sizes[: len(work.counts)], self._again(work, way, share)
        if is_whole:
            pairs = zip(kept, sizes[len(kept) :], strict=True)
            kept = [again * saved + (1 - again) * whole for saved, whole in pairs]
        plain = ~self._in_shares
        ends = model.end_parameters / self.t * (1 + ((self.p == 1) & (not model.tied)))
        ends = ends * plain * (2 + work.gradient_bytes * (not work.adapters))
        logits, rest = RESERVED * logits, RESERVED * (at_work + (self.p == 1) * made) + buffers
        if not practice.flat_shards:
            logits, rest = logits * plain, rest * plain
        states, counts = self._states(work), [*work.counts.values()]
        held = RESERVED * (1 + CAPTURED * (practice.graphs != "none" and practice.flat_shards))
        found = np.zeros(len(self.rows))
        for p in np.unique(self.p):
            rows = np.flatnonzero(self.p == p)
            flight = held * self._in_flight(rows, int(p))
            every = [
                count * (state[rows, None] + size[rows, None] * flight)
                for count, state, size in zip(counts, states, kept, strict=True)
            ]
            weights = 1 / np.maximum(sum(every), 1.0)
            weights /= weights.sum(axis=1, keepdims=True)
            found[rows] = sum((weights * size).min(axis=1) for size in every)
            found[rows] += weights[:, 0] * ends[rows] + weights[:, -1] * logits[rows]
            found[rows] += weights[:, -1] * ends[rows] * (p > 1)
        found += rest
        return found

    def _in_flight(self, rows: Ints, p: int) -> Floats:
        """Microbatches that devices of p hold at once, for each of some rows."""
        v, m, behind = self.v[rows, None], self.m[rows, None], p - np.arange(p)
        interleaved = ((v - 1) * p + 2 * behind - 1) / v
        found: Floats = np.minimum(m, np.where(v == 1, behind, interleaved))
        return found


def _distinct(columns: Sequence[Ints | Bools]) -> tuple[list[tuple[Any, ...]], Ints]:
    """The different rows of some columns, and which of them every row is."""
    code = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        code = code * (int(column.max(initial=0)) + 1) + column
    _, first, place = np.unique(code, return_index=True, return_inverse=True)
    return [*zip(*(column[first].tolist() for column in columns), strict=True)], place


def with_way(layout: Layout, way: Layout) -> Layout:
    """The layout with another way to recompute."""
    return structs.replace(layout, recompute=way.recompute, modules=way.modules)


def _rows(work: Training, question: Question) -> Iterator[tuple[int, ...]]:
    """The rows of a question: every degree that divides what it should, and has no fault."""
    _, batch, _, fixed, *_ = question
    model, server, most = work.model, work.rates.server, MOST_MICROBATCH
    if model.experts:
        most = EXPERTS_MOST

    @cache
    def able(parts: tuple[str, ...], layout: Layout) -> bool:
        """Whether none of the parts has a fault, as far as these degrees say it."""
        return not any(find_faults(work, layout, batch, parts))

    for t, c, p, n in _degrees(work, question):
        if not able(("tp", "cp"), Layout(tp=t, cp=c)):
            continue
        shards = [
            SHARDS.index(shard)
            for shard in _shards(work, fixed, p, n * c)
            if able(("shard",), Layout(cp=c, pp=p, shard=shard))
        ]
        pairs = [
            (v, b)
            for v in _allow(fixed.chunks, _chunks(work, p))
            if able(("pp", "ends"), Layout(pp=p, chunks=v))
            and able(("schedule",), Layout(chunks=v, schedule=fixed.schedule))
            for b in _allow(fixed.microbatch, _divisors(batch // n, most))
            if able(("dp", "chunks"), Layout(pp=p, chunks=v, dp=n, microbatch=b))
        ]
        ranks = t * c * n
        for e in _allow(fixed.ep, _divisors(math.gcd(model.experts or 1, ranks))):
            cut = {1, t} if model.experts and e * t <= server else {1}
            for etp in _allow(fixed.etp, sorted(cut)):
                # faults of these see ranks of a stage, and whether there are more, or chunks
                some = Layout(ep=e, etp=etp, dp=ranks, pp=min(p, 2))
                parts = "ep", "etp", "recompute", "offload"
                able_with = {v: able(parts, structs.replace(some, chunks=v)) for v in (1, 2)}
                for (v, b), shard in itertools.product(pairs, shards):
                    if able_with[min(v, 2)]:
                        yield t, c, e, etp, p, v, n, b, shard


def _degrees(work: Training, question: Question) -> Iterator[tuple[int, int, int, int]]:
    """Those of t, c, p and n of which all devices are the product."""
    devices, batch, _, fixed, *_ = question
    for t in _allow(fixed.tp, _divisors(work.rates.server)):
        for c in _allow(fixed.cp, _divisors(max(1, devices // t), MOST_CONTEXT)):
            for p in _allow(fixed.pp, _divisors(devices // (t * c))):
                n, rest = divmod(devices, t * c * p)
                if not rest and n and batch % n == 0 and fixed.dp in (None, n):
                    yield t, c, p, n


def _allow(asked: int | None, values: Sequence[int]) -> Sequence[int]:
    """What is asked for; where that is nothing, all values."""
    return values if asked is None else [asked]


def _shards(work: Training, fixed: Layout, p: int, ranks: int) -> Sequence[Shard]:
    """The ways to share state that are open to so many `ranks` with the same parameters."""
    if fixed.shard is not None:
        return [fixed.shard]
    ways = [*work.engine.shard]
    if work.practice.fsdp:  # beside shares of the state alone, which cost nothing
        return ways[1:2] if ranks == 1 else ways[1:]
    if "parameters" in ways and ranks > 1:  # where more is shared more is exchanged
        return ways
    return [shard_of(work, p)]


def shard_of(work: Training, p: int) -> Shard:
    """What replicas share by default: all that the trainer has; less of it in pipelines."""
    ways = work.engine.shard
    if ways[-1] == "parameters" and p > 1:
        return "optimizer" if work.practice.flat_shards else "gradients"
    return ways[-1]


def _chunks(work: Training, p: int) -> list[int]:
    """Stages on a device: few, or a number that shares the blocks out evenly; one in any case.

    Where embedding and head count as blocks, or the ends may have fewer, with these.
    """
    more = {"blocks": (2,), "fewer": (0, 1, 2)}.get(work.practice.ends, (0,))
    counted = [work.model.blocks + ends for ends in more]
    tried = [
        v
        for v in range(2, max(counted) // p + 1)
        if v <= FEW_CHUNKS or any(blocks % (p * v) == 0 for blocks in counted)
    ]
    return [1, *tried] if p > 1 else [1]


@lru_cache(maxsize=1024)
def _divisors(n: int, most: int | None = None) -> list[int]:
    return [d for d in range(1, min(n, most or n) + 1) if n % d == 0]
