"""The glossary has the terms of `--explain`, in their words."""

from partopt.report.glossary import TERMS
from tests.docs.documents import read


def test_the_page_has_the_terms_that_are_explained():
    described = [
        line.strip("|\n").split(" | ", 1)
        for line in read("glossary.md").splitlines()
        if line.startswith("| ") and not line.startswith("| term ")
    ]
    assert [(term.strip(), text.strip()) for term, text in described] == list(TERMS.items())
