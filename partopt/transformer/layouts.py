"""Every layout of a transformer that a trainer can say on a cluster, in closed form."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from msgspec import structs

from partopt.documents.engine import Layout
from partopt.documents.stage import Shard
from partopt.transformer.block import Training
from partopt.transformer.iteration import Estimate, estimate, find_faults

# tried up to these
MOST_CONTEXT, MOST_MICROBATCH = 16, 64
FEW_CHUNKS = 8  # so many are tried whether or not stages have as many blocks then
EXPERTS_MICROBATCH = 2  # of a model with experts: imbalance, which grows with it, is not computed
FEWER = 40  # layouts of which fewer blocks are made again, the fastest
MISSING = 1.3  # of the limit: what needs more is not among what nearly fits


class Found(NamedTuple):
    """Estimates of the layouts `tried`.

    Those that fit by seconds; by bytes those that would be faster than the first and nearly fit;
    the one that needs least; and those that fit, are left out by rule, and would be before the
    first.
    """

    fitting: list[Estimate]
    lacking: list[Estimate]
    tried: int
    least: Estimate | None
    left_out: list[Estimate]


def find_layouts(
    work: Training, devices: int, batch: int, limit: float, fixed: Layout, partly: bool
) -> Found:
    """Estimate every layout of `batch` samples on `devices`, with the parts that are `fixed`.

    Where a layout fits only with all blocks made again, fewer are tried if the trainer can make
    them `partly` again. Of a model with experts small microbatches come first, and blocks are made
    again only where nothing fits without.
    """
    stated = layouts(work, devices, batch, fixed)
    every = [estimate(work, layout, batch, MISSING * limit) for layout in stated]
    fitting = [candidate for candidate in every if candidate.memory_bytes <= limit]
    if partly and fixed.recompute is None:
        without = {
            candidate.layout for candidate in fitting if candidate.layout.recompute == "never"
        }
        again = [
            candidate
            for candidate in fitting
            if candidate.layout.recompute == "always"
            and structs.replace(candidate.layout, recompute="never") not in without
        ]
        fitting += [
            fewer
            for candidate in sorted(again, key=lambda candidate: candidate.seconds)[:FEWER]
            if (fewer := _fewer_again(work, candidate.layout, batch, limit)) is not None
        ]
    fitting.sort(key=lambda candidate: candidate.seconds)
    known = fitting
    if work.model.experts:
        fitting = _usual(fitting, fixed)
    first_s = fitting[0].seconds if fitting else float("inf")
    lacking = [
        candidate
        for candidate in every
        if candidate.memory_bytes > limit and candidate.seconds < first_s
    ]
    lacking.sort(key=lambda candidate: candidate.memory_bytes)
    least = min(every, key=lambda candidate: candidate.memory_bytes, default=None)
    left_out = [candidate for candidate in known if candidate.seconds < first_s]
    return Found(fitting, lacking, len(every), least, left_out)


def any_fits(work: Training, devices: int, batch: int, limit: float, fixed: Layout) -> bool:
    """Whether a layout of `batch` samples on `devices`, with the parts that are `fixed`, fits."""
    return any(
        estimate(work, layout, batch, 0.0).memory_bytes <= limit
        for layout in layouts(work, devices, batch, fixed)
    )


def _fewer_again(work: Training, layout: Layout, batch: int, limit: float) -> Estimate | None:
    """The layout in which stages make as few blocks again as fit; None where all it takes."""
    most, found = -(-work.model.blocks // ((layout.pp or 1) * (layout.chunks or 1))), None
    low, high = 0, most  # none do not fit, all do
    while high - low > 1:
        middle = (low + high) // 2
        candidate = estimate(work, structs.replace(layout, recompute=middle), batch)
        if candidate.memory_bytes <= limit:
            found, high = candidate, middle
        else:
            low = middle
    return found


def _usual(fitting: Sequence[Estimate], fixed: Layout) -> list[Estimate]:
    """Those that people run of experts, where there are any; all where parts of it are fixed.

    Large microbatches and blocks that are made again come out faster than they are: the imbalance
    of experts, which such layouts multiply, is not computed.
    """
    found = list(fitting)
    if fixed.microbatch is None:
        found = [o for o in found if (o.layout.microbatch or 1) <= EXPERTS_MICROBATCH] or found
    if fixed.recompute is None:
        whole = ("never", "selective")
        found = [candidate for candidate in found if candidate.layout.recompute in whole] or found
    return found


def layouts(work: Training, devices: int, batch: int, fixed: Layout) -> Iterator[Layout]:
    """Every layout on all devices with the parts that are `fixed`, which the trainer can run."""
    model, server = work.model, work.rates.server

    def allow(name: str, values: Iterable[int]) -> list[int]:
        asked = getattr(fixed, name)
        return list(values) if asked is None else [asked]

    def can_be(t: int, c: int) -> bool:
        faults = find_faults(work, Layout(tp=t, cp=c), batch)
        return not {"tp", "cp"} & {fault.fields["part"] for fault in faults}

    for t in allow("tp", _divisors(server)):
        for c in allow("cp", _divisors(max(1, devices // t), MOST_CONTEXT)):
            if not can_be(t, c):
                continue
            for p in allow("pp", _divisors(devices // (t * c))):
                n, rest = divmod(devices, t * c * p)
                if rest or not n or batch % n or fixed.dp not in (None, n):
                    continue
                spread = math.gcd(model.experts, t * c * n) if model.experts else 1
                for v in allow("chunks", _chunks(work, p)):
                    for b in allow("microbatch", _divisors(batch // n, MOST_MICROBATCH)):
                        for e in allow("ep", _divisors(spread)):
                            degrees = {"tp": t, "cp": c, "ep": e, "pp": p, "chunks": v, "dp": n}
                            some = structs.replace(fixed, **degrees, microbatch=b)
                            yield from _ways(work, some, batch)


def _ways(work: Training, some: Layout, batch: int) -> Iterator[Layout]:
    """A layout with every way to recompute and to share state, where these are open."""
    if any(find_faults(work, some, batch)):
        return
    again: list[Any] = ["never", "selective", "always"]
    if work.practice.selective == "attention" and work.practice.scores is None:
        again.remove("selective")  # a kernel that keeps no scores makes them again in any case
    shards: list[Any] = [shard_of(work, some.pp or 1)]
    if "parameters" in work.engine.shard and (some.dp or 1) * (some.cp or 1) > 1:
        shards = [*work.engine.shard]  # where more is shared more is exchanged
    for recompute in again if some.recompute is None else [some.recompute]:
        for shard in shards if some.shard is None else [some.shard]:
            name = some.schedule or ("interleaved" if (some.chunks or 1) > 1 else "1f1b")
            full = structs.replace(some, recompute=recompute, shard=shard, schedule=name)
            if not any(find_faults(work, full, batch)):
                yield full


def shard_of(work: Training, p: int) -> Shard:
    """What replicas share by default: all that the trainer has; in pipelines they gather once."""
    ways = work.engine.shard
    return "gradients" if ways[-1] == "parameters" and p > 1 else ways[-1]


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
