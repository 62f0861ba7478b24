from operator import itemgetter

import click
import pytest

from partopt.printable import shorten
from partopt.report.text import Column, bar, label_lines, page_width, table_of


def columns_of(**kinds):
    """Columns by their headings, each with the cell at its place in a row."""
    return [
        Column(name, itemgetter(place), kind) for place, (name, kind) in enumerate(kinds.items())
    ]


def test_numbers_stand_right_and_words_left_without_trailing_blanks():
    columns = columns_of(NAME="text", TIME="number", NOTE="text")
    rows = [["a", "1.00 ms", "x"], ["longer", "12 s", ""]]
    assert table_of(rows, columns).splitlines()[1:] == [
        "a       1.00 ms  x",
        "longer     12 s",
    ]


def test_a_table_wider_than_the_page_shortens_its_widest_text_and_no_number():
    columns = columns_of(NAME="text", KIND="text", TIME="number")
    (line,) = table_of([["n" * 60, "k" * 20, "9" * 12]], columns).splitlines()[1:]
    assert line == f"{'n' * 21}..{'n' * 21}  {'k' * 20}  {'9' * 12}"


@pytest.mark.parametrize(
    "share, drawn, ascii_only",
    [(0, "", ""), (0.5, "██", "##"), (1, "████", "####"), (7, "████", "####"), (0.4, "█▋", "##")],
)
def test_bars(share, drawn, ascii_only):
    assert bar(share, 4) == drawn
    assert bar(share, 4, ascii_only=True) == ascii_only


def test_long_names_lose_their_middle():
    assert shorten("transformer.h.11.mlp", 12) == "trans..1.mlp"
    assert shorten("wte", 12) == "wte"


def test_labels_stand_in_a_column():
    assert label_lines([("model", "gpt"), ("cluster", "two")]) == "model    gpt\ncluster  two"


def test_a_verdict_has_a_colour_and_is_never_shortened():
    rows = [["p" * 30, "1.00 ms", "does not fit"], ["q" * 30, "2.00 ms", "yes"]]
    with page_width(40):
        columns = columns_of(PLANNER="text", PERIOD="number", FITS="whole")
        _, first, second = table_of(rows, columns).splitlines()
    assert first.endswith("\x1b[31mdoes not fit\x1b[0m") and "\x1b[32myes\x1b[0m" in second
    assert max(map(len, map(click.unstyle, (first, second)))) <= 40


def test_a_page_that_is_too_narrow_does_without_the_spare_columns():
    rows = [["name", "1" * 20, "2" * 20, "3" * 20]]
    with page_width(60):
        columns = columns_of(A="text", B="number", C="number", D="number")
        columns[1:3] = columns[1]._replace(spare=2), columns[2]._replace(spare=1)
        shown = click.unstyle(table_of(rows, columns))
    assert shown.splitlines()[0].split() == ["A", "B", "D"]
