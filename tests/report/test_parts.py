"""What pages are made of: tables, bars, folded lists, phrases, and the pages of small documents."""

from operator import itemgetter

import click
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partopt.documents.stage import Figures
from partopt.documents.tables import Verification, VerificationRow
from partopt.documents.topology import AllReduceRates, Device, Level, Topology
from partopt.printable import shorten
from partopt.report.clusters import render_topology
from partopt.report.folds import Fold, fold
from partopt.report.pages import render_verification
from partopt.report.phrases import basis_lines, price_lines
from partopt.report.text import Column, bar, label_lines, page_style, table_of


def columns_of(**kinds):
    """Columns by their headings, each with the cell at its place in a row."""
    return [
        Column(name, itemgetter(place), kind) for place, (name, kind) in enumerate(kinds.items())
    ]


def test_numbers_stand_right_and_words_left_without_trailing_blanks():
    columns = columns_of(NAME="text", TIME="number", NOTE="text")
    rows = [["a", "1.00 ms", "x"], ["longer", "12 s", ""]]
    assert table_of(rows, columns).splitlines()[1:] == ["a       1.00 ms  x", "longer     12 s"]


def test_a_table_wider_than_the_page_shortens_its_widest_text_and_no_number():
    columns = columns_of(NAME="text", KIND="text", TIME="number")
    (line,) = table_of([["n" * 60, "k" * 20, "9" * 12]], columns).splitlines()[1:]
    assert line == f"{'n' * 21}..{'n' * 21}  {'k' * 20}  {'9' * 12}"


def test_bars_short_names_and_labels():
    for share, drawn, ascii_only in (
        (0, "", ""),
        (0.5, "██", "##"),
        (1, "████", "####"),
        (7, "████", "####"),
        (0.4, "█▋", "##"),
    ):
        with page_style(ascii_only=True):
            plain = bar(share, 4)
        assert (bar(share, 4), plain) == (drawn, ascii_only)
    assert shorten("transformer.h.11.mlp", 12) == "trans..1.mlp"
    assert shorten("wte", 12) == "wte"
    assert label_lines([("model", "gpt"), ("cluster", "two")]) == "model    gpt\ncluster  two"


def test_a_verdict_has_a_colour_and_is_never_shortened():
    rows = [["p" * 30, "1.00 ms", "does not fit"], ["q" * 30, "2.00 ms", "yes"]]
    with page_style(width=40):
        columns = columns_of(PLANNER="text", PERIOD="number", FITS="whole")
        _, first, second = table_of(rows, columns).splitlines()
    assert first.endswith("\x1b[31mdoes not fit\x1b[0m") and "\x1b[32myes\x1b[0m" in second
    assert max(map(len, map(click.unstyle, (first, second)))) <= 40


def test_a_page_that_is_too_narrow_does_without_the_spare_columns():
    rows = [["name", "1" * 20, "2" * 20, "3" * 20]]
    with page_style(width=60):
        columns = columns_of(A="text", B="number", C="number", D="number")
        columns[1:3] = columns[1]._replace(spare=2), columns[2]._replace(spare=1)
        shown = click.unstyle(table_of(rows, columns))
    assert shown.splitlines()[0].split() == ["A", "B", "D"]


@pytest.mark.slow
@given(st.lists(st.sampled_from("ab"), max_size=40))
def test_the_folds_written_out_are_the_list(keys):
    folds = fold(keys)
    written = [keys[place] for each in folds for _ in range(each.times) for place in each.block]
    assert written == keys


@pytest.mark.parametrize(
    ("keys", "folds"),
    [
        ("eaaaah", [Fold(0, 1, 1), Fold(1, 1, 4), Fold(5, 1, 1)]),
        ("eabcabcabch", [Fold(0, 1, 1), Fold(1, 3, 3), Fold(10, 1, 1)]),
        ("eabab", [Fold(0, 1, 1), Fold(1, 2, 2)]),
        ("aab", [Fold(0, 3, 1)]),  # saves one row: not worth it
        ("abc", [Fold(0, 3, 1)]),
        ("", []),
    ],
)
def test_equal_elements_and_repeated_blocks_are_folded(keys, folds):
    assert fold(keys, least_saved=2) == folds


def test_what_estimated_times_rest_on():
    assert basis_lines(None) == []
    assert basis_lines("H100") == [("rests on", "times estimated for H100: nothing was measured")]


HELD = VerificationRow(
    check="numbers", passed=True, took_s=0.3, text="130 fields, simulated again", differences=[]
)
DIFFERENCES = ["stages: 2 recorded, 3 found"]
BROKEN = VerificationRow(
    check="request", passed=False, took_s=0.0, text="two `stages`", differences=DIFFERENCES
)
FAILED = Verification(verified=False, claim="", checks=[HELD, BROKEN])


def test_the_page_of_a_verification(tmp_path):
    held = Verification(verified=True, claim="optimal", checks=[HELD])
    assert render_verification(held).splitlines() == [
        "numbers  ok      130 fields, simulated again (300.0 ms)",
        "verified: optimal",
    ]
    assert FAILED.failed == ["request"]
    with page_style(spell=lambda text: text.replace("`stages`", "--stages")):
        page = render_verification(FAILED)
    assert page.splitlines()[1:] == [
        "request  FAILED  two --stages",
        "         stages: 2 recorded, 3 found",
    ]
    FAILED.save(str(tmp_path / "verification.json"))
    assert Verification.load(str(tmp_path / "verification.json")) == FAILED


def test_what_engines_do_on_a_level_is_told():
    rates = AllReduceRates(bandwidth_bytes_per_s=5e8, latency_s=1e-4)
    one = Level(name="server", size=2, bandwidth_bytes_per_s=1e9, overhead_s=2e-5, allreduce=rates)
    two = Level(name="cluster", size=2, bandwidth_bytes_per_s=1e9, copy_bytes_per_s=1e11)
    on = Topology(name="t", device=Device(name="d"), levels=[one, two], allreduce="tree")
    assert render_topology(on).splitlines()[-5:] == [
        "A message over server takes 20.00 us of both devices.",
        "An all-reduce over server goes at 500 MB/s, a step 100.0 us late.",
        "A message over cluster takes its bytes at 100 GB/s of both devices.",
        "All-reduces are tree.",
        "Bandwidth is of one link of one member, in one direction.",
    ]


@pytest.mark.parametrize(
    ("figures", "devices", "lines"),
    [
        ({}, 4, []),
        (
            {"price_per_hour": 2.5, "samples_per_money": 6860.0},
            1,
            ["2.50 an hour for the device: 6.86 k samples for 1.00"],
        ),
        (
            {"price_per_hour": 10, "samples_per_money": 6860.0, "tokens_per_money": 14.05e6},
            4,
            ["10.00 an hour for 4 devices: 6.86 k samples (14.1 M tokens) for 1.00"],
        ),
        ({"price_per_hour": 10}, 4, ["10.00 an hour for 4 devices: - samples for 1.00"]),
    ],
)
def test_what_money_buys(figures, devices, lines):
    assert price_lines(Figures(**figures), devices) == [("price", line) for line in lines]
    assert price_lines(msgspec.UNSET, devices) == []
