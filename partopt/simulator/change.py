"""Changes to what a plan runs under, and what comes of them when they are tried.

Nothing is advised that was not executed: a change has options of `simulate`, and the gain and the
price that are stated are those of the plan executed with them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from partopt.errors import PartoptError
from partopt.simulator.conditions import Conditions
from partopt.simulator.execution import Execution

MOST_ACTIONS = 300_000  # of an execution that is repeated with changes
WORTH = 0.02  # of the speed: a change that brings less is not worth the trouble

Goal = Literal["faster", "fits", "settles"]


class Change(NamedTuple):
    """Options to change, what else they take, in words, and what the change is for."""

    options: Mapping[str, Any]
    more: str = ""
    goal: Goal = "faster"


class Tried(NamedTuple):
    """A change that does what it is for, executed.

    `options` are all that `simulate` is called with; `speedup` is the samples/s with the change
    over those without it, `peak_memory_bytes` what the fullest device then needs; `text` says both.
    """

    options: dict[str, Any]
    speedup: float
    peak_memory_bytes: int
    text: str


@dataclass(frozen=True)
class Trials:
    """What a plan was executed under, and how to execute it under other conditions."""

    given: Conditions
    run: Callable[[Conditions], Execution]

    def first(self, now: Execution, changes: Sequence[Change]) -> Tried | None:
        """The first of `changes` to the execution `now` that does what it is for."""
        return next(self._successes(now, changes), None)

    def fastest(self, now: Execution, changes: Sequence[Change]) -> Tried | None:
        """The fastest of `changes` to the execution `now` that do what they are for."""
        return max(self._successes(now, changes), key=lambda each: each.speedup, default=None)

    def _successes(self, now: Execution, changes: Sequence[Change]) -> Iterator[Tried]:
        for change in changes if len(now.order.kind) <= MOST_ACTIONS else ():
            options = self._with(change.options)
            with suppress(PartoptError):  # the plan cannot run that way
                then = self.run(Conditions(**options))
                if _achieves(change.goal, now, then):
                    yield _compare(now, then, options, change.more)

    def _with(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """All that was given, with `options` in place of it; those by level one by one.

        A warm-up is one of a schedule, and goes with it.
        """
        given = {
            field.name: value
            for field in dataclasses.fields(self.given)
            if (value := getattr(self.given, field.name)) not in (None, {})
            and not (field.name == "warmup" and "schedule" in options)
        }
        by_level = {
            name: {**given[name], **value}
            for name, value in options.items()
            if isinstance(value, Mapping) and name in given
        }
        return {**given, **options, **by_level}


def _achieves(goal: Goal, now: Execution, then: Execution) -> bool:
    """Whether the execution `then` is what a change to `now` was for."""
    limit = then.plan.memory_limit_bytes
    if limit is not None and int(then.peak_memory_bytes.max()) > limit:
        return False
    if goal == "fits":
        return True
    if goal == "settles":
        return then.steady is not None and then.steady.settled
    return then.period_s * (1 + WORTH) <= now.period_s


def _compare(now: Execution, then: Execution, options: dict[str, Any], more: str) -> Tried:
    speedup = now.period_s / then.period_s
    peak, before = (int(each.peak_memory_bytes.max()) for each in (then, now))
    gains = [
        f"{abs(speedup - 1):.1%} {'faster' if speedup > 1 else 'slower'}",
        f"{peak / max(before, 1) - 1:+.1%} memory",
    ]
    said = [text for text in gains if not text.lstrip("+-").startswith("0.0%")]
    return Tried(options, speedup, peak, ", ".join([*said, *([more] if more else [])]))
