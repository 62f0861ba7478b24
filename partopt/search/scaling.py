"""How a model scales: its best plan on ever more devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from partopt.cost.problem import Progress, ignore_progress
from partopt.documents.plan import Plan
from partopt.errors import PartoptError, found_until_then
from partopt.job import Job
from partopt.options import AUTO, MANUAL
from partopt.schedules import schedule
from partopt.search import contest
from partopt.search.solve import solve_profile
from partopt.search.variants import part_of


def _solve(job: Job, progress: Progress) -> Plan:
    return solve_profile(job, progress).plan


def scale_plans(
    job: Job,
    devices: Sequence[int],
    weak: bool = False,
    progress: Progress = ignore_progress,
    find: Callable[[Job, Progress], Plan] = _solve,
) -> list[Plan]:
    """The best plan of `job` on every number of `devices`, which `find` gives.

    By default that is of its planner or the best of all, at its best microbatch size, unless the
    job says which.

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
            plans.append(find(scaled, tell))
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
