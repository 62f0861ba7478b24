"""From a job to its plan, and to the plans that it was chosen from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from partopt.cost.problem import Problem, Progress, ignore_progress
from partopt.documents import Note
from partopt.documents.engine import PARTOPT
from partopt.documents.plan import Certificate, Plan, RunnerUp, needed_bytes
from partopt.documents.profile import Profile
from partopt.documents.transformer import Transformer
from partopt.errors import ANSWER_IS_NO, PartoptError, found_until_then, make_each
from partopt.job import Job
from partopt.options import AUTO
from partopt.search import contest
from partopt.search.effort import SearchParams
from partopt.search.jobs import job_for
from partopt.search.layout_plans import as_planned, search_layouts
from partopt.search.levers import with_levers
from partopt.search.ranking import first_of, order_of, rate
from partopt.search.rows import Row, search_planners, search_rows
from partopt.search.trainer_limits import Expressible, check_model, parts_of, restrict
from partopt.search.variants import ANY, Variant, Within
from partopt.simulator.prediction import complete_prediction
from partopt.trainers import TRAINERS
from partopt.trainers.parts import Part
from partopt.trainers.says import find_faults
from partopt.trainers.trainer import Trainer
from partopt.transformer.layouts import Found
from partopt.units import format_bytes, format_rate

_BESIDE = ("gpipe", "data_parallel")  # planners whose plans stand beside that of a named planner
_SHOWN = ("pipedream", *_BESIDE)  # and beside the best of all
_NOTICED = 0.01  # of the speed: a smaller difference is not told
_STARTS = 4  # plans whose cuts are moved for a trainer, the best


@dataclass(frozen=True)
class Result:
    """A plan; the `alternatives` to it, of a transformer other layouts, fastest first; and notes.

    `by_size` are the best plans at the microbatch sizes that were tried, the best first; `plan`
    alone where the job says which size, and under `schedule="auto"`.
    """

    plan: Plan
    alternatives: tuple[Plan, ...]
    notes: tuple[Note, ...]
    by_size: tuple[Plan, ...]

    def __repr__(self) -> str:
        """The model and the plan, what it reaches, and what is beside it."""
        plan, layout, topology = self.plan, self.plan.layout, self.plan.topology.cluster
        degrees = {name: getattr(layout, name) for name in ("tp", "cp", "ep", "pp", "dp")}
        shape = ", ".join(f"{name} {size}" for name, size in degrees.items() if (size or 1) > 1)
        shape = shape if plan.transformer else f"{plan.shape}, {plan.schedule}"
        reached = format_rate(plan.predicted.samples_per_s, "samples")
        memory = f"{format_bytes(needed_bytes(plan))} a device"
        return (
            f"Result: {plan.profile.name} on {topology.devices} devices of {topology.name}: {shape}"
            f"\n  {reached}, {memory}: {'fits' if self.fits else 'does not fit'}"
            f"\n  {len(self.alternatives)} alternatives, {len(self.notes)} notes"
        )

    @property
    def document(self) -> Plan:
        """The plan with the alternatives to it in short, as it is written.

        Beside a transformer's stand layouts in any case.
        """
        if self.plan.transformer:
            return self.plan
        return msgspec.structs.replace(
            self.plan, runners_up=[RunnerUp.of(plan) for plan in self.alternatives]
        )

    @property
    def certificate(self) -> Certificate | None:
        """What is proved of the plan; None where nothing is."""
        return self.plan.certificate

    @property
    def fits(self) -> bool:
        """Whether the plan fits its devices."""
        return self.plan.fits


def solve(
    job: Job,
    progress: Progress = ignore_progress,
    *,
    rules: Sequence[str] = (),
    levers: bool = True,
) -> Result:
    """The best plan of `job`, simulated: of its trainer, the best that this can say.

    What the job leaves open is chosen, as `solve_profile` does it. `rules` are those of
    `export_plan`; the alternatives are what else was found that the trainer can say. Of a
    transformer all layouts are estimated in closed form, and the fastest simulated; the plan says
    what else would be faster, without `levers` not.
    `progress(what, done, total)` is called now and then. Raises PartoptError where the job asks for
    what the trainer cannot do, and with the reasons where no plan that it can say was found;
    Interrupted with the result until then.
    """
    if isinstance(job.model, Profile) and job.trainer == PARTOPT:
        return solve_profile(job, progress)
    job = job_for(job, job.trainer, rules)
    if isinstance(job.model, Transformer):
        return _solve_transformer(job, progress, levers)
    trainer = TRAINERS.lookup(job.trainer)
    return solve_within(job, trainer, parts_of(job, trainer, rules), progress)


def _solve_transformer(job: Job, progress: Progress, levers: bool) -> Result:
    """The plan of the best layout, which itself says what stands beside it."""

    def finish(plan: Plan, found: Found) -> Plan:
        return with_levers(as_planned(job, plan), plan, found, progress, job)

    with found_until_then(lambda plan: plan and _result(plan, [], job.notes)):
        plan, _, others = search_layouts(job, progress, finish if levers else None)
        return _result(plan, others, job.notes)


def solve_profile(job: Job, progress: Progress = ignore_progress, within: Within = ANY) -> Result:
    """The best plan of `job`, simulated: of its planner, or of all planners that can plan for it.

    What the job leaves open is chosen: the schedule where it is "auto", the microbatch size of
    those that were measured, the layout, recomputation and, for a trainer, what replicas share;
    all of it `within` what plans may be. Under "auto" the alternatives are the best under each of
    the other schedules. A plan that does not fit is returned where none was found that does:
    `fits`. `progress(what, done, total)` is called now and then. Raises PartoptError where there is
    none, and Interrupted with the result until then.
    """
    if job.planner_name is not None:
        return _solve_by_planner(job, job.planner_name, progress)
    with found_until_then(lambda rows: rows and _of_rows(job, rows)):
        shown = () if job.schedule == AUTO else _SHOWN
        return _of_rows(job, search_rows(job, within, progress, shown))


def _of_rows(job: Job, rows: Sequence[Row]) -> Result:
    """The first of the plans of the rows, and beside it the best of others."""
    every = [plan for row in rows for plan in row.every]
    if job.schedule == AUTO:
        return _result(*_first_of(every, lambda plan: plan.schedule), job.notes)
    first, others = _first_of(every, lambda plan: plan.planner)
    sizes = {first.microbatch_size: first}
    for plan in rows[0].by_variant:
        sizes.setdefault(plan.microbatch_size, plan)
    others.sort(key=rate, reverse=True)
    return _result(first, others, [*job.notes, *rows[0].notes], [*sizes.values()])


def _first_of(plans: Sequence[Plan], kind: Callable[[Plan], object]) -> tuple[Plan, list[Plan]]:
    """The first of the plans, and beside it the best of every other kind and the fastest of all.

    PartoptError where none has the layout that is fixed.
    """
    able = sorted(as_fixed(plans), key=order_of)
    first = first_of(able)
    found = {kind(first): first}
    for plan in able:
        found.setdefault(kind(plan), plan)
    fastest = able[0] if order_of(able[0]) < order_of(first) else first
    beside = {id(plan): plan for plan in (fastest, *found.values()) if plan is not first}
    return first, list(beside.values())


def _solve_by_planner(job: Job, name: str, progress: Progress) -> Result:
    """The plan of the planner `name` at its best microbatch size, beside those of others there."""
    row: Row | None = None

    def until_then(last: Row | None) -> Result | None:
        found = row or last
        return _result(found.best, [], [], found.by_variant) if found else None

    with found_until_then(until_then):
        row = search_planners(job, [name], progress)
        plans = _beside(name, row.problem, SearchParams.at(job.effort))
    notes = [*job.notes, *row.notes, *_note_data_parallel(row.best, plans)]
    others = sorted(plans.values(), key=rate, reverse=True)
    best, *others = as_fixed([row.best, *others])
    return _result(best, others, notes, row.by_variant)


def _result(
    best: Plan, others: Sequence[Plan], notes: Sequence[Note], by_size: Sequence[Plan] = ()
) -> Result:
    """The best plan, whose prediction is completed, beside others; `by_size` is by default it."""
    plan = complete_prediction(best)
    sizes = [plan if sized is best else sized for sized in by_size or [best]]
    return Result(plan, tuple(others), tuple(notes), tuple(sizes))


def as_fixed(plans: Sequence[Plan]) -> list[Plan]:
    """Those whose layout has the degrees that were fixed. PartoptError where none has."""
    found = [plan for plan in plans if not any(plan.find_other_degrees())]
    if not found:
        told = "; ".join(
            dict.fromkeys(what for plan in plans for what in plan.find_other_degrees())
        )
        raise PartoptError(
            f"no plan was found with that layout: {told}",
            "fix less of it, or give another number of devices or microbatches",
            ANSWER_IS_NO,
            code="no-plan",
        )
    return found


def _beside(name: str, problem: Problem, params: SearchParams) -> dict[str, Plan]:
    """The plans that stand beside that of the planner `name`; none where they refuse."""
    able = [other for other in contest.contestants(problem) if other in _BESIDE and other != name]
    with suppress(PartoptError):
        return contest.Contest(able, Variant(problem)).plans_at(params).plans
    return {}


def _note_data_parallel(plan: Plan, others: Mapping[str, Plan]) -> Iterator[Note]:
    """That plain data parallelism is faster than `plan`, where it is among `others` and fits."""
    other = others.get("data_parallel")
    if other is None or not other.fits:
        return
    speedup = other.predicted.samples_per_s / plan.predicted.samples_per_s
    if speedup > 1 + _NOTICED:
        fits = "" if other.memory_limit_bytes is None else " and fits"
        yield Note(
            code="data-parallel-faster",
            text=f"data_parallel is {speedup - 1:.1%} faster{fits}: `planner=data_parallel`",
            fields={"planner": plan.planner, "speedup": speedup},
        )


def solve_within(
    job: Job, trainer: Trainer, parts: Sequence[Part], progress: Progress = ignore_progress
) -> Result:
    """`solve` of a trainer, to which the layers of the profile are `parts`."""
    check_model(job, trainer, parts)
    job, within = restrict(job, trainer, parts)
    notes = [*job.notes] if trainer.trains else [*job.notes, _inference(trainer)]
    said, plans = Expressible(job, trainer, parts, progress), list[Plan]()
    with found_until_then(lambda found: _ranked(plans or said.put_all(found or ()), job, notes)):
        found, told = _search(job, within, progress)
        notes += [note for note in told if trainer.trains and note not in notes]
        plans += said.put_all(found)
        firsts: dict[object, int] = {}  # by number of stages, the best
        for place, plan in enumerate(plans):
            firsts.setdefault((plan.schedule, len(plan.stages)), place)
        for place in list(firsts.values())[:_STARTS] if job.planner_name is None else ():
            plans[place] = said.improve(plans[place])
    if not plans:
        faults = dict.fromkeys(f for plan in found for f in find_faults(plan, trainer, parts))
        raise PartoptError(
            f"no plan was found that {trainer.name} can say: {'; '.join(faults)}",
            "give other devices or another number of microbatches, or choose the schedule",
            ANSWER_IS_NO,
            code="no-plan",
        )
    return _ranked(plans, job, notes)


def _ranked(plans: Sequence[Plan], job: Job, notes: Sequence[Note]) -> Result:
    """The first of the plans, and the best of those of other stages or, of several, schedules."""

    def kind(plan: Plan) -> object:
        if job.schedule == AUTO:
            return plan.schedule
        return tuple((stage.start, tuple(stage.ranks), stage.recompute) for stage in plan.stages)

    return _result(*_first_of(plans, kind), notes)


def _inference(trainer: Trainer) -> Note:
    text = (
        f"{trainer.name} runs forwards alone: the stages are balanced for training, whose "
        "schedule, times and memory the page shows"
    )
    return Note(code="plan-of-training", text=text)


def _search(job: Job, within: Within, progress: Progress) -> tuple[list[Plan], Sequence[Note]]:
    """All plans that are found within what the trainer can, and notes; Interrupted with plans."""
    if job.planner_name is None:
        with found_until_then(lambda rows: [plan for row in rows or () for plan in row.every]):
            rows = search_rows(job, within, progress)
            return [plan for row in rows for plan in row.every], ()
    results = list[Result]()
    with found_until_then(lambda last: [result.plan for result in (*results, last) if result]):
        _plan_by_planner(job, within, progress, results)
    notes = [note for result in results for note in result.notes]
    return [result.plan for result in results], notes


def _plan_by_planner(job: Job, within: Within, progress: Progress, found: list[Result]) -> None:
    """Add what its planner finds; all stages recompute, or none, where they have to be alike."""
    modes = ["never", "always"] if within.alike and job.recompute == "auto" else [job.recompute]
    make_each(modes, lambda mode: found.append(solve_profile(job.with_(recompute=mode), progress)))
