"""Faults that may strike a run, drawn at random, and what the run has to say of each."""

from __future__ import annotations

import random
import re
import signal
from typing import NamedTuple

LATEST_S = 0.8  # at which a fault strikes, from when all processes are there
LATER_S = 0.25  # from the first checkpoint
LAST_ACTION = 30  # in which one strikes, of those of its rank
M = 4
SHAPES: dict[int, list[list[int]]] = {  # replicas of the stages, by ranks
    2: [[1, 1]],
    3: [[1, 1, 1], [2, 1]],
    4: [[1, 1, 1, 1], [2, 2], [2, 1, 1]],
}
RANKS = ("killed", "stopped", "killed in an action", "hangs", "raises", "out of memory")
SLOW = "slow, then Ctrl-C"
PARENT = ("Ctrl-C", "Ctrl-Z, Ctrl-C", "SIGTERM", "SIGHUP", "parent killed", SLOW)
SIGNALS = {
    "killed": signal.SIGKILL,
    "stopped": signal.SIGSTOP,
    "Ctrl-C": signal.SIGINT,
    "Ctrl-Z, Ctrl-C": signal.SIGINT,
    "SIGTERM": signal.SIGTERM,
    "SIGHUP": signal.SIGHUP,
    "parent killed": signal.SIGKILL,
}
REASONS = {
    "killed": r"the process was killed by signal 9 \(SIGKILL\)$",
    "killed in an action": r"the process was killed by signal 9 \(SIGKILL\)$",
    "stopped": "it is alive, but others waited for it in vain$",
    "hangs": "it is alive, but others waited for it in vain$",
    "raises": "ValueError: boom$",
    "out of memory": "MemoryError",
}
WORDS = {"SIGTERM": "terminated", "SIGHUP": "hung up"}


class Fault(NamedTuple):
    """What strikes which rank, or the parent, of which run; at a time or in an action.

    `time_s` counts from when all processes are there or, `later`, from the first checkpoint.
    """

    number: int
    kind: str
    replicas: list[int]
    schedule: str
    engine: str
    saves: bool
    rank: int
    later: bool
    time_s: float | None
    action: int | None

    @property
    def ranks(self) -> int:
        """How many processes train."""
        return sum(self.replicas)

    @property
    def plan(self) -> str:
        """The file of its plan."""
        return f"{self.schedule}-{'-'.join(map(str, self.replicas))}.json"


def draw(count: int, seed: int) -> list[Fault]:
    """Random faults, of every kind nearly as many."""
    chance = random.Random(seed)
    kinds = [(RANKS + PARENT)[number % len(RANKS + PARENT)] for number in range(count)]
    chance.shuffle(kinds)
    return [_draw(number, kind, chance) for number, kind in enumerate(kinds)]


def _draw(number: int, kind: str, chance: random.Random) -> Fault:
    timed, replicas = kind in SIGNALS, chance.choice(SHAPES[chance.choice((2, 3, 4))])
    equal, alone = len(set(replicas)) == 1, max(replicas) == 1
    saves, later = chance.random() < 0.7, chance.random() < 0.7
    return Fault(
        number=number,
        kind=kind,
        replicas=replicas,
        schedule=chance.choice(("1f1b", "gpipe", "zb-h1") if alone else ("1f1b",)),
        engine=chance.choice(("torch", "partopt") if equal else ("partopt",)),
        saves=saves,
        rank=chance.randrange(sum(replicas)),
        later=timed and saves and later,
        time_s=chance.uniform(0.0, LATER_S if saves and later else LATEST_S) if timed else None,
        action=None if timed else chance.randrange(1, LAST_ACTION),
    )


def is_named(fault: Fault, code: int, text: str) -> bool:
    """Whether the exit code and the message are those of the fault."""
    if fault.kind == "parent killed":
        return code == -signal.SIGKILL
    if fault.kind in PARENT:
        said = f"{WORDS.get(fault.kind, 'interrupted')}: every process has ended"
        return code == 128 + SIGNALS.get(fault.kind, signal.SIGINT) and text.splitlines()[-1:] == [
            said
        ]
    stage = [s for s, count in enumerate(fault.replicas) for _ in range(count)][fault.rank]
    where = rf" at {stage}[FBIWAU]\d*" + ("" if fault.action is not None else "|")
    first = rf"^error: .*rank {fault.rank} failed({where}): {REASONS[fault.kind]}"
    last = rf"no action yet|{stage}[FBIWAU]\d* of step \d+"
    every = all(re.search(rf"^  rank {r}: ", text, re.MULTILINE) for r in range(fault.ranks))
    own = re.search(rf"^  rank {fault.rank}: ({last})", text, re.MULTILINE)
    return code == 1 and every and own is not None and bool(re.search(first, text, re.MULTILINE))
