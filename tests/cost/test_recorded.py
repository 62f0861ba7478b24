"""What plans of one's own take, value by value: what it was is what it is.

`tests/golden/prices.jsonl` holds, a line a job, what every value of a plan adds up to. Whoever
changes one on purpose runs `pytest tests/cost/test_recorded.py --update`, and says why.
"""

from __future__ import annotations

import msgspec

from partopt.cost.pricing import under
from partopt.documents.plan import Plan
from tests.golden.jobs import JOBS, plan_by_hand
from tests.golden.records import beside, condensed, record_test
from tests.helpers import ROOT

GIVEN = {"schema", "profile", "topology"}
# in place of the plan's own: the schedule and microbatches of an iteration
SCHEDULES = [("1f1b-eager", 8), ("gpipe", 24), ("zb-h1", 12), ("pipedream", None)]


def price(name: str) -> dict[str, object]:
    """A plan of one's own cuts and replicas in short, and what others have under other schedules.

    Asynchronous ones are not for buffers of all microbatches.
    """
    plan = plan_by_hand(name)
    first, found = short(plan), dict[str, object]()
    for schedule, M in SCHEDULES:
        if M is not None or plan.engine.buffers == "flight":
            found[schedule] = beside(short(under(plan, schedule, M)), first)
    return {"own": first, **found}


def short(plan: Plan) -> dict[str, object]:
    document = msgspec.to_builtins(plan)
    return condensed({key: own for key, own in document.items() if key not in GIVEN})


test_a_plan_takes_what_it_took = record_test(ROOT / "tests/golden/prices.jsonl", JOBS, price)
