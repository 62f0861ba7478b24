import pytest

from partopt.printable import shorten
from partopt.report.table import bar, label_lines, table


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
