"""Whatever is in a file, partopt reads it, says what is wrong with it, or says that its answer is
no; it never breaks.
"""

import contextlib
import json
from typing import Any

import yaml
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from partopt import documents, planners
from partopt.cost.problem import problem_of
from partopt.documents import plan
from partopt.documents.plan import Plan
from partopt.documents.profile import Profile
from partopt.documents.topology import Topology
from partopt.errors import PartoptError
from partopt.importers import pipedream
from partopt.report import plan as plan_report
from partopt.report import profile as profile_report
from partopt.report import topology as topology_report
from partopt.search.verify import verify
from tests.examples import examples
from tests.helpers import chain_profile, flat, two_level

quick = examples(150, suppress_health_check=[HealthCheck.too_slow])

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
GRAPH = (
    "node1 -- Input0 -- forward_compute_time=1.0, backward_compute_time=0.0, "
    "activation_size=10.0, parameter_size=0.0\n"
    "node2 -- Linear(1, 2) -- forward_compute_time=1.0, backward_compute_time=2.0, "
    "activation_size=[4.0; 6.0], parameter_size=7.0\n"
    "\tnode1 -- node2\n"
)

numbers = st.sampled_from(
    [0, -1, 1, 2, 3, 7, -0.0, 0.5, 1e-300, 1e300, 2**31, 2**53, 2**63, 2**64, 10**30]
)
values = (
    st.none()
    | st.booleans()
    | numbers
    | st.text(max_size=5)
    | st.just([])
    | st.just({})
    | st.lists(numbers, max_size=3)
)


def places(node: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of everything inside `node`."""
    inside = (
        node.items()
        if isinstance(node, dict)
        else enumerate(node)
        if isinstance(node, list)
        else ()
    )
    return [path for key, value in inside for path in ((*here, key), *places(value, (*here, key)))]


@st.composite
def mutated(draw: st.DrawFn, original: Any) -> Any:
    """The document with one to three of its values replaced, removed or repeated."""
    document = json.loads(json.dumps(original))
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(places(document) or [("schema",)]))
        parent = document
        for step in path[:-1]:
            parent = parent[step]
        change = draw(st.sampled_from(["replace", "remove", "repeat"]))
        if change == "replace" or path[-1] == "schema":
            parent[path[-1]] = draw(values)
        elif change == "remove":
            del parent[path[-1]]
        elif isinstance(parent, list):
            parent.append(parent[path[-1]])
    return document


def profile_or_error(content: bytes) -> None:
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


def plan_or_error(content: bytes) -> None:
    try:
        loaded = Plan.parse(content)
    except PartoptError:
        return
    assert documents.decode(documents.encode(loaded), plan.Plan, "again") == loaded
    assert plan_report.render(loaded)


@quick
@given(mutated(PLAN))
def test_a_plan_with_anything_in_it_is_verified_or_not(document):
    with contextlib.suppress(PartoptError):
        checks = verify(Plan.parse(json.dumps(document).encode()), PLANNED).checks
        assert [check.check for check in checks if check.passed or check.text]


def topology_or_error(content: bytes) -> None:
    try:
        loaded = Topology.parse(content)
    except PartoptError:
        return
    assert Topology.parse(loaded.dump().encode()) == loaded
    assert topology_report.render(loaded)


@quick
@given(mutated(PROFILE))
def test_a_profile_with_anything_in_it(document):
    profile_or_error(json.dumps(document).encode())


@quick
@given(mutated(PROFILE))
def test_a_newer_profile_with_anything_in_it(document):
    profile_or_error(json.dumps(document | {"schema": "partopt.profile/1.9"}).encode())


@quick
@given(mutated(PLAN))
def test_a_plan_with_anything_in_it(document):
    plan_or_error(json.dumps(document).encode())


@quick
@given(mutated(TOPOLOGY))
def test_a_topology_with_anything_in_it(document):
    topology_or_error(yaml.safe_dump(document).encode())


@quick
@given(st.binary(max_size=60))
def test_any_bytes_at_all(content):
    for read in (profile_or_error, plan_or_error, topology_or_error):
        read(content)


@quick
@given(
    st.data(), st.sampled_from([json.dumps(PROFILE), json.dumps(PLAN), yaml.safe_dump(TOPOLOGY)])
)
def test_a_file_with_some_bytes_changed(data, text):
    content = bytearray(text.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(content)))
        content[start : start + data.draw(st.integers(0, 5))] = data.draw(st.binary(max_size=4))
    for read in (profile_or_error, plan_or_error, topology_or_error):
        read(bytes(content))


@quick
@given(st.data())
def test_a_pipedream_graph_with_some_characters_changed(data):
    text = GRAPH
    for _ in range(data.draw(st.integers(0, 3))):
        start = data.draw(st.integers(0, len(text)))
        stop = start + data.draw(st.integers(0, 9))
        text = text[:start] + data.draw(st.text("node123 -=.,;[]e\n\t", max_size=5)) + text[stop:]
    try:
        imported = pipedream.read(text, "graph", "model", 1)
    except PartoptError:
        return
    profile_or_error(documents.encode(imported))
