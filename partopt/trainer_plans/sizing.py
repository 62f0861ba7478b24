"""A model on clusters of several sizes: how it scales, and the least on which it fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from partopt.cost.problem import Progress, ignore_progress
from partopt.documents.engine import Layout
from partopt.documents.plan import Plan
from partopt.documents.tables import Scaling
from partopt.documents.transformer import Transformer
from partopt.errors import PartoptError, found_until_then
from partopt.job import Job
from partopt.options import PARTS
from partopt.search import fitting
from partopt.search.fitting import Fitting
from partopt.search.scaling import scale_plans
from partopt.search.side_by_side import scaling_of
from partopt.search.solve import solve
from partopt.trainer_plans.transformers import (
    batch_of,
    fixed_parts,
    search_layouts,
    training_for,
)
from partopt.trainers import TRAINERS
from partopt.transformer.layouts import any_fits

MOST = 16_384  # devices of the clusters that are tried


def scale(
    job: Job,
    devices: Sequence[int],
    weak: bool = False,
    progress: Progress = ignore_progress,
) -> Scaling:
    """How `job` scales: its best plan on every number of `devices`, a transformer's by its trainer.

    Errors as `scale_plans`. Interrupted carries the rows until then.
    """
    with found_until_then(lambda plans: plans and scaling_of(plans)):
        return scaling_of(scale_plans(job, devices, weak, progress, _best_plan))


def _best_plan(job: Job, progress: Progress) -> Plan:
    if not isinstance(job.model, Transformer):
        return solve(job, progress).plan
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
