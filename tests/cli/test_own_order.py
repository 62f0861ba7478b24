"""`partopt simulate --schedule FILE.csv`: an order of a person's own."""

import re

import pytest

from tests.helpers import chain_profile


@pytest.fixture
def rows(partopt, plan_file, synchronous, tmp_path):
    """The plan's own order, rank by rank, and what to do with it when it is changed."""
    assert (
        partopt("simulate", synchronous, "--microbatches", 4, "-o", tmp_path / "own.csv").code == 0
    )

    def run(change=lambda rows: None, *given):
        rows = [line.split(",") for line in (tmp_path / "own.csv").read_text().splitlines()]
        change(rows)
        (tmp_path / "changed.csv").write_text("\n".join(",".join(row) for row in rows))
        return partopt("simulate", synchronous, "--schedule", tmp_path / "changed.csv", *given)

    return run


def test_its_microbatches_are_counted(rows):
    found = rows(lambda rows: None, "--json").document
    assert (found["microbatches"], found["changed"][0]) == (4, "schedule 1f1b -> changed.csv")


def test_what_it_holds_is_counted(rows):
    def eager(rows):
        rows[0] = [cell for cell in rows[0] if "F" in cell] + [
            cell for cell in rows[0] if "B" in cell
        ]
        rows[2] = ["2F0", "2F1", "2F2", "2B0", "2F3", "2B1", "2B2", "2B3"]

    found = rows(eager, "--json").document
    assert [rank["peak_in_flight"] for rank in found["ranks"]] == [4, 3, 3, 1]


def test_a_deadlock_is_told_with_rank_and_action(rows):
    def swap(rows):
        rows[1] = ["1F0", "1B0", *[cell for cell in rows[1] if cell not in ("1F0", "1B0")]]
        rows[3] = ["3F1", "3B1", "3F0", "3B0", *rows[3][4:]]

    outcome = rows(swap)
    assert (outcome.code, outcome.out) == (2, "")
    assert re.search(
        r"changed.csv: the schedule deadlocks: rank 3 waits at 3F1 for ever", outcome.errors[0]
    )


@pytest.mark.parametrize(
    "change, error",
    [
        (lambda rows: rows[2].pop(0), "rank 2: 2F0 is missing"),
        (lambda rows: rows[1].append("1F0"), "rank 1: 1F0 occurs twice"),
        (lambda rows: rows[0].append("9F0"), "rank 0: 9F0 names an unknown stage"),
        (lambda rows: rows.pop(), "3 rows for the 4 ranks of a pipeline"),
        (lambda rows: rows[0].insert(1, "hello"), 'row 1, cell 2: unrecognised action "hello"'),
        (lambda rows: rows.clear(), "it has no actions"),
    ],
)
def test_a_malformed_order(rows, tmp_path, change, error):
    outcome = rows(change)
    assert (outcome.code, outcome.out, outcome.errors) == (
        2,
        "",
        [f"{tmp_path / 'changed.csv'}: {error}"],
    )


def test_a_file_that_is_not_there(partopt, synchronous, tmp_path):
    assert partopt("simulate", synchronous, "--schedule", tmp_path / "x.csv").errors == [
        f"{tmp_path / 'x.csv'}: no such file"
    ]


@pytest.mark.parametrize(
    ("given", "option"),
    [(("--warmup", "3,2,1,0"), "--warmup"), (("--with", "allreduce=blocking"), "--with allreduce")],
)
def test_options_that_it_leaves_no_room_for(rows, given, option):
    assert rows(lambda rows: None, *given).hints == [f"drop {option}"]


def test_on_another_network(rows):
    fast, slow = (
        rows(lambda rows: None, "--bandwidth", f"all={rate}", "--json").document
        for rate in ("1 TB/s", "10 MB/s")
    )
    assert fast["period_s"] < slow["period_s"]


def test_gradients_of_more_than_one_bucket(partopt, profile_file, topology_file, tmp_path):
    """Two replicas exchange the gradients of 100 MB in buckets of 25 MiB."""
    profile = profile_file(chain_profile([1e-3] * 4, None, [10**6] * 4, [10**8] * 4), name="b.json")
    plan, own = tmp_path / "b.plan.json", tmp_path / "own.csv"
    split = "--cuts", "2", "--replicas", "2,2", "--schedule", "1f1b", "--microbatches", 4
    assert partopt("plan", profile, "--topology", topology_file(), *split, "-o", plan).code == 0
    assert partopt("simulate", plan, "-o", own).code == 0
    found = [
        partopt("simulate", plan, "--json", *given).document["makespan_s"]
        for given in ([], ["--schedule", own])
    ]
    assert found[0] == found[1]
