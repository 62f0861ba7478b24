"""What simulations of plans of one's own say: what it was is what it is.

`tests/golden/simulations.jsonl` holds, a line a job, what every value of the documents adds up to.
Whoever changes one on purpose runs `pytest tests/simulator/test_recorded.py --update`, and says
why.
"""

from __future__ import annotations

from typing import Any

import pytest

import partopt as po
from partopt.errors import PartoptError
from tests.golden.jobs import JOBS, plan_by_hand
from tests.golden.records import beside, condensed, record_test
from tests.helpers import ROOT
from tests.simulator.plans import chunked

pytestmark = pytest.mark.slow

# what is other than planned, by a name
CONDITIONS: dict[str, dict[str, Any]] = {
    "varied": {"jitter": "5%", "draws": 4, "seed": 3},
    "with one slow": {"slow": {1: 1.5}},
    "deeper": {"warmup": "+1"},
    "of another batch": {"microbatches": 24},
    "eagerly": {"schedule": "1f1b-eager", "microbatches": 12},
    "in two parts": {"schedule": "zb-h1", "microbatches": 6},
}

COSTS: dict[str, Any] = {
    "forward": [1.0, 2.0, 1.5, 1.0, 3.0, 0.5],
    "backward": [2.0, 3.0, 3.5, 2.0, 4.0, 1.0],
    "cuts": [3, 1, 2, 0, 1],
    "weights": [8, 4, 1, 2, 16, 3],
}
CHUNKED = {
    "interleaved": chunked("interleaved", 2, 3, 8, d=2, **COSTS),
    "interleaved in two parts": chunked("interleaved-zb", 2, 3, 6, **COSTS),
    "in a vee": chunked("zbv", 3, 2, 6, **COSTS),
    "from both ends": chunked("dualpipe", 4, 2, 8, cuts=[3, 1, 2], weights=[8, 4, 1, 2]),
}
NAMES = [*JOBS, *CHUNKED]


def simulations(name: str) -> dict[str, object]:
    """The documents of a plan under all conditions that it may have, in short.

    Of the second one on they have what the first has not.
    """
    plan = CHUNKED[name] if name in CHUNKED else plan_by_hand(name)
    planned = po.simulate(plan)
    first, found = condensed(planned.document), dict[str, object]()
    for condition, options in CONDITIONS.items():
        try:
            own = condensed(po.simulate(plan, **options).document)
            found[condition] = beside(own, first)
        except PartoptError as error:
            found[condition] = error.message
    return {"as planned": first, **found, "flows": condensed(planned.flows)}


test_a_simulation_says_what_it_said = record_test(
    ROOT / "tests/golden/simulations.jsonl", NAMES, simulations
)
