"""A model on clusters of several sizes: how it scales, and the least on which it fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from msgspec import UNSET, UnsetType, structs

from partopt.cost.problem import Progress, ignore_progress
from partopt.documents.engine import Layout
from partopt.documents.plan import Plan
from partopt.documents.tables import Run, Scaling, ScalingRow
from partopt.documents.transformer import Fewer, Transformer
from partopt.errors import ANSWER_IS_NO, PartoptError, found_until_then
from partopt.job import Job
from partopt.options import PARTS
from partopt.search import fitting
from partopt.search.fitting import Fitting
from partopt.search.scaling import scale_plans
from partopt.search.side_by_side import scaling_of
from partopt.search.solve import solve_profile
from partopt.trainer_plans.transformers import (
    batch_of,
    estimate_layouts,
    fixed_parts,
    search_layouts,
    training_for,
)
from partopt.trainers import TRAINERS
from partopt.transformer.as_profile import estimate_again
from partopt.transformer.layouts import Found, any_fits

MOST = 16_384  # devices of the clusters that are tried
_FASTER = 0.01  # of the time: for less no device is left idle


def scale(
    job: Job,
    devices: Sequence[int],
    weak: bool = False,
    progress: Progress = ignore_progress,
) -> Scaling:
    """How `job` scales: its best plan on every number of `devices`, a transformer's by its trainer.

    Errors as `scale_plans`. Interrupted carries the rows until then.
    """
    with found_until_then(lambda plans: plans and _table(plans)):
        return _table(scale_plans(job, devices, weak, progress, _best_plan))


def _table(plans: Sequence[Plan]) -> Scaling:
    """A row a plan, a transformer's with the part that it loses most by."""
    found, rows = scaling_of(plans), list[ScalingRow]()
    for row, plan in zip(found.rows, plans, strict=True):
        part, share = _largest_loss(plan) if plan.transformer else (UNSET, UNSET)
        rows.append(structs.replace(row, part=part, part_share=share))
    return structs.replace(found, rows=rows)


def _largest_loss(plan: Plan) -> tuple[str, float]:
    """The part that takes most of a transformer's iteration beside products and attention."""
    parts = dict(estimate_again(plan).parts)
    whole_s = sum(parts.values())
    lost = {name: parts[name] for name in parts.keys() - {"products", "attention", "experts"}}
    name = max(lost, key=lambda name: lost[name])
    return name, lost[name] / whole_s


def scale_servers(job: Job, least: int, most: int, progress: Progress = ignore_progress) -> Scaling:
    """How a transformer's `job` scales on `least` to `most` servers, its outermost level.

    Sizes are the fewest on which it fits, powers of two, and `most`. PartoptError where it
    fits on none of them.
    """
    first = find_servers(job, least)
    if first is None or first > most:
        what = f"no layout of {job.trainer} fits on {least} to {most} servers"
        hint = "give more memory" if first is None else f"one does on {first}"
        raise PartoptError(what, hint, ANSWER_IS_NO, code="no-plan")
    inside = job.topology.cluster.devices // job.topology.cluster.levels[-1].size
    doubled = [1 << k for k in range(most.bit_length())]
    sizes = sorted({first, most, *(size for size in doubled if first < size < most)})
    sizes = [size for size in sizes if _fits(job, inside * size)]
    return scale(job, [inside * size for size in sizes], progress=progress)


def price_runs(
    scaling: Scaling, tokens: float, days: float | None = None, budget: float | None = None
) -> Scaling:
    """The table with runs of so many `tokens`, and the size that is best for `days` or a `budget`.

    That is the one of those in time which takes fewest hours of devices; of those that are paid for
    the fastest; without either nothing is chosen. PartoptError where no size is in time or paid
    for, or no price is known.
    """
    rows = [structs.replace(row, run=_run_of(row, tokens)) for row in scaling.rows]
    able = [row for row in rows if row.fits and row.run]
    if budget is not None and not all(row.run and row.run.cost for row in able):
        what, hint = "`budget`: no price of a device is known", "add `price=2.1`"
        raise PartoptError(what, hint, code="missing-option", option="price")
    if days is not None:
        able = [row for row in able if row.run and row.run.days <= days]
    if budget is not None:
        able = [row for row in able if row.run and (row.run.cost or math.inf) <= budget]
    if not able:
        raise PartoptError(
            "no number of devices is in time and paid for",
            "give more days, a larger budget or more servers",
            ANSWER_IS_NO,
            code="no-plan",
        )

    def order(row: ScalingRow) -> float:
        assert row.run
        return row.run.device_hours if days is not None else row.run.days

    chosen = min(able, key=order).devices if (days, budget) != (None, None) else UNSET
    return structs.replace(scaling, rows=rows, tokens=tokens, chosen=chosen)


def _run_of(row: ScalingRow, tokens: float) -> Run:
    assert row.figures and row.figures.tokens_per_s
    hours, price = tokens / row.figures.tokens_per_s / 3600, row.figures.price_per_hour
    cost = UNSET if price is None else price * hours
    return Run(days=hours / 24, device_hours=row.devices * hours, cost=cost)


def find_fewer(job: Job, found: Found) -> Fewer | UnsetType:
    """The next power of two of a cluster's devices, where as many are faster than all."""
    whole, best = job.topology.cluster.devices, found.fitting[0] if found.fitting else None
    if whole & (whole - 1) == 0 or best is None:
        return UNSET
    devices = 1 << (whole.bit_length() - 1)
    with suppress(PartoptError):  # they fill no servers evenly, or the layout is for all
        fewer = estimate_layouts(job.with_(topology=job.topology.resize(devices))).fitting
        if fewer and fewer[0].seconds < (1 - _FASTER) * best.seconds:
            return Fewer(
                devices=devices,
                iteration_s=fewer[0].seconds,
                saved=1 - fewer[0].seconds / best.seconds,
                layout=fewer[0].layout,
            )
    return UNSET


def _best_plan(job: Job, progress: Progress) -> Plan:
    if not isinstance(job.model, Transformer):
        return solve_profile(job, progress).plan
    try:
        return search_layouts(job, progress)[0].plan
    except PartoptError as error:
        raise error.at(f"{job.topology.cluster.devices} devices") from None


def find_servers(job: Job, least: int = 1) -> int | None:
    """The least size of the outermost level, from `least` on, on which a transformer's layout fits.

    By bytes alone, in closed form. None where no layout fits on up to `MOST` devices, or on a size
    that is `least` doubled again and again.
    """
    cluster = job.topology.cluster
    inside = cluster.devices // cluster.levels[-1].size
    low, high, highest = least - 1, least, MOST // inside
    while high <= highest and not _fits(job, inside * high):
        low, high = high, max(high + 1, min(2 * high, highest))
    if high > highest:
        return None
    # not bisected: a number of devices that is no multiple of much has few layouts
    return next(size for size in range(low + 1, high + 1) if _fits(job, inside * size))


def find_fitting(job: Job, ask: Callable[[Job], Plan] | None = None) -> Fitting | None:
    """The options with which the best plan of `job` fits, where it has none that does.

    As `partopt.search.fitting` finds them. Of a transformer that is the least number of `servers`,
    with the `layout` as it is or open, by bytes alone.
    """
    if not isinstance(job.model, Transformer):
        return fitting.find_fitting(job, ask) if ask else fitting.find_fitting(job)
    size = job.topology.cluster.levels[-1].size
    servers, more, free = find_servers(job, size + 1), dict[str, Any](), None
    if job.layout != Layout():
        free = find_servers(job.with_(layout=Layout()), size)
    if free is not None and (servers is None or free < servers):
        servers, more = free, {"layout": Layout(), **dict.fromkeys(PARTS)}
    if servers is None:
        return None
    return Fitting(more | ({"servers": servers} if servers != size else {}), None)


def _fits(job: Job, devices: int) -> bool:
    """Whether a layout on so many devices fits, with graphs or without."""
    resized = job.with_(topology=job.topology.resize(devices))
    limit, fixed = resized.limit_bytes or math.inf, fixed_parts(resized)
    ways = [resized, resized.with_(facts={"graphs": "none", **resized.facts})]
    return any(
        any_fits(training_for(way), devices, batch_of(job), limit, fixed)
        for way in (ways if "graphs" in TRAINERS.lookup(job.trainer).choices else ways[:1])
    )
