"""The idle shares in closed form against the simulator."""

import msgspec
import pytest

from partopt.cost.plan import under
from partopt.schedules import SCHEDULES
from partopt.schedules.layout import CHUNKS, LOOPED, ranks_of
from partopt.simulator import execute
from partopt.simulator.advice import Pipeline, idle_share, pipeline_of
from tests.report.timelines import plan_of

FREE = {"optimizer_s": 0.0, "parameter_bytes": 0, "input_bytes": 0, "output_bytes": 0}
SYNCHRONOUS = [name for name, entry in SCHEDULES.items() if not entry.asynchronous]


@pytest.mark.parametrize("d", [1, 2])
@pytest.mark.parametrize("name", [name for name in SYNCHRONOUS if name != "1f1b-eager"])
def test_equal_stages_idle_as_the_closed_form_says(name, d):
    shape = SCHEDULES[name].shape
    v = CHUNKS.get(shape, 3 if shape == LOOPED else 1)
    M = 12 * d
    plan = under(plan_of(name, ranks_of(shape, 4, v, d), M, **FREE))
    assert pipeline_of(plan) == Pipeline(4, v, 12)
    assert execute(plan).bubble == pytest.approx(idle_share(name, Pipeline(4, v, 12)), abs=1e-9)


def test_unequal_replicas_fill_as_one_pipeline_of_all_devices():
    plan = under(plan_of("1f1b", [[0, 1, 2], [3]], 30, **FREE))
    wide = msgspec.structs.replace(plan.stages[0], compute_s=9e-3, forward_s=3e-3, backward_s=6e-3)
    plan = msgspec.structs.replace(plan, stages=[wide, plan.stages[1]])
    assert pipeline_of(plan) == Pipeline(4, 1, 30)
    assert execute(plan).bubble == pytest.approx(idle_share("1f1b", Pipeline(4, 1, 30)), abs=0.03)
