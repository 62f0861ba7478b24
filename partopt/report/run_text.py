"""The page of a run: predicted beside measured, and whether it learned what one process learns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from partopt.documents.training_run import Run
from partopt.report.phrases import Lines, basis_lines, speed_text
from partopt.report.text import Column, label_lines, table_of
from partopt.units import format_bytes, format_seconds

_ENGINES = {"torch": "torch's runtime", "partopt": "own engine"}
_KINDS = {
    "FORWARD": "forward_s",
    "BACKWARD": "backward_s",
    "TRANSFER": "transfer_s",
    "ALL-REDUCE": "allreduce_s",
    "IDLE": "idle_s",
}


def render(run: Run) -> str:
    """The page.

    Every rank has two lines, what was predicted and what was measured: the mean of a forward and of
    a backward, and for the whole iteration or cycle the seconds of waiting, by what for. Above them
    is the memory of the rank that held the most.
    """
    below = [("note", note) for note in run.remarks] + basis_lines(run.plan.estimated)
    parts = [label_lines(_head(run)), _whole(run), _ranks(run), label_lines(below)]
    return "\n\n".join(filter(None, parts))


def _head(run: Run) -> Lines:
    plan, check = run.plan, run.check
    steps = "a step" if run.steps == 1 else f"{run.steps} steps"
    engine = _ENGINES.get(run.engine, run.engine)
    batch = f"{plan.microbatches} microbatches of {plan.microbatch_size}"
    ranks = f"{len(run.ranks)} ranks, {engine}, {run.backend} on {run.device}"
    first, last = run.losses[0], run.losses[-1]
    lines = [
        ("model", f"{plan.model}, {plan.schedule}, {plan.shape} on {plan.topology}"),
        ("run", f"{steps} of {batch}, {ranks}"),
        ("loss", f"{first:.6g}" if run.steps == 1 else f"{first:.6g}, at last {last:.6g}"),
    ]
    if check is not None:
        found = "equal to one process" if check.equal else "NOT equal to one process"
        compared = f"{check.compared} of {check.parameters} parameters to {check.largest_error:.1g}"
        worst = "" if check.equal else f" ({check.worst})"
        lines.append(("check", f"{found}: losses to {check.loss_error:.1g}, {compared}{worst}"))
    return lines


def _whole(run: Run) -> str:
    """The period and the peak of the rank that held the most, predicted and measured."""
    what: str = run.plan.measured_per or "period"
    rows: list[tuple[str, Callable[[float], str], float | None, float | None]] = [
        (what, format_seconds, run.predicted_s, run.measured_s),
        ("with the run's own times", format_seconds, run.own_times_s, run.measured_s),
    ]
    fullest = max(run.ranks, key=lambda rank: rank.measured.peak_memory_bytes or 0)
    peaks = fullest.predicted.peak_memory_bytes, fullest.measured.peak_memory_bytes
    if None not in peaks:
        rows.append((f"peak memory, rank {fullest.rank}", format_bytes, *peaks))
    # what no plan predicts: context, libraries, communicators, fragments
    for what, size in (
        ("its allocator has", fullest.measured.reserved_bytes),
        ("its GPU has in use", fullest.measured.device_bytes),
    ):
        if size is not None:
            rows.append((what, format_bytes, None, size))
    table = table_of(
        rows,
        [
            Column("", lambda row: row[0], "text"),
            Column("PREDICTED", lambda row: "-" if row[2] is None else row[1](row[2])),
            Column("MEASURED", lambda row: row[1](row[3])),
            Column("ERROR", lambda row: "-" if row[2] is None else error(row[2], row[3])),
        ],
    )
    return f"{table}\n{speed_text(run.samples_per_s, run.plan.tokens_per_sample)}"


def error(predicted: float, measured: float) -> str:
    """How far the prediction is from what was measured, of the latter."""
    return f"{predicted / measured - 1:+.1%}" if measured > 0 else "-"


def _ranks(run: Run) -> str:
    def halves() -> Iterator[tuple[str, str, str, Any]]:
        for rank in run.ranks:
            stages = ",".join(map(str, rank.stages))
            yield str(rank.rank), stages, "predicted", rank.predicted
            yield "", "", "measured", rank.measured

    def seconds(kind: str) -> Callable[[Any], str]:
        return lambda row: format_seconds(getattr(row[3], kind))

    return table_of(
        halves(),
        [
            Column("RANK", lambda row: row[0]),
            Column("STAGES", lambda row: row[1], "text", spare=1),
            Column("", lambda row: row[2], "text"),
            *(Column(heading, seconds(kind)) for heading, kind in _KINDS.items()),
        ],
        gap=1,
    )
