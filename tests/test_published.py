"""The numbers of papers, each within the tolerance of `benchmarks/published.py` and of the docs."""

import re
from functools import cache
from itertools import groupby

import pytest

import partopt
from benchmarks import published
from tests.docs.documents import read, section


@cache
def rows():
    return list(published.rows())


@pytest.mark.slow
def test_they_are_as_near_as_is_stated():
    assert [row for row in rows() if not row.holds] == [] != rows()


@pytest.mark.slow
def test_the_documents_state_the_tables_their_rows_and_their_tolerances():
    text = section(read("accuracy.md"), "Published numbers")
    for table, group in groupby(rows(), key=lambda row: row.table):
        own = list(group)
        [tolerance] = {row.tolerance for row in own}
        stated = "exact" if tolerance <= published.EXACT else f"{100 * tolerance:g} %"
        [line] = [line for line in text.splitlines() if line.startswith(f"| {table} |")]
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[2:] == [str(len(own)), stated], table


def test_the_documents_say_what_is_not_compared():
    text = re.sub(r"\s+", " ", section(read("accuracy.md"), "Published numbers"))
    for what, _ in published.LEFT_OUT:
        assert what in text


@pytest.mark.slow
def test_what_is_said_of_vgg_on_the_second_cluster_is_so():
    profile = partopt.Profile.load("vgg16.v100-published.float32")
    job = partopt.Job(profile, partopt.Topology.load("v100-nvlink"))
    assert partopt.solve(job).plan.shape == "16"


def test_a_row_that_is_off_does_not_hold():
    assert not published.Row("t", "c", 2.0, 2.2, 0.05).holds
    assert published.Row("t", "c", 2.0, 2.2, 0.11).holds
    assert not published.Row("t", "c", "15-1", "16").holds


@pytest.mark.slow
def test_the_command_prints_every_table(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["published.py", "all"])
    found = rows()
    monkeypatch.setattr(published, "rows", lambda: found)
    with pytest.raises(SystemExit) as stopped:
        published.main()
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert all(row.table in printed and row.case in printed for row in found)
    assert max(map(len, printed.splitlines())) <= 80
