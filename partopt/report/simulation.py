"""What a simulation found, as a document and as people read it."""

from __future__ import annotations

from partopt import documents
from partopt.documents.plan import Plan
from partopt.report import advice, gantt
from partopt.report.changes import Planned, changes, compared, planned_of
from partopt.report.plan import head
from partopt.report.shares import level_table, share_table
from partopt.report.table import labelled
from partopt.schedules.order import B, I
from partopt.simulator.execution import Execution
from partopt.simulator.finding import Finding
from partopt.units import format_bytes, format_rate, format_seconds

_AGREES = 1e-3  # of the period: closer than that, the simulation confirms the plan


class RankTime(documents.Part, frozen=True, kw_only=True):
    """Where the time of a rank goes between `window_start_s` and `window_end_s`; `idle_s` is the
    sum of the last three.
    """

    rank: int
    stages: list[int]
    compute_s: float
    transfer_s: float
    allreduce_s: float
    idle_s: float
    waiting_for_activations_s: float
    waiting_for_gradients_s: float
    finished_s: float
    peak_in_flight: int
    peak_memory_bytes: int


class LevelTime(documents.Part, frozen=True, kw_only=True):
    """How busy the busiest port of a level is between `window_start_s` and `window_end_s`, and what
    was sent over the level.
    """

    level: str
    transfer_share: float
    allreduce_share: float
    sent_bytes: float


class SimulationDocument(documents.Part, frozen=True, kw_only=True):
    """A plan executed.

    The window is the iteration or, asynchronous, one cycle of the steady state.
    """

    schema: str = "partopt.simulation/1"
    model: str
    schedule: str
    microbatch_size: int
    microbatches: int
    makespan_s: float
    iteration_s: float | None
    period_s: float
    bubble: float
    longest_span_s: float
    samples_per_s: float
    settled: bool | None
    window_start_s: float
    window_end_s: float
    peak_memory_bytes: int
    fits: bool
    changed: list[str]
    planned: Planned
    levels: list[LevelTime]
    advice: list[Finding]
    ranks: list[RankTime]


def document(simulation: Execution, before: Plan, found: list[Finding]) -> SimulationDocument:
    """What `simulation` found of a plan that was `before`, and the advice `found` in it."""
    plan, peak = simulation.plan, int(simulation.peak_memory_bytes.max())
    limit = plan.topology.device.memory_bytes
    return SimulationDocument(
        model=plan.profile.name,
        schedule=plan.schedule,
        microbatch_size=plan.microbatch_size,
        microbatches=simulation.microbatches,
        makespan_s=simulation.makespan_s,
        iteration_s=None if simulation.steady else simulation.makespan_s,
        period_s=simulation.period_s,
        bubble=simulation.bubble,
        longest_span_s=simulation.longest_span_s,
        samples_per_s=plan.microbatch_size / simulation.period_s,
        settled=simulation.steady.settled if simulation.steady else None,
        window_start_s=simulation.start_s,
        window_end_s=simulation.end_s,
        peak_memory_bytes=peak,
        fits=limit is None or peak <= limit,
        changed=changes(before, plan),
        planned=planned_of(before),
        levels=[_level_time(*each) for each in _levels(simulation)],
        advice=found,
        ranks=[
            _rank_time(simulation, rank, stages)
            for rank, stages in sorted(plan.stages_by_rank().items())
        ],
    )


def _levels(simulation: Execution) -> list[tuple[str, float, float, float]]:
    return [
        (use.level, use.transfer_share, use.allreduce_share, use.bytes)
        for use in simulation.level_use
    ]


def _level_time(
    level: str, transfer_share: float, allreduce_share: float, sent_bytes: float
) -> LevelTime:
    return LevelTime(
        level=level,
        transfer_share=transfer_share,
        allreduce_share=allreduce_share,
        sent_bytes=sent_bytes,
    )


def _rank_time(simulation: Execution, rank: int, stages: list[int]) -> RankTime:
    shares = simulation.shares
    return RankTime(
        rank=rank,
        stages=stages,
        compute_s=float(shares.compute_s[rank]),
        transfer_s=float(shares.transfer_s[rank]),
        allreduce_s=float(shares.allreduce_s[rank]),
        idle_s=float(shares.idle_s[rank]),
        waiting_for_activations_s=float(shares.forward_s[rank]),
        waiting_for_gradients_s=float(shares.gradient_s[rank]),
        finished_s=float(shares.end_s[rank]),
        peak_in_flight=int(simulation.peak_in_flight[rank]),
        peak_memory_bytes=int(simulation.peak_memory_bytes[rank]),
    )


def render(
    simulation: Execution,
    before: Plan,
    found: list[Finding],
    width: int = 80,
    ascii_only: bool = False,
    colour: bool = False,
) -> str:
    """The timeline in `width` columns, and in 80 where the time goes, how busy the links are, what
    comes of it, and advice.
    """
    parts = [
        head(simulation.plan),
        _drawing(simulation, width, ascii_only, colour),
        share_table(simulation, ascii_only),
        level_table(simulation),
        *compared(before, simulation),
        labelled(_outcome(simulation, before)),
        advice.render(found),
    ]
    return "\n\n".join(parts)


def _drawing(simulation: Execution, width: int, ascii_only: bool, colour: bool) -> str:
    """The timeline, and how much of it that is."""
    window = drawn(simulation)
    text = gantt.render(simulation.timeline, width, ascii_only, colour, window)
    if window is None or window[1] >= simulation.makespan_s:
        return text
    drawn_s, all_s = format_seconds(window[1]), format_seconds(simulation.makespan_s)
    return f"{text}\nThe first {drawn_s} of {all_s}, in which the pipeline fills. BUSY is of these."


def drawn(simulation: Execution) -> tuple[float, float] | None:
    """The seconds to draw: the whole iteration; asynchronous, until the pipeline is full, and as
    long again or two cycles.
    """
    if simulation.steady is None:
        return None
    order, timeline = simulation.order, simulation.timeline
    first_back = (order.stage == 0) & ((order.kind == B) | (order.kind == I))
    full = float(timeline.start[first_back].min())
    return 0.0, min(
        simulation.makespan_s, full + max(full, 2 * (simulation.end_s - simulation.start_s))
    )


def _outcome(simulation: Execution, before: Plan) -> list[tuple[str, str]]:
    plan, period = simulation.plan, simulation.period_s
    rate = format_rate(plan.microbatch_size / period, "samples")
    devices = len(plan.stages_by_rank())
    span = (
        ""
        if simulation.steady
        else f"; the longest span of a rank is {format_seconds(simulation.longest_span_s)}"
    )
    return [
        (
            "ran",
            (
                f"{simulation.microbatches} microbatches in "
                f"{format_seconds(simulation.makespan_s)}{span}"
            ),
        ),
        (
            "period",
            (
                f"{format_seconds(period)} a "
                f"microbatch{_pace(simulation)}{_promised(simulation, before)}"
            ),
        ),
        (
            "speed",
            (
                f"{rate}; {'device' if devices == 1 else f'{devices} devices'} idle "
                f"{simulation.bubble:.1%} of the time"
            ),
        ),
        ("memory", _memory(simulation)),
    ]


def _pace(simulation: Execution) -> str:
    steady = simulation.steady
    if steady is None:
        return f": an iteration of {simulation.microbatches}"
    if not steady.settled:
        return ", the mean pace: NOT SETTLED"
    every = "" if steady.microbatches == 1 else f" {steady.microbatches}"
    return (
        f" in steady state, which repeats with every{every} "
        f"microbatch{'' if steady.microbatches == 1 else 'es'}"
    )


def _promised(simulation: Execution, before: Plan) -> str:
    """What the plan says, where nothing was changed and it says something else."""
    said = before.predicted.period_s
    if changes(before, simulation.plan) or abs(simulation.period_s - said) <= _AGREES * said:
        return ""
    return f"; the plan says {format_seconds(said)}"


def _memory(simulation: Execution) -> str:
    peaks, limit = simulation.peak_memory_bytes, simulation.plan.topology.device.memory_bytes
    peak = int(peaks.max())
    text = f"{format_bytes(peak)} at most, on rank {int(peaks.argmax())}"
    if limit is None:
        return f"{text}; no limit is known"
    if peak > limit:
        return f"{text}: DOES NOT FIT {format_bytes(limit)}, over by {format_bytes(peak - limit)}"
    return f"{text}, {peak / limit:.0%} of {format_bytes(limit)}"
