import click
import pytest

from partopt.printable import shorten
from partopt.report.table import bar, label_lines, table
from partopt.report.width import page_width


def test_numbers_stand_right_and_words_left_without_trailing_blanks():
    assert table(
        ["NAME", "TIME", "NOTE"], [["a", "1.00 ms", "x"], ["longer", "12 s", ""]], left=(0, 2)
    ).splitlines()[1:] == [
        "a       1.00 ms  x",
        "longer     12 s",
    ]


def test_a_table_wider_than_the_page_shortens_its_widest_text_and_no_number():
    (line,) = table(
        ["NAME", "KIND", "TIME"], [["n" * 60, "k" * 20, "9" * 12]], left=(0, 1)
    ).splitlines()[1:]
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
        _, first, second = table(
            ["PLANNER", "PERIOD", ""], rows, left=(0, 2), verdicts=(2,)
        ).splitlines()
    assert first.endswith("\x1b[31mdoes not fit\x1b[0m") and "\x1b[32myes\x1b[0m" in second
    assert max(map(len, map(click.unstyle, (first, second)))) <= 40


def test_a_page_that_is_too_narrow_does_without_the_spare_columns():
    rows = [["name", "1" * 20, "2" * 20, "3" * 20]]
    with page_width(60):
        shown = click.unstyle(table(["A", "B", "C", "D"], rows, spare=(2, 1)))
    assert shown.splitlines()[0].split() == ["A", "B", "D"]
