"""How a model scales: its best plan on ever more devices, or on a range of servers."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType, structs

from partopt.cost.problem import Progress, ignore_progress
from partopt.documents.plan import Plan
from partopt.documents.tables import Scaling, ScalingRow
from partopt.documents.transformer import Transformer
from partopt.errors import ANSWER_IS_NO, PartoptError, found_until_then
from partopt.job import Job
from partopt.options import AUTO, MANUAL
from partopt.schedules import schedule
from partopt.search import contest
from partopt.search.sizes import Sizes, find_frontier, find_servers
from partopt.search.solve import solve
from partopt.search.variants import part_of
from partopt.transformer.as_profile import estimate_again

_SLOWER = 0.01  # of the speed: fewer devices that are faster by more are named


def scale(
    job: Job,
    devices: Sequence[int],
    weak: bool = False,
    progress: Progress = ignore_progress,
) -> Scaling:
    """How `job` scales: its best plan on every number of `devices`, as `scale_plans` finds it.

    Interrupted carries the rows until then.
    """
    with found_until_then(lambda plans: plans and scaling_of(plans)):
        return scaling_of(scale_plans(job, devices, weak, progress))


def scale_plans(
    job: Job,
    devices: Sequence[int],
    weak: bool = False,
    progress: Progress = ignore_progress,
) -> list[Plan]:
    """The best plan of `job` on every number of `devices`, as `solve` finds it.

    Strong scaling keeps the batch of an iteration; `weak`: it grows with the devices, from the
    first number on. Raises PartoptError, before anything is planned, for numbers that the topology
    cannot be cut down or grown to, and for options that go with one number of devices; Interrupted
    with the plans that are finished.
    """
    _check(job, devices, weak)
    jobs = [_on(job, count, devices[0], weak) for count in devices]
    plans: list[Plan] = []
    with found_until_then(lambda _: plans or None):
        for count, scaled in zip(devices, jobs, strict=True):
            tell = part_of(progress, f"{count} devices", len(devices))
            try:
                plans.append(solve(scaled, tell, levers=False).plan)
            except PartoptError as error:
                if isinstance(job.model, Transformer):
                    raise error.at(f"{count} devices") from None
                raise
    return plans


def _on(job: Job, count: int, first: int, weak: bool) -> Job:
    """The job on `count` devices."""
    batch = {name: getattr(job, name) for name in _batch(job)} if weak else {}
    grown = {name: _grow(name, size, count, first) for name, size in batch.items()}
    return job.with_(topology=job.topology.resize(count), **grown)


def _batch(job: Job) -> list[str]:
    """The options that say how large an iteration is, of those that are given."""
    return [n for n in ("microbatches", "global_batch") if getattr(job, n) is not None]


def _grow(name: str, batch: int, count: int, first: int) -> int:
    """The `batch` of the option `name`, for the `first` number of devices, grown to `count`.

    PartoptError where that is no whole number.
    """
    if batch * count % first:
        nearest = -(-batch // first) * first
        raise PartoptError(
            f"`{name}={batch}`: grows to no whole number from {first} to {count} devices",
            f"choose a multiple of {first}: `{name}={nearest}`",
            code="not-a-multiple",
            option=name,
        )
    return batch * count // first


def _check(job: Job, devices: Sequence[int], weak: bool) -> None:
    numbers = all(isinstance(count, int) and count > 0 for count in devices)
    if not numbers or not devices or list(devices) != sorted(set(devices)):
        raise PartoptError(
            f"`scaling={','.join(map(str, devices))}`: must be ascending numbers of devices",
            "for example `scaling=8,16,32`",
            code="invalid-option",
            option="devices",
        )
    for name in ("cuts", "replicas"):
        if getattr(job, name) is not None:
            raise _for_one_number(f"`{name}`", f"drop `{name}`, or `scaling`", name)
    if job.planner == MANUAL:
        hint = "choose another planner, or drop `scaling`"
        raise _for_one_number("`planner=manual`", hint, "planner")
    if weak and job.schedule != AUTO and schedule(job.schedule).asynchronous:
        raise PartoptError(
            f"`weak`: {job.schedule} is asynchronous and has no batch to grow",
            "drop `weak`, or choose `schedule=1f1b`",
            code="conflicting-options",
            option="weak",
        )
    if job.planner is not None:
        contest.check_planner(job.planner, job.problem)


def _for_one_number(what: str, hint: str, option: str) -> PartoptError:
    return PartoptError(
        f"{what}: a split of your own is for one number of devices",
        hint,
        code="conflicting-options",
        option=option,
    )


def scaling_of(plans: Sequence[Plan]) -> Scaling:
    """The table of `plans` of one model on several numbers of devices, in their order.

    Of a transformer, which one device may not hold, gains are over the first; and a row has the
    part that its plan loses most by.
    """
    rows = [_scaling_row(plan, plans[0]) for plan in plans]
    rows = [structs.replace(row, faster_on=_faster_on(row, rows)) for row in rows]
    return Scaling(estimated=plans[0].profile.estimated, rows=rows)


def _faster_on(row: ScalingRow, rows: Sequence[ScalingRow]) -> int | UnsetType:
    """The fewer devices that are faster with the same batch, as where the batch divides by them."""
    batch = row.microbatch_size * (row.microbatches or 1)
    fewer = [
        other
        for other in rows
        if other.devices < row.devices
        and other.fits
        and other.microbatch_size * (other.microbatches or 1) == batch
        and (not row.fits or other.samples_per_s > (1 + _SLOWER) * row.samples_per_s)
    ]
    fastest = max(fewer, key=lambda other: other.samples_per_s, default=None)
    return fastest.devices if fastest else UNSET


def _scaling_row(plan: Plan, first: Plan) -> ScalingRow:
    devices, predicted, of_layout = plan.topology.devices, plan.predicted, plan.transformer
    gain = predicted.speedup_over_one_device
    part, share = _largest_loss(plan) if of_layout else (UNSET, UNSET)
    if of_layout:
        devices = plan.topology.cluster.devices
        gain = first.topology.cluster.devices * predicted.samples_per_s
        gain /= first.predicted.samples_per_s
    return ScalingRow(
        devices=plan.topology.cluster.devices,
        planner=plan.trainer if of_layout else plan.planner,
        shape=plan.shape,
        layout=plan.layout if of_layout else UNSET,
        microbatch_size=plan.microbatch_size,
        microbatches=plan.microbatches,
        period_s=predicted.period_s,
        samples_per_s=predicted.samples_per_s,
        figures=predicted.figures,
        speedup_over_one_device=gain,
        efficiency=gain / devices,
        bound_by=predicted.bound_by,
        part=part,
        part_share=share,
        fits=plan.fits,
    )


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
        return scaling_of(known) if known else None

    def simulate(servers: set[int]) -> list[Plan]:
        devices = [sizes.inside * n for n in sorted(servers)]
        return scale_plans(job, devices, progress=progress) if devices else []

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
