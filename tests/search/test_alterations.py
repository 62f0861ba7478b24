"""No value of a plan can be changed unseen, but for those that leave everything it says true."""

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from partopt import documents
from partopt.cost.problem import problem_from_plan
from partopt.documents.plan import Plan
from partopt.errors import PartoptError
from partopt.planners import PLANNERS
from partopt.search.contest import plan_alone
from partopt.search.effort import SearchParams
from partopt.search.verify import verify
from partopt.trainers import TRAINERS
from tests.search.alterations import Alteration, alterations
from tests.search.plans import KINDS, Made

pytestmark = pytest.mark.any_effort

LABELS = {
    "topology.name",
    "topology.device.name",
    "topology.levels.name",
    "topology.levels.link",
}
LINKS = {
    f"topology.levels.{name}" for name in ("bandwidth_bytes_per_s", "links", "latency_s", "bus")
}
IN_EVERY_KIND = ("stages", "predicted", "communication", "topology", "engine")
WISHES = {f"request.{name}" for name in ("stages", "cut_at", "replication", "recompute", "costs")}

make: Callable[[str], Made] = cache(lambda kind: KINDS[kind]())


def read(document: dict[str, Any]) -> Plan | None:
    """The plan in a document; `None` where it is refused."""
    try:
        return Plan.parse(json.dumps(document).encode())
    except PartoptError:
        return None


def decides_the_same(plan: Plan, made: Made) -> bool:
    """Whether the plan's planner, asked what the plan records, makes the same of it."""
    asked = problem_from_plan(plan, made[1].profile)
    own = plan_alone(plan.planner, asked, SearchParams.at("quick"))[0]
    return (own.stages, own.certificate) == (made[0].stages, made[0].certificate)


def still_answers(plan: Plan, made: Made) -> bool:
    """Whether the plan is as good an answer to what it says was asked.

    Of `optimal` it is where it is verified: its bound is computed again from what is asked now.
    """
    mine = plan.planner == "optimal" or plan.planner not in PLANNERS
    return mine or decides_the_same(plan, made)


# Why a plan may say something else and be right, and what then holds of it.
HARMLESS: dict[str, Callable[[Alteration, Plan, Made], bool]] = {
    "nothing depends on a label of the topology": lambda which, plan, made: which.name in LABELS,
    "the memory holds the plan, and no better one": lambda which, plan, made: (
        which.name == "topology.device.memory_bytes"
        and (which.new is None or plan.peak_memory_bytes <= which.new)
        and still_answers(plan, made)
    ),
    "nothing that the plan sends is slower or faster": lambda which, plan, made: (
        which.name in LINKS and still_answers(plan, made)
    ),
    "priced and simulated again, the plan is the same on an engine that does that": (
        lambda which, plan, made: which.name.startswith("engine.")
    ),
    "trainers that run the schedule differ in what their engines do": lambda which, plan, made: (
        which.name == "trainer"
        and plan.schedule in (TRAINERS[which.new].schedules or [plan.schedule])
    ),
    "there are no replicas that could hold shares": lambda which, plan, made: (
        which.name == "layout.shard" and all(stage.replicas == 1 for stage in plan.stages)
    ),
    "no level has an all-reduce of its own to choose": lambda which, plan, made: (
        which.name == "topology.allreduce" and still_answers(plan, made)
    ),
    "runners-up are said to be unchecked; each is another plan": lambda which, plan, made: (
        which.name.startswith("runners_up.")
        and which.path[-1] in ("planner", "schedule", "shape", "peak_memory_bytes")
    ),
    "no layers are tied": lambda which, plan, made: (
        which.name == "request.tied" and not made[1].chain.tied
    ),
    "the plan is as requested, and the answer to that": lambda which, plan, made: (
        which.name in WISHES and not list(plan.find_deviations()) and still_answers(plan, made)
    ),
    "nothing is claimed of other shares": lambda which, plan, made: (
        which.name == "request.any_shard" and plan.certificate is None
    ),
    "nothing is claimed of a plan of a grid": lambda which, plan, made: (
        which.name == "planner" and which.new == "grid" and plan.certificate is None
    ),
    "another planner decides the same": lambda which, plan, made: (
        which.name == "planner"
        and {which.old, which.new} <= {"straight", "gpipe", "torchgpipe", "lingvo"}
        and decides_the_same(plan, made)
    ),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:lingvo")
@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_that_is_altered_anywhere_is_refused_or_fails_or_is_still_right(kind):
    """Numbers are more in every second kind, and less in the others; what every kind has, each
    alters every second value of.
    """
    plan, problem = make(kind)
    refused = failed = 0
    turn = list(KINDS).index(kind)
    factor = (1.001, 0.999)[turn % 2]
    for number, (which, document) in enumerate(
        alterations(json.loads(documents.encode(plan)), [factor])
    ):
        if which.path[0] in IN_EVERY_KIND and (number + turn // 2) % 2:
            continue
        altered = read(document)
        if altered is None:
            refused += 1
        elif not verify(altered, problem.profile).verified:
            failed += 1
        else:
            assert any(holds(which, altered, (plan, problem)) for holds in HARMLESS.values()), which
    assert refused > 30 and failed > 50 and refused + failed > 100


TOLD = [  # once let through
    ("optimal, tied", "request.tied", "together"),
    ("optimal, an iteration", "family", "nested"),
    ("optimal, an iteration", "layout.schedule", "naive"),
    ("optimal", "certificate.proof", None),
    ("optimal", "certificate.scope", None),
    ("pipedream", "certificate.proof", None),
    ("grid", "runners_up.samples_per_s", None),
    ("grid", "runners_up.period_s", None),
    ("grid", "runners_up.microbatch_size", None),
    ("grid", "runners_up.fits", None),
    ("manual", "planner", "grid"),
    ("manual", "planner", "gpipe"),
    ("grid", "planner", "manual"),
    ("grid", "planner", "gpipe"),
    ("grid, chunks", "planner", "optimal"),
    ("gpipe", "planner", "manual"),
    ("gpipe", "planner", "grid"),
    ("optimal", "planner", "pipedream"),
    ("straight", "planner", "optimal"),
    ("optimal", "trainer", "partoptx"),
    ("optimal", "trainer", "megatron"),
    ("grid, chunks", "trainer", "deepspeed"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name", "value"), TOLD)
def test_an_alteration_that_contradicts_the_plan_is_told(kind, name, value):
    """`None` stands for any other value."""
    plan, problem = make(kind)
    changed = [
        read(document)
        for which, document in alterations(json.loads(documents.encode(plan)))
        if which.name == name and value in (None, which.new)
    ]
    assert changed
    assert not any(each and verify(each, problem.profile).verified for each in changed)
