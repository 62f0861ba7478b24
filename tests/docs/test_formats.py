"""docs/formats.md against the structs that it describes and the examples that it gives."""

import re
import typing
from typing import Any

import msgspec
import pytest
import yaml

from partopt import documents, planners, units
from partopt.cost.problem import problem_of
from partopt.documents.plan import Plan
from partopt.documents.profile import Profile
from partopt.documents.topology import Topology, TopologyFile
from partopt.errors import PartoptError
from partopt.report.comparison import Comparison, compare
from partopt.report.scaling import Scaling
from partopt.report.simulation import SimulationDocument, document
from partopt.report.verification import Verification
from partopt.simulator import simulation_of
from partopt.simulator.advice import findings
from tests.docs.documents import blocks, read, rows, section

TEXT = read("formats.md")
PROFILE, PLAN, COMPARISON, SIMULATION = (block.encode() for block in blocks(TEXT, "json"))
TOPOLOGY = blocks(TEXT, "yaml")[0].encode()
PARSERS = {
    "size": units.parse_bytes,
    "bandwidth": units.parse_bandwidth,
    "duration": units.parse_seconds,
}


def structs(found: Any) -> set[type[msgspec.Struct]]:
    """Every struct in a type, and those in its fields."""
    if isinstance(found, type) and issubclass(found, msgspec.Struct):
        inner = [
            structs(hint) for hint in typing.get_type_hints(found, include_extras=True).values()
        ]
        return {found}.union(*inner)
    return set().union(*map(structs, typing.get_args(found)))


@pytest.mark.parametrize(
    "heading, document",
    [
        ("profile.json", Profile),
        ("cluster.yaml", TopologyFile),
        ("plan.json", Plan),
        ("comparison JSON", Comparison),
        ("scaling JSON", Scaling),
        ("simulation JSON", SimulationDocument),
        ("verification JSON", Verification),
    ],
)
def test_every_field_is_described_and_no_other(heading, document):
    fields = {
        field.name for struct in structs(document) for field in msgspec.structs.fields(struct)
    }
    text = section(TEXT, heading)
    first_cells = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `")]
    described = words_in_code("\n".join(first_cells))
    assert (
        fields - described - words_in_code(text.partition("Fields of `topology` in a plan")[2])
        == set()
    )
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
    assert documents.parse(COMPARISON, Comparison, lambda _: [], "comparison").rows


def test_planning_the_example_gives_the_example_plan():
    problem = problem_of(Profile.parse(PROFILE), Topology.parse(TOPOLOGY))
    assert_same(planners.plan("pipedream", problem), Plan.parse(PLAN))


def test_comparing_the_examples_gives_the_example_comparison():
    problem = problem_of(Profile.parse(PROFILE), Topology.parse(TOPOLOGY))
    plans = {name: planners.plan(name, problem) for name in ("pipedream", "data_parallel")}
    expected = documents.parse(COMPARISON, Comparison, lambda _: [], "comparison")
    assert_same(compare(plans, plans["data_parallel"], problem.memory_bytes), expected)


def test_simulating_the_example_plan_gives_the_example_simulation():
    example = Plan.parse(PLAN)
    simulation = simulation_of(example)
    expected = documents.parse(SIMULATION, SimulationDocument, lambda _: [], "simulation")
    assert_same(
        document(simulation, example, findings(simulation, example.topology.device.memory_bytes)),
        expected,
    )


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
