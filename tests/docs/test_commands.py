"""docs/commands.md: every command of its tables that needs no model's file is run."""

import re
import shlex

import pytest

from tests.docs.documents import read
from tests.helpers import two_level
from tests.trainers.models import transformer

PLANNED = "model.json --topology cluster.yaml --effort quick"
NAMES = {
    "PROFILE": "model.json",
    "T": "cluster.yaml",
    "PLAN": "plan.json",
    "FILE...": "plan.json",
    "TRAINER": "flows",
    "NAME": "plan",
    "[DOCUMENT...]": "",
    "...": PLANNED,
}
# what takes long, measures, or reads what the page does not have
LEFT_OUT = (
    "profile",
    "run",
    "doctor",
    "import",
    "topology measure",
    "show RUN.json",
    "plan CONFIG",
)


def shown():
    """The words of each command of the tables, names in capitals and dots filled in."""
    cells = [line.split(" | ")[0] for line in read("commands.md").splitlines() if "| `" in line]
    for command in re.findall("`partopt ([^`]+)`", "\n".join(cells)):
        if not command.startswith(LEFT_OUT):
            yield shlex.split(" ".join(NAMES.get(word, word) for word in command.split()))


@pytest.mark.slow
def test_the_commands_run(partopt, profile_file, topology_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    profile_file(transformer(), "model.json")
    topology_file(two_level(2, 2), "cluster.yaml")
    assert partopt("plan", *PLANNED.split(), "--cuts", "4,7,10", "-o", "plan.json").code == 0
    commands = list(shown())
    assert len(commands) > 20
    for words in commands:
        more = ["--force"] if "f.svg" in words else []
        more += ["--profile", "model.json"] if "--verify" in words else []
        done = partopt(*words, *more)
        assert done.code == 0, (words, done.err)
