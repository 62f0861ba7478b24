"""Whatever is in a file, partopt reads it, says what is wrong with it, or says that its answer is
no; it never breaks.
"""

import contextlib
import json

import pytest
import yaml
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from benchmarks.fuzz import GRAPH, change_text, change_values
from partopt import documents, planners
from partopt.cost.problem import problem_of
from partopt.documents import plan
from partopt.documents.plan import Plan
from partopt.documents.profile import Profile
from partopt.documents.topology import Topology
from partopt.errors import PartoptError
from partopt.importers import pipedream
from partopt.report import plan_text as plan_report
from partopt.report import profile_text as profile_report
from partopt.report.clusters import render_topology
from partopt.search.verify import verify
from tests.examples import examples
from tests.helpers import chain_profile, flat, two_level

quick = examples(100, suppress_health_check=[HealthCheck.too_slow])

PROFILE = json.loads(
    documents.encode(
        chain_profile(
            [1e-3] * 3,
            output_bytes=[9] * 3,
            parameter_bytes=[8] * 3,
            tensors=[(0, [1, 2], 9)],
            stash_groups=[([0, 2], 7)],
            shared=[("tied", [0, 1], 5)],
        )
    )
)
PLANNED = Profile.parse(json.dumps(PROFILE).encode())
PLAN = json.loads(documents.encode(planners.plan("gpipe", problem_of(PLANNED, two_level(2, 2)))))
TOPOLOGY = yaml.safe_load(two_level(2, 2, outer_latency=1e-6, memory_bytes=10**9).dump())


def mutated(original):
    """The document with one to three changes."""
    return st.randoms(use_true_random=False).map(
        lambda random: change_values(original, random, random.randint(1, 3))
    )


def edited(text):
    """The text with up to three changes."""
    return st.randoms(use_true_random=False).map(
        lambda random: change_text(text, random, random.randint(0, 3))
    )


def profile_or_error(content):
    """Read a profile; one that is accepted can be shown, written, and planned by every planner or
    refused by it.
    """
    try:
        loaded = Profile.parse(content)
    except PartoptError as error:
        assert all(part.message for part in error.parts)
        return
    assert Profile.parse(documents.encode(loaded)) == loaded
    assert profile_report.render(loaded)
    for name in planners.PLANNERS:
        try:
            split = {"replicas": (1,)} if name == "manual" else {}
            planned = planners.plan(name, problem_of(loaded, flat(2), **split))
        except PartoptError:
            continue
        assert plan_report.render(Plan.parse(documents.encode(planned)))


def plan_or_error(content):
    try:
        loaded = Plan.parse(content)
    except PartoptError:
        return
    assert documents.decode(documents.encode(loaded), plan.Plan, "again") == loaded
    assert plan_report.render(loaded)


@pytest.mark.slow
@quick
@given(mutated(PLAN))
def test_a_plan_with_anything_in_it_is_verified_or_not(document):
    with contextlib.suppress(PartoptError):
        checks = verify(Plan.parse(json.dumps(document).encode()), PLANNED).checks
        assert [check.check for check in checks if check.passed or check.text]


def topology_or_error(content):
    try:
        loaded = Topology.parse(content)
    except PartoptError:
        return
    assert Topology.parse(loaded.dump().encode()) == loaded
    assert render_topology(loaded)


@pytest.mark.slow
@quick
@given(mutated(PROFILE))
def test_a_profile_with_anything_in_it(document):
    profile_or_error(json.dumps(document).encode())


@pytest.mark.slow
@quick
@given(mutated(PROFILE))
def test_a_newer_profile_with_anything_in_it(document):
    profile_or_error(json.dumps(document | {"schema": "partopt.profile/1.9"}).encode())


@pytest.mark.slow
@quick
@given(mutated(PLAN))
def test_a_plan_with_anything_in_it(document):
    plan_or_error(json.dumps(document).encode())


@pytest.mark.slow
@quick
@given(mutated(TOPOLOGY))
def test_a_topology_with_anything_in_it(document):
    topology_or_error(yaml.safe_dump(document).encode())


@pytest.mark.slow
@quick
@given(st.binary(max_size=60))
def test_any_bytes_at_all(content):
    for read in (profile_or_error, plan_or_error, topology_or_error):
        read(content)


@pytest.mark.slow
@quick
@given(st.data())
def test_a_file_with_some_characters_changed(data):
    read, text = data.draw(
        st.sampled_from(
            [
                (profile_or_error, json.dumps(PROFILE)),
                (plan_or_error, json.dumps(PLAN)),
                (topology_or_error, yaml.safe_dump(TOPOLOGY)),
            ]
        )
    )
    read(data.draw(edited(text)).encode(errors="surrogatepass"))


@pytest.mark.slow
@quick
@given(edited(GRAPH))
def test_a_pipedream_graph_with_some_characters_changed(text):
    try:
        imported = pipedream.read(text, "graph", "model", 1)
    except PartoptError:
        return
    profile_or_error(documents.encode(imported))
