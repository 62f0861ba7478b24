"""Why a trainer cannot run a layout, or why it is not computed: what is wrong with each part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from partopt.documents.engine import Layout
from partopt.documents.transformer import Practice, Transformer
from partopt.errors import PartoptError
from partopt.transformer.block import Training
from partopt.transformer.iteration import Degrees, further_stage, stated_blocks
from partopt.transformer.offloading import TOGETHER


class _Asked(NamedTuple):
    """A layout that is asked for with a batch, and its degrees."""

    work: Training
    layout: Layout
    batch: int
    degrees: Degrees
    model: Transformer
    practice: Practice


def find_faults(
    work: Training, layout: Layout, batch: int, parts: Iterable[str] = ()
) -> Iterator[PartoptError]:
    """Why a layout cannot be run, or is not computed, with the part of the layout.

    It may not divide what it should, ask for what the trainer does not have, or lack what another
    part or a fact needs. Looked at are these `parts`, by default all.
    """
    degrees = Degrees.of(work, layout, batch)
    asked = _Asked(work, layout, batch, degrees, work.model, work.practice)
    for part in parts or _FAULTS:
        for what in _FAULTS[part](asked):
            hint = "change that part of the layout"
            message = f"layout.{part}: {what}"
            yield PartoptError(message, hint, code="unsupported-layout", part=part)


def _tp(asked: _Asked) -> Iterator[str]:
    work, model, practice = asked.work, asked.model, asked.practice
    t, c, server = asked.degrees.t, asked.degrees.c, work.rates.server
    if model.heads % t:
        yield f"{model.heads} heads are not a multiple of {t}"
    elif model.kv_heads % t and not (work.repeats_keys and t % model.kv_heads == 0):
        yield f"{model.kv_heads} heads of keys are not a multiple of {t}"
    if (state := model.recurrence) and (state.heads % t or state.groups % t):
        yield f"a recurrence of {state.heads} heads, {state.groups} of keys, is not cut in {t}"
    for width in {model.ffn, model.shared_ffn}:
        if width % t:
            yield f"a feed-forward of {width} is not a multiple of {t}"
    if practice.sequence_parallel and t > 1 and work.sequence % (t * c):
        yield f"{work.sequence} tokens are not a multiple of {t} x {c}"
    if t > server:
        yield f"{t} ranks are more than the {server} of a server, which is not computed"
    if practice.tp_overlap == "buffers" and (t == 1 or not practice.sequence_parallel):
        yield "tp-overlap needs tp > 1 and sequence-parallel"


def _cp(asked: _Asked) -> Iterator[str]:
    t, c, rates = asked.degrees.t, asked.degrees.c, asked.work.rates
    if t <= rates.server and not rates.holds(t * c):
        yield f"groups of {t} x {c} ranks neither fill nor divide servers of {rates.server}"
    if c > 1 and asked.work.sequence % (2 * c):
        s = asked.work.sequence
        yield f"{s} tokens, half a rank's at a time, are not a multiple of {2 * c}"
    if state := asked.model.recurrence:  # core/ssm, which share out heads
        shared = [state.heads, *[state.groups] * (state.rule == "delta")]
        if c > 1 and not asked.work.spreads_recurrences:
            yield "recurrences of this trainer have no context parallelism"
        elif c > 1 and any(heads % (t * c) for heads in shared):
            yield f"a recurrence of {state.heads} heads is not shared out to {t} x {c}"
    if c > 1 and asked.practice.scores:
        yield "attention that writes its scores is of one rank's context"


def _ep(asked: _Asked) -> Iterator[str]:
    (_, _, e, p, v, *_), experts = asked.degrees, asked.model.experts or 1
    if experts % e:
        yield f"{experts} experts are not a multiple of {e}"
    if _stage_ranks(asked) % e:
        yield from _misplaced_experts(asked)
    if asked.practice.dispatch != "alltoall" and asked.model.experts and asked.degrees.spread == 1:
        yield f"exchange={asked.practice.dispatch} needs ep > 1"
    if asked.practice.dispatch_overlap and (asked.degrees.spread == 1 or (p > 1 and v == 1)):
        yield "exchange-overlap needs ep > 1 and, in a pipeline, chunks"


def _etp(asked: _Asked) -> Iterator[str]:
    etp, numerics = asked.degrees.shape.etp, asked.model.numerics
    has_biases = numerics.bias == "all" if numerics else not asked.model.gated
    if etp > 1 and has_biases:  # megatron/core/transformer/moe/experts.py
        yield "experts that have biases are not cut"
    if _stage_ranks(asked) % asked.degrees.e == 0:
        yield from _misplaced_experts(asked)
    if asked.model.expert_ffn % etp or (etp > 1 and not asked.model.experts):
        yield f"experts of {asked.model.expert_ffn} are not a multiple of {etp}"


def _stage_ranks(asked: _Asked) -> int:
    return asked.degrees.t * asked.degrees.c * asked.degrees.n


def _misplaced_experts(asked: _Asked) -> Iterator[str]:
    ranks, spread = _stage_ranks(asked), asked.degrees.spread
    if ranks % spread:
        yield f"the {ranks} ranks of a stage, tp x cp x dp, are not a multiple of {spread}"


def _dp(asked: _Asked) -> Iterator[str]:
    n, b = asked.degrees.n, asked.degrees.shape.b
    if asked.batch % (n * b):
        yield f"{asked.batch} samples, in microbatches of {b}, are not a multiple of {n * b}"


def _pp(asked: _Asked) -> Iterator[str]:
    model, p, v = asked.model, asked.degrees.p, asked.degrees.v
    ends = 2 if asked.practice.ends in ("blocks", "fewer") else 0
    if asked.practice.ends == "free":
        ends = 2 + bool(model.further)
    if p * v > model.blocks + ends:
        yield f"{p} x {v} stages of {model.blocks} blocks"
    if p > 1 and model.tied and not asked.work.parts_ties:
        yield "embedding and head share their weight, which this trainer keeps in one stage"


def _ends(asked: _Asked) -> Iterator[str]:
    """Blocks that are stated of every stage, and are not those of the model."""
    model, p, v, ends = asked.model, asked.degrees.p, asked.degrees.v, asked.practice.ends
    stated, further = stated_blocks(ends), further_stage(ends)
    empty = [not n for i, n in enumerate(stated) if i not in (0, further, len(stated) - 1)]
    wrong = len(stated) != p * v or sum(stated) != model.blocks or any(empty)
    if stated and (wrong or (further is not None and not model.further)):
        yield f"{ends[:60]} are not {p} x {v} stages of {model.blocks} blocks"


def _chunks(asked: _Asked) -> Iterator[str]:
    p, v, m = asked.degrees.p, asked.degrees.v, asked.degrees.m
    if v > 1 and p == 1:
        yield f"{v} stages on each of one device, which is no pipeline: pp > 1"
    elif v > 1 and m % p:
        yield f"{m} microbatches are not a multiple of {p} devices"


def _schedule(asked: _Asked) -> Iterator[str]:
    name, v = asked.layout.schedule, asked.degrees.v
    if name not in (None, "interleaved" if v > 1 else "1f1b"):
        yield f"{name} with chunks={v}"


def _shard(asked: _Asked) -> Iterator[str]:
    practice, shard, known = asked.practice, asked.layout.shard, asked.work.engine.shard
    p, c = asked.degrees.p, asked.degrees.c
    if shard is not None and shard not in known:
        yield f"{shard}: the trainer has {', '.join(known)}"
    elif practice.optimizer_offload and shard not in (None, "optimizer"):
        yield "optimizer-offload needs shard=optimizer"
    elif practice.flat_shards and asked.layout.shares_gradients:
        yield from _flat_shards(practice, p)
    elif practice.flat_shards:
        pass
    elif shard == "parameters" and p > 1:
        yield "a stage keeps what a backward gathers, and whole gradients: gather once (gradients)"
    elif shard == "none" and c > 1 and "parameters" in known:
        yield "context parallel ranks share parameters in any case"
    if practice.host_shards and (p > 1 or shard == "none"):
        yield "cpu-offload is of shares of gradients or parameters, computed for pp=1"


def _flat_shards(practice: Practice, p: int) -> Iterator[str]:
    """What flat shards of gradients or parameters do not go with."""
    what = "gradients and parameters in shares"
    if p > 1:
        yield f"{what} make a stage's output a view, which pipelines do not free: pp=1"
    if practice.graphs in ("router", "attention"):
        yield f"{what} have hooks, which graphs={practice.graphs} do not hold"
    if practice.dispatch_overlap:
        yield f"{what} have buffers of two blocks, and exchange-overlap needs more"
    if practice.muon:
        yield f"{what} are stepped by Adam alone"


def _modules(asked: _Asked) -> Iterator[str]:
    if asked.layout.modules and asked.layout.recompute != "selective":
        yield "blocks make modules again with recompute=selective"
    elif asked.layout.modules and asked.practice.selective != "attention":
        yield "the trainer makes operations again, or blocks"


def _recompute(asked: _Asked) -> Iterator[str]:
    practice, again, made = asked.practice, asked.layout.recomputation, asked.work.engine.recompute
    if again.way == "selective" and again.way not in made:
        yield "the trainer makes all of a block again or nothing"
    elif again.is_whole and not {"blocks", "stage"} & {*made}:
        yield "the trainer makes nothing again"
    spread, p, v = asked.degrees.spread, asked.degrees.p, asked.degrees.v
    overlaps = practice.dispatch_overlap and spread > 1 and not (p > 1 and v == 1)
    if overlaps and again.is_whole:
        yield "exchange-overlap makes no blocks again"
    if practice.graphs in ("router", "attention") and again.is_whole:
        yield f"graphs={practice.graphs} hold parts of blocks that are made again"


def _offload(asked: _Asked) -> Iterator[str]:
    practice, copied = asked.practice, asked.degrees.shape.offload
    if copied and practice.graphs == "full":
        yield "graphs=full wait for copies to the host, which is not computed"
    elif practice.fused_experts and len(TOGETHER & {*copied}) == 1:
        yield f"fused-experts copy what {'+'.join(sorted(TOGETHER))} save, or nothing"


_FAULTS: Mapping[str, Callable[[_Asked], Iterator[str]]] = {
    "tp": _tp,
    "cp": _cp,
    "ep": _ep,
    "etp": _etp,
    "dp": _dp,
    "pp": _pp,
    "ends": _ends,
    "chunks": _chunks,
    "schedule": _schedule,
    "shard": _shard,
    "modules": _modules,
    "recompute": _recompute,
    "offload": _offload,
}
