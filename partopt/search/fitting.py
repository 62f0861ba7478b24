"""Where nothing fits: the options with which something does, by the same search with parts freed.

The parts that a job fixes are freed one after another, until a plan fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, get_args

from partopt.cost.memory import STATE_BYTES
from partopt.cost.problem import Progress, ignore_progress
from partopt.documents.engine import PARTOPT, Layout
from partopt.documents.plan import Optimizer, Plan
from partopt.documents.stage import Shard
from partopt.documents.transformer import Transformer, Worth
from partopt.errors import PartoptError
from partopt.job import Job
from partopt.options import AUTO, MANUAL, PARTS
from partopt.schedules import schedule
from partopt.search.layout_questions import choose_graphs
from partopt.search.levers import Switches
from partopt.search.rows import may_fit
from partopt.search.sizes import Sizes, find_servers
from partopt.search.solve import solve, solve_profile
from partopt.search.variants import are_shares_open


@dataclass(frozen=True)
class Fitting:
    """Options of the job that make a plan fit, None for one to leave out; its speed if known."""

    options: dict[str, Any]
    samples_per_s: float | None


def find_fitting(
    job: Job, progress: Progress = ignore_progress, rules: Sequence[str] = ()
) -> Fitting | None:
    """The options with which the best plan of `job` fits, where it has none that does.

    As few parts are freed as will do: recomputation, the microbatch size, the layout and the
    planner, then what replicas share, the optimizer, and the schedule. None where nothing that was
    tried fits. Of a transformer that is the least number of `servers`, with the `layout` as it is
    or open, by bytes alone; or `facts`, where a switch of the trainer that changes no numbers is
    faster than these. `progress` and `rules` are as in `solve`.
    """
    if isinstance(job.model, Transformer):
        return _fitting_servers(job)

    def ask(freed: Job) -> Plan:
        if freed.planner_name == MANUAL:  # whether or not the trainer runs such a split
            return solve_profile(freed, progress).plan
        return solve(freed, progress, rules=rules).plan

    for changes in _freed(job):
        with suppress(PartoptError):
            freed = job.with_(**changes)
            hopeless = freed.planner_name is None and not may_fit(freed)
            if not hopeless and (plan := ask(freed)).fits:
                options = {n: value for n, value in changes.items() if value != getattr(job, n)}
                return Fitting(options, plan.predicted.samples_per_s)
    return None


def list_tried(job: Job) -> list[str]:
    """The parts that `find_fitting` frees, in words."""
    tried = dict.fromkeys(name for changes in _freed(job) for name in changes)
    return ["`schedule=auto`" if name == "schedule" else f"`{name}`" for name in tried]


def _freed(job: Job) -> Iterator[dict[str, Any]]:
    """Changes of the job, with ever more parts free.

    A planner that is named does not choose whether to recompute: both are yielded.
    """
    named = job.planner_name is not None
    if named and job.recompute != "always" and job.engine.recompute != ("none",):
        yield {"recompute": "always"}
        for changes in _freed_parts(job):
            yield changes
            if "recompute" not in changes:
                yield changes | {"recompute": "always"}
    else:
        yield from _freed_parts(job)


def _freed_parts(job: Job) -> Iterator[dict[str, Any]]:
    """As `_freed`, but for the recomputation of a planner that is named."""
    changes: dict[str, Any] = {}
    if job.planner_name is None and job.recompute is not None:
        changes["recompute"] = None
        yield dict(changes)
    for name in ("microbatch_size", "planner", "stages", "chunks"):
        if getattr(job, name) is not None and not (name == "planner" and job.cuts):
            changes[name] = None
            if name == "planner":
                changes["recompute"] = None
            yield dict(changes)
    if job.layout != Layout():
        changes |= {"layout": Layout(), "replication": "free"}
        yield dict(changes)
    for shard in _shards(job):
        yield changes | {"shard": shard}
    if shards := _shards(job):
        changes["shard"] = shards[-1]
    for optimizer in _optimizers(job):
        yield changes | {"optimizer": optimizer}
    entry = None if job.schedule == AUTO else schedule(job.schedule)
    if entry is not None and not entry.asynchronous and job.planner is None and not job.cuts:
        yield changes | {"schedule": AUTO}


def _shards(job: Job) -> list[Shard]:
    """What replicas may share beyond what was looked at, the least first."""
    if job.topology.devices == 1 or (job.shard is None and job.trainer != PARTOPT):
        return []
    names: tuple[Shard, ...] = get_args(Shard)
    most = job.engine.shard[-1] if are_shares_open(job, job.schedule) else job.shard or "none"
    more = names[names.index(most) + 1 :]
    return [name for name in more if job.trainer == PARTOPT or name in job.engine.shard]


def _optimizers(job: Job) -> list[Optimizer]:
    """Those with less state than the job's, the most first; none where it says how much."""
    if job.engine.optimizer_bytes is not None:
        return []
    names: tuple[Optimizer, ...] = get_args(Optimizer)
    less = [name for name in names[::-1] if STATE_BYTES[name] < STATE_BYTES[job.optimizer]]
    return sorted(less, key=lambda name: -STATE_BYTES[name])


def _fitting_servers(job: Job) -> Fitting | None:
    """As `find_fitting` of a transformer."""
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
    rows = Switches(*choose_graphs(job), before=job).alone()
    able = (row for row in rows if not row.changes_numbers)
    return min(able, key=lambda row: row.iteration_s, default=None)
