"""docs/formats.md against the structs that it describes and the examples that it gives."""

import re
import typing

import msgspec
import pytest
import yaml

from partopt import planners, units
from partopt.cost.problem import problem_of
from partopt.documents.device import Roofline, read_device
from partopt.documents.kinds import DOCUMENTS
from partopt.documents.profile import Profile
from partopt.documents.topology import Topology
from partopt.errors import PartoptError
from tests.docs.documents import blocks, read, rows, section

TEXT = read("formats.md")
PROFILE, PLAN = (block.encode() for block in blocks(TEXT, "json"))
TOPOLOGY, DEVICE = (block.encode() for block in blocks(TEXT, "yaml"))
PARSERS = {
    "size": units.parse_bytes,
    "bandwidth": units.parse_bandwidth,
    "duration": units.parse_seconds,
    "price": units.parse_price,
}


def structs(found):
    """Every struct in a type, and those in its fields."""
    if isinstance(found, type) and issubclass(found, msgspec.Struct):
        hints = typing.get_type_hints(found, include_extras=True)
        return {found}.union(*map(structs, hints.values()))
    return set().union(*map(structs, typing.get_args(found)))


def words_in_code(text):
    """The words between backticks."""
    return {word for code in re.findall(r"`([^`\n]+)`", text) for word in re.findall(r"\w+", code)}


FIRST_CELLS = words_in_code(
    "\n".join(
        line.split(" | ")[0]
        for heading in ("profile.json", "cluster.yaml", "plan.json", "device.yaml")
        for line in section(TEXT, heading).splitlines()
        if line.startswith("| `") and "partopt" not in line.split(" | ")[0]
    )
)


EVERY = structs(typing.Union[tuple(DOCUMENTS.values())])  # noqa: UP007
FILES = ("profile", "topology", "plan", "device")  # what people write or keep


def test_every_field_of_a_file_is_described_here_or_in_the_schema_and_none_else():
    for struct in set().union(*(structs(DOCUMENTS[kind]) for kind in FILES)):
        names = {field.name for field in msgspec.structs.fields(struct)}
        assert names - words_in_code(TEXT) - words_in_code(struct.__doc__ or "") == set()
    known = {field.name for struct in EVERY for field in msgspec.structs.fields(struct)}
    assert FIRST_CELLS - known == set()
    printed = rows(section(TEXT, "Simulations"))[1:]
    assert words_in_code(" ".join(f"`{row[0]}`" for row in printed)) - known == set()
    kinds = words_in_code(" ".join(f"`{row[0]}`" for row in rows(TEXT.partition("\n## ")[0])[1:]))
    assert kinds == {*DOCUMENTS}


def test_quantities_mean_what_the_table_says():
    for written, kind, means in [row for row in rows(section(TEXT, "Rules")) if row[1] in PARSERS]:
        if means.startswith("refused"):
            with pytest.raises(PartoptError):
                PARSERS[kind](written)
        else:
            assert PARSERS[kind](written) == pytest.approx(float(means))


def test_the_examples_load():
    assert Profile.parse(PROFILE).model.name == "three"
    assert Topology.parse(TOPOLOGY).devices == 3
    assert Roofline.of(read_device(DEVICE, "docs")).peaks_flops["float16"] == 120e12


def test_planning_the_example_gives_what_the_example_shows_of_its_plan():
    problem = problem_of(Profile.parse(PROFILE), Topology.parse(TOPOLOGY))
    found = planners.plan("pipedream", problem)
    assert_shows(msgspec.to_builtins(found), msgspec.json.decode(PLAN))
    assert yaml.safe_load(found.topology.dump())["name"] == "workstation-3"


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


def assert_shows(found, shown):
    """Whatever is `shown` is in `found`, numbers to the digits that a document prints."""
    if isinstance(shown, dict):
        for key, value in shown.items():
            assert_shows(found[key], value)
    elif isinstance(shown, list):
        assert len(found) == len(shown)
        for own, value in zip(found, shown, strict=True):
            assert_shows(own, value)
    elif isinstance(shown, float):
        assert found == pytest.approx(shown, rel=1e-9)
    else:
        assert found == shown
