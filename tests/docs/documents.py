"""The documents of docs/, taken apart."""

import re

from tests.helpers import ROOT

NAMES = sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def read(name):
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def blocks(text, language):
    """The contents of the fenced blocks of `language`, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def prints(shown, output):
    """Whether `output` is what a page shows of it; a line of dots is for lines left out."""
    pieces = re.split(r"^\.\.\.\n", shown, flags=re.MULTILINE)
    return re.fullmatch(r"(?:.*\n)*?".join(map(re.escape, pieces)), output)


def section(text, heading):
    """The text under `## heading`, up to the next heading of that rank."""
    return re.split(
        r"^## ", text.partition(f"\n## {heading}\n")[2], maxsplit=1, flags=re.MULTILINE
    )[0]


def rows(text):
    """The cells of every row of every table, without headings and rules; backticks dropped."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split(" | ")] for line in lines]
