"""A plan that does not fit its devices: options with which one does."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import get_args

from partopt.cost.memory import STATE_BYTES
from partopt.documents.engine import PARTOPT, Recompute
from partopt.documents.plan import Optimizer, Plan
from partopt.documents.stage import Shard
from partopt.errors import PartoptError
from partopt.job import Job
from partopt.planners import PLANNERS
from partopt.search import contest


@dataclass(frozen=True)
class Fitting:
    """Options of the job that make a plan fit, and the speed of that plan."""

    options: dict[str, str | int]
    samples_per_s: float


def find_fitting(job: Job, plan: Plan) -> Fitting | None:
    """The changes to `job` under which the fastest plan fits, where `plan` of it does not.

    As few kinds of change as will do: microbatch size and recomputation, then the planner, then
    what replicas share, then the optimizer. None where nothing that was tried fits.
    """
    others = _other_planners(job, plan)
    ways: list[Mapping[str, str]] = [{}]
    ways += [{"shard": name} for name in _shards(job)]
    ways += [{"optimizer": name} for name in _optimizers(job)]
    for way in ways:
        for names in ([plan.planner], others):
            found = list(_fitting(names, plan, way, job))
            if found:
                return max(found, key=lambda each: each.samples_per_s)  # ties keep the first
    return None


def list_tried(job: Job, plan: Plan) -> list[str]:
    """The changes that `find_fitting` tries, in words: nothing that the job says itself."""
    ways = {
        "other measured microbatch sizes": len(_sizes(job, plan)) > 1,
        "`recompute=always`": job.recompute != "always",
        "other planners": bool(_other_planners(job, plan)),
    }
    most = [f"`shard={name}`" for name in _shards(job)[-1:]]
    most += [f"`optimizer={name}`" for name in _optimizers(job)[-1:]]
    return [*(way for way, tried in ways.items() if tried), *most]


def _other_planners(job: Job, plan: Plan) -> list[str]:
    names = [] if plan.planner == "manual" else contest.contestants(job.problem)
    return [name for name in names if name != plan.planner]


def _shards(job: Job) -> list[Shard]:
    """What replicas may share beyond what they do, the least first; nothing on one device."""
    names: tuple[Shard, ...] = get_args(Shard)
    more = names[names.index(job.shard) + 1 :] if job.topology.devices > 1 else ()
    return [name for name in more if job.trainer == PARTOPT or name in job.engine.shard]


def _optimizers(job: Job) -> list[Optimizer]:
    """Those with less state than the job's, the most first; none where it says how much."""
    if job.engine.optimizer_bytes is not None:
        return []
    names: tuple[Optimizer, ...] = get_args(Optimizer)
    less = [name for name in names[::-1] if STATE_BYTES[name] < STATE_BYTES[job.optimizer]]
    return sorted(less, key=lambda name: -STATE_BYTES[name])


def _sizes(job: Job, plan: Plan) -> list[int]:
    """The plan's microbatch size, and the others that were measured, largest first.

    Only smaller ones where the job says which.
    """
    now, free = plan.microbatch_size, job.microbatch_size is None
    measured = [m.microbatch_size for m in job.profile.measured()]
    return [now, *(size for size in reversed(measured) if size < now or (free and size > now))]


def _fitting(names: list[str], plan: Plan, way: Mapping[str, str], job: Job) -> Iterator[Fitting]:
    """What fits at every measured size up to the job's, with and without recomputation.

    With the options `way` of the job changed.
    """
    given = {
        "planner": plan.planner,
        "microbatch_size": plan.microbatch_size,
        "recompute": job.recompute or "never",
    }
    for name, size, recompute in itertools.product(names, _sizes(job, plan), get_args(Recompute)):
        if recompute == "auto" and "auto" not in PLANNERS[name].uses:
            continue
        with suppress(PartoptError):  # a global batch may be no multiple of that size
            other = job.with_(microbatch_size=size, recompute=recompute, **way)
            found = contest.plan_decided(name, other.problem)
            if found.fits:
                then = dict(zip(given, (name, size, recompute), strict=True))
                options = {key: value for key, value in then.items() if value != given[key]}
                yield Fitting({**options, **way}, found.predicted.samples_per_s)
