"""A plan as people read it: the model and the cluster, the stages, and what to expect of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from partopt.documents.engine import PARTOPT
from partopt.documents.plan import Plan, Predicted
from partopt.documents.proof import proof_of
from partopt.documents.stage import Load, Stage, stages_text
from partopt.printable import shorten
from partopt.report.basis import basis_lines
from partopt.report.figures import price_lines, speed_lines, speed_text
from partopt.report.head import head_of_plan
from partopt.report.memory import memory_lines
from partopt.report.ranks import format_ranks, ranks_text
from partopt.report.table import bar, label_lines, table
from partopt.report.topology import speedup_text
from partopt.report.width import stretch
from partopt.schedules.one_f_one_b import noam
from partopt.simulator.advice import held_back
from partopt.units import format_bytes, format_seconds

_LAYERS_WIDTH = 20  # on a page of 80, as the next
_RANKS_WIDTH = 14
_BUSY_WIDTH = 4
_AGREES = 1e-3  # of the period: closer than that, the simulation confirms the formula
_ALL = 0.995  # of the time: what is busy for so much of it is always busy
_OTHERS = 3  # loads beside the one that binds
_HEADINGS = ["#", "LAYERS", "RANKS", "COMPUTE", "SYNC", "FLIGHT", "MEMORY", "BUSY"]


def render(
    plan: Plan,
    ascii_only: bool = False,
    spell: Callable[[str], str] = str,
    by_size: Sequence[Plan] = (),
) -> str:
    """The plan as text, options that it names written as `spell` does.

    `by_size` are the best plans at the microbatch sizes that were tried.
    """
    rows = [_row(s, stage, plan, ascii_only) for s, stage in enumerate(plan.stages)]
    outcome = [(label, spell(text)) for label, text in _outcome(plan, ascii_only)]
    if len(by_size) > 1:
        outcome.append(("tried", "; ".join(map(_speed_of_size, by_size))))
    return "\n\n".join([str(head_of_plan(plan)), _stages(rows), label_lines(outcome)])


def _stages(rows: list[list[str]]) -> str:
    return table(_HEADINGS, rows, left=(1, 2, 7), verdicts=(2,), spare=(7, 5))


def _speed_of_size(plan: Plan) -> str:
    speed = speed_text(plan.predicted.samples_per_s, plan.profile.tokens_per_sample)
    fits = "" if plan.fits else ", does not fit"
    return f"microbatch {plan.microbatch_size}: {speed}{fits}"


def _row(s: int, stage: Stage, plan: Plan, ascii_only: bool) -> list[str]:
    # one all-reduce an iteration, or one for every round of r microbatches
    exchanged_by = 1 if plan.microbatches else stage.replicas
    busy = [_busy_s(each, plan) for each in plan.stages]
    whole = max(busy) if plan.microbatches else plan.predicted.period_s
    return [
        str(s),
        _layers(stage, stretch(_LAYERS_WIDTH, 0.6)),
        ranks_text(stage.ranks, stretch(_RANKS_WIDTH, 0.4, least=_RANKS_WIDTH)),
        format_seconds(stage.compute_s / stage.replicas),
        format_seconds(stage.gradients_s / exchanged_by) if stage.gradients_s else "-",
        str(stage.in_flight),
        format_bytes(stage.memory.total_bytes),
        bar(busy[s] / whole, _BUSY_WIDTH, ascii_only),
    ]


def _busy_s(stage: Stage, plan: Plan) -> float:
    """Seconds per microbatch that pace a stage.

    The longer of its compute and, where gradients are exchanged every round, their exchange.
    """
    return max(stage.compute_s, 0.0 if plan.microbatches else stage.gradients_s) / stage.replicas


def _layers(stage: Stage, width: int) -> str:
    """The layers of a stage, such as `3-8 h.1..6`.

    Numbers, the first name, and what differs in the last; where that is too wide, without the start
    that the names share.
    """
    numbers = f"{stage.start} "
    if len(stage.modules) > 1:
        numbers = f"{stage.start}-{stage.stop - 1} "
    forms = [numbers + name for name in _names(stage)]
    return next((form for form in forms if len(form) <= width), shorten(forms[-1], width))


def _names(stage: Stage) -> list[str]:
    """The first and the last layer together, the fullest form first."""
    first, last = stage.modules[0].split("."), stage.modules[-1].split(".")
    shorter = [".".join(first[skip:]) for skip in range(len(first))]
    if len(stage.modules) == 1:
        return shorter
    pairs = zip(first[:-1], last[:-1], strict=False)
    shared = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
    names = [f"{'.'.join(first[skip:])}..{'.'.join(last[shared:])}" for skip in range(shared + 1)]
    return names + [f"{name}.." for name in shorter]


def _outcome(plan: Plan, ascii_only: bool) -> Iterator[tuple[str, str]]:
    predicted = plan.predicted
    speed = speed_text(predicted.samples_per_s, plan.profile.tokens_per_sample)
    speedup = speedup_text(predicted.speedup_over_one_device, plan.topology)
    yield "speed", f"{speed}, {speedup}; devices idle {predicted.bubble:.1%}"
    yield from speed_lines(predicted)
    yield "period", f"{format_seconds(predicted.period_s)} a microbatch{_formula(predicted)}"
    if predicted.iteration_s is not None:
        iteration = format_seconds(predicted.iteration_s)
        yield "", f"{iteration} an iteration of {plan.microbatches} microbatches"
    yield from _loads(plan)
    yield from price_lines(predicted.figures, plan.topology.cluster.devices)
    if plan.microbatches is None:
        yield "flight", _flight(plan)
    yield from _trainer(plan)
    whole, *parts = memory_lines(plan, ascii_only)
    yield "memory", whole
    for line in parts:
        yield "", line
    if len(plan.stages) == 1 and plan.fits:
        yield "pipeline", _no_pipeline(plan)
    recomputed = [s for s, stage in enumerate(plan.stages) if stage.recompute]
    if 0 < len(recomputed) < len(plan.stages):
        yield "", f"activations recomputed in {shorten(stages_text(recomputed), 40)}"
    if plan.idle_ranks:
        ranks = shorten(format_ranks(plan.idle_ranks), 40)
        each = plan.topology.group_ranks
        idle, devices = len(plan.idle_ranks) * each, plan.topology.devices * each
        yield "idle", f"{idle} of {devices} devices: ranks {ranks}"
    proof, certificate = proof_of(plan), plan.certificate
    if proof is not None and certificate is not None:
        if plan.planner != "optimal":
            yield "objective", f"{format_seconds(certificate.objective_s)}, {certificate.status}"
        yield "proof", proof.line
    yield from basis_lines(plan.profile.estimated)


def _trainer(plan: Plan) -> Iterator[tuple[str, str]]:
    """For which trainer the plan is; where none was named and it never flushes, what that means."""
    if plan.trainer != PARTOPT:
        yield "trainer", plan.trainer
    elif plan.microbatches is None:
        stale = ", with stale weights" if any(s.weight_versions > 1 for s in plan.stages) else ""
        yield (
            "trainer",
            f"partopt; {plan.schedule} is asynchronous{stale}. For trainers that flush: "
            "`for=megatron`, `for=torchtitan`, `for=deepspeed`",
        )


def _no_pipeline(plan: Plan) -> str:
    """Why one stage is enough, and below which memory it would not be."""
    peak = format_bytes(plan.peak_memory_bytes)
    return (
        f"none is needed: each device holds the whole model, {peak}; with less "
        "than that a device, this plan would not fit"
    )


def _formula(predicted: Predicted) -> str:
    """The formula's period, where it is another than the simulator's."""
    estimate_s = predicted.estimate.period_s
    if abs(predicted.period_s - estimate_s) <= _AGREES * estimate_s:
        return ""
    return f" (formula {format_seconds(estimate_s)})"


def _loads(plan: Plan) -> list[tuple[str, str]]:
    """What binds the period, and how free everything else is.

    That is the share of the time for which a load is idle, and for memory the share that is unused;
    of the loads the tightest.
    """
    predicted, others = plan.predicted, []
    limit, peak = plan.memory_limit_bytes, plan.peak_memory_bytes
    binds, held = predicted.bound_by, held_back(plan)
    for load in predicted.estimate.loads:
        share = load.seconds / predicted.period_s
        if str(load) == binds:
            binds = _name(load, plan) + (
                f", busy {_percent(share)} of the time" if share < _ALL else ""
            )
        elif load.what == "all-reduce" and plan.microbatches:  # nothing goes on beside it
            binds += f"; {load} adds {_percent(share)}"
        else:
            others.append((max(0.0, 1 - share), _name(load, plan)))
    others = sorted(others, key=lambda other: other[0])[:_OTHERS]
    free = [f"{name} {_percent(share)}" for share, name in others]
    if limit is not None and peak <= limit:
        free.append(
            f"memory of {stages_text(plan.fullest_stages)} {_percent(1 - peak / limit)} "
            f"({format_bytes(limit - peak)})"
        )
    if held is not None:
        binds = f"memory: {held.text}"
    return [("binds", binds), *([("slack", ", ".join(free))] if free else [])]


def _name(load: Load, plan: Plan) -> str:
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
