"""The optimal planner beside the others, on everything that is shipped."""

from __future__ import annotations

import math

import pytest

from partopt import planners
from partopt.cost.iteration import objective_s
from partopt.cost.problem import Problem, problem_of
from partopt.documents import shipped
from partopt.documents.profile import Profile
from partopt.documents.topology import Topology
from partopt.errors import PartoptError
from partopt.planners import PLANNERS
from tests.helpers import ROOT
from tests.planners.exhaustive import holds
from tests.planners.problems import proven

OTHERS = ("pipedream", "gpipe", "straight", "data_parallel")  # the planners that need nothing more
SCHEDULES = [
    ("pipedream", None),
    ("pipedream-2bw", None),
    ("1f1b", 16),
    ("1f1b-eager", 16),
    ("gpipe", 16),
]
# of the estimates, which are chains of equal blocks, one stands for all
PROFILES = sorted(
    path.name.removesuffix(".json")
    for path in (ROOT / "profiles").glob("*.json")
    if "-estimated." not in path.name or path.name.startswith("vit-g.h100")
)
TOPOLOGIES = sorted(path.stem for path in (ROOT / "topologies").glob("*.yaml"))


def check(given: Problem) -> None:
    """No other plan that fits is faster by the formulas; there is none where the planner says
    so.
    """
    others = [planners.decide(name, given).partition for name in OTHERS]
    fitting = [objective_s(other, given) for other in others if holds(other, given)]
    try:
        best, certificate = proven(planners.decide("optimal", given))
    except PartoptError:
        assert fitting == []
        return
    assert holds(best, given)
    assert certificate.status == "optimal"
    assert objective_s(best, given) <= min(fitting, default=math.inf) * (1 + 1e-9)


@pytest.mark.parametrize("schedule, microbatches", SCHEDULES)
@pytest.mark.parametrize("name", PROFILES)
def test_on_what_is_shipped(name, schedule, microbatches):
    """Every other cluster has a limit, and under the next schedule the others."""
    model = Profile.load(shipped.find(name, "profiles"))
    first = SCHEDULES.index((schedule, microbatches))
    for n, cluster in enumerate(TOPOLOGIES, first):
        memory_bytes = 2 * 10**9 if n % 2 else None
        on = Topology.load(shipped.find(cluster, "topologies"))
        check(
            problem_of(
                model, on, schedule=schedule, microbatches=microbatches, memory_bytes=memory_bytes
            )
        )


def check_the_best(partopt, *arguments: object) -> None:
    """The plan of `optimal`, which is taken by default, is no slower, simulated, than that of each
    other that fits.
    """
    best = partopt("plan", *arguments, "--json").document
    assert best["planner"] == "optimal"
    alone = partopt("plan", *arguments, "--planner", "optimal", "--json").document
    del best["runners_up"], alone["runners_up"]  # beside a named planner stand fewer
    assert alone == best
    for name in PLANNERS.keys() - {"manual", "optimal"}:
        named = partopt("plan", *arguments, "--planner", name, "--json")
        if named.code == 0:
            # they may have other microbatch sizes
            best_s, named_s = (
                found["predicted"]["period_s"] / found["microbatch_size"]
                for found in (best, named.document)
            )
            assert best_s <= named_s


@pytest.mark.parametrize("cluster", ["v100-pcie", "dgx-a100"])
@pytest.mark.parametrize("name", ["gpt.cpu.float32", "vgg16.cpu.float32", "bert-base.cpu.float32"])
def test_it_is_no_slower_than_each_on_what_is_shipped(partopt, name, cluster):
    check_the_best(partopt, name, "--topology", cluster)
    check_the_best(partopt, name, "--topology", cluster, "--schedule", "1f1b", "--microbatches", 16)


@pytest.mark.parametrize("name", [name for name in PROFILES if "v100-published" in name])
def test_it_is_no_slower_than_each_on_the_published_graphs(partopt, name):
    check_the_best(partopt, name, "--topology", "v100-pcie")
