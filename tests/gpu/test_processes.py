"""Real processes under NCCL's rules: nothing hangs, and a step takes what its devices take."""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest
import torch

from partopt.errors import PartoptError
from partopt.runtime import postings
from partopt.runtime.context import Context
from partopt.runtime.engine import execute
from partopt.runtime.measured import measured_execution, stage_seconds
from partopt.simulator.execution import execute as simulate
from tests.gpu import nccl
from tests.gpu.nccl import rehearse
from tests.gpu.programs import posted_ahead
from tests.helpers import flat
from tests.runtime import sleeping
from tests.runtime.cases import cases, run_case
from tests.runtime.plans import straight
from tests.runtime.references import expected

CASES = {case.name: case for case in cases()}
SOME = ["1f1b on 2", "1f1b [1, 2, 1]", "gpipe on 4", "zbv on 4", "dualpipe on 4"]
SOME += ["interleaved-zb on 4", "pipedream [2, 1]", "serial messages", "tied [2, 2]"]
SOME += ["stale weights sharing"]
RANKS = 4


def train(context, case):
    return run_case(case, context, execute)


def train_all(context):
    return {name: train(context, CASES[name]) for name in SOME}


def train_at_once(context, case):
    """Without a use of the groups before, and with receives that keep to no sequence."""
    with (
        mock.patch.object(Context, "connect", lambda self: None),
        mock.patch.object(postings, "postings_of", posted_ahead(3)),
    ):
        return train(context, case)


@pytest.fixture(scope="module")
def trained():
    """What each rank was left with, by case, of one launch."""
    return rehearse(train_all, RANKS)


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_plans_train_under_nccls_rules(name, trained):
    weights, losses = expected(CASES[name])
    found = [own[name] for own in trained]
    assert {n: loss for each in found for n, loss in each.losses.items()} == pytest.approx(losses)
    assert {s for each in found for s in each.weights} == {*range(len(weights))}
    for each in found:
        for s, own in each.weights.items():
            assert all(
                (one - other).abs().max() < 1e-9 for one, other in zip(own, weights[s], strict=True)
            )


@pytest.mark.slow
def test_receives_ahead_in_groups_that_nobody_used_hang():
    case = CASES[SOME[0]]
    with pytest.raises(PartoptError) as raised:
        rehearse(partial(train_at_once, case=case), case.plan.world_size, wait_s=4.0)
    assert "in vain" in str(raised.value) or "lost the connection" in str(raised.value)


SECONDS = {"forward": [0.01, 0.01], "backward": [0.02, 0.02], "cuts": [1000]}
PLAN = straight("1f1b", [1, 1], 8, **SECONDS)
SHARED = straight(
    "1f1b", [2, 1], 8, weights=[4_000_000, 0], topology=flat(3, nccl.BYTES_PER_S), **SECONDS
)


def run_asleep(context, plan):
    """A step whose stages launch what they do, and return."""
    device = torch.cuda.current_stream().device
    with mock.patch.object(sleeping, "_sleep", device.launch):
        return execute(plan, lambda s: sleeping.SleepingStage(plan, s), context=context)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [PLAN, SHARED])
def test_a_record_has_the_seconds_of_the_device_not_of_its_launches(plan):
    records = rehearse(partial(run_asleep, plan=plan), plan.world_size)
    measured, predicted = measured_execution(plan, records), simulate(plan)
    # what a busy host of this test launches late makes a step longer, and none shorter
    assert measured.makespan_s > 0.99 * predicted.makespan_s
    for row, stage in zip(stage_seconds(plan, [records], None), plan.stages, strict=True):
        assert 0.99 * stage.forward_s < row.forward_s < 2 * stage.forward_s
        assert 0.99 * stage.backward_s < row.backward_s < 2 * stage.backward_s
    sent = measured.timeline.transfers
    assert (sent.end >= sent.start).all()
    assert (sent.end - sent.start).max() >= nccl.LATENCY_S * 0.9
    if plan is SHARED:
        (start,), (end,) = measured.timeline.collectives.start, measured.timeline.collectives.end
        takes_s = nccl.LATENCY_S + 4_000_000 / nccl.BYTES_PER_S
        assert takes_s * 0.9 <= end - start
