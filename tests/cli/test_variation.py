"""`partopt simulate --jitter` and `--slow`."""

import json
from pathlib import Path

import pytest

from partopt import documents


def test_the_page_says_what_varies_what_it_costs_and_whose_slowness_costs_most(
    partopt, synchronous, monkeypatch
):
    monkeypatch.chdir(Path(synchronous).parent)  # the advice has the path of the plan
    outcome = partopt("simulate", "sync.json", "--jitter", "5%", "--slow", "1=1.2")
    assert outcome.code == 0
    text = " ".join(outcome.out.split())
    assert (
        "varied action times by 5% of their mean, lognormal, 50 draws of 16 microbatches, seed 0; "
        "rank 1 takes 1.2 times as long an iteration"
    ) in text
    assert "-> p50" in text
    assert "slowness of rank" in text
    assert max(map(len, outcome.out.splitlines())) <= 80


def test_the_document_has_a_variation_only_where_one_was_asked_for(partopt, synchronous, tmp_path):
    plain = partopt("simulate", synchronous, "--json")
    assert "variation" not in plain.document
    given = ("simulate", synchronous, "--jitter", "5%", "--draws", 7, "--seed", 3, "--json")
    found = partopt(*given)
    assert found.out == partopt(*given).out
    variation = found.document["variation"]
    assert (variation["jitter"], variation["draws"], variation["seed"]) == (0.05, 7, 3)
    assert variation["plain_s"] == plain.document["iteration_s"]
    assert {each["rank"] for each in variation["sensitivity"]} == {0, 1, 2, 3}
    without = {name: value for name, value in found.document.items() if name != "variation"}
    without["advice"] = [each for each in without["advice"] if each["code"] != "slow-rank"]
    assert without == plain.document
    path = tmp_path / "varied.json"
    documents.write_bytes(str(path), json.dumps(found.document).encode())
    assert "varied   action times by 5%" in partopt("show", path).out


@pytest.mark.parametrize(
    ("given", "error", "hint"),
    [
        (["--jitter", "5"], "--jitter: '5' is not a share in percent", 'write "5%"'),
        (["--slow", "9=1.2"], "--slow 9=1.2: rank 9 has no work in this plan", "from 0 to 3"),
        (["--slow", "1=0"], "--slow 1=0.0: a factor is more than 0 and at most 1000", "1=1.2"),
        (["--slow", "1"], "--slow 1: not of the form RANK=FACTOR", "write --slow 3=1.2"),
        (["--slow", "1=2", "--slow", "1=3"], "--slow 1: given twice", "once"),
        (["--draws", "5"], "--draws 5: nothing is drawn", "add --jitter 5%"),
    ],
)
def test_bad_input_is_refused_with_a_hint(partopt, synchronous, given, error, hint):
    outcome = partopt("simulate", synchronous, *given)
    assert (outcome.code, outcome.errors) == (2, [error])
    assert hint in outcome.err
