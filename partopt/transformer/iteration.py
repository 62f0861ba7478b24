"""Seconds of an iteration of a layout, and the bytes of its fullest rank, in closed form."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from partopt.documents.engine import STATE, Layout
from partopt.documents.transformer import BITS, Kind, Transformer
from partopt.transformer.block import Block, Shape, Training
from partopt.transformer.offloading import BLOCKS, copied_modules
from partopt.transformer.rates import COLLECTIVE_S, Seconds
from partopt.transformer.unequal_stages import (
    cut_for_makespan,
    cut_units,
    ends_of,
    makespan_s,
    pace_s,
)

# measured or counted
HOST_S = 40e-3  # of an iteration: Korthikanti's tables 4 and 5, 1.10 s less blocks, head and step
# bytes a parameter of an optimizer's step: in shares, beside its state; of all
STEP, WHOLE_STEP = 22, 8
FSDP_STEP = 40  # the same where parameters and gradients are in shares and in float32
FLOAT32_EXCHANGE = 26  # flattened, divided, cast and copied back, as the code does it
# bytes a parameter of a host's memory, where a gradient is added to one there: copied out of the
# driver's buffer (8), added (12)
HOST_SUM = 20
# the allocator holds so much of what comes and goes: three runs of torchtitan, 1.042 to 1.058
RESERVED = 1.05
CAPTURED = 0.06  # of activations, what graphs hold beside; assumed
DISPATCH_BYTES = 2e9  # buffers of DeepEP and of HybridEP; assumed
MORE_ROWS = 1.1  # of the mean, rows of experts at work
OF_STATE = ("parameters", "gradients", "optimizer")
LASTING = (*OF_STATE, "tower", "in shares", "buffers")  # allocated once
WHOLE = 64
# fitted
STRAGGLER = 0.004  # the slowest of twice as many devices: runs of NeMo, 8 to 2,304 H100
FEW = 8  # devices that were fitted on
PASS_S = 0.2e-3  # of a chunk's forward or backward in a pipeline: runs of NeMo of 6 and 12 chunks
PARTS = 10  # of a block's seconds, in which cuts into chunks are computed


class Estimate(NamedTuple):
    """Seconds of an iteration and bytes of the fullest rank.

    `parts` sum to the seconds; `memory` sums to the bytes.
    """

    layout: Layout
    seconds: float
    memory_bytes: float
    parts: Mapping[str, float]
    memory: Mapping[str, float]


class Stage(NamedTuple):
    """What a device or a stage holds: blocks by kind, as `Training.counts` has them; and ends.

    Those are blocks of `further` tokens, the embedding where it is `first`, the head where `last`.
    """

    counts: tuple[int, ...]
    further: int
    first: int
    last: int

    @property
    def blocks(self) -> int:
        """Of all kinds."""
        return sum(self.counts)


class Degrees(NamedTuple):
    """A layout as numbers. `again` is the share of blocks that recompute, whole ones."""

    t: int
    c: int
    e: int
    p: int
    v: int
    n: int
    m: int
    shape: Shape
    again: float

    @classmethod
    def of(cls, work: Training, layout: Layout, batch: int) -> Degrees:
        """The degrees of a layout whose replicas share `batch` samples; "auto" says too little."""
        t, c, e, p = layout.tp or 1, layout.cp or 1, layout.ep or 1, layout.pp or 1
        v, n, b = layout.chunks or 1, layout.dp or 1, layout.microbatch or 1
        remade, offload = layout.recomputation, list[str]()
        again = min(1.0, remade.blocks * p * v / work.model.blocks) if remade.blocks else 1.0
        assert remade.way != "auto"
        if work.practice.offload and not remade.is_whole:
            offload = copied_modules(work.model, work.practice, remade.modules)
        fsdp, etp = layout.shares_gradients, layout.etp or 1
        shape = Shape(b, t, c, e, remade.way, fsdp, etp, remade.modules, tuple(offload))
        return cls(t, c, e, p, v, n, batch // (n * b), shape, again)

    @property
    def devices(self) -> int:
        """All of them."""
        return self.t * self.c * self.p * self.n

    @property
    def spread(self) -> int:
        """Ranks over which the experts of a block lie."""
        return self.e * self.shape.etp

    @property
    def sharers(self) -> int:
        """Ranks with the same parameters: replicas, and those that share their context."""
        return self.n * self.c


def estimate(work: Training, layout: Layout, batch: int, most: float = math.inf) -> Estimate:
    """An iteration of `batch` samples, on as many devices as the layout has.

    Of what needs more than `most` bytes the seconds are infinite, and not looked at. Blocks are cut
    in the best of the ways that are open.
    """
    return _best_cut(work, layout, batch, most)[1]


def settle_cut(work: Training, layout: Layout, batch: int) -> Training:
    """The training with the one way to cut blocks that is best for a layout, of those open."""
    return _best_cut(work, layout, batch, math.inf)[0]


def _best_cut(work: Training, layout: Layout, batch: int, most: float) -> tuple[Training, Estimate]:
    """The best way to cut: the fastest with room; where none has, the one that needs least."""
    degrees = Degrees.of(work, layout, batch)
    found = [(one, _estimate(one, degrees, layout, most)) for one in _differing(work, degrees)]

    def rank(pair: tuple[Training, Estimate]) -> tuple[float, ...]:
        needed = pair[1].memory_bytes
        return max(0.0, needed - work.room), pair[1].seconds, needed

    return found[0] if len(found) == 1 else min(found, key=rank)


def _differing(work: Training, degrees: Degrees) -> Sequence[Training]:
    """The training, cut in every way that is open and has other stages."""
    if degrees.p == 1 or not work.other_ends:
        return [work]
    stages = degrees.p * degrees.v
    able = [one for one in work.as_cut if one is work or stages <= work.model.blocks]
    held = [stages_of(one, degrees) for one in able]
    return [one for i, one in enumerate(able) if held[i] not in held[:i]]


def _estimate(work: Training, degrees: Degrees, layout: Layout, most: float) -> Estimate:
    """An iteration with blocks that are cut as the practice does."""
    loads = _loads(work, degrees)
    memory = {
        name: size * (1 if name in LASTING else RESERVED)
        for name, size in _memory(work, degrees, layout, loads).items()
    }
    held = sum(memory.values())
    if held > most:
        return Estimate(layout, math.inf, held, {}, memory)
    parts = _seconds(work, degrees, layout, loads)
    parts["stragglers"] = straggling(degrees.devices) * sum(parts.values())
    return Estimate(layout, sum(parts.values()), held, parts, memory)


def iteration_s(work: Training, layout: Layout, batch: int) -> float:
    """Seconds of an iteration, whether or not the layout fits."""
    degrees = Degrees.of(work, layout, batch)
    found = (
        _seconds(one, degrees, layout, _loads(one, degrees)) for one in _differing(work, degrees)
    )
    return (1 + straggling(degrees.devices)) * min(sum(parts.values()) for parts in found)


def has_odd_widths(model: Transformer) -> bool:
    """Whether products have widths at which kernels are known to be slower than is computed."""
    widths = [model.hidden, model.ffn, model.expert_ffn, model.shared_ffn, model.q, model.kv]
    widths += [model.expert_hidden, model.recurrence.values if model.recurrence else 0]
    return any(width % WHOLE for width in widths)


def straggling(devices: int) -> float:
    """The share of the time by which the slowest of so many devices holds the others up."""
    return STRAGGLER * math.log2(max(1, devices / FEW))


def stage_blocks(L: int, p: int, v: int, ends: str, head: float) -> list[int]:
    """Blocks of the p v stages, in order.

    Evenly, the first stages one more; with embedding and head as a block each ("blocks"), or
    embedding, norm and head as a layer each ("layers"). "fewer": of devices of one stage the last
    has so many fewer that the slowest, with a head as long as `head` blocks, is as fast as can be;
    with chunks, the last stage has one fewer, or the first and the last, where all others have as
    many then. Or those that `ends` states.
    """
    S = p * v
    if stated := stated_blocks(ends):
        return stated
    if p > 1 and v == 1 and ends == "fewer":
        return _fewer_blocks(L, p, head)
    first, last = {"blocks": (1, 1), "layers": (1, 2)}.get(ends, (0, 0)) if S > 1 else (0, 0)
    if ends == "fewer" and S > 1 and L % S:
        first, last = {S - 1: (0, 1), S - 2: (1, 1)}.get(L % S, (0, 0))
    whole, left = divmod(L + first + last, S)
    counts = [whole + (stage < left) for stage in range(S)]
    return [max(0, n - first * (i == 0) - last * (i == S - 1)) for i, n in enumerate(counts)]


def stated_blocks(ends: str) -> list[int]:
    """Blocks of the stages that `17-20-22m-21` states; none where `ends` is a way."""
    return [int(count.rstrip("m")) for count in ends.split("-")] if ends[0].isdecimal() else []


def further_stage(ends: str) -> int | None:
    """The stage that `17-20-22m-21` states to predict further tokens; None where it says none."""
    stated = [count.endswith("m") for count in ends.split("-")] if ends[0].isdecimal() else []
    return stated.index(True) if True in stated else None


def _fewer_blocks(L: int, p: int, head: float) -> list[int]:
    def slowest(last: int) -> tuple[float, int]:
        return max(-(-(L - last) // (p - 1)), last + head), -last

    last = min(range(L // p + 1), key=slowest)
    whole, left = divmod(L - last, p - 1)  # later devices hold fewer microbatches
    return [whole + (d >= p - 1 - left) for d in range(p - 1)] + [last]


@lru_cache(maxsize=4096)
def _counts(L: int, p: int, v: int, ends: str, head: float) -> tuple[int, ...]:
    return tuple(stage_blocks(L, p, v, ends, head))


@lru_cache(maxsize=4096)
def _stages(
    kinds: tuple[Kind, ...], counts: tuple[int, ...], further: int, place: int | None, p: int
) -> Sequence[Stage]:
    """What every p-th of the stages holds together: blocks in their order, and ends.

    Further tokens are in the stage at their `place`, by default the last one.
    """
    bounds, S = [*accumulate(counts, initial=0)], len(counts)
    names, where = dict.fromkeys(kinds), S - 1 if place is None else place
    return [
        Stage(
            tuple(sum(kinds[bounds[i] : bounds[i + 1]].count(k) for i in inside) for k in names),
            further * (where in inside),
            0 in inside,
            S - 1 in inside,
        )
        for inside in (range(d, S, p) for d in range(p))
    ]


def stages_of(work: Training, degrees: Degrees, together: int | None = None) -> Sequence[Stage]:
    """What every stage holds, in order; or what every so many of them hold `together`."""
    ends, (p, v) = cut_of(work, degrees), (degrees.p, degrees.v)
    head = _head(work, degrees) if ends == "fewer" and v == 1 < p else 0.0
    key = p, v, ends, head, together
    if key not in work.memo.cuts:
        counts, place = _counts(work.model.blocks, p, v, ends, head), further_stage(ends)
        found = _stages(work.kinds, counts, work.model.further, place, together or p * v)
        work.memo.cuts[key] = found
    return work.memo.cuts[key]


def cut_of(work: Training, degrees: Degrees) -> str:
    """How blocks are shared out: as `Practice.ends`, blocks of every stage where they are free.

    So that no other cut has a shorter iteration; of chunks seconds are counted in parts of those of
    the mean block, `PARTS`.
    """
    if (ends := work.practice.ends) != "free" or degrees.p == 1:
        return ends
    if (key := (degrees, "free")) not in work.memo.cuts:
        work.memo.cuts[key] = _free_cut(work, degrees)
    return str(work.memo.cuts[key])


def _free_cut(work: Training, degrees: Degrees) -> str:
    """The blocks of every stage where they are shared out freely."""
    (_, _, _, p, v, _, m, shape, again), further = degrees, work.model.further
    blocks = work.blocks(shape)
    by_kind = {
        kind: Seconds(block.forward_s, block.backward_s + again * block.again_s)
        for kind, block in blocks.items()
    }
    last = blocks[work.kinds[-1]]
    read_s = work.pictures_s(shape).forward
    embedding, head = Seconds(read_s, last.embedding_s - read_s), Seconds(0.0, last.head_s)
    tokens = [further * seconds for seconds in work.further_s(shape)] if further else []
    if v == 1:
        units = [embedding, *(by_kind[kind] for kind in work.kinds), head]
        units[-1:-1] = [Seconds(*tokens)] if further else []
        return ends_of(cut_for_makespan(tuple(units), p, m), work.model.blocks, further)
    mean_s = work.mean(shape).seconds / PARTS
    sizes = [round(sum(unit) / mean_s) for unit in (*by_kind.values(), embedding, tokens, head)]
    return _cut(work.kinds, tuple(sizes[:-3]), *sizes[-3:], p, v)


@lru_cache(maxsize=8192)
def _cut(
    kinds: tuple[Kind, ...],
    sizes: tuple[int, ...],
    embedding: int,
    further: int,
    head: int,
    p: int,
    v: int,
) -> str:
    """The blocks of every stage where those of kinds, in the order of these, have such `sizes`."""
    by_kind = dict(zip(dict.fromkeys(kinds), sizes, strict=True))
    units = [embedding, *(by_kind[kind] for kind in kinds), *([further] if further else []), head]
    return ends_of(cut_units(tuple(map(float, units)), p, v), len(kinds), further)


def _loads(work: Training, degrees: Degrees) -> Sequence[Stage]:
    """What every device of a pipeline holds."""
    return stages_of(work, degrees, degrees.p)


def _head(work: Training, degrees: Degrees) -> float:
    """What is behind the last block in blocks, as far as their shares depend on it."""
    mean, further = work.mean(degrees.shape), work.model.further
    further_s = further * sum(work.further_s(degrees.shape)) if further else 0.0
    return round((mean.head_s + further_s) / mean.seconds, 2)


def stage_counts(work: Training, degrees: Degrees) -> list[int]:
    """Blocks of every stage, as the trainer shares them out."""
    return [stage.blocks for stage in stages_of(work, degrees)]


def once_s(work: Training, layout: Layout, batch: int) -> float:
    """Seconds of an iteration that no action of a pipeline takes: the step, the host.

    And of exchanges what a plan of t c ranks a device does not show: the part of context parallel
    ranks, what an exchange in float32 takes more and, of parameters in shares, the first gather,
    the last scatter, what collectives take.
    """
    degrees = Degrees.of(work, layout, batch)
    block = _block(work, degrees)
    if not degrees.shape.fsdp:
        found = _replicas_s(work, degrees, layout, block)
        seen_s = _replicas_s(work, degrees, layout, block, seen=True)["replicas"]
        return found["step"] + HOST_S + max(0.0, found["replicas"] - seen_s)
    found = _fsdp_s(work, degrees, layout)
    if degrees.p > 1:  # of all of a stage, which the plan exchanges once
        seen_s = _seen(degrees) * found["replicas"]
    else:  # what takes longer than the compute of all blocks, head and embedding
        parameters = sum(_parameters(work, degrees))
        gather_s, scatter_s = (
            _seen(degrees) * work.rates.replicas_s(size * parameters, degrees.sharers, degrees.t)
            for size in (min(2, BITS[work.format] / 8), work.gradient_bytes)
        )
        L, ends_s = work.model.blocks, (block.head_s / 3, block.head_s * 2 / 3)
        late_s = max(0.0, gather_s - L * block.forward_s - ends_s[0])
        scatter_s += 0.0 if layout.shard == "gradients" else gather_s
        late_s += max(0.0, scatter_s - L * (block.backward_s + block.again_s) - ends_s[1])
        seen_s = degrees.m * late_s
    return found["step"] + HOST_S + max(0.0, found["replicas"] - seen_s)


def _seen(degrees: Degrees) -> float:
    """The share of an exchange that n replicas do, where one stands for c ranks."""
    ranks = degrees.sharers
    return (1 - 1 / degrees.n) / (1 - 1 / ranks) if ranks > 1 else 0.0


def _block(work: Training, degrees: Degrees) -> Block:
    """A block in the mean of kinds, which makes as much again as blocks do in the mean."""
    block = work.mean(degrees.shape)
    return block._replace(again_s=degrees.again * block.again_s)


def _stage_s(work: Training, degrees: Degrees, stage: Stage) -> Seconds:
    """Seconds of all that a device or a stage has of a microbatch, the ends in the backward."""
    forward_s = backward_s = 0.0
    blocks = work.blocks(degrees.shape).values()
    for block, count in zip(blocks, stage.counts, strict=True):
        forward_s += count * block.forward_s
        backward_s += count * (block.backward_s + degrees.again * block.again_s)
    read_s = stage.first * work.pictures_s(degrees.shape).forward
    ends_s = stage.first * block.embedding_s - read_s + stage.last * block.head_s
    further = work.further_s(degrees.shape) if stage.further else Seconds(0.0, 0.0)
    return Seconds(
        forward_s + stage.further * further.forward + read_s,
        backward_s + stage.further * further.backward + ends_s,
    )


def _seconds(
    work: Training, degrees: Degrees, layout: Layout, loads: Sequence[Stage]
) -> dict[str, float]:
    """Seconds of an iteration by part; those of blocks are the mean of devices."""
    block, L, p, m = _block(work, degrees), work.model.blocks, degrees.p, degrees.m
    parts = {name: m * L / p * sum(seconds) for name, seconds in block.parts.items()}
    parts["recomputation"] = m * L / p * block.again_s
    read_s = sum(work.pictures_s(degrees.shape))
    parts["embedding and head"] = m / p * (block.head_s + block.embedding_s - read_s)
    if work.pictures:
        parts["tower"] = m / p * read_s
    if work.model.further:
        parts["further tokens"] = m / p * work.model.further * sum(work.further_s(degrees.shape))
    if p > 1:
        parts |= _pipeline_s(work, degrees, loads)
    if degrees.shape.fsdp:
        parts |= _fsdp_s(work, degrees, layout)
    else:
        parts |= _replicas_s(work, degrees, layout, block)
    if work.practice.muon:
        parts["step"] += _orthogonal_s(work, degrees)
    parts["host"] = HOST_S
    return parts


def _pipeline_s(work: Training, degrees: Degrees, stages: Sequence[Stage]) -> dict[str, float]:
    """Beside the mean of devices: what the slowest has more, the bubble, and sends."""
    (_, _, _, p, v, _, m, shape, _), rates = degrees, work.rates
    known = {stage: _stage_s(work, degrees, stage) for stage in {*stages}}
    every = [known[stage] for stage in stages]
    loads = [sum(seconds) for seconds in every]
    slow_s, whole_s = max(loads), sum(loads)
    if v > 1 and work.is_unequal:
        held = stages_of(work, degrees)
        known = {stage: _stage_s(work, degrees, stage) for stage in {*held}}
        slow_s = (slow_s + pace_s([known[stage] for stage in held], p)) / 2
    idle_s = max(0.0, whole_s - slow_s) / v
    if v == 1:
        idle_s = makespan_s(loads, [seconds.forward for seconds in every], m) - m * slow_s
    elif work.practice.dispatch_overlap:  # one more microbatch is in flight
        idle_s += whole_s / p / v
    send_s = rates.send_s(work.message_bytes(shape), degrees.devices // p, degrees.devices)
    shown_s, fill = send_s, p - 1
    if ("interleaved" if v > 1 else "1f1b") not in work.engine.waits:
        # a send goes under the next chunk's work, but not while the pipe fills and drains
        chunk_s = work.model.blocks / p / v * _block(work, degrees).seconds
        shown_s = max(0.0, send_s - chunk_s / 2) + rates.taken * send_s
        fill += (v - 1) * p
    if work.practice.sends == "parts" and not work.practice.sequence_parallel:
        shown_s += rates.replicas_s(shape.t * work.message_bytes(shape), shape.t)
    return {
        "imbalance": m * (slow_s - whole_s / p),
        "bubble": idle_s,
        "sends": 2 * m * v * (shown_s + PASS_S) + 2 * fill * send_s,
    }


def _fsdp_s(work: Training, degrees: Degrees, layout: Layout) -> dict[str, float]:
    """Parameters in shares: what gathers and scatter-reductions show, and the step.

    Block k + 1 is gathered behind block k, forward and again backward, and gradients are scattered
    behind the next backward. With a pipeline all of a stage is gathered once an iteration.
    """
    rates, p, m, shape, practice = work.rates, degrees.p, degrees.m, degrees.shape, work.practice
    ranks = _sharing(work, degrees)
    stays = layout.shard == "gradients"
    dense, experts = _parameters(work, degrees)
    stepped = FSDP_STEP * (dense / ranks + experts / _copies(degrees))
    step_s = (rates.on_host_s if practice.host_shards else rates.passes_s)(stepped)
    gathers_s = backs_s = added_s = all_s = first_s = 0.0
    for (kind, block), count in zip(work.blocks(shape).items(), work.counts.values(), strict=True):
        block_s, back_s = _gathers_s(work, degrees, layout, kind)
        scatter_s = back_s - (0.0 if stays else block_s)
        work_s = block.backward_s + degrees.again * block.again_s
        gathers_s += count * max(rates.taken * block_s, block_s - block.forward_s)
        backs_s += count * (shown_s := max(rates.taken * back_s, back_s - work_s))
        if practice.host_shards:  # from the second microbatch on the host waits, and adds
            summed = HOST_SUM * sum(work.parameters(shape, kind)) / ranks
            before_s = back_s - scatter_s
            before_s = max(rates.taken * before_s, before_s - work_s)
            added_s += count * (before_s + scatter_s + rates.on_host_s(summed) - shown_s)
        all_s, first_s = all_s + count * (block_s + scatter_s), max(first_s, block_s + scatter_s)
    grad = work.gradient_bytes
    ends = work.model.end_parameters / degrees.t * (0.5 if work.model.tied else 1)
    first_s += rates.replicas_s(ends * (2 + grad), ranks, degrees.t)
    if p > 1:
        return {"step": step_s, "replicas": all_s / p + first_s / 2}
    gathers_s *= 1 if stays and practice.flat_shards else m
    replicas_s = gathers_s + m * (backs_s + first_s) + (m - 1) * added_s
    return {"step": step_s, "replicas": replicas_s}


def _gathers_s(work: Training, degrees: Degrees, layout: Layout, kind: Kind) -> tuple[float, float]:
    """Seconds of a block's gather, and of what its backward exchanges."""
    rates, t, wide = work.rates, degrees.t, BITS[work.format] / 8
    ranks = _sharing(work, degrees)
    start_s = COLLECTIVE_S if degrees.sharers > 1 else 0.0
    weights, grad = sum(work.parameters(degrees.shape, kind)), work.gradient_bytes
    if work.practice.host_shards:  # float32 goes in before it is gathered, and out
        start_s += 4 * weights / ranks / rates.host_link
    block_s = rates.replicas_s(weights * wide, ranks, t) + start_s
    scatter_s = rates.replicas_s(weights * grad, ranks, t) + start_s
    if ranks < degrees.sharers:  # copies of the shares are all-reduced across servers
        port = rates.message_rate(rates.server, t * degrees.sharers)
        scatter_s += 2 * weights * grad / ranks / port
    return block_s, scatter_s + (0.0 if layout.shard == "gradients" else block_s)


def _replicas_s(
    work: Training, degrees: Degrees, layout: Layout, block: Block, seen: bool = False
) -> dict[str, float]:
    """Whole parameters: what the exchange of gradients shows, once an iteration, and the step.

    With `seen` as much as a plan of groups of ranks shows, in which all parameters have as many
    replicas.
    """
    model, rates, practice = work.model, work.rates, work.practice
    (t, _, _, p, v, *_), grad = degrees, work.gradient_bytes
    parameters = _parameters(work, degrees)
    dense, experts = (sum(parameters), 0.0) if seen else parameters
    shared, copies = layout.shard == "optimizer", _copies(degrees)
    ways = 1 if shared else 2
    reduce_s = ways * rates.replicas_s(dense * grad, degrees.sharers, t)
    if practice.exchange == "float32" and not seen:
        reduce_s = 2 * rates.replicas_s(dense * 4, degrees.sharers, t)
        reduce_s += rates.passes_s(FLOAT32_EXCHANGE * dense)
    reduce_s += ways * rates.replicas_s(experts * grad, copies, degrees.spread)
    gather_s = 0.0
    if shared:
        gather_s = rates.replicas_s(work.weight_bytes * dense, degrees.sharers, t)
        gather_s += rates.replicas_s(work.weight_bytes * experts, copies, degrees.spread)
    if seen:
        reduce_s, gather_s = _seen(degrees) * reduce_s, _seen(degrees) * gather_s
    if model.tied and p > 1:  # the first and the last stage add theirs, all replicas at once
        ring = rates.ring_rate(max(rates.server, degrees.devices // p))
        tied_s = work.trained_ends / t * grad / ring
        reduce_s += tied_s / max(1, rates.server // (t * degrees.c)) if seen else tied_s
    shown_s = reduce_s + gather_s
    if work.engine.allreduce == "overlap":
        # behind the last microbatch's backward and the first one's forward; chunks end p slots
        # apart. The first block's share has nothing to hide behind
        window = model.blocks / p * (1 + (p - 1) * (v - 1) / v)
        alone_s = (reduce_s + gather_s) * p / model.blocks
        late_s = max(0.0, reduce_s - window * block.backward_s)
        late_s += max(0.0, gather_s - window * block.forward_s)
        hidden_s = max(0.0, shown_s - alone_s - late_s)
        shown_s = alone_s + late_s + rates.taken * hidden_s
    dense, experts = parameters
    sharers = (degrees.sharers, copies) if shared else (1, 1)
    stepped = dense / sharers[0] + experts / sharers[1]
    step_s = _step_s(work, stepped, dense + experts)
    return {"step": step_s, "replicas": shown_s}


def _step_s(work: Training, stepped: float, whole: float) -> float:
    """Seconds of the optimizer of a rank, which steps some of the `whole` parameters that it has.

    What the host steps it does beside the device.
    """
    rates, offloaded = work.rates, work.practice.optimizer_offload
    size_bytes = (STEP * (1 - offloaded) + min(STATE, _state(work))) * stepped
    if not offloaded:
        return rates.passes_s(size_bytes + WHOLE_STEP * whole)
    host_s = rates.stepped_on_host_s(offloaded * stepped, work.practice.offload_overlap)
    return rates.passes_s(WHOLE_STEP * whole) + max(host_s, rates.passes_s(size_bytes))


def _state(work: Training) -> float:
    """Bytes of an optimizer's state of a parameter, on the device."""
    if work.practice.optimizer_offload:  # whatever formats are said, it is in float32
        return (1 - work.practice.optimizer_offload) * STATE
    return STATE if work.engine.optimizer_bytes is None else work.engine.optimizer_bytes


def share_bytes(work: Training) -> float:
    """Bytes of a parameter where all of it lies in shares: itself, gradient, optimizer's state.

    Those of the optimizer have a float32 copy, beside which there may be one in 16 bits.
    """
    return _state(work) + (2 + work.gradient_bytes if work.practice.flat_shards else 4)


def _orthogonal_s(work: Training, degrees: Degrees) -> float:
    """Newton-Schulz iterations of Muon (K. Jordan, 2024): five of three products for a matrix.

    Replicas share those of experts; attention's every rank makes.
    """
    model, p = work.model, degrees.p
    narrow, wide = sorted((model.expert_inputs, model.expert_ffn))
    blocks = sum(count for kind, count in work.counts.items() if kind.experts) / p
    matrices = blocks * model.matrices * model.experts / degrees.spread / _copies(degrees)
    flops = 5 * matrices * (4 * narrow**2 * wide + 2 * narrow**3)
    narrow, wide = sorted((model.q, model.latent.queries if model.latent else model.hidden))
    attending = sum(count for kind, count in work.counts.items() if kind.attends)
    flops += 5 * attending / p * 6 * narrow**2 * wide
    if state := model.recurrence:
        narrow, wide = sorted((model.hidden, state.values))
        recurrent = sum(count for kind, count in work.counts.items() if kind.is_recurrent)
        flops += 5 * recurrent / p * 6 * narrow**2 * wide
    return flops / 2 * work.rates.arithmetic_s(1, 1, 1, work.wide)


def _copies(degrees: Degrees) -> int:
    """Ranks with the same experts."""
    return max(1, degrees.devices // (degrees.p * degrees.spread))


def _parameters(work: Training, degrees: Degrees) -> tuple[float, float]:
    """Those of a rank that are trained, in the mean of stages, one end among them; its experts'."""
    model, (t, _, _, p, *_) = work.model, degrees
    dense, experts = work.mean(degrees.shape).trained
    ends = work.trained_ends / t * (2 if p == 1 and not model.tied else 1)
    ends += work.pictures.trained_parameters if work.pictures else 0
    return model.blocks * dense / p + ends, model.blocks * experts / p


def parameter_bytes(work: Training) -> tuple[float, float]:
    """Bytes of a parameter that is trained where it is whole, with its gradient; of its state."""
    return work.weight_bytes + work.gradient_bytes, _state(work)


def _contents(work: Training, degrees: Degrees, stage: Stage) -> Iterable[tuple[Block, int]]:
    """The blocks of a device, and how many there are; and those of further tokens."""
    pairs = zip(work.blocks(degrees.shape).values(), stage.counts, strict=True)
    if not stage.further:
        return pairs
    return [*pairs, *((block, stage.further) for block in work.further_blocks(degrees.shape))]


def _held(work: Training, degrees: Degrees, stage: Stage) -> tuple[float, float]:
    """Parameters that a device holds of a stage, embedding and head left out; and of experts."""
    dense = experts = 0.0
    for block, count in _contents(work, degrees, stage):
        dense += count * block.parameters.dense
        experts += count * block.parameters.experts
    return dense + stage.further * work.model.joining_parameters / degrees.t, experts


def _memory(
    work: Training, degrees: Degrees, layout: Layout, loads: Sequence[Stage]
) -> dict[str, float]:
    """Bytes by part of the device that has most."""
    of = _fsdp_bytes if degrees.shape.fsdp else _stage_bytes
    # of devices with as much, the first has most microbatches in flight
    fullest = {stage: d for d, stage in reversed([*enumerate(loads)])}.values()
    found = [of(work, degrees, layout, d, loads[d]) for d in fullest]
    return max(found, key=lambda parts: sum(parts.values()))


def working_bytes(work: Training, shape: Shape, made_again: float) -> float:
    """Bytes while a block that holds whole parameters works, and has `made_again` so many."""
    model, T = work.model, work.tokens(shape)
    size = 4 * T * model.hidden + made_again + _row_bytes(work, shape)
    if work.practice.scores:
        size += work.practice.scores.work * model.heads * work.sequence * T / shape.t
    return size


def _row_bytes(work: Training, shape: Shape) -> float:
    """Of the rows of a block's experts while they are at work; none where there are no experts."""
    model, rows = work.model, work.tokens(shape) / work.share(shape) * MORE_ROWS
    return rows * model.experts_per_token * (4 * model.expert_inputs + 6 * model.expert_ffn)


def logits_bytes(work: Training, shape: Shape) -> float:
    """Bytes of the logits of a microbatch, as the loss holds them."""
    loss, t, numbers = work.practice.loss, shape.t, work.tokens(shape) * work.model.vocabulary
    if loss.gathers and t > 1:  # those of the rank, and all of them
        return (loss.held + 2 / t + 2) * numbers
    return loss.held * numbers / t


def buffer_bytes(work: Training, shape: Shape) -> float:
    """Bytes that last beside what stages hold, whatever that is."""
    model, practice = work.model, work.practice
    size = practice.buffer_bytes
    if practice.sums == "product" and not shape.fsdp and not work.adapters:
        size += _spare_bytes(work, shape)
    if model.experts and practice.dispatch != "alltoall":
        size += DISPATCH_BYTES
    return size


def _spare_bytes(work: Training, shape: Shape) -> float:
    """Of the tensors that stand for gradients which products add up: one a shape of weights.

    In 16 bits, for all blocks (Transformer Engine, pytorch/module/base.py, get_dummy_wgrad).
    """
    model, known = work.model, work.memo.spare_bytes
    if (shape := Shape(t=shape.t, etp=shape.etp)) in known:
        return known[shape]
    shapes = {(one.n, one.k) for kind in work.counts for one in work.products(shape, kind)}
    if model.experts:
        width = model.expert_ffn / shape.etp
        shapes |= {
            ((model.matrices - 1) * width, model.expert_inputs),
            (model.expert_inputs, width),
        }
    known[shape] = 2 * sum(n * k for n, k in shapes)
    return known[shape]


def _in_flight(degrees: Degrees, d: int) -> float:
    """Microbatches of all chunks of device d that are held at once, under 1F1B."""
    p, v, m = degrees.p, degrees.v, degrees.m
    return min(m, p - d) if v == 1 else min(m, ((v - 1) * p + 2 * (p - d) - 1) / v)


def _kept_bytes(work: Training, degrees: Degrees, stage: Stage) -> tuple[float, float]:
    """Bytes that a device keeps of a microbatch; and that a block has while it is made again."""
    shape, again, kept, whole = degrees.shape, degrees.again, 0.0, 0.0
    for block, count in _contents(work, degrees, stage):
        if shape.recompute != "always":
            kept += count * block.saved_bytes
        elif count:
            kept += count * (again * block.saved_bytes + (1 - again) * block.whole_bytes)
            whole = max(whole, block.whole_bytes)
    if work.practice.keeps_outputs:
        kept += work.block(shape).saved_bytes
    if work.pictures and stage.first:
        kept += work.pictures.kept_bytes(shape.b, shape.recompute == "always")
    if "qkv_linear" in shape.offload and degrees.p > 1 and work.model.latent is None:
        kept += degrees.v * work.message_bytes(shape)  # the schedule holds inputs of stages
    return kept, whole


def _with_ends(work: Training, degrees: Degrees, stage: Stage) -> tuple[float, float]:
    """Parameters that a device has of a stage, with embedding and head; and of experts."""
    dense, experts = _held(work, degrees, stage)
    ends = (stage.first + stage.last) / (2 if work.model.tied and degrees.p == 1 else 1)
    return dense + ends * work.model.end_parameters / degrees.t, experts


def _stepped_parts(
    work: Training, degrees: Degrees, layout: Layout, stage: Stage
) -> tuple[float, float]:
    """Those trained that a device holds whole of a stage, and those whose state it has."""
    dense, experts = _with_ends(work, degrees, stage)
    if work.adapters:
        contents = [*_contents(work, degrees, stage)]
        dense = sum(count * block.trained.dense for block, count in contents)
        experts = sum(count * block.trained.experts for block, count in contents)
    sharers = (degrees.sharers, _copies(degrees)) if layout.shard == "optimizer" else (1, 1)
    return dense + experts, dense / sharers[0] + experts / sharers[1]


def _shares(work: Training, degrees: Degrees, stage: Stage) -> float:
    """Parameters in the shares of a device, where all of them lie in some."""
    dense, experts = _with_ends(work, degrees, stage)
    return dense / _sharing(work, degrees) + experts / _copies(degrees)


def _sharing(work: Training, degrees: Degrees) -> int:
    """Ranks over which the shares of parameters lie."""
    if work.practice.shards == "server":
        return max(1, min(work.rates.server // degrees.t, degrees.sharers))
    return degrees.sharers


def _stage_bytes(
    work: Training, degrees: Degrees, layout: Layout, d: int, stage: Stage
) -> dict[str, float]:
    """Of device d with such a stage, which holds whole parameters."""
    model, practice, (_, _, _, p, v, _, _, shape, _) = work.model, work.practice, degrees
    kept, whole = _kept_bytes(work, degrees, stage)
    held, stepped = _stepped_parts(work, degrees, layout, stage)
    whole_bytes = 2 * held
    if work.adapters:
        whole_bytes += 2 * sum(_with_ends(work, degrees, stage))
    elif work.weight_bytes < 2:
        whole_bytes -= (2 - work.weight_bytes) * sum(_held(work, degrees, stage))
    flight = _in_flight(degrees, d)
    if practice.dispatch_overlap and p > 1 and model.experts:
        flight += 1 / v
    if shape.offload:
        contents = _contents(work, degrees, stage)
        whole += BLOCKS * max((block.copied_bytes for block, n in contents if n), default=0.0)
    tower = {"tower": tower_bytes(work, degrees, layout)} if work.pictures and stage.first else {}
    return tower | {
        "parameters": whole_bytes,
        "gradients": work.gradient_bytes * held,
        "optimizer": _state(work) * stepped,
        "activations": kept * flight * (1 + CAPTURED * (practice.graphs != "none")),
        "logits": logits_bytes(work, shape) * (stage.last + stage.further),
        "at work": working_bytes(work, shape, whole),
        "buffers": buffer_bytes(work, shape),
    }


def tower_bytes(work: Training, degrees: Degrees, layout: Layout) -> float:
    """Bytes of parameters, gradients and state of what reads pictures, on every rank that does."""
    assert work.pictures
    sharers = degrees.sharers if layout.shard == "optimizer" else 1
    state_bytes = work.gradient_bytes + _state(work) / sharers
    return 2 * work.pictures.tower.parameters + state_bytes * work.pictures.trained_parameters


def host_bytes(work: Training, layout: Layout, batch: int) -> float:
    """Bytes in the memory of a server's host, all of whose devices have as much as the fullest.

    Of state that is stepped there, with a gradient; of activations; or of all shares.
    """
    degrees, practice = Degrees.of(work, layout, batch), work.practice
    found = list[float]()
    for d, stage in enumerate(_loads(work, degrees)):
        copied = sum(block.copied_bytes * n for block, n in _contents(work, degrees, stage))
        on_host = _in_flight(degrees, d) * copied
        if practice.host_shards and degrees.shape.fsdp:
            on_host += share_bytes(work) * _shares(work, degrees, stage)
        elif practice.optimizer_offload:
            stepped = _stepped_parts(work, degrees, layout, stage)[1]
            on_host += practice.optimizer_offload * (STATE + 4) * stepped
        found.append(on_host)
    return min(work.rates.server, degrees.devices) * max(found)


def _fsdp_bytes(
    work: Training, degrees: Degrees, layout: Layout, d: int, stage: Stage
) -> dict[str, float]:
    """Of device d with such a stage, whose parameters lie in shares.

    A pipeline keeps the stage gathered, and whole gradients in float32; else the embedding and the
    head stay, or all where gradients alone are shared, two blocks are gathered and one is
    scattered. In a pipeline a stage has a buffer for every input and gradient that it receives
    in an iteration (torch 2.13, pipelining/stage.py, _prepare_forward_infra and
    _prepare_backward_infra). Flat ones have buffers of two blocks and an end. Of those in the
    host's memory the shares of a block are here, which come and go.
    """
    model, practice, (t, _, _, p, v, _, m, shape, _) = work.model, work.practice, degrees
    stays, received = layout.shard == "gradients", 2 * v - (d == 0) - (d == p - 1)
    T, h, held = work.tokens(shape), model.hidden, sum(_with_ends(work, degrees, stage))
    ends = held - sum(_held(work, degrees, stage))
    block = max(sum(block.parameters) for block in work.blocks(shape).values())
    width = max(model.width(kind) for kind in work.counts)
    shares = share_bytes(work) * _shares(work, degrees, stage)
    if practice.host_shards:
        shares = 8 * block / _sharing(work, degrees)
    found = {"in shares": shares}
    if practice.flat_shards:
        whole, buffers = ends + 2 * block, 2 * block + model.end_parameters / t
        if stays:
            whole, found["in shares"] = held, shares - 2 * _shares(work, degrees, stage)
        found["gathered"] = 2 * whole + work.gradient_bytes * buffers
        rest = _stage_bytes(work, degrees, layout, d, stage).items()
        return found | {name: size for name, size in rest if name not in OF_STATE}
    return found | {
        "gathered": 6 * held if p > 1 else 2 * (held if stays else ends + block) + 8 * block,
        "activations": _kept_bytes(work, degrees, stage)[0] * _in_flight(degrees, d),
        "buffers": m * received * work.message_bytes(shape),
        "logits": practice.loss.held * T * model.vocabulary / t * (stage.last + stage.further),
        "at work": T * (12 * h + (12 * width + 8 * model.q) / t) + _row_bytes(work, shape),
    }
