"""What else makes a transformer's training faster: switches of its trainer, a layout to try.

Switches are searched as layouts are: one may make another layout the best, and what two are worth
is not the sum of both.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from msgspec import UNSET, UnsetType, structs

from partopt.cost.problem import Progress, ignore_progress
from partopt.documents.engine import Layout
from partopt.documents.plan import Plan, seconds_of
from partopt.documents.transformer import Challenger, Practice, Transformer, Worth
from partopt.errors import PartoptError
from partopt.job import Job
from partopt.search.layout_plans import is_apart, modelled_of, simulate_layout, with_modelled
from partopt.search.layout_questions import (
    batch_of,
    choose_graphs,
    format_of,
    question_of,
    run_with_facts,
    training_for,
)
from partopt.search.ranking import order_of
from partopt.trainers import TRAINERS
from partopt.trainers.trainer import Lever
from partopt.transformer.as_profile import estimate_again
from partopt.transformer.block import Training
from partopt.transformer.chances import expected_gain, fits_chance
from partopt.transformer.faults import find_faults
from partopt.transformer.iteration import Estimate, estimate
from partopt.transformer.layouts import Found, find_fastest, first_fitting
from partopt.transformer.rates import PLANNED

BENCHMARK = "benchmark"  # recipes that trainers' authors publish times of
_HELPS = 2e-3  # of the time: what saves less is not worth a line
_TRIED = 0.01  # of the time: where less is expected a try is not worth it
# some layouts are slower with other cuts, kernels that reach less of links, conversions
_UNSURE = ("ends", "exchange", "dtype")
_SAME = 1e-6  # of the time: what costs no more is not missed


class Taken(NamedTuple):
    """The fastest layout that fits, and the switches with which it does, with a value of theirs.

    The `job` is the question without them, which may leave graphs out.
    """

    found: Estimate
    on: frozenset[Lever]
    job: Job


def _seconds(taken: Taken | None) -> float:
    return taken.found.seconds if taken else math.inf


class Switches:
    """The fastest layouts of a job with switches of its trainer on, in closed form.

    `levers` are those that are off and that the job leaves open; `found` are the layouts without.
    The number format is one where no block was measured in another.
    One that frees memory makes no layout faster: it is looked for among layouts that may be faster
    than what is known without it. `progress` hears of every search. Where graphs were given up, it
    is tried with those of the job `before` that, too.
    """

    def __init__(
        self,
        job: Job,
        found: Found,
        progress: Progress = ignore_progress,
        before: Job | None = None,
    ) -> None:
        self._job, self._progress = job, progress
        others = [before] if before and run_with_facts(before) != run_with_facts(job) else []
        self._jobs = [job, *others]
        self._trainer = TRAINERS.lookup(job.trainer)
        self._known = {name.replace("_", "-"): str(value) for name, value in job.facts.items()}
        if job.dtype or job.calibrate:
            self._known["dtype"] = format_of(job)
        self._usual, self._question = training_for(job), question_of(job)
        self._by_default, _ = self._trainer.run_with({})
        names = [lever.facts[-1][0] for lever in self._trainer.levers]
        self._places = {name: place for place, name in enumerate(names)}
        open_ = [lever for lever in self._trainer.levers if self._is_open(lever)]
        self.levers = [*{lever.facts[-1][0]: lever for lever in open_[::-1]}.values()][::-1]
        first = Taken(found.fitting[0], frozenset(), job) if found.fitting else None
        self._fastest: dict[frozenset[Lever], Taken | None] = {frozenset(): first}

    def fastest(self, on: Iterable[Lever]) -> Taken | None:
        """The fastest layout that fits with some of these switches on; None where none fits."""
        key = frozenset(on)
        if key not in self._fastest:
            known = [taken for some, taken in self._fastest.items() if some < key and taken]
            least = min(known, key=_seconds, default=None)
            self._fastest[key] = self._search(key, least)
        return self._fastest[key]

    def seconds(self, on: Iterable[Lever]) -> float:
        """Those of the fastest layout."""
        return _seconds(self.fastest(on))

    def combine(self, among: Collection[Lever]) -> frozenset[Lever]:
        """Those `among` the switches that are fastest together; none of them adds nothing.

        First all are on at once that free no memory, and then without those, in turn, with which
        some layouts are slower. Then with all that free some, alone and together, in place of what
        contradicts them: more of them are on if they save more.
        """
        freeing = sorted((lever for lever in among if lever.frees), key=self._place)
        chosen = frozenset(among) - {*freeing}
        taken = self.fastest(chosen)
        for lever in sorted(chosen, key=self._place):
            if lever.facts[-1][0] in _UNSURE:
                better = self._search(chosen - {lever}, taken)
                if better is not taken:
                    taken, chosen = better, chosen - {lever}
        sets = (itertools.combinations(freeing, n + 1) for n in range(len(freeing)))
        added = (functools.reduce(self._add, some, chosen) for some in itertools.chain(*sets))
        for on in dict.fromkeys(added):
            better = self._search(on, taken)
            if _seconds(better) <= (1 - _HELPS) * _seconds(taken):
                taken = better
        if taken is None:
            return frozenset()
        chosen = taken.on
        for lever in sorted(chosen, key=self._place, reverse=True):  # last what changes no numbers
            if not lever.frees and not self._is_missed(lever, taken._replace(on=chosen)):
                chosen -= {lever}
        training = self.training(taken.job, chosen)
        found = estimate(training, taken.found.layout, batch_of(taken.job))
        self._fastest.setdefault(chosen, Taken(found, chosen, taken.job))
        return chosen

    def facts(self, on: Collection[Lever]) -> dict[str, str]:
        """What the switches set, in the trainer's order; not what it does by default."""
        ordered = sorted(on, key=self._place)
        stated = dict(fact for lever in ordered for fact in lever.facts)

        def is_usual(name: str, value: str) -> bool:
            sets = self._trainer.choices.get(name, {}).get(value, {})
            return bool(sets) and all(getattr(self._by_default, key) == sets[key] for key in sets)

        return {name: value for name, value in stated.items() if not is_usual(name, value)}

    def worth(self, on: Collection[Lever], recipe: str = "") -> Worth | None:
        """What the switches are worth, as a `recipe` if that sets them; None if that is nothing."""
        taken = self.fastest(on)
        if taken is None or taken.found.seconds > (1 - _HELPS) * self.seconds(()):
            return None
        if len(taken.on) == 1 and any(self._is_idle(lever, taken.found.layout) for lever in on):
            return None  # what it needs besides is faster alone
        return self._worth(taken, recipe)

    def fit(self, layout: Layout) -> Worth | None:
        """What a layout takes with the switch with which it fits, the one that costs least."""
        able, batch = list[Taken](), batch_of(self._job)
        for lever in self.levers:
            for job, steps, works in self._steps(frozenset({lever})):
                if any(find_faults(works[-1], layout, batch)):
                    continue
                place = first_fitting(works, layout, batch, self._question.limit)
                if place is not None:
                    able.append(Taken(estimate(works[place], layout, batch), steps[place], job))
        taken = min(able, key=_seconds, default=None)
        return self._worth(taken) if taken else None

    def alone(self) -> Iterator[Worth]:
        """What a recipe is worth that the trainer's authors publish times of; then every switch."""
        recipes = self._trainer.recipes.get(BENCHMARK, {})
        stated = recipes.get(self._usual.model.name, {}).items()
        of_recipe = [lever for lever in self.levers if lever.facts[-1] in stated]
        rows = [self.worth(of_recipe, BENCHMARK)] if of_recipe else []
        rows += [self.worth([lever]) for lever in self.levers]
        yield from (row for row in rows if row)

    def _place(self, lever: Lever) -> int:
        """That of a switch among those of the trainer."""
        return self._places[lever.facts[-1][0]]

    def _worth(self, taken: Taken, recipe: str = "") -> Worth:
        found, before_s = taken.found, self.seconds(())
        ordered = sorted(taken.on, key=self._place)
        graphs = self.training(taken.job, taken.on).practice.graphs
        return Worth(
            facts={"recipe": recipe} if recipe else self.facts(taken.on),
            flags=[f"recipe={recipe}"] if recipe else [lever.flag for lever in ordered],
            iteration_s=found.seconds,
            saved=1 - found.seconds / before_s if before_s < math.inf else UNSET,
            layout=found.layout,
            changes_numbers=any(lever.changes_numbers for lever in ordered),
            verified=all(lever.verified for lever in ordered),
            graphs=graphs if graphs != self._usual.practice.graphs else UNSET,
        )

    def _is_open(self, lever: Lever) -> bool:
        """Whether the job says nothing of the switch and nothing against it, and it is off."""
        facts = {name.replace("_", "-"): value for name, value in lever.facts}
        agrees = facts | self._known == self._known | facts
        if [*facts][-1] in self._known or not agrees:
            return False
        usual = self._usual
        if self._is_idle(lever, self._question.fixed) or usual.rates.server <= lever.beyond:
            return False
        if lever.needs == "ep" and not usual.model.experts:
            return False
        try:
            on = self.training(self._job, frozenset({lever}))
        except PartoptError:  # as of a kernel that the device is not known to have
            return False
        return (on.practice, on.engine, on.format) != (usual.practice, usual.engine, usual.format)

    def _is_idle(self, lever: Lever, layout: Layout) -> bool:
        """Whether the layout has one rank alone of what the switch needs several of."""
        return bool(lever.needs) and getattr(layout, lever.needs) == 1

    def training(self, job: Job, on: frozenset[Lever], like: Training | None = None) -> Training:
        """How the trainer trains with the switches; what is known of one that is `like` it stays.

        PartoptError where it cannot have all of them.
        """
        job = job.with_(facts={**job.facts, **self.facts(on)})
        return (like or self._usual).having(*run_with_facts(job), format_of(job))

    def _steps(
        self, on: frozenset[Lever]
    ) -> Iterator[tuple[Job, Sequence[frozenset[Lever]], Sequence[Training]]]:
        """The switches with values that free ever more, and how the trainer trains with them.

        Of several that have values one has all of them in turn, and the others have the last. All
        of it for every job that is asked and that the switches leave another one.
        """
        valued = [lever for lever in on if lever.values]
        most = {lever: lever.at(lever.values[-1]) for lever in valued}
        every = [[on]] * (not valued)
        for last in valued:
            rest = frozenset(most.get(lever, lever) for lever in on if lever != last)
            every.append([rest | {last.at(value)} for value in last.values])
        for steps in every:
            practices = list[Practice]()
            for job in self._jobs:
                first = self.training(job, steps[0])
                if first.practice not in practices:
                    practices.append(first.practice)
                    yield job, steps, _Trainings(self, job, steps, first)

    def _search(self, on: frozenset[Lever], least: Taken | None) -> Taken | None:
        """With those that need several tensor or expert parallel ranks, or on one without them.

        What is known with fewer of them, the `least`, where nothing else is faster.
        """
        self._progress("estimating what else helps", 0, 1)
        asked = [(on, self._question.fixed)]
        for part in sorted({lever.needs for lever in on} - {""}):
            for some, fixed in [*asked]:
                alone = frozenset(lever for lever in some if lever.needs != part)
                if alone and getattr(fixed, part) is None:
                    asked.append((alone, structs.replace(fixed, **{part: 1})))
        for some, fixed in asked:
            for job, steps, works in self._steps(some):
                question = self._question._replace(fixed=fixed)
                better = find_fastest(works, question, _seconds(least))
                if better is not None:
                    taken = Taken(better[0], steps[better[1]], job)
                    least = min(least or taken, taken, key=_seconds)
        return least

    def _add(self, on: frozenset[Lever], lever: Lever) -> frozenset[Lever]:
        """The switches with another one, without those that the trainer cannot have beside it."""
        added = frozenset({lever})
        for other in sorted(on, key=self._place):
            with suppress(PartoptError):
                self.training(self._job, added | {other})
                added |= {other}
        return added

    def _is_missed(self, lever: Lever, taken: Taken) -> bool:
        """Whether the layout takes longer without the switch, or has no room."""
        found, alone = taken.found, self.training(taken.job, taken.on - {lever})
        without = estimate(alone, found.layout, batch_of(taken.job))
        least = _HELPS if lever.changes_numbers else _SAME
        limit, room = self._question.limit, self._question.room
        if room and alone.model.experts and found.memory_bytes <= room:
            limit = min(room, limit)
        return without.memory_bytes > limit or without.seconds > found.seconds * (1 + least)


class _Trainings(Sequence[Training]):
    """The trainings of a job with the switches of every step, made when they are asked for."""

    def __init__(
        self, switches: Switches, job: Job, steps: Sequence[frozenset[Lever]], first: Training
    ) -> None:
        self._switches, self._job, self._steps, self._made = switches, job, steps, {0: first}

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, place: Any) -> Any:
        place = range(len(self))[place]
        if place not in self._made:
            step = self._steps[place]
            self._made[place] = self._switches.training(self._job, step, self._made[0])
        return self._made[place]


def take_best(job: Job, numbers: bool = False) -> Job:
    """The job with the switches of its trainer that make it fastest, those it leaves open.

    With `numbers` also those that change what training computes.
    """
    chosen, found = choose_graphs(job)
    switches = Switches(chosen, found, before=job)
    open_ = [lever for lever in switches.levers if numbers or not lever.changes_numbers]
    on = switches.combine(open_)
    taken = switches.fastest(on)
    best = taken.job if taken else chosen
    return best.with_(facts={**best.facts, **switches.facts(on)})


def with_levers(
    job: Job,
    plan: Plan,
    found: Found,
    progress: Progress = ignore_progress,
    before: Job | None = None,
) -> Plan:
    """The plan, which says what else would be faster: switches, alone and together; a layout.

    The job is as it is planned; `before` that it may have asked for graphs.
    """
    switches = Switches(job, found, progress, before)
    alone, together = [*switches.alone()], switches.worth(switches.combine(switches.levers))
    if plan.fits:
        alone = [row for one in alone if (row := _simulate(job, one, plan))]
        together = _simulate(job, together, plan) if together else None
    best_s = min((lever.iteration_s for lever in alone), default=math.inf)
    more = together is not None and together.iteration_s < (1 - _HELPS) * best_s
    beside = [
        row if row.fits else structs.replace(row, fits_with=switches.fit(row.layout) or UNSET)
        for row in modelled_of(plan).beside
    ]
    return with_modelled(
        plan,
        beside=beside,
        levers=alone,
        together=together if together and more else UNSET,
        challenger=find_challenger(job, found, estimate_again(plan)),
    )


def _simulate(job: Job, worth: Worth, plan: Plan) -> Worth | None:
    """What switches are worth beside a plan, simulated where that may be another time.

    So it is beside a plan that is far from its closed form, and of free cuts with several chunks;
    the plan's layout may then be the better one. None if that is nothing.
    """
    assert isinstance(job.model, Transformer)
    stated = {**job.facts, **worth.facts, **({"graphs": worth.graphs} if worth.graphs else {})}
    asked = job.with_(facts=TRAINERS.lookup(job.trainer).spell_recipe(stated, job.model.name))
    in_chunks = worth.layout.chunks != 1 and run_with_facts(asked)[0].ends == "free"
    if not (in_chunks or is_apart(plan)):
        return worth
    training, before_s = training_for(asked), seconds_of(plan)
    layouts = dict.fromkeys([worth.layout, modelled_of(plan).layout])
    able = [one for one in layouts if not any(find_faults(training, one, batch_of(job)))]
    found = min((simulate_layout(asked, training, one) for one in able), key=order_of)
    if not found.fits or seconds_of(found) > (1 - _HELPS) * before_s:
        return None
    saved, layout = 1 - seconds_of(found) / before_s, modelled_of(found).layout
    return structs.replace(worth, iteration_s=seconds_of(found), saved=saved, layout=layout)


def find_challenger(job: Job, found: Found, best: Estimate) -> Challenger | UnsetType:
    """The layout that is most worth a try beside the best, by the gain that is expected of it.

    It may need more than is planned with; and it may be slower as computed, for that may be wrong.
    """
    limit = job.limit_bytes
    if not found.fitting or limit is None:
        return UNSET
    assert isinstance(job.model, Transformer)

    def gain(candidate: Estimate) -> float:
        return 1 - candidate.seconds / best.seconds

    def chance(candidate: Estimate) -> float:
        return fits_chance(candidate.memory_bytes, limit / PLANNED)

    def expect(candidate: Estimate) -> float:
        return expected_gain(gain(candidate), chance(candidate))

    def is_usual(candidate: Estimate) -> bool:
        """Of experts people run small microbatches, and nothing made again."""
        rows = candidate.layout.microbatch or 1, best.layout.microbatch or 1
        return rows[0] <= rows[1] and candidate.layout.recompute == best.layout.recompute

    able = [one for one in found.lacking if not job.model.experts or is_usual(one)]
    able += [one for one in found.fitting if not _is_alike(one.layout, best.layout)]
    tried = max(able, key=expect, default=None)
    if tried is None or expect(tried) < _TRIED:
        return UNSET
    return Challenger(
        layout=tried.layout,
        iteration_s=tried.seconds,
        saved=gain(tried),
        memory_bytes=round(tried.memory_bytes),
        fits_chance=round(chance(tried), 2),
    )


def _is_alike(layout: Layout, other: Layout) -> bool:
    """Whether layouts differ in chunks alone, or in how many blocks are made again."""
    alike = structs.replace(layout, chunks=other.chunks, schedule=other.schedule)
    return alike.recomputation.is_whole == other.recomputation.is_whole and (
        structs.replace(alike, recompute=other.recompute) == other
    )
