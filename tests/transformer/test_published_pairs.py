"""What levers are worth: partopt beside published runs that differ in one of them alone.

The data are not part of the repository; without them only how pairs are found is tested.
"""

import statistics

import pytest

from benchmarks import published_pairs
from benchmarks.published_pairs import DATA, LEVERS, Lever, Pair, Run, line, merge, pairs_of
from tests.docs.documents import read, rows, section

needs_runs = pytest.mark.skipif(not DATA.exists(), reason="published runs are not here")
BITS = Lever("fewer bits", [("bits",), ("bits", "scales")], ("16", "8"))


def run(published_s, computed_s=1.0, **facts):
    return Run(" ".join(facts.values()), facts, published_s, computed_s)


def test_pairs_differ_in_the_columns_of_a_lever_and_in_nothing_else():
    runs = [
        run(4.0, 8.0, bits="16", scales="tensor", tp="1"),
        run(3.0, 4.0, bits="8", scales="tensor", tp="1"),
        run(2.0, 2.0, bits="8", scales="block", tp="1"),
        run(9.0, 9.0, bits="8", scales="tensor", tp="2"),  # two things
        run(9.0, 9.0, bits="4", scales="tensor", tp="1"),  # no value of this lever
        run(9.0, 9.0, scales="tensor", tp="1"),  # whose bits are not known
    ]
    found = [*pairs_of(BITS, runs)]
    assert found == [
        Pair("16 tensor 1 -> 8 tensor 1", 25.0, 50.0),
        Pair("16 tensor 1 -> 8 block 1", 50.0, 75.0),
    ]
    assert next(iter(pairs_of(BITS, runs[::-1]))) == found[0]
    assert found[0].apart == 25.0


def test_a_lever_that_does_nothing_has_no_pair_and_one_without_values_begins_with_the_slower():
    alone, group = (
        [run(2.0, parallel="no", tp=tp), run(1.0, parallel="yes", tp=tp)] for tp in ("1", "2")
    )
    lever = Lever("parallel", [("parallel",)], idle=("tp", "1"))
    assert [pair.published for pair in pairs_of(lever, alone + group)] == [50.0]
    named = [run(1.0, 3.0, modules="mlp"), run(2.0, 2.0, modules="moe")]
    assert [*pairs_of(Lever("modules", [("modules",)], ()), named)] == [
        Pair("moe -> mlp", 50.0, -50.0)
    ]


def test_repeats_are_one_run_of_their_mean():
    [once] = merge([run(1.0, 3.0, bits="8"), run(3.0, 5.0, bits="8")])
    assert (once.published_s, once.computed_s) == (2.0, 4.0)
    assert len(merge([run(1.0, bits="8"), run(1.0, bits="16")])) == 2


def test_a_line_counts_signs_where_they_are_sure():
    pairs = [Pair("", 1.0, -1.0), Pair("", 2.0, 1.0), Pair("", -8.0, 2.0)]
    assert line("mine", "here", pairs).split()[2:] == ["3", "1/2", "1.0", "1.0", "2.0"]
    assert line("mine", "", []).endswith("no pair")


@pytest.fixture(scope="module")
def sets():
    return published_pairs.sets_of_runs()


@pytest.mark.slow
@needs_runs
def test_worths_of_levers_are_as_near_as_is_said(sets):
    every = {lever.name: [*pairs_of(lever, sets["dense"])] for lever in LEVERS}
    # kernels are those of older software, and no switch of a trainer
    switches = [pair for name, pairs in every.items() if "kernel" not in name for pair in pairs]
    dense = [pair for pairs in every.values() for pair in pairs]
    for pairs, count, right, apart in ((dense, 239, 225, 3.3), (switches, 109, 108, 2.3)):
        sure = [pair for pair in pairs if abs(pair.published) >= published_pairs.SURE]
        assert len(sure) == count
        assert sum(pair.published * pair.computed > 0 for pair in sure) >= right
        assert statistics.median(abs(pair.apart) for pair in pairs) <= apart
    assert len(dense) == 259


@pytest.mark.slow
@needs_runs
def test_the_documents_state_what_is_printed(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["published_pairs.py"])
    published_pairs.main()
    printed = capsys.readouterr().out.splitlines()[1:]
    text = section(read("accuracy.md"), "Levers")
    stated = [" ".join(row) for row in rows(text)[1:]]
    assert stated == [" ".join(each.split()) for each in printed if "no pair" not in each]
    without = [each.partition("  ")[0] for each in printed if "no pair" in each]
    assert f"No pair: {', '.join(without)}." in " ".join(text.split())


def test_without_data_the_command_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(published_pairs, "DATA", tmp_path)
    monkeypatch.setattr("sys.argv", ["published_pairs.py"])
    with pytest.raises(SystemExit, match=r"runs\.csv: no such file"):
        published_pairs.main()
