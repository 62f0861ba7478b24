"""Input that is made to do harm: every answer is short, quick, and names each fault once."""

import json
from pathlib import Path

import pytest

from partopt.documents.topology import Topology
from tests.helpers import changed

CLUSTER = """\
name: c
device: {name: d}
levels:
  - {name: s, size: 2, bandwidth: 1 GB/s}
"""


def multiplied(times: int) -> str:
    """A topology under a key whose anchors stand for ten to the power of `times` values."""
    more = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, times)]
    return "\n".join(["a0: &a0 [x, x, x, x, x, x, x, x, x, x]", *more, CLUSTER])


@pytest.mark.parametrize(
    "arguments", [["show", "{}"], ["plan", "mlp.cpu.float32", "--topology", "{}"]]
)
def test_anchors_that_multiply_are_refused_at_once(partopt, tmp_path, arguments):
    path = tmp_path / "c.yaml"
    path.write_text(multiplied(30))
    outcome = partopt(*[word.format(path) for word in arguments])
    assert (outcome.code, outcome.out) == (2, "")
    [error] = outcome.errors
    assert error.endswith("not YAML: more than 20,000 values")


def test_anchors_are_read():
    level = "&one {name: s, size: 2, bandwidth: 1 GB/s}"
    text = CLUSTER.replace("{name: s, size: 2, bandwidth: 1 GB/s}", level)
    more = "  - {<<: *one, name: t, size: 3}\n"
    assert Topology.parse((text + more).encode()).devices == 6


def test_a_long_yaml_is_refused_at_once(partopt, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(CLUSTER + "#" * 10**6)
    outcome = partopt("show", path)
    assert (outcome.code, outcome.errors) == (2, [f"{path}: more than 1 MB of YAML"])


@pytest.mark.parametrize("name", ["n" * 5000, "n/" * 5000, "n " * 5000])
def test_a_long_name_is_shortened(partopt, name):
    for arguments in (
        ["show", name],
        ["plan", name, "--topology", name],
        ["simulate", name],
        ["profile", f"{name}.py", "-o", "-"],
    ):
        outcome = partopt(*arguments)
        assert outcome.code == 2
        assert len(outcome.errors) == 1 and len(outcome.err) < 1200


def test_a_long_schedule_is_no_file(partopt, synchronous):
    outcome = partopt("simulate", synchronous, "--schedule", "x" * 5000)
    assert (outcome.code, len(outcome.errors)) == (2, 1) and len(outcome.err) < 1000


def without_a_stage(plan: bytes, s: int) -> bytes:
    stages = json.loads(plan)["stages"]
    return changed(plan, "stages", to=stages[:s] + stages[s + 1 :])


def test_a_plan_without_its_first_stage_has_one_fault(partopt, plan_file, tmp_path):
    content = Path(plan_file("--planner", "straight")).read_bytes()
    (tmp_path / "cut.json").write_bytes(without_a_stage(content, 0))
    outcome = partopt("show", tmp_path / "cut.json")
    assert outcome.code == 2
    [error] = outcome.errors
    assert "do not follow layer 0" in error


def test_faults_that_differ_in_numbers_alone_are_shown_once(partopt, plan_file, tmp_path):
    content = Path(plan_file("--planner", "straight")).read_bytes()
    flows = [flow | {"level": "x"} for flow in json.loads(content)["communication"]]
    (tmp_path / "f.json").write_bytes(changed(content, "communication", to=flows))
    outcome = partopt("show", tmp_path / "f.json")
    assert outcome.errors == [
        f"{tmp_path / 'f.json'}: communication[0]: no level x",
        f"and {len(flows) - 1} more",
    ]


@pytest.mark.parametrize(
    ("field", "value", "fault"),
    [
        ("source", None, "send without its source and destination"),
        ("destination", 99, "no stage 99"),
        ("level", "x", "no level x"),
        ("kind", "x", "kind: invalid enum value 'x'"),
    ],
)
def test_traffic_that_cannot_be_is_refused(partopt, plan_file, tmp_path, field, value, fault):
    content = Path(plan_file("--planner", "straight")).read_bytes()
    (tmp_path / "f.json").write_bytes(changed(content, "communication", 0, field, to=value))
    outcome = partopt("export", tmp_path / "f.json", "--to", "flows")
    assert outcome.code == 2
    [error] = outcome.errors
    assert error.endswith(fault)
