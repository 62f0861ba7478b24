"""Every layout of a transformer that a trainer can say on a cluster, in closed form."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from msgspec import structs

from partopt.documents.engine import MODULES, Layout
from partopt.errors import found_until_then
from partopt.transformer.block import Shape, Training
from partopt.transformer.columns import OF_WAYS, Columns, Question, with_way
from partopt.transformer.faults import find_faults
from partopt.transformer.iteration import Estimate, estimate, iteration_s

# of a model with experts, where the host starts all operations: then every launch costs
EXPERTS_MICROBATCH = 2
ROOM = 0.85  # of a device's memory, what layouts of experts take at most: people's 0.5 to 0.9
ENOUGH = 16  # layouts of other degrees that fit, behind which no slower ones are estimated
FEWER = 40  # layouts of which fewer blocks are made again, the fastest
_NEVER = Layout(recompute="never")
_SHARES = 8  # of the blocks of a stage, in which the fewest that are made again are bounded
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
    work: Training, question: Question, report: Callable[[float], None] = lambda share: None
) -> Found:
    """The layouts that a question asks for.

    Those are estimated that may be as fast as `ENOUGH` layouts that fit. Where one fits only with
    all blocks made again, fewer are tried if stages can make them partly again, and modules. Of a
    model with experts those come first that leave room, in small microbatches where no graphs hold
    what the host starts; and blocks are made again only where nothing fits without. `report` is
    called with the share that is done. Interrupted with those until then, if one fits.
    """
    _, batch, limit, fixed, partly, room = question
    room = limit if room is None or not work.model.experts else min(room, limit)
    every, fastest, most = list[Estimate](), dict[Layout, float](), MISSING * limit

    def until_then(_: object) -> Found | None:
        found = _found_of(work, question, every, room)
        return found if found.fitting else None

    report(0.0)
    with found_until_then(until_then):
        able = _Able(work, question, _ways(work, fixed), most)
        for bound_s, core, ways in able.by_seconds(work, partly and fixed.recompute is None):
            report(min(1.0, len(fastest) / ENOUGH))
            if len(fastest) >= ENOUGH and bound_s > sorted(fastest.values())[ENOUGH - 1]:
                break
            for layout in [with_way(core, way) for way in ways]:
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
    return _found_of(work, question, every, room)


def _found_of(work: Training, question: Question, every: Sequence[Estimate], room: float) -> Found:
    """What was found where those of `every` were estimated."""
    _, batch, limit, fixed, partly, _ = question
    fitting = [candidate for candidate in every if candidate.memory_bytes <= limit]
    if partly and fixed.recompute is None:
        fitting += _partly_again(work, every, batch, limit)
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
    work: Training, every: Sequence[Estimate], batch: int, limit: float
) -> Iterator[Estimate]:
    """Of those estimated that fit only with all blocks made again, with fewer, and with modules.

    They are the fastest with as many blocks made again as bring them down to the limit, about.
    """
    known = {found.layout: found for found in every if found.seconds < math.inf}

    def about_s(found: Estimate) -> float:
        layout = structs.replace(found.layout, recompute="never")
        keeping = known.get(layout) or estimate(work, layout, batch)
        freed = keeping.memory_bytes - found.memory_bytes
        made = min(1.0, (keeping.memory_bytes - limit) / freed) if freed > 0 else 1.0
        return keeping.seconds + made * (found.seconds - keeping.seconds)

    fitting = [found for found in every if found.memory_bytes <= limit]
    kept = {found.layout for found in fitting if found.layout.recompute == "never"}
    again = [
        found
        for found in fitting
        if found.layout.recompute == "always"
        and structs.replace(found.layout, recompute="never") not in kept
    ]
    ways = [] if work.model.experts else _ways_by_modules(work)
    for layout in [found.layout for found in sorted(again, key=about_s)[:FEWER]]:
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
    experts, fewer = bool(last.model.experts), partly and fixed.recompute is None
    ways, rules = _ways(last, fixed), [(limit, False)]
    if partly and not experts and len(ways) > 1:
        ways[-1:-1] = _ways_by_modules(last)
    if experts:
        rules = [(min(room or limit, limit), True), (limit, True), *rules]
    for most, usual in rules:
        able = _Able(last, question, ways, most, usual)
        if experts and not able.is_any():
            continue
        for bound_s, core, laid in able.by_seconds(first, fewer, below):
            if bound_s >= below:
                break
            for way in laid:
                layout: Layout | None = with_way(core, way)
                assert layout
                if way.recompute == "always" and fewer:
                    layout = _fewer_again(last, layout, batch, most)
                elif estimate(last, layout, batch, 0.0).memory_bytes > most:
                    continue
                if layout is None or iteration_s(first, layout, batch) >= below:
                    continue
                place = first_fitting(works, layout, batch, most)
                candidate = estimate(works[place or 0], layout, batch)
                if candidate.seconds < below:
                    below, found = candidate.seconds, (candidate, place or 0)
                if place == 0 and (experts or way is ways[0]):
                    break  # what is made again beyond takes longer
        break
    return found


class _Able:
    """Layouts of a question that may fit into `most` bytes, and ways to recompute of each.

    By what they need at least. With `usual` ones alone, as `_is_usual` has them.
    """

    def __init__(
        self,
        work: Training,
        question: Question,
        ways: Sequence[Layout],
        most: float,
        usual: bool = False,
    ) -> None:
        self._work, self._batch, self._most = work, question.batch, most
        fixed, columns = question.fixed, Columns.of(work, question)
        small = structs.replace(fixed, microbatch=1)
        self._ways = [
            way for way in ways if not usual or _is_usual(work, with_way(small, way), fixed)
        ]
        if usual:
            sizes = {b: _is_usual(work, Layout(microbatch=b), fixed) for b in {*columns.b.tolist()}}
            columns = columns.take(np.isin(columns.b, [b for b, able in sizes.items() if able]))
        self._columns = columns.take(columns.state_bytes(work) <= most)
        self._bytes = np.full(len(self._columns.rows), math.inf)
        left = np.ones(len(self._bytes), bool)  # of which no way that frees most is allowed yet
        for way in [*self._ways[:0:-1], *self._ways[:1]]:
            able = self._columns.allow(work, way) & (left | (way is self._ways[0]))
            needed = self._columns.take(able).bytes(work, way)
            self._bytes[able] = np.minimum(self._bytes[able], needed)
            left &= ~able
        fits = self._bytes <= most
        self._columns, self._bytes = self._columns.take(fits), self._bytes[fits]

    def is_any(self) -> bool:
        """Whether one fits."""
        for row in np.argsort(self._bytes, kind="stable"):
            core = self._columns.layout(row)
            for layout in _with_ways(self._work, core, self._batch, self._ways[::-1]):
                if estimate(self._work, layout, self._batch, 0.0).memory_bytes <= self._most:
                    return True
        return False

    def by_seconds(
        self, work: Training, fewer: bool, below: float = math.inf
    ) -> Iterator[tuple[float, Layout, list[Layout]]]:
        """Those that may take less than `below` seconds, with a bound of it, and in its order.

        If `fewer`, of what is made again whole as few blocks as fit. With the ways that may fit.
        """
        least = work.having(structs.replace(work.practice, offload=""), work.engine, work.format)
        columns = self._columns.take(self._columns.seconds(least, _NEVER) < below)
        by_way = np.full((len(self._ways), len(columns.rows)), math.inf)
        for way, found in zip(self._ways, by_way, strict=True):
            able = columns.allow(self._work, way)
            parts = _SHARES if fewer and way.recompute == "always" else 1
            for part in reversed(range(parts)):
                fits = able & (columns.bytes(self._work, way, (part + 1) / parts) <= self._most)
                some = columns.take(fits)
                found[fits] = some.seconds(work, way, part / parts if parts > 1 else 1.0)
        bounds = by_way.min(axis=0, initial=math.inf)
        for row in np.argsort(bounds, kind="stable"):
            if bounds[row] < below:
                laid = [way for way, s in zip(self._ways, by_way[:, row], strict=True) if s < below]
                yield float(bounds[row]), columns.layout(row), laid


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


def _find_least(work: Training, question: Question) -> Estimate | None:
    """The layout that needs least; those are tried whose state alone is less."""
    found, ways, columns = None, _ways(work, question.fixed), Columns.of(work, question)
    needed = columns.state_bytes(work)
    for row in np.argsort(needed, kind="stable"):
        if found and needed[row] > found.memory_bytes:
            break
        for layout in [*_with_ways(work, columns.layout(row), question.batch, ways)][-1:]:
            one = estimate(work, layout, question.batch)
            found = min(found or one, one, key=lambda known: known.memory_bytes)
    return found


def any_fits(work: Training, question: Question) -> bool:
    """Whether a layout that a question asks for fits."""
    return _Able(work, question, _ways(work, question.fixed), question.limit).is_any()


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


def layouts(work: Training, devices: int, batch: int, fixed: Layout) -> Iterator[Layout]:
    """Every layout on all devices with the parts that are `fixed`, which the trainer can run."""
    columns, ways = Columns.of(work, Question(devices, batch, math.inf, fixed)), _ways(work, fixed)
    for row in range(len(columns.rows)):
        yield from _with_ways(work, columns.layout(row), batch, ways)


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
        full = with_way(core, way)
        if not any(find_faults(work, full, batch, OF_WAYS)):
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
