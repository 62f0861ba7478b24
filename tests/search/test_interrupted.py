"""Ctrl-C in a search: what was found until then is a whole answer, or nothing was found.

It arrives at a drawn report of progress, which every part of a search gives.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import partopt as po
from partopt.cost.problem import Progress
from partopt.documents.plan import Plan
from partopt.documents.profile import Profile
from partopt.errors import Interrupted, PartoptError
from partopt.search import improve
from tests.helpers import flat, measurement, profile_of, two_level, uniform_profile

pytestmark = [pytest.mark.slow, pytest.mark.any_effort]

DRAWS = 5  # interruptions of each search


class Reports:
    """Progress that counts its reports, and is interrupted at one of them."""

    def __init__(self, last: int | None = None) -> None:
        self.count, self.last = 0, last

    def __call__(self, what: str, done: int, total: int) -> None:
        self.count += 1
        if self.count == self.last:
            raise KeyboardInterrupt


def interruptions(search: Callable[[Progress], Any]) -> Iterator[Any]:
    """What is found until drawn reports and the last, None for nothing; then the whole answer."""
    whole = Reports()
    answer = search(whole)
    drawn = random.Random(0).sample(range(1, whole.count + 1), min(DRAWS, whole.count))
    for last in sorted({*drawn, whole.count}):
        try:
            search(Reports(last))
        except Interrupted as stopped:
            yield stopped.found
        except KeyboardInterrupt:
            yield None
        else:
            pytest.fail(f"the search does not end at report {last} of {whole.count}")
    yield answer


def sized(*sizes: int) -> Profile:
    """A model of eight unequal layers, measured at several microbatch sizes."""
    forward = [1.0, 2.0, 1.5, 3.0, 1.0, 2.5, 2.0, 1.0]
    return profile_of([measurement([s * x for x in forward], microbatch_size=s) for s in sizes])


CLUSTER = two_level(2, 4, 1e9, 1e8)
QUESTIONS: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b", "global_batch": 32},
    "asynchronous": {"schedule": "pipedream"},
    "interleaved": {"schedule": "interleaved", "global_batch": 32},
    "auto": {"schedule": "auto", "global_batch": 32},
    "optimal": {"schedule": "1f1b", "global_batch": 32, "planner": "optimal"},
    "pipedream": {"planner": "pipedream"},
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_plan_that_is_found_until_then_is_a_whole_one(name: str) -> None:
    profile = sized(1, 2)
    job = po.Job(profile, CLUSTER, effort="quick", **QUESTIONS[name])
    *until_then, whole = interruptions(lambda tell: po.solve(job, tell))
    found = [result for result in until_then if result is not None]
    assert found
    for result in found:
        check(result.document, profile)
        assert result.plan.predicted.samples_per_s <= whole.plan.predicted.samples_per_s * 1.0001
        assert result.plan in result.by_size


def check(plan: Plan, profile: Profile) -> None:
    """A plan is what `partopt show --verify` accepts, and is read as it was written."""
    verification = po.verify(plan, profile)
    assert verification.verified, verification.checks


def test_an_interrupted_comparison_has_the_rows_until_then() -> None:
    job = po.Job(sized(1, 2), CLUSTER, effort="quick", schedule="1f1b", global_batch=32)
    for planners in ((), ("optimal", "gpipe")):
        *until_then, (whole, _) = interruptions(
            lambda tell, planners=planners: po.compare(job, planners, None, tell)
        )
        rows = {row.planner for row in whole.rows}
        found = [pair[0] for pair in until_then if pair is not None]
        assert found
        assert all({row.planner for row in table.rows} <= rows for table in found)


def test_planners_before_the_one_that_is_interrupted_have_their_rows() -> None:
    job = po.Job(sized(1), CLUSTER, effort="quick", schedule="1f1b", global_batch=32)
    *until_then, _ = interruptions(
        lambda tell: po.compare(job, ["gpipe", "optimal", "data_parallel"], None, tell)
    )
    rows = [[row.planner for row in pair[0].rows] for pair in until_then if pair is not None]
    assert all("gpipe" in found for found in rows)
    assert any({"gpipe", "optimal"} <= set(found) for found in rows)


def test_an_interrupted_scaling_has_the_rows_that_are_finished() -> None:
    job = po.Job(uniform_profile(8), flat(8), effort="quick", schedule="1f1b", global_batch=32)
    *until_then, whole = interruptions(lambda tell: po.scale(job, [2, 4, 8], False, tell))
    found = [table for table in until_then if table is not None]
    assert found
    assert all(table.rows == whole.rows[: len(table.rows)] for table in found)


def test_a_trainers_plan_until_then_is_one_that_it_can_say() -> None:
    profile = po.Profile.load("llama-7b.h100-estimated.bfloat16")
    cluster = po.Topology.load("dgx-h100", 1)
    job = po.Job(profile, cluster, effort="quick", schedule="1f1b", global_batch=16)
    found = interruptions(lambda tell: po.solve(job.with_(trainer="megatron"), tell))
    plans = [result.document for result in found if result is not None]
    assert len(plans) > 1
    for plan in plans:
        check(plan, profile)
        assert po.export_plan(plan, "megatron", stem="plan")


ASKED = po.Job(
    model=po.find_transformer("llama3-8b"),
    topology=po.Topology.load("dgx-h100", 1),
    trainer="megatron",
    global_batch=32,
    sequence=2048,
    facts={},
)


def test_a_layout_until_then_answers_the_question_that_fixes_it() -> None:
    found = interruptions(lambda tell: po.solve(ASKED, tell))
    plans = [result.plan for result in found if result is not None]
    assert len(plans) > 1
    for plan in plans:
        check(plan, po.find_profile(plan))


def test_interrupted_layouts_have_the_rows_that_are_finished() -> None:
    *until_then, whole = interruptions(lambda tell: po.scale(ASKED, [4, 8], False, tell))
    found = [table for table in until_then if table is not None]
    assert found
    assert all(table.rows == whole.rows[: len(table.rows)] for table in found)


def test_a_second_interruption_keeps_what_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the plan of what is being searched is made, which takes a while."""
    job = po.Job(sized(1, 2), CLUSTER, effort="quick", schedule="auto", global_batch=32)

    def again(*_: object) -> None:
        raise KeyboardInterrupt

    whole = Reports()
    po.solve(job, whole)
    monkeypatch.setattr("partopt.search.contest.Contest.plans_so_far", again)
    with pytest.raises(Interrupted) as stopped:
        po.solve(job, Reports(whole.count - 1))
    check(stopped.value.found.document, job.profile)


def test_a_plan_that_is_too_long_to_be_simulated_whole_is_none(monkeypatch):
    """A search of a million devices was interrupted, and said that it had too many actions."""

    def too_long(self):
        raise PartoptError("too long", code="too-many-actions")

    for search in (improve.Improvement, improve.GridSearch):
        monkeypatch.setattr(search, "plan_so_far", too_long)
    job = po.Job(sized(1), two_level(2, 2), schedule="1f1b", microbatches=8)
    found = [*interruptions(lambda progress: po.solve(job, progress))]
    assert None in found[:-1]
    assert found[-1].plan.fits
