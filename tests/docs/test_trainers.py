"""docs/trainers.md: the commands that it shows print what it shows, and its table is the code's."""

import re
import shlex

import pytest

from partopt import TRAINERS
from partopt.trainers import writers
from partopt.trainers.torch import SYNCHRONOUS
from tests.docs.documents import prints, read, rows, section

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
    assert shown == {*writers()} - {"torch"}  # shown elsewhere


@pytest.mark.slow
def test_what_it_shows_is_what_the_commands_print(partopt, tmp_path, monkeypatch):
    """In the order of the page, for exports read what was planned before."""
    monkeypatch.chdir(tmp_path)
    for command, output in SHOWN:
        outcome = partopt(*shlex.split(command))
        assert outcome.code == 0, outcome.err
        if command.startswith("export"):
            assert prints(output, outcome.out), command
        else:
            assert output == ""
        if command.endswith("--to megatron"):
            assert outcome.err.startswith(NOTES[1])


def cells(trainer):
    """The row of a trainer in the table."""
    serves = trainer.schedules is None
    schedules = "any" if serves else ", ".join(trainer.schedules)
    if trainer.schedules is not None and trainer.schedules.keys() == SYNCHRONOUS.keys():
        schedules = "all synchronous ones but `dualpipe`"
    shards = "any" if serves else ", ".join(own for own in trainer.engine.shard if own != "none")
    return [
        trainer.name,
        trainer.tried,
        schedules.strip("`"),
        trainer.says.replicas,
        "any" if serves else trainer.says.recomputed,
        shards or "-",
        BEGINS[trainer.says.cuts],
    ]


def test_the_table_says_what_the_trainers_do():
    assert rows(section(PAGE, "What each can say"))[1:] == [
        cells(TRAINERS[name]) for name in writers()
    ]
