"""A plan as people read it: the model and the cluster, the stages, and what to expect of them."""

from __future__ import annotations

import itertools

from partopt.cost.flight import noam
from partopt.documents.plan import Load, Plan, Stage, stages_text
from partopt.report.table import bar, labelled, shorten, table
from partopt.report.topology import describe
from partopt.units import format_bytes, format_rate, format_seconds

_LAYERS_WIDTH = 20
_RANKS_WIDTH = 11
_BUSY_WIDTH = 4
_ALL = 0.995  # of the time: what is busy for so much of it is always busy
_HEADINGS = ["#", "LAYERS", "RANKS", "COMPUTE", "SYNC", "FLIGHT", "MEMORY", "BUSY"]


def render(plan: Plan, ascii_only: bool = False) -> str:
    """The plan as text."""
    limit = plan.memory_limit_bytes
    rows = [_row(s, stage, plan, ascii_only) for s, stage in enumerate(plan.stages)]
    return "\n\n".join(
        [head(plan), table(_HEADINGS, rows, left=(1, 2, 7)), labelled(_outcome(plan, limit))]
    )


def head(plan: Plan) -> str:
    """The model, the cluster, and the plan in a line each."""
    layers, weights = plan.stages[-1].stop, plan.profile.parameter_bytes
    lines = [
        (
            "model",
            (
                f"{plan.profile.name}: {layers} layers, {format_bytes(weights)} of "
                f"parameters, microbatch {plan.microbatch_size}"
            ),
        ),
        ("cluster", describe(plan.topology)),
        (
            "plan",
            (
                f"{plan.planner}: {_count(len(plan.stages), 'stage')}, "
                f"{shorten(plan.shape, 40)}, schedule {plan.schedule}"
            ),
        ),
    ]
    return labelled(lines)


def format_ranks(ranks: list[int]) -> str:
    """`0-14 (x15)`: runs of consecutive ranks, ascending, and how many there are."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{text} (x{len(ranks)})" if len(ranks) > 1 else text


def _row(s: int, stage: Stage, plan: Plan, ascii_only: bool) -> list[str]:
    # one all-reduce an iteration, or one for every round of r microbatches
    exchanged_by = 1 if plan.microbatches else stage.replicas
    busy = [_busy_s(each, plan) for each in plan.stages]
    whole = max(busy) if plan.microbatches else plan.predicted.period_s
    return [
        str(s),
        _layers(stage, _LAYERS_WIDTH),
        ranks_text(stage.ranks, _RANKS_WIDTH),
        format_seconds(stage.compute_s / stage.replicas),
        format_seconds(stage.gradients_s / exchanged_by) if stage.gradients_s else "-",
        str(stage.in_flight),
        format_bytes(stage.memory.total_bytes),
        bar(busy[s] / whole, _BUSY_WIDTH, ascii_only),
    ]


def ranks_text(ranks: list[int], width: int) -> str:
    """The ranks in the fullest form that fits: all of them, the first and how many, how many."""
    forms = [format_ranks(ranks), f"{min(ranks)}.. (x{len(ranks)})"]
    return next((form for form in forms if len(form) <= width), f"x{len(ranks)}")


def _busy_s(stage: Stage, plan: Plan) -> float:
    """Seconds per microbatch that pace a stage: its compute or, exchanged every round, its
    gradients.
    """
    return max(stage.compute_s, 0.0 if plan.microbatches else stage.gradients_s) / stage.replicas


def _layers(stage: Stage, width: int) -> str:
    """`3-8 h.1..6`: numbers, the first name, and what differs in the last; where that is too wide,
    without the start that they share.
    """
    first, last = stage.modules[0].split("."), stage.modules[-1].split(".")
    numbers, more = (
        (f"{stage.start} ", "")
        if stage.stop - stage.start == 1
        else (f"{stage.start}-{stage.stop - 1} ", "..")
    )
    shared = len(
        list(
            itertools.takewhile(
                lambda pair: pair[0] == pair[1], zip(first[:-1], last[:-1], strict=False)
            )
        )
    )
    names = (
        [f"{'.'.join(first[skip:])}..{'.'.join(last[shared:])}" for skip in range(shared + 1)]
        if more
        else []
    )
    names += [".".join(first[skip:]) + more for skip in range(len(first))]
    return next(
        (numbers + name for name in names if len(numbers + name) <= width),
        shorten(numbers + names[-1], width),
    )


def _outcome(plan: Plan, limit: int | None) -> list[tuple[str, str]]:
    predicted = plan.predicted
    lines = [("period", f"{format_seconds(predicted.period_s)} a microbatch")]
    if predicted.iteration_s is not None:
        lines.append(
            (
                "",
                (
                    f"{format_seconds(predicted.iteration_s)} an iteration of "
                    f"{plan.microbatches} microbatches"
                ),
            )
        )
    lines += _loads(plan, limit)
    rate = format_rate(predicted.samples_per_s, "samples")
    lines.append(
        (
            "speed",
            (
                f"{rate}, {predicted.speedup_over_one_device:.2f} times one device; devices "
                f"idle {predicted.bubble:.1%}"
            ),
        )
    )
    if plan.microbatches is None:
        lines.append(("flight", _flight(plan)))
    lines.append(("memory", _memory(plan, limit)))
    recomputed = [s for s, stage in enumerate(plan.stages) if stage.recompute]
    if 0 < len(recomputed) < len(plan.stages):
        lines.append(("", f"activations recomputed in {shorten(stages_text(recomputed), 40)}"))
    if plan.idle_ranks:
        lines.append(
            (
                "idle",
                (
                    f"{len(plan.idle_ranks)} of {plan.topology.devices} devices: ranks "
                    f"{shorten(format_ranks(plan.idle_ranks), 40)}"
                ),
            )
        )
    if plan.certificate is not None:
        lines.append(
            ("sought", f"{format_seconds(plan.certificate.objective_s)}: {plan.certificate.status}")
        )
        lines.append(("proof", plan.certificate.proof))
    return lines


def _loads(plan: Plan, limit: int | None) -> list[tuple[str, str]]:
    """What binds the period; and of everything else for how much of the time it is free, of the
    memory how much of it.
    """
    predicted, free, peak = plan.predicted, [], plan.peak_memory_bytes
    binds = predicted.bound_by
    for load in predicted.estimate.loads:
        share = load.seconds / predicted.period_s
        if str(load) == binds:
            binds = _named(load, plan) + (
                f", busy {_percent(share)} of the time" if share < _ALL else ""
            )
        elif load.what == "all-reduce" and plan.microbatches:  # nothing goes on beside it
            binds += f"; {load} adds {_percent(share)}"
        else:
            free.append(f"{_named(load, plan)} {_percent(max(0.0, 1 - share))}")
    if limit is not None and peak <= limit:
        free.append(
            f"memory of {stages_text(plan.fullest_stages)} {_percent(1 - peak / limit)} "
            f"({format_bytes(limit - peak)})"
        )
    return [("binds", binds), *([("slack", ", ".join(free))] if free else [])]


def _named(load: Load, plan: Plan) -> str:
    """The load, a cut with the layer that it comes after."""
    return (
        f"{load} (after layer {plan.stages[load.place].start - 1})"
        if load.what == "cut"
        else str(load)
    )


def _percent(share: float) -> str:
    return f"{share:.1%}" if share < 0.0995 else f"{share:.0%}"


def _flight(plan: Plan) -> str:
    """NOAM, and where it is not the formula's, what that would give."""
    text = f"NOAM {plan.noam}: microbatches in flight for each replica of the first stage"
    formula = noam(sum(stage.replicas for stage in plan.stages), plan.stages[0].replicas)
    if plan.noam == formula:
        return text
    without = plan.predicted.formula_period_s
    return (
        f"{text}; the formula's {formula} "
        f"{'deadlocks' if without is None else f'gives {format_seconds(without)} a microbatch'}"
    )


def _memory(plan: Plan, limit: int | None) -> str:
    peak = plan.peak_memory_bytes
    text = f"{format_bytes(peak)} on each device of {stages_text(plan.fullest_stages)}"
    if limit is None:
        return f"{text}; no limit is known"
    if peak > limit:
        return f"{text}: DOES NOT FIT {format_bytes(limit)}, over by {format_bytes(peak - limit)}"
    return f"{text}, {peak / limit:.0%} of {format_bytes(limit)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
