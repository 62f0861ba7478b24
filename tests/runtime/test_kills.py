"""Random faults in real runs, one of each kind: each is named, ends soon, and leaves nothing."""

import json
from collections import Counter

import pytest

from tests.forked import run_forked
from tests.helpers import ROOT

COUNT = 12


@pytest.mark.slow
@pytest.mark.usefixtures("heeded_signals")
def test_random_faults():
    words = ["--count", str(COUNT), "--seed", "2", "--json"]
    done = run_forked(str(ROOT / "benchmarks/kills.py"), words, ROOT)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    for each in outcomes:
        assert each["named"]  # and the exit code is its
        assert each["seconds"] <= 30
        assert not each["left"]
        assert not each["broken"]  # the last checkpoint
    kinds = Counter(each["fault"]["kind"] for each in outcomes)
    assert len(kinds) == 12 and set(kinds.values()) == {COUNT // 12}
    found = {(each["fault"]["engine"], each["fault"]["saves"]) for each in outcomes}
    assert found == {(engine, saves) for engine in ("torch", "partopt") for saves in (True, False)}
    assert sum(each["steps"] > 0 for each in outcomes) > COUNT // 4  # had a checkpoint to break
