import pytest
from msgspec import UNSET, structs

from partopt import solve
from partopt.documents.topology import Topology
from partopt.errors import PartoptError
from partopt.importers.hugging_face import load_transformer
from partopt.job import Job
from partopt.report.plans_text import render_scaling
from partopt.search import scaling
from partopt.search.scaling import scale_plans
from tests.helpers import flat, two_level, uniform_profile


def scaled(topology, devices, weak=False, **options):
    return scale_plans(Job(uniform_profile(8), topology, **options), devices, weak)


@pytest.mark.slow
def test_each_plan_is_the_best_on_its_own_number_of_devices():
    plans = scaled(two_level(2, 4), [1, 2, 4, 6])
    assert [plan.topology.devices for plan in plans] == [1, 2, 4, 6]
    assert [[level.size for level in plan.topology.levels] for plan in plans] == [
        [1, 1],
        [2, 1],
        [2, 2],
        [2, 3],
    ]
    for plan in plans:
        assert plan == solve(Job(uniform_profile(8), plan.topology)).plan


def test_a_planner_that_is_named_makes_every_plan():
    plans = scaled(flat(4), [2, 4], planner="straight")
    assert [plan.planner for plan in plans] == ["straight"] * 2


def test_weak_scaling_grows_the_batch_with_the_devices():
    plans = scaled(flat(4), [2, 4], weak=True, schedule="1f1b", microbatches=8)
    assert [plan.microbatches for plan in plans] == [8, 16]


def test_a_batch_that_is_no_multiple_of_the_first_devices_grows_where_it_is_whole():
    """6 on 4 devices are 9 on 6 and 12 on 8, and no whole number on 5."""
    given = {"weak": True, "schedule": "1f1b", "microbatches": 6}
    plans = scaled(flat(8), [4, 6, 8], **given)
    assert [plan.microbatches for plan in plans] == [6, 9, 12]
    with pytest.raises(PartoptError, match="grows to no whole number from 4 to 5") as refused:
        scaled(flat(8), [4, 5], **given)
    assert refused.value.hint == "choose a multiple of 4: `microbatches=8`"


def test_numbers_are_checked_before_any_plan_is_made(monkeypatch):
    monkeypatch.setattr(scaling, "solve", lambda *_, **__: pytest.fail("it planned first"))
    with pytest.raises(PartoptError, match="9 devices do not fill"):
        scaled(two_level(8, 4), [8, 9])
    for wrong in ([2.5], [0, 2], [2, 2], [4, 2], []):
        with pytest.raises(PartoptError, match="must be ascending numbers of devices"):
            scaled(flat(4), wrong)
    with pytest.raises(PartoptError, match="pipedream does not look at it"):
        scaled(flat(4), [2], planner="pipedream", stages=2)


def test_a_planner_that_refuses_a_number_says_so():
    with pytest.raises(PartoptError, match="gpip"):
        scaled(flat(4), [2], planner="gpip")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama3-8b", "qwen3-30b-a3b"])
def test_devices_that_make_a_batch_slower_are_told_to_be_left_idle(model):
    """27 is no divisor of the batch: replicas on 216 devices are few, and pipelines long."""
    job = Job(
        load_transformer(model),
        Topology.load("gb200-nvl72", 3),
        trainer="megatron",
        global_batch=128,
        sequence=4096,
    )
    found = scaling.scale(job, [72, 144, 216])
    few, some, many = found.rows
    assert few.faster_on is UNSET and some.faster_on is UNSET and many.faster_on == 144
    slower = 1 - many.samples_per_s / some.samples_per_s
    page = " ".join(render_scaling(found).split())
    assert f"{slower:.1%} slower than 144 of them, the others idle" in page
    assert slower > 0.01
    without = structs.replace(many, samples_per_s=0.995 * some.samples_per_s)
    assert scaling._faster_on(without, [few, some, without]) is UNSET
    larger = structs.replace(many, microbatches=2 * many.microbatches)
    assert scaling._faster_on(larger, [few, some, larger]) is UNSET
