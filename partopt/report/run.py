"""The page of a run: predicted beside measured, and whether it learned what one process learns."""

from __future__ import annotations

from collections.abc import Iterator

from partopt.documents.run import RankSeconds, Run
from partopt.report.basis import basis_lines
from partopt.report.figures import speed_text
from partopt.report.table import label_lines, table
from partopt.units import format_bytes, format_seconds

_ENGINES = {"torch": "torch's runtime", "partopt": "own engine"}
_KINDS = ("forward_s", "backward_s", "transfer_s", "allreduce_s", "idle_s")


def render(run: Run) -> str:
    """The page.

    Each rank has two lines, what was predicted and what was measured: the mean of a forward and of
    a backward, and for the whole iteration or cycle the seconds of waiting, by what for. Above them
    is the memory of the rank that held the most.
    """
    parts = [label_lines(_head(run)), _whole(run), _ranks(run), label_lines(_below(run))]
    return "\n\n".join(filter(None, parts))


def _head(run: Run) -> Iterator[tuple[str, str]]:
    plan = run.plan
    yield "model", f"{plan.model}, {plan.schedule}, {plan.shape} on {plan.topology}"
    many = "a step" if run.steps == 1 else f"{run.steps} steps"
    engine = _ENGINES.get(run.engine, run.engine)
    yield (
        "run",
        f"{many} of {plan.microbatches} microbatches of {plan.microbatch_size}, "
        f"{len(run.ranks)} ranks, {engine}, {run.backend} on {run.device}",
    )
    first, last = run.losses[0], run.losses[-1]
    yield "loss", f"{first:.6g}" if run.steps == 1 else f"{first:.6g}, at last {last:.6g}"
    check = run.check
    if check is not None:
        found = "equal to one process" if check.equal else "NOT equal to one process"
        yield (
            "check",
            f"{found}: losses to {check.loss_error:.1g}, {check.compared} of {check.parameters} "
            f"parameters to {check.largest_error:.1g}"
            + ("" if check.equal else f" ({check.worst})"),
        )


def _whole(run: Run) -> str:
    what = "microbatch" if run.plan.schedule.startswith("pipedream") else "iteration"
    rows = [
        [what, *_compared(run.predicted_s, run.measured_s)],
        ["with the run's own times", *_compared(run.own_times_s, run.measured_s)],
        *_peak(run),
    ]
    speed = speed_text(run.samples_per_s, run.plan.tokens_per_sample)
    return table(["", "PREDICTED", "MEASURED", "ERROR"], rows) + f"\n{speed}"


def _peak(run: Run) -> Iterator[list[str]]:
    """The row of the rank that held the most."""
    for rank in sorted(run.ranks, key=lambda rank: -(rank.measured.peak_memory_bytes or 0))[:1]:
        predicted, measured = rank.predicted.peak_memory_bytes, rank.measured.peak_memory_bytes
        if predicted is not None and measured is not None:
            sizes = [format_bytes(predicted), format_bytes(measured)]
            yield [f"peak memory, rank {rank.rank}", *sizes, error(predicted, measured)]


def _compared(predicted: float, measured: float) -> list[str]:
    return [format_seconds(predicted), format_seconds(measured), error(predicted, measured)]


def error(predicted: float, measured: float) -> str:
    """How far the prediction is from what was measured, of the latter."""
    return f"{predicted / measured - 1:+.1%}" if measured > 0 else "-"


def _ranks(run: Run) -> str:
    headings = ["RANK", "STAGES", "", "FORWARD", "BACKWARD", "TRANSFER", "ALL-REDUCE", "IDLE"]
    rows = []
    for rank in run.ranks:
        name = [str(rank.rank), ",".join(map(str, rank.stages))]
        rows.append([*name, "predicted", *_cells(rank.predicted)])
        rows.append(["", "", "measured", *_cells(rank.measured)])
    return table(headings, rows, left=(1, 2), gap=1, spare=(1,))


def _cells(seconds: RankSeconds) -> list[str]:
    return [format_seconds(getattr(seconds, kind)) for kind in _KINDS]


def _below(run: Run) -> Iterator[tuple[str, str]]:
    for note in run.remarks:
        yield "note", note
    yield from basis_lines(run.plan.estimated)
