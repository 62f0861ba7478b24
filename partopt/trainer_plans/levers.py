"""What else makes a transformer's training faster: switches of its trainer, a layout to try.

Switches are searched as layouts are: one may make another layout the best, and what two are worth
is not the sum of both.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress

from msgspec import UNSET, UnsetType, structs

from partopt.documents.engine import Layout
from partopt.documents.plan import Plan
from partopt.documents.transformer import Challenger, Transformer, Worth
from partopt.errors import PartoptError
from partopt.job import Job
from partopt.trainer_plans.transformers import (
    batch_of,
    estimate_layouts,
    training_for,
    with_modelled,
)
from partopt.trainers import TRAINERS
from partopt.trainers.trainer import Lever
from partopt.transformer.block import Training
from partopt.transformer.chances import expected_gain, fits_chance
from partopt.transformer.iteration import Estimate, estimate, is_whole
from partopt.transformer.layouts import Found
from partopt.transformer.rates import PLANNED

BENCHMARK = "benchmark"  # recipes that trainers' authors publish times of
_HELPS = 2e-3  # of the time: what saves less is not worth a line
_TRIED = 0.01  # of the time: where less is expected a try is not worth it
_SAME = 1e-6  # of the time: what costs no more is not missed


class Switches:
    """The fastest layouts of a job with switches of its trainer on, in closed form.

    `levers` are those that are off and that the job leaves open; `found` are the layouts without.
    """

    def __init__(self, job: Job, found: Found) -> None:
        self._job = job
        self._trainer = TRAINERS.lookup(job.trainer)
        self._known = {name.replace("_", "-"): str(value) for name, value in job.facts.items()}
        self.levers = [lever for lever in self._trainer.levers if self._is_open(lever)]
        first = found.fitting[0] if found.fitting else None
        self._fastest: dict[frozenset[Lever], Estimate | None] = {frozenset(): first}

    def fastest(self, on: Iterable[Lever]) -> Estimate | None:
        """The fastest layout that fits with these switches on; None where none fits."""
        key = frozenset(on)
        if key not in self._fastest:
            self._fastest[key] = self._search(key)
        return self._fastest[key]

    def seconds(self, on: Iterable[Lever]) -> float:
        """Those of the fastest layout."""
        found = self.fastest(on)
        return found.seconds if found else math.inf

    def combine(self, among: Collection[Lever]) -> frozenset[Lever]:
        """Those `among` the switches that are fastest together; none of them adds nothing.

        All are on at once, and once more without those that cut blocks otherwise: of the rest none
        makes a layout slower.
        """
        cutting = {lever for lever in among if lever.facts[-1][0] == "ends"}
        tried = frozenset(among), frozenset(among) - cutting
        chosen = min(tried, key=self.seconds)
        found = self.fastest(chosen)
        for lever in reversed(self.levers):  # first those that change numbers
            if found and lever in chosen and not self._is_missed(lever, chosen, found):
                chosen -= {lever}
        return chosen

    def facts(self, on: Collection[Lever]) -> dict[str, str]:
        """What the switches set, in the trainer's order; not what it does by default."""
        stated = dict(fact for lever in self._trainer.levers if lever in on for fact in lever.facts)
        usual, choices = self._trainer.run_with({})[0], self._trainer.choices

        def is_usual(name: str, value: str) -> bool:
            sets = choices.get(name, {}).get(value, {})
            return bool(sets) and all(getattr(usual, key) == sets[key] for key in sets)

        return {name: value for name, value in stated.items() if not is_usual(name, value)}

    def worth(self, on: Collection[Lever], recipe: str = "") -> Worth | None:
        """What the switches are worth, as a `recipe` if that sets them; None if that is nothing."""
        found, before_s = self.fastest(on), self.seconds(())
        if found is None or found.seconds > (1 - _HELPS) * before_s:
            return None
        ordered = [lever for lever in self.levers if lever in on]
        return Worth(
            facts={"recipe": recipe} if recipe else self.facts(on),
            flags=[f"recipe={recipe}"] if recipe else [lever.flag for lever in ordered],
            iteration_s=found.seconds,
            saved=1 - found.seconds / before_s if before_s < math.inf else UNSET,
            layout=found.layout,
            changes_numbers=any(lever.changes_numbers for lever in on),
            verified=all(lever.verified for lever in on),
        )

    def alone(self) -> Iterator[Worth]:
        """What a recipe is worth that the trainer's authors publish times of; then every switch."""
        recipes = self._trainer.recipes.get(BENCHMARK, {})
        stated = recipes.get(self._training(()).model.name, {}).items()
        of_recipe = [lever for lever in self.levers if lever.facts[-1] in stated]
        rows = [self.worth(of_recipe, BENCHMARK)] if of_recipe else []
        rows += [self.worth([lever]) for lever in self.levers]
        yield from (row for row in rows if row)

    def _is_open(self, lever: Lever) -> bool:
        """Whether the job says nothing of the switch and nothing against it, and it is off."""
        if lever.facts[-1][0] in self._known:
            return False
        if any(self._known.get(name, value) != value for name, value in lever.facts):
            return False
        usual = self._training(())
        try:
            on = self._training([lever])
        except PartoptError:  # as of a kernel that the device is not known to have
            return False
        return (on.practice, on.engine) != (usual.practice, usual.engine)

    def _training(self, on: Iterable[Lever]) -> Training:
        return training_for(self._with(frozenset(on)))

    def _with(self, on: frozenset[Lever]) -> Job:
        return self._job.with_(facts={**self._job.facts, **self.facts(on)})

    def _search(self, on: frozenset[Lever]) -> Estimate | None:
        """With those that need several tensor parallel ranks, or on one rank without them."""
        alone, found = frozenset(lever for lever in on if lever.tp == 1), list[Estimate]()
        asked, layout = [self._with(on)], self._job.layout
        if alone != on and layout.tp in (None, 1):
            asked.append(self._with(alone).with_(layout=structs.replace(layout, tp=1)))
        for job in asked:
            with suppress(PartoptError):  # no layout has as many ranks
                found += estimate_layouts(job).fitting[:1]
        return min(found, key=lambda one: one.seconds, default=None)

    def _is_missed(self, lever: Lever, on: frozenset[Lever], found: Estimate) -> bool:
        """Whether the layout takes longer without the switch, or does not fit."""
        alone = self._training(on - {lever})
        without = estimate(alone, found.layout, batch_of(self._job))
        limit = self._job.limit_bytes or math.inf
        return without.memory_bytes > limit or without.seconds > found.seconds * (1 + _SAME)


def take_best(job: Job, numbers: bool = False) -> Job:
    """The job with the switches of its trainer that make it fastest, those it leaves open.

    With `numbers` also those that change what training computes.
    """
    found = estimate_layouts(job)
    switches = Switches(job, found)
    open_ = [lever for lever in switches.levers if numbers or not lever.changes_numbers]
    return job.with_(facts={**job.facts, **switches.facts(switches.combine(open_))})


def with_levers(job: Job, plan: Plan, found: Found) -> Plan:
    """The plan, which says what else would be faster: switches, alone and together; a layout."""
    switches = Switches(job, found)
    alone, together = [*switches.alone()], switches.worth(switches.combine(switches.levers))
    best_s = min((lever.iteration_s for lever in alone), default=math.inf)
    more = together is not None and together.iteration_s < (1 - _HELPS) * best_s
    return with_modelled(
        plan,
        levers=alone,
        together=together if together and more else UNSET,
        challenger=find_challenger(job, found),
    )


def find_challenger(job: Job, found: Found) -> Challenger | UnsetType:
    """The layout that is most worth a try beside the first, by the gain that is expected of it.

    It may need more than is planned with; and it may be slower as computed, for that may be wrong.
    """
    limit, best = job.limit_bytes, found.fitting[0] if found.fitting else None
    if best is None or limit is None:
        return UNSET
    assert isinstance(job.model, Transformer)

    def saved(candidate: Estimate) -> float:
        return 1 - candidate.seconds / best.seconds

    def chance(candidate: Estimate) -> float:
        return fits_chance(candidate.memory_bytes, limit / PLANNED)

    def gain(candidate: Estimate) -> float:
        return expected_gain(saved(candidate), chance(candidate))

    def is_usual(candidate: Estimate) -> bool:
        """Of experts people run small microbatches, and nothing made again."""
        rows = candidate.layout.microbatch or 1, best.layout.microbatch or 1
        return rows[0] <= rows[1] and candidate.layout.recompute == best.layout.recompute

    able = [one for one in found.lacking if not job.model.experts or is_usual(one)]
    able += [one for one in found.fitting if not _is_alike(one.layout, best.layout)]
    tried = max(able, key=gain, default=None)
    if tried is None or gain(tried) < _TRIED:
        return UNSET
    return Challenger(
        layout=tried.layout,
        iteration_s=tried.seconds,
        saved=saved(tried),
        memory_bytes=round(tried.memory_bytes),
        fits_chance=round(chance(tried), 2),
    )


def _is_alike(layout: Layout, other: Layout) -> bool:
    """Whether layouts differ in chunks alone, or in how many blocks are made again."""
    alike = structs.replace(layout, chunks=other.chunks, schedule=other.schedule)
    return is_whole(alike.recompute) == is_whole(other.recompute) and (
        structs.replace(alike, recompute=other.recompute) == other
    )
