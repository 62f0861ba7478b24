"""docs/formats.md against the structs that it describes and the examples that it gives."""

import re
import typing
from typing import Any

import msgspec
import pytest
import yaml

from partopt import planners, units
from partopt.cost.problem import problem_of
from partopt.documents.comparison import Comparison
from partopt.documents.device import Roofline, read_device
from partopt.documents.figures import Figures
from partopt.documents.flows import Flows
from partopt.documents.kinds import DOCUMENTS
from partopt.documents.plan import Plan
from partopt.documents.profile import Profile
from partopt.documents.simulation import DrawnTimeline, SimulationDocument
from partopt.documents.topology import Topology
from partopt.errors import PartoptError
from partopt.search.tables import comparison_of
from partopt.simulator import execute
from partopt.simulator.advice import findings
from partopt.simulator.document import document_of
from partopt.simulator.flows import flows_of
from tests.docs.documents import blocks, read, rows, section

TEXT = read("formats.md")
PROFILE, PLAN, COMPARISON, SIMULATION, FLOWS = (block.encode() for block in blocks(TEXT, "json"))
TOPOLOGY, DEVICE = (block.encode() for block in blocks(TEXT, "yaml"))
PARSERS = {
    "size": units.parse_bytes,
    "bandwidth": units.parse_bandwidth,
    "duration": units.parse_seconds,
    "price": units.parse_price,
}


def structs(found: Any) -> set[type[msgspec.Struct]]:
    """Every struct in a type, and those in its fields."""
    if isinstance(found, type) and issubclass(found, msgspec.Struct):
        inner = [
            structs(hint) for hint in typing.get_type_hints(found, include_extras=True).values()
        ]
        return {found}.union(*inner)
    return set().union(*map(structs, typing.get_args(found)))


HEADINGS = {
    "profile": "profile.json",
    "topology": "cluster.yaml",
    "plan": "plan.json",
    "device": "device.yaml",
}
# parts that another section describes
DESCRIBED = {
    "comparison": {Topology, Figures},
    "scaling": {Figures},
    "simulation": {Topology, Figures},
    "groups": {Topology, Figures},
    "trial": {DrawnTimeline},
}


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_every_field_is_described_and_no_other(kind):
    elsewhere = set().union(*map(structs, DESCRIBED.get(kind, ())))
    fields = {
        field.name
        for struct in structs(DOCUMENTS[kind]) - elsewhere
        for field in msgspec.structs.fields(struct)
    }
    text = section(TEXT, HEADINGS.get(kind, f"{kind} JSON"))
    first_cells = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `")]
    described = words_in_code("\n".join(first_cells))
    topology_in_plan = words_in_code(text.partition("Fields of `topology` in a plan")[2])
    assert fields - described - topology_in_plan == set()
    assert described - fields == set()


def words_in_code(text: str) -> set[str]:
    """The words between backticks."""
    return {word for code in re.findall(r"`([^`\n]+)`", text) for word in re.findall(r"\w+", code)}


@pytest.mark.parametrize(
    "written, kind, means", [row for row in rows(section(TEXT, "Rules")) if row[1] in PARSERS]
)
def test_quantities_mean_what_the_table_says(written, kind, means):
    if means.startswith("refused"):
        with pytest.raises(PartoptError):
            PARSERS[kind](written)
    else:
        assert PARSERS[kind](written) == pytest.approx(float(means))


def test_the_examples_load():
    assert Profile.parse(PROFILE).model.name == "three"
    assert Topology.parse(TOPOLOGY).devices == 3
    assert Plan.parse(PLAN).shape == "2-1"
    assert Comparison.parse(COMPARISON).rows
    assert Roofline.of(read_device(DEVICE, "docs")).peaks_flops["float16"] == 120e12


def test_planning_the_example_gives_the_example_plan():
    problem = problem_of(Profile.parse(PROFILE), Topology.parse(TOPOLOGY))
    assert_same(planners.plan("pipedream", problem), Plan.parse(PLAN))


def test_comparing_the_examples_gives_the_example_comparison():
    problem = problem_of(Profile.parse(PROFILE), Topology.parse(TOPOLOGY))
    plans = {name: planners.plan(name, problem) for name in ("pipedream", "data_parallel")}
    expected = Comparison.parse(COMPARISON)
    assert_same(comparison_of(plans, plans["data_parallel"]), expected)


def test_simulating_the_example_plan_gives_the_example_simulation():
    example = Plan.parse(PLAN)
    execution = execute(example)
    found = document_of(execution, example, findings(execution))
    expected = SimulationDocument.parse(SIMULATION)
    assert found.timeline is not None
    # the example leaves out what its timeline goes on with
    ranks = [
        msgspec.structs.replace(
            rank,
            actions=" ".join(rank.actions.split()[: len(shown.start_s)]),
            start_s=rank.start_s[: len(shown.start_s)],
            end_s=rank.end_s[: len(shown.end_s)],
            allreduce_start_s=rank.allreduce_start_s[: len(shown.allreduce_start_s)],
            allreduce_end_s=rank.allreduce_end_s[: len(shown.allreduce_end_s)],
        )
        for rank, shown in zip(found.timeline.ranks, expected.timeline.ranks, strict=True)
    ]
    timeline = msgspec.structs.replace(found.timeline, ranks=ranks)
    assert_same(msgspec.structs.replace(found, timeline=timeline), expected)


def test_the_flows_of_the_example_plan_are_the_example_flows():
    assert_same(flows_of(execute(Plan.parse(PLAN))), Flows.parse(FLOWS))


def test_the_topology_in_the_plan_is_the_topology_example():
    assert Plan.parse(PLAN).topology == Topology.parse(TOPOLOGY)
    assert yaml.safe_load(Plan.parse(PLAN).topology.dump())["name"] == "workstation-3"


def test_versions_are_read_as_the_rules_say():
    newer = PROFILE.replace(b"partopt.profile/1", b"partopt.profile/1.1").replace(
        b'"dtype"', b'"added": 1, "dtype"'
    )
    assert Profile.parse(newer) == msgspec.structs.replace(
        Profile.parse(PROFILE), schema="partopt.profile/1.1"
    )
    for wrong in (b"partopt.profile/2", b"partopt.plan/1"):
        with pytest.raises(PartoptError):
            Profile.parse(PROFILE.replace(b"partopt.profile/1", wrong))
    with pytest.raises(PartoptError, match="unknown key"):
        Profile.parse(PROFILE.replace(b'"dtype"', b'"added": 1, "dtype"'))


def assert_same(found: msgspec.Struct, expected: msgspec.Struct) -> None:
    """Equal field by field, numbers to the digits that a document prints."""
    left, right = flattened(found), flattened(expected)
    # left out of the example
    left = left | {path: "..." for path in left if path.endswith(".sha256")}
    assert list(left) == list(right)
    for path, value in right.items():
        assert left[path] == (
            pytest.approx(value, rel=1e-9) if isinstance(value, float) else value
        ), path


def flattened(value: Any, path: str = "") -> dict[str, Any]:
    """The leaves of a document by their path."""
    if isinstance(value, msgspec.Struct):
        value = msgspec.to_builtins(value)
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {
            key: leaf
            for name, part in items
            for key, leaf in flattened(part, f"{path}.{name}").items()
        }
    return {path: value}
