"""A plan as people read it: the model and the cluster, the stages, and what to expect of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from msgspec import UNSET

from partopt.documents.engine import PARTOPT, TORCH
from partopt.documents.plan import Plan, needed_bytes, noam, proof_of, room_bytes
from partopt.documents.stage import Load, Stage, stages_text
from partopt.printable import shorten
from partopt.report.layout_words import where_again
from partopt.report.phrases import (
    Lines,
    against_limit,
    basis_lines,
    count_text,
    format_ranks,
    head,
    price_lines,
    ranks_text,
    speed_lines,
    speed_text,
    speedup_text,
)
from partopt.report.text import (
    Column,
    bar,
    label_lines,
    stretch,
    style,
    table_of,
    width,
    with_label,
)
from partopt.units import format_bytes, format_seconds

_AGREES = 1e-3  # of the period: closer than that, the simulation confirms the formula
_ALL = 0.995  # of the time: what is busy for so much of it is always busy
_OTHERS = 3  # loads beside the one that binds
_IN_TURN = 4  # microbatches of an iteration a device, where none is said
_CELLS, _LABEL = 60, 9  # columns of the bar of memory, and before every line
# parts of a device's memory: what they are called, and their cells, the second in ASCII
_PARTS = {
    "parameters": ("parameters", "█P"),
    "gradients": ("gradients", "▓G"),
    "optimizer": ("optimizer", "▒O"),
    "activations": ("activations", "░A"),
    "buffers": ("buffers", "=="),
    "transient": ("transient", "++"),
    "free": ("free", "·."),
    "reserve": ("reserved", "xx"),
}
_WHY = {
    "assumed": " (3.5 GB and 3 %)",
    "computed": " (buffers, and what the allocator holds)",
    "measured": " (the profiled peak beyond the formulas', and 2.5 GB)",
}


_TIE = 0.01  # more than what the fastest plan gains over a simpler one that is first
_SHARED = {
    "optimizer": "the optimizer's state",
    "gradients": "gradients and the optimizer's state",
    "parameters": "parameters, gradients and the optimizer's state",
}


def render(plan: Plan, by_size: Sequence[Plan] = ()) -> str:
    """The plan as text; `by_size` are the best plans at the microbatch sizes that were tried."""
    outcome = [(label, style().spell(text)) for label, text in _outcome(plan)]
    if len(by_size) > 1:
        tried = [
            f"microbatch {best.microbatch_size}: {_speed(best)}"
            + ("" if best.fits else ", does not fit")
            for best in by_size
        ]
        outcome.append(("tried", "; ".join(tried)))
    stages = table_of(enumerate(plan.stages), stage_columns(plan))
    about = "\n".join(filter(None, [head(plan), label_lines(weights_lines(plan))]))
    return "\n\n".join([about, stages, label_lines(outcome)])


def weights_lines(plan: Plan) -> Lines:
    """How old weights are where no flush renews them, and what has a flush; else nothing."""
    oldest = max(stage.weight_versions for stage in plan.stages) - 1
    if plan.microbatches is not None or not oldest:
        return []
    batch = plan.microbatch_size * plan.topology.devices * _IN_TURN
    age = f"up to {count_text(oldest, 'update')} old; synchronous:"
    flags = style().spell(f"`schedule=1f1b` `global_batch={batch}`")
    return [("weights", f"{age} {flags}")]


def _speed(plan: Plan) -> str:
    return speed_text(plan.predicted.samples_per_s, plan.profile.tokens_per_sample)


def stage_columns(plan: Plan) -> list[Column]:
    """Those of the stages; BUSY is against the busiest or, of rounds, against the period."""

    def sync(row: tuple[int, Stage]) -> str:
        # one all-reduce an iteration, or one for every round of r microbatches
        divisor = 1 if plan.microbatches else row[1].replicas
        return format_seconds(row[1].gradients_s / divisor) if row[1].gradients_s else "-"

    def busy_s(stage: Stage) -> float:
        exchanged = 0.0 if plan.microbatches else stage.gradients_s
        return max(stage.compute_s, exchanged) / stage.replicas

    whole = max(map(busy_s, plan.stages)) if plan.microbatches else plan.predicted.period_s
    return [
        Column("#", lambda row: str(row[0])),
        Column("LAYERS", lambda row: _layers(row[1], stretch(20, 0.6)), "text"),
        Column("RANKS", lambda row: ranks_text(row[1].ranks, stretch(14, 0.4, least=14)), "whole"),
        Column("COMPUTE", lambda row: format_seconds(row[1].compute_s / row[1].replicas)),
        Column("SYNC", sync),
        Column("FLIGHT", lambda row: str(row[1].in_flight), spare=2),
        Column("MEMORY", lambda row: format_bytes(row[1].memory.total_bytes)),
        Column("BUSY", lambda row: bar(busy_s(row[1]) / whole, 4), "text", 1),
    ]


def _layers(stage: Stage, room: int) -> str:
    """The layers of a stage, such as `3-8 h.1..6`, in the fullest form that has room.

    Numbers, the first name, and what differs in the last; where that is too wide, without the start
    that the names share, then the first name alone.
    """
    first, last = stage.modules[0].split("."), stage.modules[-1].split(".")
    names = [".".join(first[skip:]) for skip in range(len(first))]
    numbers = f"{stage.start}"
    if len(stage.modules) > 1:
        numbers = f"{stage.start}-{stage.stop - 1}"
        pairs = zip(first[:-1], last[:-1], strict=False)
        shared = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        end = ".".join(last[shared:])
        names = [f"{name}..{end}" for name in names[: shared + 1]] + [f"{name}.." for name in names]
    forms = [f"{numbers} {name}" for name in names]
    return next((form for form in forms if len(form) <= room), shorten(forms[-1], room))


def _outcome(plan: Plan) -> Iterator[tuple[str, str]]:
    predicted, estimate_s = plan.predicted, plan.predicted.estimate.period_s
    speedup = speedup_text(predicted.speedup_over_one_device, plan.topology)
    yield "speed", f"{_speed(plan)}, {speedup}; devices idle {predicted.bubble:.1%}"
    yield from speed_lines(predicted)
    yield from _faster(plan)
    differs = abs(predicted.period_s - estimate_s) > _AGREES * estimate_s
    formula = f" (formula {format_seconds(estimate_s)})" if differs else ""
    yield "period", f"{format_seconds(predicted.period_s)} a microbatch{formula}"
    if predicted.iteration_s is not None:
        iteration = format_seconds(predicted.iteration_s)
        yield "", f"{iteration} an iteration of {plan.microbatches} microbatches"
    yield from _loads(plan)
    yield from price_lines(predicted.figures, plan.topology.cluster.devices)
    if plan.microbatches is None:
        yield "flight", _flight(plan)
    yield from _trainer(plan)
    yield from with_label("memory", memory_lines(plan))
    if plan.shard != "none" and max(stage.replicas for stage in plan.stages) > 1:
        yield "shares", f"replicas of a stage share {_SHARED[plan.shard]}: `shard={plan.shard}`"
    if len(plan.stages) == 1 and plan.fits:
        whole = f"each device holds the whole model, {format_bytes(plan.peak_memory_bytes)}"
        less = "with less than that a device, this plan would not fit"
        yield "pipeline", f"none is needed: {whole}; {less}"
    if plan.layout.recompute not in ("never", "always"):
        yield "", f"activations recomputed in {where_again(plan)}"
    if plan.idle_ranks:
        group_ranks = plan.topology.group_ranks
        idle, devices = len(plan.idle_ranks) * group_ranks, plan.topology.devices * group_ranks
        ranks = "rank" if len(plan.idle_ranks) == 1 else "ranks"
        which = shorten(format_ranks(plan.idle_ranks), 40)
        yield "idle", f"{idle} of {devices} devices: {ranks} {which}"
    proof, certificate = proof_of(plan), plan.certificate
    if proof is not None and certificate is not None:
        if plan.planner != "optimal":
            yield "objective", f"{format_seconds(certificate.objective_s)}, {certificate.status}"
        yield "proof", proof.line
    yield from basis_lines(plan.profile.estimated)


def _faster(plan: Plan) -> Iterator[tuple[str, str]]:
    """The fastest of the plans beside it, of which this one is the simplest."""
    rows = [row for row in plan.runners_up or [] if row.fits]
    best = max(rows, key=lambda row: row.samples_per_s, default=None)
    gain = best.samples_per_s / plan.predicted.samples_per_s - 1 if best else 0.0
    if best and 0 < gain <= _TIE:
        yield "", f"{best.schedule} of {shorten(best.shape, 20)} is {gain:.2%} faster, less simple"


def _trainer(plan: Plan) -> Iterator[tuple[str, str]]:
    """For which trainer and engine the plan is; where it never flushes, what that means."""
    if plan.trainer != PARTOPT:
        yield "trainer", plan.trainer + ("'s pipeline runtime" if plan.trainer == TORCH else "")
    elif plan.microbatches is None:
        yield (
            "trainer",
            f"partopt's own engine; {plan.schedule} is asynchronous. For trainers that flush: "
            "`for=megatron`, `for=torchtitan`, `for=deepspeed`",
        )
    else:
        able = plan.copies == 1  # torch's has no stages on two ranks of a pipeline
        yield "trainer", "partopt's own engine" + ("; for torch's: `for=torch`" if able else "")


def _loads(plan: Plan) -> Lines:
    """What binds the period, and how free everything else is.

    That is the share of the time for which a load is idle, and for memory the share that is unused;
    of the loads the tightest.
    """

    def name(load: Load) -> str:
        after = plan.stages[load.place].start - 1
        return f"{load} (after layer {after})" if load.what == "cut" else str(load)

    def percent(share: float) -> str:
        return f"{share:.1%}" if share < 0.0995 else f"{share:.0%}"

    predicted, others = plan.predicted, []
    binds, bound = predicted.bound_by, predicted.binding_load
    for load in predicted.estimate.loads:
        share = load.seconds / predicted.period_s
        if load is bound:
            binds = name(load) + (f", busy {percent(share)} of the time" if share < _ALL else "")
        elif load.what == "all-reduce" and plan.microbatches:  # nothing goes on beside it
            binds += f"; {load} adds {percent(share)}"
        elif not predicted.bound_by.startswith(f"{load.what} of"):  # simulated ports that bind
            others.append((max(0.0, 1 - share), name(load)))
    others = sorted(others, key=lambda other: other[0])[:_OTHERS]
    free = [f"{name} {percent(share)}" for share, name in others]
    limit, peak = plan.memory_limit_bytes, plan.peak_memory_bytes
    if limit is not None and peak <= limit:
        left = f"{percent(1 - peak / limit)} ({format_bytes(limit - peak)})"
        free.append(f"memory of {stages_text(plan.fullest_stages)} {left}")
    if predicted.held_back:
        binds = predicted.binds
    return [("binds", binds), *([("slack", ", ".join(free))] if free else [])]


def _flight(plan: Plan) -> str:
    """NOAM, and where it is not the formula's, what that would give."""
    text = f"NOAM {plan.noam}: microbatches in flight for each replica of the first stage"
    formula = noam(sum(stage.replicas for stage in plan.stages), plan.stages[0].replicas)
    if plan.noam == formula:
        return text
    period_s = plan.predicted.formula_period_s
    gives = "deadlocks" if period_s is None else f"gives {format_seconds(period_s)} a microbatch"
    return f"{text}; the formula's {formula} {gives}"


def memory_lines(plan: Plan) -> Iterator[str]:
    """The fullest device against its limit: in all, as a bar, and part by part."""
    peak, limit, reserve = plan.peak_memory_bytes, plan.memory_limit_bytes, plan.reserve
    needed, room = needed_bytes(plan), room_bytes(plan)
    on = f"{format_bytes(needed)} on each device of {stages_text(plan.fullest_stages)}"
    chance = plan.transformer.fits_chance if plan.transformer else UNSET
    likely = "" if chance is UNSET else f"; {chance:.0%} likely to fit"
    yield on + against_limit(needed, room) + likely
    parts = device_parts([plan.stages[s] for s in plan.fullest_stages])
    parts |= {
        "free": 0 if limit is None else max(0, limit - peak),
        "reserve": reserve.size_bytes,
    }
    parts = {name: size for name, size in parts.items() if size > 0}
    # the cells of a part end where it would, rounded
    columns, whole, done, cells = width() - _LABEL, sum(parts.values()), 0, ""
    words: list[str] = []
    for name, size in parts.items():
        label, marks = _PARTS[name]
        done += size
        cells += marks[style().ascii_only] * (
            round(min(_CELLS, columns) * done / whole) - len(cells)
        )
        why = _WHY.get(reserve.basis, "") if name == "reserve" else ""
        word = f"{marks[style().ascii_only]} {label} {format_bytes(size)}{why}"
        # in as few lines as hold them, none broken
        if words and len(words[-1]) + len(word) + 3 <= columns:
            words[-1] += f", {word}"
        else:
            words[-1:] = [f"{words[-1]},", word] if words else [word]
    yield cells
    yield from words


def device_parts(stages: Sequence[Stage]) -> dict[str, int]:
    """Bytes of every part on a device that holds `stages`, of which one backward runs at a time."""
    held = [stage.memory for stage in stages]
    return {
        "parameters": sum(memory.parameters_bytes for memory in held),
        "gradients": sum(memory.gradients_bytes for memory in held),
        "optimizer": sum(memory.optimizer_bytes for memory in held),
        "activations": sum(memory.activations_bytes for memory in held),
        "buffers": sum(memory.buffers_bytes for memory in held),
        "transient": max(memory.transient_bytes for memory in held),
    }
