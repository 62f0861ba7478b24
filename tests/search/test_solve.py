"""Plans of named planners beside plain data parallelism."""

import pytest

import partopt as po
from tests.helpers import chain_profile, flat, uniform_profile

UNEVEN = chain_profile([1e-3] * 4 + [5e-3], output_bytes=[0] * 5, parameter_bytes=[10**6] * 5)


def solved(profile, planner, cluster, **options):
    if planner == "manual":
        options |= {"cuts": [2]}
    return po.solve(po.Job(profile, cluster, planner=planner, **options))


def told(result):
    return [note for note in result.notes if note.code == "data-parallel-faster"]


@pytest.mark.parametrize(
    "planner", ["gpipe", "torchgpipe", "lingvo", "straight", "manual", "pipedream"]
)
@pytest.mark.parametrize("schedule", [{}, {"schedule": "1f1b", "microbatches": 16}])
def test_data_parallelism_is_told_of_where_it_is_faster(planner, schedule):
    result = solved(UNEVEN, planner, flat(4, 100e9), **schedule)
    beside = po.solve(po.Job(UNEVEN, flat(4, 100e9), planner="data_parallel", **schedule))
    speedup = beside.plan.predicted.samples_per_s / result.plan.predicted.samples_per_s
    notes = told(result)
    assert bool(notes) == (speedup > 1.01)
    if notes:
        assert notes[0].fields == {"planner": planner, "speedup": speedup}
        assert notes[0].text == (
            f"data_parallel is {speedup - 1:.1%} faster: `planner=data_parallel`"
        )
    assert notes or planner == "pipedream"


def test_it_is_not_told_of_where_it_does_not_fit_or_is_slower():
    heavy = chain_profile([1e-3] * 4 + [5e-3], parameter_bytes=[10**6] * 5)
    whole = 4 * 5 * 10**6
    assert told(solved(heavy, "gpipe", flat(4, 100e9, memory_bytes=whole - 1))) == []
    [note] = told(solved(heavy, "gpipe", flat(4, 100e9, memory_bytes=10 * whole)))
    assert note.text.endswith("faster and fits: `planner=data_parallel`")
    assert told(solved(uniform_profile(8), "straight", flat(4, 1e6))) == []


def test_nor_beside_the_other_planners():
    for planner in ("data_parallel", "optimal", None):
        assert told(solved(UNEVEN, planner, flat(4, 100e9))) == []


def test_the_command_line_warns(partopt, profile_file, topology_file):
    cluster = topology_file(flat(4, 100e9, memory_bytes=10**12))
    outcome = partopt("plan", profile_file(UNEVEN), "--topology", cluster, "--planner", "gpipe")
    assert outcome.code == 0
    assert "% faster and fits: --planner data_parallel" in outcome.err
