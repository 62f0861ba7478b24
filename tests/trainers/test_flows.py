"""`--to flows`: every flow of any plan, as a table and as a document."""

from __future__ import annotations

import csv
import io

import pytest

from partopt.documents.plan import Plan
from partopt.documents.tables import Flows
from tests.helpers import uniform_profile

PLANS = [
    "--planner data_parallel",
    "--cuts 3 --replicas 3,1",
    "--cuts 3 --schedule zb-h1 --microbatches 8 --recompute always",
    "--cuts 1,3,4 --schedule interleaved --microbatches 8",
    "--cuts 3 --replicas 2,2 --schedule 1f1b --microbatches 8 --shard parameters",
]


@pytest.fixture
def plan_file(partopt, profile_file, topology_file, tmp_path):
    def write(options):
        path = tmp_path / "plan.json"
        profile, cluster = profile_file(uniform_profile(6)), topology_file()
        words = ["plan", profile, "--topology", cluster, *options.split(), "-o", path]
        assert partopt(*words).code == 0
        return path

    return write


@pytest.mark.parametrize("options", PLANS)
def test_the_table_and_the_document_have_every_flow_of_the_plan(
    partopt, plan_file, tmp_path, options
):
    path = plan_file(options)
    table = partopt("export", path, "--to", "flows")
    assert partopt("export", path, "--to", "flows", "-o", tmp_path / "flows.json").code == 0
    flows = Flows.load(str(tmp_path / "flows.json"))
    rows = list(csv.DictReader(io.StringIO(table.out)))
    planned = Plan.load(str(path)).communication
    assert [(flow.kind, flow.bytes, flow.per) for flow in flows.flows] == [
        (flow.kind, flow.bytes, flow.per) for flow in planned
    ]
    for row, flow in zip(rows, flows.flows, strict=True):
        assert row["kind"] == flow.kind
        assert row["ranks"] == " ".join(map(str, flow.ranks))
        assert row["critical"] == ("yes" if flow.critical else "no")
        assert (row["bytes"], float(row["takes_s"])) == (str(flow.bytes), flow.takes_s)
        assert row["source"] == ("" if flow.source is None else str(flow.source))


def test_the_document_is_shown(partopt, plan_file, tmp_path):
    path = plan_file(PLANS[4])
    outcome = partopt("export", path, "--to", "flows", "-o", tmp_path / "flows.json")
    assert "flows:   6, of which 2 are critical" in outcome.err
    page = partopt("show", tmp_path / "flows.json").out
    assert page.splitlines()[:4] == [
        "model    chain, microbatch 1, on flat-4",
        "plan     manual: 2-2, schedule 1f1b, 45.40 ms an iteration of 8",
        "flows    6, of which 2 are critical",
        "",
    ]
    assert max(map(len, page.splitlines())) <= 80


def test_a_plan_without_flows(partopt, plan_file, tmp_path):
    path = plan_file("--planner straight --stages 1")
    assert partopt("export", path, "--to", "flows").out.count("\n") == 1
    partopt("export", path, "--to", "flows", "-o", tmp_path / "flows.json")
    assert "flows    none" in partopt("show", tmp_path / "flows.json").out
