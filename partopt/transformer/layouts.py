"""Every layout of a transformer that a trainer can say on a cluster, in closed form."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

from msgspec import structs

from partopt.documents.engine import MODULES, Layout
from partopt.documents.stage import Shard
from partopt.transformer.block import Shape, Training
from partopt.transformer.faults import find_faults
from partopt.transformer.iteration import (
    PASS_S,
    Degrees,
    Estimate,
    estimate,
    iteration_s,
    state_bytes,
    straggling,
)

# tried up to these
MOST_CONTEXT, MOST_MICROBATCH, EXPERTS_MOST = 16, 64, 8
FEW_CHUNKS = 8  # so many are tried whether or not stages have as many blocks then
# of a model with experts, where the host starts all operations: then every launch costs
EXPERTS_MICROBATCH = 2
ROOM = 0.85  # of a device's memory, what layouts of experts take at most: people's 0.5 to 0.9
ENOUGH = 16  # layouts of other degrees that fit, behind which no slower ones are estimated
FEWER = 40  # layouts of which fewer blocks are made again, the fastest
_OF_WAYS = ("shard", "modules", "recompute", "offload")  # parts that they may not go with
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


def find_layouts(work: Training, question: Question) -> Found:
    """The layouts that a question asks for.

    Those are estimated whose blocks alone are not slower than `ENOUGH` layouts that fit. Where a
    layout fits only with all blocks made again, fewer are tried if stages can make them partly
    again, and modules. Of a model with experts those come first that leave room, in small
    microbatches where no graphs hold what the host starts; and blocks are made again only where
    nothing fits without.
    """
    _, batch, limit, fixed, partly, room = question
    room = limit if room is None or not work.model.experts else min(room, limit)
    every, fastest, most = list[Estimate](), dict[Layout, float](), MISSING * limit
    for bound_s, laid in walk(work, question, most, partial(least_s, work, batch=batch)):
        if len(fastest) >= ENOUGH and bound_s > sorted(fastest.values())[ENOUGH - 1]:
            break
        if estimate(work, laid[-1], batch, most).memory_bytes > most:
            laid = laid[-1:]
        for layout in laid:
            candidate = estimate(work, layout, batch, most)
            every.append(candidate)
            if candidate.memory_bytes > room or not _is_usual(work, layout, fixed):
                continue
            degrees = structs.replace(
                layout,
                **dict.fromkeys(("chunks", "microbatch", "schedule", "recompute", "modules")),
            )
            fastest[degrees] = min(candidate.seconds, fastest.get(degrees, math.inf))
            if work.model.experts:
                break  # what is made again beyond takes longer
    fitting = [candidate for candidate in every if candidate.memory_bytes <= limit]
    if partly and fixed.recompute is None:
        fitting += _partly_again(work, fitting, batch, limit)
    fitting.sort(key=lambda candidate: candidate.seconds)
    known = fitting
    if work.model.experts:
        fitting = _usual(work, fitting, fixed, room)
    first_s = fitting[0].seconds if fitting else float("inf")
    lacking = [
        candidate
        for candidate in every
        if candidate.memory_bytes > limit and candidate.seconds < first_s
    ]
    lacking.sort(key=lambda candidate: candidate.memory_bytes)
    needs = min(every, key=lambda candidate: candidate.memory_bytes) if fitting else None
    least = needs or _find_least(work, question)
    left_out = [candidate for candidate in known if candidate.seconds < first_s]
    return Found(fitting, lacking, len(every), least, left_out)


def _partly_again(
    work: Training, fitting: Sequence[Estimate], batch: int, limit: float
) -> Iterator[Estimate]:
    """Those that fit only with all blocks made again, the fastest, with fewer; and with modules."""
    kept = {found.layout for found in fitting if found.layout.recompute == "never"}
    again = [
        found
        for found in fitting
        if found.layout.recompute == "always"
        and structs.replace(found.layout, recompute="never") not in kept
    ]
    ways = [] if work.model.experts else _ways_by_modules(work)
    for layout in [found.layout for found in sorted(again, key=lambda one: one.seconds)[:FEWER]]:
        fewer = _fewer_again(work, layout, batch, limit)
        if fewer and fewer != layout:
            yield estimate(work, fewer, batch)
        made = (estimate(work, one, batch) for one in _with_ways(work, layout, batch, ways))
        yield from [one for one in made if one.memory_bytes <= limit][:1]


def find_fastest(
    works: Sequence[Training], question: Question, below: float = math.inf
) -> tuple[Estimate, int] | None:
    """The fastest layout that fits with one of `works`, in less than `below` seconds; and which.

    Each of `works` needs less memory than the one before it and takes no less time: a layout takes
    the first with which it fits. Otherwise as the first of `find_layouts`. None where that takes
    as long, or there is none.
    """
    _, batch, limit, fixed, partly, room = question
    first, last, found = works[0], works[-1], None
    experts = bool(last.model.experts)
    ways, rules = _ways(last, fixed), [(limit, False)]
    if partly and not experts and len(ways) > 1:
        ways[-1:-1] = _ways_by_modules(last)
    if experts:
        rules = [(min(room or limit, limit), True), (limit, True), *rules]
    for most, usual in rules:
        known = not experts  # that one fits, without which the next rule counts
        bound = partial(least_s, last, batch=batch, piped=True)
        for least, every in walk(last, question, most, bound, ways):
            if known and least >= below:
                break
            laid = [one for one in every if not usual or _is_usual(last, one, fixed)]
            if known and laid and iteration_s(first, laid[0], batch) >= below:
                continue
            ends = (*laid[-1:], *laid[:1])
            if all(estimate(last, end, batch, 0.0).memory_bytes > most for end in ends):
                continue
            for layout in laid:
                fewer: Layout | None = layout
                if layout.recompute == "always" and partly and fixed.recompute is None:
                    one = structs.replace(layout, recompute=1)
                    if known and iteration_s(first, one, batch) >= below:
                        continue
                    fewer = _fewer_again(last, layout, batch, most)
                seen = known and fewer is not laid[0]
                if fewer is None or (seen and iteration_s(first, fewer, batch) >= below):
                    continue
                place = first_fitting(works, fewer, batch, most)
                known = known or place is not None
                candidate = None if place is None else estimate(works[place], fewer, batch)
                if candidate and candidate.seconds < below:
                    below, found = candidate.seconds, (candidate, place or 0)
                if place == 0 and (experts or layout is laid[0]):
                    break  # what is made again beyond takes longer
        if known and (experts or found):
            break
    return found


def first_fitting(
    works: Sequence[Training], layout: Layout, batch: int, limit: float
) -> int | None:
    """The place of the first of `works`, which need ever less, with which a layout fits."""

    def over(place: int) -> float:
        return estimate(works[place], layout, batch, 0.0).memory_bytes - limit

    return _first(over, 0, len(works) - 1)


def _first(over: Callable[[int], float], low: int, high: int) -> int | None:
    """The first from `low` to `high` of which less and less is `over`, that is not; None where all.

    What is over mostly falls in equal steps.
    """
    if (least := over(high)) > 0:
        return None
    if low == high or (most := over(low)) <= 0:
        return low
    while high - low > 1:
        place = low + math.ceil(most / (most - least) * (high - low))
        place = min(max(place, low + 1), high - 1)
        if (rest := over(place)) > 0:
            low, most = place, rest
        else:
            high, least = place, rest
    return high


def least_s(work: Training, core: Layout, batch: int, piped: bool = False) -> float:
    """Seconds of blocks and ends, from which all of an iteration is more: nothing made again.

    Also `piped`, with what passes take and the bubble of equal stages: others have no shorter one.
    """
    degrees = Degrees.of(work, core, batch)
    block = work.mean(degrees.shape)
    blocks_s = work.model.blocks * (block.forward_s + block.backward_s)
    whole_s = degrees.m / degrees.p * (blocks_s + block.head_s + block.embedding_s)
    if piped and degrees.p > 1:
        p, v, m = degrees.p, degrees.v, degrees.m
        idle = (p - 1) / v / m if v > 1 or m > p else max(0, p / m - 1)
        whole_s = (1 + idle) * whole_s + 2 * m * v * PASS_S
    return (1 + straggling(degrees.devices)) * whole_s


def _find_least(work: Training, question: Question) -> Estimate | None:
    """The layout that needs least; those are tried whose state alone is less."""
    found, batch = list[Estimate](), question.batch

    def state(core: Layout) -> float:
        return state_bytes(work, Degrees.of(work, core, batch))

    for bytes_, laid in walk(work, question, math.inf, state):
        if found and bytes_ > found[0].memory_bytes:
            break
        found = [min([*found, estimate(work, laid[-1], batch)], key=lambda one: one.memory_bytes)]
    return found[0] if found else None


def any_fits(work: Training, question: Question) -> bool:
    """Whether a layout that a question asks for fits."""
    return any(
        estimate(work, laid[-1], question.batch, 0.0).memory_bytes <= question.limit
        for _, laid in walk(work, question, question.limit)
    )


def _fewer_again(work: Training, layout: Layout, batch: int, limit: float) -> Layout | None:
    """A layout that makes all blocks again, with as few as fit; None where none does."""
    most = -(-work.model.blocks // ((layout.pp or 1) * (layout.chunks or 1)))

    def with_again(fewer: int) -> Layout:
        return structs.replace(layout, recompute=fewer) if fewer < most else layout

    def over(fewer: int) -> float:
        return estimate(work, with_again(fewer), batch, 0.0).memory_bytes - limit

    fewest = _first(over, 1, most)
    return with_again(fewest) if fewest else None


def _is_usual(work: Training, layout: Layout, fixed: Layout) -> bool:
    """Whether people run such a layout, if it is of experts; parts that are fixed are.

    Where the host starts all operations, large microbatches and blocks that are made again come
    out faster than they are: the imbalance of experts as it is drawn grows so.
    """
    if not work.model.experts:
        return True
    microbatch, graphs = layout.microbatch or 1, work.practice.graphs != "none"
    small = graphs or fixed.microbatch is not None or microbatch <= EXPERTS_MICROBATCH
    return small and (fixed.recompute is not None or not layout.recomputation.is_whole)


def _usual(
    work: Training, fitting: Sequence[Estimate], fixed: Layout, room: float
) -> list[Estimate]:
    """Layouts of experts as people run them that leave room; else those without; else all."""
    usual = [one for one in fitting if _is_usual(work, one.layout, fixed)]
    return [one for one in usual if one.memory_bytes <= room] or usual or [*fitting]


def walk(
    work: Training,
    question: Question,
    most: float = math.inf,
    bound: Callable[[Layout], float] | None = None,
    ways: Iterable[Layout] = (),
) -> Iterator[tuple[float, list[Layout]]]:
    """The layouts of a question, those together that differ in what is made again alone.

    Of these the first takes least time, and the last needs least memory. None surely needs more
    than `most` bytes. With a `bound` of what all of some have at least, those come in its order,
    and it is yielded, too. `ways` to recompute are by default all that are open.
    """
    ways = ways or _ways(work, question.fixed)
    found: Iterable[tuple[float, Layout]] = ((0.0, core) for core in cores(work, question, most))
    if bound is not None:
        found = sorted(((bound(core), core) for _, core in found), key=lambda pair: pair[0])
    for least, core in found:
        if laid := [*_with_ways(work, core, question.batch, ways)]:
            yield least, laid


def layouts(work: Training, devices: int, batch: int, fixed: Layout) -> Iterator[Layout]:
    """Every layout on all devices with the parts that are `fixed`, which the trainer can run."""
    for _, laid in walk(work, Question(devices, batch, math.inf, fixed)):
        yield from laid


def cores(work: Training, question: Question, most: float = math.inf) -> Iterator[Layout]:
    """The layouts but for what is made again, and those that surely need more than `most` bytes."""
    devices, batch, _, fixed, *_ = question
    model, server = work.model, work.rates.server

    def allow(name: str, values: Iterable[int]) -> list[int]:
        asked = getattr(fixed, name)
        return list(values) if asked is None else [asked]

    for t in allow("tp", _divisors(server)):
        for c in allow("cp", _divisors(max(1, devices // t), MOST_CONTEXT)):
            if any(find_faults(work, Layout(tp=t, cp=c), batch, ("tp", "cp"))):
                continue
            for p in allow("pp", _divisors(devices // (t * c))):
                n, rest = divmod(devices, t * c * p)
                if rest or not n or batch % n or fixed.dp not in (None, n):
                    continue
                spread = math.gcd(model.experts, t * c * n) if model.experts else 1
                chunks, most_b = allow("chunks", _chunks(work, p)), MOST_MICROBATCH
                if model.experts:
                    most_b = EXPERTS_MOST
                microbatches = allow("microbatch", _divisors(batch // n, most_b))
                degrees = {"tp": t, "cp": c, "pp": p, "dp": n}
                for e in allow("ep", _divisors(spread)):
                    cut = {1, t} if model.experts and e * t <= server else {1}
                    for etp in allow("etp", sorted(cut)):
                        over = {"ep": e, "etp": etp if etp > 1 else fixed.etp}
                        some = structs.replace(fixed, **degrees, **over)
                        some = structs.replace(some, shard=some.shard or shard_of(work, p))
                        if state_bytes(work, Degrees.of(work, some, batch)) > most:
                            continue
                        for v, b in itertools.product(chunks, microbatches):
                            full = structs.replace(some, shard=fixed.shard, chunks=v, microbatch=b)
                            yield from _with_shards(work, full, batch)


def _with_shards(work: Training, some: Layout, batch: int) -> Iterator[Layout]:
    """A layout with every way to share state, where these are open."""
    if any(find_faults(work, structs.replace(some, recompute=None, modules=None), batch)):
        return
    shards = [shard_of(work, some.pp or 1)]
    ways, alone = [*work.engine.shard], (some.dp or 1) * (some.cp or 1) == 1
    if work.practice.fsdp:  # beside shares of the state alone, which cost nothing
        shards = ways[1:2] if alone else ways[1:]
    elif "parameters" in ways and not alone:  # where more is shared more is exchanged
        shards = ways
    for shard in shards if some.shard is None else [some.shard]:
        name = some.schedule or ("interleaved" if (some.chunks or 1) > 1 else "1f1b")
        yield structs.replace(some, recompute=None, modules=None, shard=shard, schedule=name)


def _ways(work: Training, fixed: Layout) -> list[Layout]:
    """Every way to recompute, those that take less time first."""
    practice = work.practice
    if fixed.modules is not None or fixed.recompute is not None:
        return [Layout(recompute=fixed.recompute or "selective", modules=fixed.modules)]
    ways = [Layout(recompute="never")]
    if practice.selective != "attention" or practice.scores is not None:
        ways.append(Layout(recompute="selective"))  # other kernels keep no scores in any case
    elif work.model.experts:
        ways += _ways_by_modules(work)
    return [*ways, Layout(recompute="always")]


def _ways_by_modules(work: Training) -> list[Layout]:
    """To recompute modules alone."""
    return [Layout(recompute="selective", modules=modules) for modules in module_sets(work)]


def _with_ways(
    work: Training, core: Layout, batch: int, ways: Iterable[Layout]
) -> Iterator[Layout]:
    """A layout with those of the ways to recompute that it can have."""
    for way in ways:
        full = structs.replace(core, recompute=way.recompute, modules=way.modules)
        if not any(find_faults(work, full, batch, _OF_WAYS)):
            yield full


def module_sets(work: Training) -> Sequence[str]:
    """Modules that are made again together: first what frees most bytes for its time, then more."""
    if "selective" not in work.engine.recompute or work.practice.selective != "attention":
        return []
    ranks = math.gcd(work.model.experts or 1, work.rates.server)
    plain, gains = work.mean(Shape(e=ranks)), dict[str, float]()
    for name in MODULES:
        made = work.mean(Shape(e=ranks, recompute="selective", modules=(name,)))
        saved = plain.saved_bytes - made.saved_bytes
        if saved > 0 and made.again_s > 0 and not _is_refused(work, name):
            gains[name] = saved / made.again_s
    order = sorted(gains, key=lambda name: -gains[name])
    sets = [order[: count + 1] for count in range(len(order))]
    inside = {"moe_act", "shared_experts"}  # of "moe"
    return ["+".join(n for n in s if "moe" not in s or n not in inside) for s in sets]


def _is_refused(work: Training, name: str) -> bool:
    """Whether Megatron Core does not make a module again (transformer_config.py).

    Graphs of a router do not hold what is made again; what is scaled by maxima of earlier steps
    cannot be.
    """
    graphs, delayed = work.practice.graphs in ("router", "attention"), work.format == "fp8"
    return (graphs and name == "moe") or (delayed and name in ("layernorm", "moe_act"))


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
