"""The plans of the shipped profiles, value by value: what they were is what they are.

`plans.jsonl` holds, a line a command, what `partopt plan` gave when it was written: whoever changes
a value on purpose changes it there, and says why. Those of three models were written before a plan
knew what engines do, and are asked for without it: rings alone, gradients exchanged behind the
backward, messages that overlap.
"""

import json
import math
from pathlib import Path

import pytest
from msgspec import structs

from partopt.documents.topology import Topology

PLANS = Path(__file__).parent / "plans.jsonl"
PLAIN = {"bert-base", "mlp", "vgg16"}
LINES = [json.loads(line) for line in PLANS.read_text().splitlines()]


def leaves(node, path=""):
    """The values in a document by their paths."""
    if isinstance(node, dict):
        return {
            p: v for key, value in node.items() for p, v in leaves(value, f"{path}.{key}").items()
        }
    if isinstance(node, list) and node:
        return {
            p: v for n, value in enumerate(node) for p, v in leaves(value, f"{path}[{n}]").items()
        }
    return {path: node}


def folded(plan):
    """The plan with the first rank, the last and their number in place of the ranks."""
    for stage in plan["stages"]:
        ranks = stage["ranks"]
        stage["ranks"] = [ranks[0], ranks[-1], len(ranks)]
    return plan


def same(found, expected):
    if isinstance(expected, float) and isinstance(found, float):
        return math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-15)
    return bool(found == expected)


def plainly(arguments, folder):
    """The arguments, for a plan that knows nothing of engines."""
    rings = folder / "rings.yaml"
    place = arguments.index("--topology") + 1
    named = Topology.load(arguments[place])
    rings.write_text(structs.replace(named, allreduce="ring").dump())
    given = [*arguments[:place], str(rings), *arguments[place + 1 :]]
    given += [] if "waits=pipedream-2bw" in arguments else ["--with", "waits=none"]
    synchronous = "--microbatches" in arguments or "--global-batch" in arguments
    return given + (["--with", "allreduce=blocking"] if synchronous else [])


@pytest.mark.parametrize("line", LINES, ids=lambda line: " ".join(line["arguments"]))
def test_a_plan_is_what_it_was(partopt, line, tmp_path):
    plain = line["arguments"][0].split(".")[0] in PLAIN
    arguments = plainly(line["arguments"], tmp_path) if plain else line["arguments"]
    outcome = partopt("plan", *arguments, "--json")
    assert outcome.code == line["exit"]
    if "plan" not in line:
        return
    found, expected = leaves(folded(outcome.document)), leaves(line["plan"])
    differ = {
        path: (found.get(path), value)
        for path, value in expected.items()
        if not same(found.get(path), value)
    }
    assert differ == {}
