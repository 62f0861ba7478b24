"""A trainer's layout beside better plans: what it loses."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from partopt.documents.plan import Plan
from partopt.report.comparison import render_beside
from partopt.report.figures import speed_text
from partopt.report.table import label_lines

_SAME = 1e-3  # of the samples/s: what is nearer loses nothing


def render(plan: Plan, recut: Plan | None, best: Plan | None, trainer: str) -> str:
    """The table of the others, and what `plan` loses to each.

    `recut` has as many stages and replicas, `best` is the best that `trainer` runs.
    """
    others = [replace(recut, planner="other cuts")] if recut is not None else []
    if best is not None and best != recut:
        others.append(best)
    table = f"{render_beside(plan, others)}\n\n" if others else ""
    lost = "; ".join(_losses(plan, recut, best, trainer))
    nothing = f"nothing: no plan that {trainer} runs is faster"
    if not plan.fits and best is not None and best.fits:
        speed = speed_text(best.predicted.samples_per_s, best.profile.tokens_per_sample)
        nothing = f"all: it does not fit, and {speed} do"
    return table + label_lines([("loses", lost or nothing)])


def _losses(plan: Plan, recut: Plan | None, best: Plan | None, trainer: str) -> Iterator[str]:
    if recut is not None and loses_to(plan, recut):
        cuts = ",".join(str(stage.start) for stage in recut.stages[1:])
        yield f"{_loss(plan, recut):.1%} to the same stages cut at {cuts}"
    if best is not None and best != recut and loses_to(plan, best):
        yield f"{_loss(plan, best):.1%} to the best plan found that {trainer} runs"


def loses_to(plan: Plan, other: Plan) -> bool:
    """Whether the other plan is faster by more than a simulation can tell, and fits if need be."""
    return _loss(plan, other) > _SAME and (other.fits or not plan.fits)


def _loss(plan: Plan, other: Plan) -> float:
    return 1 - plan.predicted.samples_per_s / other.predicted.samples_per_s
