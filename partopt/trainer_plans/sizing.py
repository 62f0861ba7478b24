"""A model on clusters of several sizes: how it scales, and the least on which it fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from msgspec import UNSET, UnsetType, structs

from partopt.cost.problem import Progress, ignore_progress
from partopt.documents.engine import Layout
from partopt.documents.plan import Plan
from partopt.documents.tables import Run, Scaling, ScalingRow
from partopt.documents.transformer import Fewer, Transformer, Worth
from partopt.errors import ANSWER_IS_NO, PartoptError, found_until_then
from partopt.job import Job
from partopt.options import PARTS
from partopt.search import fitting
from partopt.search.fitting import Fitting
from partopt.search.scaling import scale_plans
from partopt.search.side_by_side import scaling_of
from partopt.search.solve import solve_profile
from partopt.trainer_plans.levers import Switches
from partopt.trainer_plans.transformers import (
    estimate_layouts,
    question_of,
    search_layouts,
    training_for,
    without_graphs,
)
from partopt.transformer.as_profile import estimate_again
from partopt.transformer.block import Training
from partopt.transformer.iteration import Estimate
from partopt.transformer.layouts import Found, any_fits, find_fastest
from partopt.units import format_count

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

    All sizes are estimated in closed form. Rows are of the fewest on which it fits, powers of two,
    `most`, and those that no other size beats in time and money: what is best for some deadline or
    budget is one of these. PartoptError where it fits on none of them.
    """
    first = find_servers(job, least)
    if first is None or first > most:
        what = f"no layout of {job.trainer} fits on {least} to {most} servers"
        hint = "give more memory" if first is None else f"one does on {first}"
        raise PartoptError(what, hint, ANSWER_IS_NO, code="no-plan")
    sizes, plans = Sizes(job), list[Plan]()
    doubled = {1 << k for k in range(first.bit_length(), most.bit_length())}
    usual = {n for n in {first, most} | doubled if sizes.fits(sizes.inside * n)}

    def table(more: Sequence[Plan] | None) -> Scaling | None:
        known = sorted([*plans, *(more or ())], key=lambda plan: plan.topology.cluster.devices)
        return _table(known) if known else None

    def simulate(servers: set[int]) -> list[Plan]:
        devices = [sizes.inside * n for n in sorted(servers)]
        return scale_plans(job, devices, False, progress, _best_plan) if devices else []

    with found_until_then(table):
        plans += simulate(usual)
        plans += simulate({*find_frontier(sizes, range(first, most + 1), progress)} - usual)
    found = table(None)
    assert found

    def is_beaten(row: ScalingRow) -> bool:
        """By a row that is faster for no more money."""
        faster = [o for o in found.rows if o.fits and o.samples_per_s > row.samples_per_s]
        return any(other.efficiency >= row.efficiency for other in faster)

    rows = [row for row in found.rows if row.devices // sizes.inside in usual or not is_beaten(row)]
    return structs.replace(found, looked_at=most + 1 - first, rows=rows)


def find_frontier(
    sizes: Sizes, servers: Sequence[int], progress: Progress = ignore_progress
) -> list[int]:
    """The numbers of `servers`, ascending, that no other beats in both time and money.

    Larger ones come first. One that costs no less than a larger one is slower, too, and is left as
    soon as its layouts are seen to be.
    """
    cost, seconds = math.inf, dict[int, float]()
    for done, size in enumerate(reversed(servers)):
        progress("estimating sizes", done, len(servers))
        devices = sizes.inside * size
        if found := sizes.find_fastest(devices, cost / devices):
            cost, seconds[size] = devices * found.seconds, found.seconds
    return [n for n in sorted(seconds) if all(seconds[n] < seconds[o] for o in seconds if o < n)]


class Sizes:
    """A transformer's job on several numbers of devices, in closed form.

    Blocks are computed once. `inside` are the devices of a member of the outermost level.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._trainings = dict[int, Training]()  # the last of every way
        self.inside = job.topology.cluster.devices // job.topology.cluster.levels[-1].size

    def fits(self, devices: int) -> bool:
        """Whether a layout on so many devices fits, with graphs or without."""
        asked = question_of(self._job)._replace(devices=devices)
        return any(any_fits(one, asked) for one in self._ways(devices))

    def find_fastest(self, devices: int, beat_s: float = math.inf) -> Estimate | None:
        """The fastest layout on so many devices that fits, if it takes less than `beat_s`."""
        asked = question_of(self._job)._replace(devices=devices)
        for training in self._ways(devices):
            if any_fits(training, asked):
                found = find_fastest([training], asked, beat_s)
                return found[0] if found else None
        return None

    def _ways(self, devices: int) -> Iterator[Training]:
        """How so many devices are trained; and without the graphs that a plan has by itself."""
        job = self._job.with_(topology=self._job.topology.resize(devices))
        for place, way in enumerate(filter(None, (job, without_graphs(job)))):
            training = training_for(way)
            if place in self._trainings:
                training.share_blocks(self._trainings[place])
            self._trainings[place] = training
            yield training


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


def find_fewer(job: Job, found: Found) -> Fewer | UnsetType:
    """Fewer of a cluster's devices, where as many are faster than all.

    Tried are, for every power of two, the most devices, or servers, that are a multiple of it: what
    batches and blocks divide by. All of these are more than half, and there are none below a power
    of two. A layout on as many is estimated only if its blocks alone are faster than the best until
    then, in the closed form of which all else is more.
    """
    sizes, whole = Sizes(job), job.topology.cluster.devices
    fewer: Fewer | UnsetType = UNSET
    if not found.fitting:
        return fewer
    best_s, servers = found.fitting[0].seconds, whole // sizes.inside
    beat_s = (1 - _FASTER) * best_s
    tried = {sizes.inside * size for size in _round_down(servers)} | {*_round_down(whole)}
    for devices in sorted(tried - {whole}, reverse=True):
        with suppress(PartoptError):  # they fill no servers evenly, or the layout is for all
            if other := sizes.find_fastest(devices, beat_s):
                beat_s = other.seconds
                fewer = Fewer(
                    devices=devices,
                    iteration_s=beat_s,
                    saved=1 - beat_s / best_s,
                    layout=other.layout,
                )
    return fewer


def _round_down(n: int) -> Iterator[int]:
    """The largest multiple of every power of two up to n, n itself among them."""
    return (n >> k << k for k in range(n.bit_length()))


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
    sizes = Sizes(job)
    low, high, highest = least - 1, least, MOST // sizes.inside
    while high <= highest and not sizes.fits(sizes.inside * high):
        low, high = high, max(high + 1, min(2 * high, highest))
    if high > highest:
        return None
    # not bisected: a number of devices that is no multiple of much has few layouts
    return next(n for n in range(low + 1, high + 1) if sizes.fits(sizes.inside * n))


def find_fitting(job: Job, ask: Callable[[Job], Plan] | None = None) -> Fitting | None:
    """The options with which the best plan of `job` fits, where it has none that does.

    As `partopt.search.fitting` finds them. Of a transformer that is the least number of `servers`,
    with the `layout` as it is or open, by bytes alone; or `facts`, where a switch of the trainer
    that changes no numbers is faster than these.
    """
    if not isinstance(job.model, Transformer):
        return fitting.find_fitting(job, ask) if ask else fitting.find_fitting(job)
    size = job.topology.cluster.levels[-1].size
    servers, more, free = find_servers(job, size + 1), dict[str, Any](), None
    if job.layout != Layout():
        free = find_servers(job.with_(layout=Layout()), size)
    if free is not None and (servers is None or free < servers):
        servers, more = free, {"layout": Layout(), **dict.fromkeys(PARTS)}
    switch = _fastest_switch(job)
    if servers is not None:
        devices = job.topology.cluster.devices // size * servers
        larger = Sizes(job.with_(layout=Layout()) if more else job).find_fastest(devices)
        if switch is None or (larger and larger.seconds < switch.iteration_s):
            return Fitting(more | ({"servers": servers} if servers != size else {}), None)
    return Fitting({"facts": {**job.facts, **switch.facts}}, None) if switch else None


def _fastest_switch(job: Job) -> Worth | None:
    """Of those of the trainer with which a layout fits, and that change no numbers."""
    rows = Switches(job, estimate_layouts(job)).alone()
    able = (row for row in rows if not row.changes_numbers)
    return min(able, key=lambda row: row.iteration_s, default=None)
