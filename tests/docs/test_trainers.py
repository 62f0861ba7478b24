"""docs/trainers.md: the commands that it shows print what it shows, and its table is the code's."""

import re
import shlex

from partopt import EXPORTERS
from partopt.exporters.target import Target
from partopt.exporters.torch_csv import SYNCHRONOUS
from tests.docs.documents import read, rows, section

PAGE = read("trainers.md")
SHOWN = [
    (" ".join(command.split("\\\n")), output)
    for block in re.findall(r"^```\n(\$ .*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    for command, output in re.findall(
        r"\$ partopt ((?:[^\n]*\\\n)*[^\n]*)\n((?:(?!\$ ).*\n)*)", block
    )
]
NOTES = re.search(r"^```\n(note: .*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
BEGINS = {
    "anywhere": "any layer",
    "parts": "a part",
    "heads": "a block or the head",
    "blocks": "a block",
}


def test_every_trainer_is_shown():
    shown = {match[1] for command, _ in SHOWN if (match := re.search("--to ([a-z-]+)", command))}
    assert shown == {*EXPORTERS} - {"torch", "flows"}  # shown elsewhere


def test_what_it_shows_is_what_the_commands_print(partopt, tmp_path, monkeypatch):
    """In the order of the page, for exports read what was planned before."""
    monkeypatch.chdir(tmp_path)
    for command, output in SHOWN:
        outcome = partopt(*shlex.split(command))
        assert outcome.code == 0, outcome.err
        if command.startswith("export"):
            assert outcome.out == output
        else:
            assert output == ""
        if command.endswith("--to megatron"):
            assert outcome.err.startswith(NOTES[1])


def cells(target: Target) -> list[str]:
    """The row of a trainer in the table."""
    serves = target.schedules is None
    schedules = "any" if serves else ", ".join(target.schedules)
    if target.schedules is SYNCHRONOUS:
        schedules = "all synchronous ones but `dualpipe`"
    shards = "any" if serves else ", ".join(own for own in target.shards if own != "none")
    return [
        target.name,
        target.tried,
        schedules.strip("`"),
        target.replicas,
        "any" if serves else target.recompute,
        shards or "-",
        BEGINS[target.cuts],
    ]


def test_the_table_says_what_the_targets_do():
    assert rows(section(PAGE, "What each can say"))[1:] == [
        cells(target) for target in EXPORTERS.values() if target.name != "flows"
    ]
