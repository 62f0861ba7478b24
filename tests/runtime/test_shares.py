"""Replicas that share the optimizer's state train what replicas train that hold it all."""

import pytest

from partopt.errors import PartoptError
from partopt.runtime.run import check_plan
from tests.runtime.cases import with_shares
from tests.runtime.launched import outcome_of
from tests.runtime.plans import straight
from tests.runtime.share_runs import RESUMED, SAVED, SHARED

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """What came of the runs."""
    return outcome_of("tests.runtime.share_runs", tmp_path_factory)


@pytest.mark.parametrize("shard", SHARED)
def test_a_run_is_equal_to_one_process_and_to_replicas_without_shares(shard, outcome):
    document = outcome.runs[shard]
    assert document.check is not None and document.check.equal
    assert document.check.largest_error < 1e-5
    assert document.losses == pytest.approx(outcome.runs["none"].losses, rel=1e-6)
    assert len(set(document.losses)) == len(document.losses)


@pytest.mark.parametrize(("number", "case"), list(enumerate(RESUMED)), ids=map(str, RESUMED))
def test_it_goes_on_under_its_plan_and_under_others(number, case, outcome):
    first, shard, replicas = case
    whole = outcome.runs[first].losses[SAVED:]
    if (first, [2, 1]) == (shard, replicas):
        assert outcome.resumed[number] == whole
    assert outcome.resumed[number] == pytest.approx(whole, rel=1e-6)


def test_replicas_take_less_memory_by_what_the_other_holds(outcome):
    """As predicted: together half of Adam's two numbers for each of the first stage."""

    def saved(which):
        none, shared = (
            sum(getattr(rank, which).peak_memory_bytes for rank in outcome.runs[shard].ranks[:2])
            for shard in SHARED
        )
        return none - shared

    assert saved("predicted") > 40_000
    assert saved("measured") == pytest.approx(saved("predicted"), rel=0.1)


def test_shares_that_cannot_be_held_are_refused():
    line = straight("1f1b", [2, 1], 4)
    for plan, shard, reason in (
        (line, "gradients", "`shard=gradients` is simulated"),
        (line, "parameters", "`shard=parameters` is simulated"),
        (straight("pipedream", [4, 1, 3, 1], 0), "optimizer", "wait for each other"),
    ):
        passing = None if plan.microbatches else 24
        with pytest.raises(PartoptError, match=reason) as raised:
            check_plan(with_shares(plan, shard), passing)
        assert raised.value.code == "cannot-run"
        check_plan(plan, passing)
