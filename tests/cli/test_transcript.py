"""What commands say beside their page, letter by letter: notes, errors, hints, what comes next."""

import math
import shlex

import pytest

from partopt.report import pages
from tests.helpers import ROOT, flat
from tests.importers.test_pipedream import graph, node
from tests.trainers.models import transformer

TRANSCRIPT = ROOT / "tests/golden/transcript.txt"
SPLIT = "plan p.json --topology c.yaml --schedule 1f1b --microbatches 8 --cuts 6,9 --replicas 1,1,1"
COMMANDS = f"""
{SPLIT}
{SPLIT} -o plan.json
{SPLIT} -o plan.json
{SPLIT} -o plan.json --force
{SPLIT} --json -o -
{SPLIT} --memory '10 MB' -o small.json
{SPLIT} --memory 10
plan p.json --topology c.yaml --cuts 8 --replicas 1,1 --for megatron --global-batch 8
plan p.json --topology c.yaml --cuts 8 --replicas 2,1 --for vllm
compare p.json --topology c.yaml --planner gpipe --memory '1 MB'
compare p.json --topology c.yaml --planner gpipe --planner straight --json
compare p.json --topology c.yaml --layout 'megatron:Et*6|t*6L' --schedule 1f1b --microbatches 4
simulate plan.json
simulate plan.json -o trace.json
simulate plan.json -o trace.csv --json
simulate plan.json -o -
simulate plan.json --memory '20 MB' --schedule zb-h1
show plan.json
show plan.json p.json
show plan.json --json
show plan.json -o plan.svg
show plan.json --profile p.json -o plan.svg --force
show plan.json --verify
show plan.json --verify --profile p.json
show p.json --verify
show p.json --profile p.json
show p.json c.yaml --json
show c.yaml
export plan.json --to megatron
export plan.json --to megatron -o args.sh
export plan.json --to deepspeed -o ds.py
export plan.json --to torchgpipe
report plan.json -o r.html
report plan.json --profile p.json -o r.html
report plan.json p.json -o r.txt
import pipedream graph.txt -o g.json
import pipedream graph.txt -o -
import megatron 'Et*6|t*6L' --profile p.json --topology c.yaml --microbatches 8
import megatron 'Et*5|t*7L' --profile p.json --topology c.yaml --microbatches 8 -o layout.json
import vllm 6,7 --profile p.json --topology c.yaml
schedule 1f1b
schedule 1f1b -o s.csv
schedule all --json
schema plan
trainer list
trainer show megatron
topology list
topology show v100-pcie
topology show v100-pcie --yaml
topology show v100-pcie -o mine.yaml
"""


@pytest.fixture
def said(partopt, profile_file, topology_file, tmp_path, monkeypatch):
    """Of each command its exit code, how its output begins and ends, and all else that it says."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pages, "_NOTED_S", math.inf)  # times of checks, which may wrap lines
    profile_file(transformer())
    topology_file(flat(4, 10e9, memory_bytes=16 * 10**9))
    (tmp_path / "graph.txt").write_text(graph([node(1, "A()"), node(2, "B()", 5, 0.1)], (1, 2)))
    found = []
    for command in COMMANDS.strip().splitlines():
        outcome = partopt(*shlex.split(command))
        page = outcome.out.splitlines()
        ends = page if len(page) < 3 else [page[0], f"... {len(page)} lines", page[-1]]
        shown = "".join(f"| {line[:100]}\n" for line in ends)
        found.append(f"$ partopt {command}\n{shown}{outcome.err}exit code {outcome.code}\n")
    return found


@pytest.mark.slow
def test_commands_say_what_they_did(said, request):
    """Whoever changes a sentence on purpose runs `pytest tests/cli --update`, and reads them."""
    if request.config.getoption("--update"):
        TRANSCRIPT.write_text("\n".join(said))
    expected = TRANSCRIPT.read_text().split("\n$ ")
    assert "\n".join(said).split("\n$ ") == expected
