"""What an engine refuses before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from partopt.documents.plan import Plan
from partopt.errors import PartoptError
from partopt.runtime.context import Context, Progress
from partopt.runtime.engine import execute
from partopt.runtime.messages import check_cuts
from partopt.runtime.updates import Tied
from tests.runtime.plans import straight
from tests.runtime.sleeping import SleepingStage

SYNCHRONOUS = straight("1f1b", [2, 1], 4, cuts=[100])
ASYNCHRONOUS = straight("pipedream", [2, 1], 0)


class Alone(Context):
    """A process that hears nothing but itself."""

    def gather(self, value: Any) -> list[Any]:
        return [value]


def alone(ranks: int = 4) -> Context:
    return Alone(0, ranks, torch.device("cpu"), Progress())


@pytest.mark.parametrize(
    ("plan", "ranks", "options", "code"),
    [
        (SYNCHRONOUS, 2, {}, "too-few-ranks"),
        (SYNCHRONOUS, 3, {"microbatches": 4}, "conflicting-options"),
        (ASYNCHRONOUS, 3, {}, "conflicting-options"),
        (ASYNCHRONOUS, 3, {"microbatches": 4, "tied": [Tied("w", [0, 1, 2])]}, "cannot-run"),
    ],
)
def test_what_cannot_run_is_refused(plan: Plan, ranks: int, options: dict[str, Any], code: str):
    with pytest.raises(PartoptError) as raised:
        execute(plan, lambda s: SleepingStage(plan, s), context=alone(ranks), **options)
    assert raised.value.code == code
    assert raised.value.hint


def test_stages_that_disagree_on_a_cut_are_refused():
    other = straight("1f1b", [2, 1], 4, cuts=[104])
    stages = {0: SleepingStage(SYNCHRONOUS, 0), 1: SleepingStage(other, 1)}
    with pytest.raises(PartoptError, match=r"stage 0 sends \[100\].*stage 1 receives \[104\]"):
        check_cuts(stages, alone())
    check_cuts(stages | {1: SleepingStage(SYNCHRONOUS, 1)}, alone())
