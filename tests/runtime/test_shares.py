"""Replicas that hold shares of the optimizer's state train what replicas train that hold it all."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from partopt.documents.plan import Plan
from partopt.errors import PartoptError
from partopt.profiler.source import find_model
from partopt.runtime.optimizers import OPTIMIZERS, steps_rows_alone
from partopt.runtime.own_loop import train_with
from partopt.runtime.run_checks import check_optimizer
from partopt.runtime.scattering import places_by_format, rows_of
from partopt.runtime.shares import check_shares
from partopt.runtime.torch_engine import can_say
from partopt.runtime.training import Training
from tests.runtime.engine_cases import with_shares
from tests.runtime.launched import outcome_of
from tests.runtime.plans import straight
from tests.runtime.share_runs import RESUMED, SAVED, SHARED, TEXT, Outcome


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """What came of the runs."""
    found: Outcome = outcome_of("tests.runtime.share_runs", tmp_path_factory)
    return found


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


def test_a_rank_takes_less_memory_by_what_the_other_holds(outcome):
    """As predicted: of Adam's two numbers for each of the first stage half."""
    first = {shard: outcome.runs[shard].ranks[0] for shard in SHARED}
    measured, predicted = (
        {shard: getattr(rank, which).peak_memory_bytes for shard, rank in first.items()}
        for which in ("measured", "predicted")
    )
    saved = predicted["none"] - predicted["optimizer"]
    assert saved > 40_000
    assert measured["none"] - measured["optimizer"] == pytest.approx(saved, rel=0.1)


def test_rows_are_shared_out_as_torch_chunks_them():
    for shape in [(5, 3), (4,), (1, 2), (7, 2, 2)]:
        tensor = torch.randn(shape)
        for r in (2, 3, 4):
            rows = [rows_of(tensor, k, r) for k in range(r)]
            for own, chunk in zip(rows, tensor.chunk(r), strict=False):
                assert torch.equal(own, chunk)
            assert torch.equal(torch.cat(rows), tensor)
    assert [rows_of(torch.ones(()), k, 2).numel() for k in range(2)] == [1, 0]


def test_parts_have_one_format_and_are_full_with_a_bucket():
    tensors = [torch.zeros(2), torch.zeros(3).half(), torch.zeros(1), torch.zeros(4)]
    assert places_by_format(tensors) == [[0, 2, 3], [1]]
    assert places_by_format(tensors, 9) == [[0, 2], [1], [3]]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_that_look_at_other_rows_are_known(name):
    kind, options = OPTIMIZERS[name]
    alone = steps_rows_alone(lambda parameters: kind(parameters, lr=0.1, **options))
    assert alone == (name != "adafactor")
    assert not steps_rows_alone(lambda parameters: torch.optim.Muon(parameters))


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (with_shares(straight("1f1b", [2, 1], 4), "parameters"), "`shard=parameters`"),
        (with_shares(straight("pipedream", [4, 1, 3, 1], 0), "optimizer"), "wait for each other"),
    ],
)
def test_shares_that_cannot_be_held_are_refused(plan: Plan, reason: str):
    with pytest.raises(PartoptError, match=reason) as raised:
        check_shares(plan, None if plan.microbatches else 24)
    assert raised.value.code == "cannot-run"
    check_shares(replace(plan, memory_rules=replace(plan.memory_rules, shard="none")), 24)


def test_torch_adds_up_whole_gradients_alone():
    plan = straight("1f1b", [2, 2], 4)
    assert can_say(with_shares(plan, "optimizer")) is None
    assert "in shares" in str(can_say(with_shares(plan, "gradients")))


def test_an_optimizer_that_looks_at_other_rows_and_a_loop_of_ones_own_are_refused(tmp_path):
    model = tmp_path / "model.py"
    model.write_text(TEXT)
    plan = with_shares(replace(straight("1f1b", [2, 1], 4), optimizer="adafactor"), "optimizer")
    with pytest.raises(PartoptError, match="the optimizer adafactor steps a row"):
        check_optimizer(Training(plan, find_model(model), 4))
    with pytest.raises(PartoptError, match="a loop of one's own"):
        train_with(print, plan, model)
