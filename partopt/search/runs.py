"""What training on many tokens takes and costs, on every size of a table."""

from __future__ import annotations

import math

from msgspec import UNSET, UnsetType, structs

from partopt.documents.tables import Run, Scaling, ScalingRow
from partopt.errors import ANSWER_IS_NO, PartoptError
from partopt.units import format_count


def price_runs(
    scaling: Scaling, tokens: float, days: float | None = None, budget: float | None = None
) -> Scaling:
    """The table with runs of so many `tokens`, and the size that is best for `days` or a `budget`.

    That is the one of those in time which takes fewest hours of devices; of those that are paid for
    the fastest; without either nothing is chosen. PartoptError where no size is in time and paid
    for, which says what is nearest, or no price is known.
    """
    rows = [structs.replace(row, run=_run_of(row, tokens)) for row in scaling.rows]
    if budget is not None and not all(row.run and row.run.cost for row in rows):
        what, hint = "`budget`: no price of a device is known", "add `price=2.1`"
        raise PartoptError(what, hint, code="missing-option", option="price")
    priced = structs.replace(scaling, rows=rows, tokens=tokens)
    able = _runs_within(priced, days, budget)
    if (days, budget) == (None, None):
        return priced
    if not able:
        raise _nearest(priced, days, budget)
    best, _ = min(able, key=lambda pair: pair[1].days if days is None else pair[1].device_hours)
    return structs.replace(priced, chosen=best)


def _nearest(scaling: Scaling, days: float | None, budget: float | None) -> PartoptError:
    """Why none of a table's runs takes so many `days` and no more money; what comes nearest."""
    runs, in_time = _runs_within(scaling), _runs_within(scaling, days)
    if not runs:
        what, hint = "no layout fits on any of these sizes", "give more servers"
        return PartoptError(what, hint, ANSWER_IS_NO, code="no-plan", option="servers")
    if not in_time:
        devices, run = min(runs, key=lambda pair: pair[1].days)
        option, what = "days", f"`days={days:g}`: no size is in time; the fastest"
        hint = f"allow `days={_round_up(run.days):g}`, or give more servers"
    else:
        devices, run = min(in_time, key=lambda pair: pair[1].cost or 0.0)
        option, what = "budget", f"`budget={_money(budget)}`: no size is paid for; the cheapest"
        what += " in time" * (len(in_time) < len(runs))
        hint = f"allow `budget={_money(_round_up(run.cost or 0.0))}`"
        if paid := _runs_within(scaling, None, budget):
            hint += f", or `days={_round_up(min(run.days for _, run in paid)):g}`"
    what += f", {devices:,} devices, takes {run.days:.4g} days"
    what += f" and costs {_money(run.cost)}" if run.cost else ""
    return PartoptError(what, hint, ANSWER_IS_NO, code="no-plan", option=option)


def _runs_within(
    scaling: Scaling, days: float | None = None, budget: float | None = None
) -> list[tuple[int, Run]]:
    """The devices and the run of rows that fit, where it takes no more than that."""
    runs = [(row.devices, row.run) for row in scaling.rows if row.fits and row.run]
    runs = [pair for pair in runs if days is None or pair[1].days <= days]
    return [pair for pair in runs if budget is None or (pair[1].cost or 0.0) <= budget]


def _round_up(value: float) -> float:
    """The next number of three digits."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return math.ceil(value / unit) * unit


def _money(amount: float | UnsetType | None) -> str:
    """`1.34M`, as it is typed."""
    return format_count(amount or 0.0).replace(" ", "").replace("G", "B")


def _run_of(row: ScalingRow, tokens: float) -> Run:
    assert row.figures and row.figures.tokens_per_s
    hours, price = tokens / row.figures.tokens_per_s / 3600, row.figures.price_per_hour
    cost = UNSET if price is None else price * hours
    return Run(days=hours / 24, device_hours=row.devices * hours, cost=cost)
