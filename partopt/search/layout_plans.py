"""A transformer's layout as its trainer runs it: the closed form, and the plan that is simulated.

A layout becomes an ordinary plan, of a profile that was computed for it: whatever takes plans takes
it, and `partopt show --verify` makes it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import UNSET, structs

from partopt import planners
from partopt.cost.problem import Problem, Progress, ignore_progress
from partopt.documents.engine import Layout
from partopt.documents.plan import Plan, cuts_of, needed_bytes, seconds_of
from partopt.documents.stage import Reserve
from partopt.documents.transformer import BITS, LayoutBeside, Modelled
from partopt.errors import found_until_then
from partopt.job import Job
from partopt.options import MANUAL
from partopt.search.cuts import move_cuts
from partopt.search.effort import SearchParams
from partopt.search.layout_questions import (
    batch_of,
    choose_graphs,
    training_for,
)
from partopt.search.ranking import TIE, first_of, layout_complexity, order_of
from partopt.simulator.execution import simulate_plan
from partopt.trainers import TRAINERS
from partopt.transformer.as_profile import (
    ends_of_starts,
    estimate_again,
    profile_of,
    stage_starts,
)
from partopt.transformer.block import Training
from partopt.transformer.chances import fits_chance
from partopt.transformer.closed_form import closed_form_of
from partopt.transformer.faults import find_faults
from partopt.transformer.iteration import (
    Degrees,
    Estimate,
    estimate,
    settle_cut,
    share_bytes,
    stages_of,
)
from partopt.transformer.layouts import ROOM, Found
from partopt.transformer.rates import PLANNED

# layouts that are simulated, the fastest that differ: some, and as many as may yet be the fastest
JUDGED, MOST_JUDGED = 4, 16
USUALLY = 0.99  # of the closed form a simulation takes that or more; or of what others do
_APART = 0.01  # of the time: what is further from its closed form is beside no closed forms
_SHOWN, _LACKING = 9, 3  # layouts beside a plan: that fit, and that need least of those that do not


def as_planned(job: Job, plan: Plan) -> Job:
    """The job with the facts of its plan, which may be without the graphs that it asks for."""
    return job.with_(facts=modelled_of(plan).facts)


def search_layouts(
    job: Job,
    progress: Progress = ignore_progress,
    finish: Callable[[Plan, Found], Plan] | None = None,
) -> tuple[Plan, Found, list[Plan]]:
    """The best of the layouts that have the parts that are asked for, all that was found, and what
    else was simulated, fastest first.

    They are estimated in closed form. The first `JUDGED` that differ are simulated, others as long
    as they may be the fastest, and the best with its blocks cut otherwise, which is shown. Of those
    as fast, but for `TIE`, the simplest is the best, and the fastest beside it. Where none fits
    at all, the plan is of the layout that needs least. `finish` gives the plan with what else is
    said of it. Raises PartoptError where there is none. Interrupted with the best until then, a
    plan as of a job that fixes its layout.
    """

    def first_of_them(until_then: tuple[Job, Found] | None) -> Plan | None:
        if until_then is None:
            return None
        asked, found = until_then
        return _fix(simulate_layout(asked, training_for(asked), found.fitting[0].layout))

    with found_until_then(first_of_them):
        job, found = choose_graphs(job, progress)
    training = training_for(job)
    assert found.least
    if not found.fitting:
        least = simulate_layout(job, training, found.least.layout)
        return finish(least, found) if finish else least, found, []
    plans, shortest = list[Plan](), USUALLY
    near = differing(found.fitting, MOST_JUDGED, ["microbatch"])

    def until_then(_: object) -> Plan:
        if not plans:
            plans.append(simulate_layout(job, training, near[0].layout))
        return _fix(min(plans, key=order_of))

    with found_until_then(until_then):
        for done, candidate in enumerate(near):
            fit = [seconds_of(plan) for plan in plans if plan.fits]
            if done >= JUDGED and fit and candidate.seconds * shortest > min(fit):
                break
            progress("simulating layouts", done, len(near))
            plans.append(simulate_layout(job, training, candidate.layout))
            shortest = min(shortest, USUALLY * seconds_of(plans[-1]) / candidate.seconds)
        fastest = move_unequal_cuts(job, training, min(plans, key=order_of))
        plans += [simulate_layout(job, training, one) for one in _simpler(plans, fastest, found)]
        layout = modelled_of(fastest).layout
        best = first_of([fastest, *(plan for plan in plans if modelled_of(plan).layout != layout)])
        if best is not fastest:
            best = move_unequal_cuts(job, training, best)
        best = with_cut_by_count(job, training, best)
        simulated = {modelled_of(plan).layout: plan for plan in [*plans, fastest]}
        del simulated[modelled_of(best).layout]
        others = sorted(simulated.values(), key=order_of)
        beside = layouts_beside(job, best, others, found)
        tie = TIE if seconds_of(fastest) < seconds_of(best) else UNSET
        best = with_modelled(best, tried=found.tried, beside=beside, tie=tie)
        to = estimate_again(best)
        for done, candidate in enumerate(found.left_out[:MOST_JUDGED]):
            progress("simulating layouts that are left out", done, MOST_JUDGED)
            left = simulate_layout(job, training, candidate.layout)
            if left.fits and seconds_of(left) < seconds_of(best):
                row = beside_of(candidate, to, left, True)
                doubt = _doubt_of(row, best)
                best = with_modelled(best, left_out=structs.replace(row, doubt=doubt))
                break
        if finish is not None:
            progress("estimating what else helps", 0, 1)
            best = finish(best, found)
    return best, found, others


def _fix(plan: Plan) -> Plan:
    """The plan as that of a job that fixes its layout."""
    return with_modelled(plan, asked=modelled_of(plan).layout)


def _simpler(plans: Sequence[Plan], fastest: Plan, found: Found) -> list[Layout]:
    """Layouts that are not simulated and about as fast, and simpler than those that are."""
    most_s = (1 + 2 * TIE) * modelled_of(fastest).closed_s
    least = layout_complexity(modelled_of(first_of([fastest, *plans])).layout)
    known = {modelled_of(plan).layout for plan in plans}
    near = [one.layout for one in found.fitting if one.seconds <= most_s]
    able = [one for one in near if one not in known and layout_complexity(one) < least]
    return sorted(able, key=layout_complexity)[:JUDGED]


def _doubt_of(left: LayoutBeside, plan: Plan) -> str:
    """Why a layout that fits is not believed."""
    if left.layout.recomputation.is_whole:
        return "nobody makes whole blocks of experts again while others fit"
    device_bytes = ((plan.memory_limit_bytes or 0) + plan.reserve.size_bytes) / PLANNED
    if device_bytes and left.memory_bytes > ROOM * device_bytes:
        share = left.memory_bytes / device_bytes
        left_free = f"and {1 - ROOM:.0%} are left free of experts: a limit of memory replaces that"
        return f"it takes {share:.0%} of the memory, {left_free}"
    return "nobody runs experts in so large microbatches, and their imbalance is not computed"


def modelled_of(plan: Plan) -> Modelled:
    """What the profile of a transformer's plan was computed from."""
    assert plan.transformer
    return plan.transformer


def with_modelled(plan: Plan, **found: Any) -> Plan:
    """The plan, with what else was `found` about its layout."""
    return structs.replace(plan, transformer=structs.replace(modelled_of(plan), **found))


def move_unequal_cuts(job: Job, training: Training, plan: Plan) -> Plan:
    """The plan of blocks that are cut by their seconds, or one whose cuts the simulator moved.

    It moves those of blocks that are cut by count, where that plan is faster. Equal blocks of one
    chunk a device have no better ones.
    """
    layout, batch = modelled_of(plan).layout, batch_of(job)
    exact = (layout.chunks or 1) == 1 and not training.is_unequal
    if exact or training.practice.ends != "free" or not plan.fits:
        return plan
    degrees = Degrees.of(training, layout, batch)
    counted = map(training.cut_by, TRAINERS.lookup(job.trainer).choices["ends"])
    able = [one for one in counted if not any(find_faults(one, layout, batch))]
    starts = {tuple(stage_starts(one, degrees)) for one in able} - {tuple(cuts_of(plan))}
    ways = [training.cut_by(ends_of_starts(training.model, start)) for start in sorted(starts)]
    begin = min([plan, *(simulate_layout(job, way, layout) for way in ways)], key=order_of)
    cut = training.cut_by(modelled_of(begin).practice.ends)
    problem = _problem(job, cut, estimate(cut, layout, batch))
    moved = move_cuts(begin, problem, SearchParams.at(job.effort))
    other = training.cut_by(ends_of_starts(training.model, cuts_of(moved)))
    if moved == begin or any(find_faults(other, layout, batch)):
        return begin
    return min(begin, simulate_layout(job, other, layout), key=order_of)


def with_cut_by_count(job: Job, training: Training, plan: Plan) -> Plan:
    """The plan, which says what its unequal blocks take if they are cut by count."""
    free = "free" in TRAINERS.lookup(job.trainer).choices.get("ends", {})
    if not training.is_unequal or not free or not plan.fits:
        return plan
    about, batch, other = modelled_of(plan), batch_of(job), training.cut_by("stage")
    degrees = Degrees.of(training, about.layout, batch)
    same = stages_of(training.cut_by(about.practice.ends), degrees) == stages_of(other, degrees)
    if same or any(find_faults(other, about.layout, batch)):
        return plan
    return with_modelled(plan, by_count_s=seconds_of(simulate_layout(job, other, about.layout)))


def is_apart(plan: Plan) -> bool:
    """Whether what stands beside a plan is simulated as it is: the closed form is another time."""
    return abs(seconds_of(plan) / modelled_of(plan).closed_s - 1) > _APART


def layouts_beside(
    job: Job, plan: Plan, simulated: Sequence[Plan], found: Found
) -> list[LayoutBeside]:
    """The layouts beside that of a plan of those that were `found`: that fit, then that do not.

    Among them is the fastest of those that were simulated.
    """
    known, to = {modelled_of(other).layout: other for other in simulated}, estimate_again(plan)

    def row_of(candidate: Estimate, fits: bool) -> LayoutBeside:
        other = known.get(candidate.layout) if fits else None
        if other is None and is_apart(plan):
            other = simulate_layout(job, training_for(job), candidate.layout)
        return beside_of(candidate, to, other, fits)

    fastest = modelled_of(min([plan, *simulated], key=order_of)).layout
    ranked = [to, *(candidate for candidate in found.fitting if candidate.layout != to.layout)]
    faster = [candidate for candidate in found.lacking if candidate.seconds < to.seconds]
    fitting, lacking = differing(ranked, 1 + _SHOWN)[1:], differing(faster, _LACKING)
    if fastest not in (to.layout, *(candidate.layout for candidate in fitting)):
        fitting[_SHOWN - 1 :] = [one for one in ranked if one.layout == fastest]
    rows = sorted((row_of(one, True) for one in fitting), key=lambda row: row.iteration_s)
    without = [row_of(candidate, False) for candidate in lacking]
    return rows + [row for row in without if row.iteration_s < seconds_of(plan)]


def beside_of(
    candidate: Estimate, to: Estimate, simulated: Plan | None, fits: bool
) -> LayoutBeside:
    """A layout beside another, `to`; its seconds are those that were `simulated`, if they were."""
    way = 1 if candidate.seconds >= to.seconds else -1
    names = dict.fromkeys([*candidate.parts, *to.parts])
    more = {name: candidate.parts.get(name, 0.0) - to.parts.get(name, 0.0) for name in names}
    part = max(more, key=lambda name: way * more[name])
    counted = round(candidate.memory_bytes)
    return LayoutBeside(
        layout=candidate.layout,
        iteration_s=candidate.seconds if simulated is None else seconds_of(simulated),
        simulated=simulated is not None,
        memory_bytes=counted if simulated is None else needed_bytes(simulated),
        fits=fits,
        part=part,
        part_s=more[part],
    )


def differing(
    ranked: Sequence[Estimate], most: int, alike: Sequence[str] = ("chunks", "microbatch")
) -> list[Estimate]:
    """The first of the estimates that differ in more than the parts that may be `alike`."""
    kept: dict[Layout, Estimate] = {}
    for candidate in ranked:
        rest = structs.replace(candidate.layout, schedule=None, **dict.fromkeys(alike))
        kept.setdefault(rest, candidate)
        if len(kept) == most:
            break
    return list(kept.values())


def simulate_layout(job: Job, training: Training, layout: Layout) -> Plan:
    """The plan of a whole layout: simulated, as many bytes reserved as the closed form counts more.

    The training may be another than that of the job. Raises PartoptError where it cannot be run.
    """
    batch, facts = batch_of(job), {**job.facts, **({"dtype": job.dtype} if job.dtype else {})}
    training = settle_cut(training, layout, batch)
    found = estimate(training, layout, batch)
    modelled = Modelled(
        model=training.model,
        sequence=training.sequence,
        format=training.format,
        practice=training.practice,
        layout=layout,
        asked=job.layout,
        facts={n: value if isinstance(value, int) else str(value) for n, value in facts.items()},
        closed_s=found.seconds,
        closed_bytes=round(found.memory_bytes),
        form=closed_form_of(training, layout, batch, found),
        calibration=[*training.calibration],
    )
    problem = _problem(job, training, found).with_(transformer=modelled)
    plan = simulate_plan(planners.plan(MANUAL, problem))
    more, limit = max(0, round(found.memory_bytes) - plan.peak_memory_bytes), job.limit_bytes
    if more and limit is not None:
        reserve = Reserve(size_bytes=more, basis="computed")
        problem = problem.with_(reserve=reserve, memory_bytes=max(1, limit - more))
        plan = simulate_plan(planners.plan(MANUAL, problem))
    if limit is None:
        return plan
    return with_modelled(plan, fits_chance=fits_chance(needed_bytes(plan), limit / PLANNED))


def _problem(job: Job, training: Training, found: Estimate) -> Problem:
    """The problem whose manual plan is the layout."""
    profile = profile_of(training, found.layout, batch_of(job))
    return Job(profile, job.topology, **_options(job, training, found)).problem


def _options(job: Job, training: Training, found: Estimate) -> dict[str, Any]:
    """The options of the job whose plan is the layout."""
    layout, memory = found.layout, found.memory
    cuts = stage_starts(training, Degrees.of(training, layout, batch_of(job)))
    n, v = layout.dp or 1, layout.chunks or 1
    # of a parameter of a rank, before those that have it share it
    if "in shares" in memory:  # and what is whole in a pipeline beside it
        state = share_bytes(training) - (2 + training.gradient_bytes) * (layout.pp == 1)
    else:
        held = memory["gradients"] / training.gradient_bytes
        narrow = 0.0 if training.adapters else 2 * held - memory["parameters"]
        state = memory["optimizer"] - narrow
        state *= (n * (layout.cp or 1) if layout.shard == "optimizer" else 1) / held
    facts: dict[str, Any] = {"optimizer_bytes": max(0.0, state)}
    if "in shares" in memory and BITS[training.format] < 16:
        facts["gathered_bytes"] = BITS[training.format] / 8
    elif training.weight_bytes < 2:
        facts["gathered_bytes"] = training.weight_bytes
    if layout.scatters_early:
        facts["allreduce"] = "overlap"
    if training.practice.host_shards:
        facts["on_host"] = True
    return {
        "trainer": job.trainer,
        "engine": structs.replace(training.engine.of_layouts, **facts),
        "schedule": layout.schedule,
        "chunks": v if v > 1 else None,
        "planner": MANUAL,
        "cuts": cuts,
        "replicas": [n] * (len(cuts) + 1),
        "microbatch_size": layout.microbatch,
        "global_batch": job.global_batch,
        "shard": layout.shard,
        "recompute": "never",
        "memory": job.limit_bytes,
    }
