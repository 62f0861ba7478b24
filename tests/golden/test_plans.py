"""The plans of the shipped profiles, value by value: what they were is what they are.

`plans.jsonl` holds, a line a command, what `partopt plan` gave when it was written. Whoever changes
a value on purpose runs `pytest tests/golden --update`, which writes the lines that differ, and says
why. The plans of three models know nothing of engines: rings alone, messages that overlap,
gradients that are exchanged behind the backward.
"""

import json

import pytest

from tests.golden.records import differences, leaves
from tests.helpers import ROOT

PLANS = ROOT / "tests/golden/plans.jsonl"
LINES = [json.loads(line) for line in PLANS.read_text().splitlines()]
RECORDED = [
    *("planner", "family", "layout", "microbatches", "noam", "optimizer", "stages"),
    *("predicted", "certificate"),
]


@pytest.fixture(scope="module")
def record(request):
    """Records what a line gives now, if it differs; None where nothing is updated."""
    if not request.config.getoption("--update"):
        yield None
        return
    lines = list(LINES)
    yield lines.__setitem__
    PLANS.write_text("".join(json.dumps(line) + "\n" for line in lines))


def folded(plan):
    """What is recorded: the first rank, the last and their number in place of the ranks."""
    for stage in plan["stages"]:
        ranks = stage["ranks"]
        stage["ranks"] = [ranks[0], ranks[-1], len(ranks)]
    return {key: value for key, value in plan.items() if key in RECORDED}


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(LINES)), ids=lambda n: " ".join(LINES[n]["arguments"]))
def test_a_plan_is_what_it_was(partopt, number, record, monkeypatch):
    monkeypatch.chdir(ROOT)  # where the paths of the arguments begin
    line = LINES[number]
    outcome = partopt("plan", *line["arguments"], "--json")
    now = {"arguments": line["arguments"], "exit": outcome.code}
    if outcome.code == 0:
        now["plan"] = folded(outcome.document)
    recorded = leaves(line)  # older lines lack what plans have had since
    differ = {path: pair for path, pair in differences(now, line).items() if path in recorded}
    if record and differ:
        record(number, now)
    else:
        assert differ == {}
