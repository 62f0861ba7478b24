"""A plan that does not fit its devices: by how much, and what would help."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from partopt.errors import ANSWER_IS_NO, PartoptError, PartoptWarning

if TYPE_CHECKING:
    from partopt.cost.problem import Problem
    from partopt.documents.plan import Plan

Restated = Callable[..., "Problem"]  # states the problem again, with some of its options changed


def does_not_fit(plan: Plan, problem: Problem, restated: Restated) -> PartoptError:
    """The error of a plan that does not fit; its hint names flags with which a plan does."""
    from partopt.documents.plan import stages_text
    from partopt.units import format_bytes

    assert problem.memory_bytes is not None
    over = format_bytes(plan.peak_memory_bytes - problem.memory_bytes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PartoptWarning)  # of plans that nobody asked for
        hint = _what_would_fit(plan.planner, problem, restated)
    needed = (
        f"a device of {stages_text(plan.fullest_stages)} needs "
        f"{format_bytes(plan.peak_memory_bytes)}"
    )
    message = f"the plan does not fit: {needed}, {over} more than there is"
    return PartoptError(message, hint, ANSWER_IS_NO)


def _what_would_fit(planner: str, problem: Problem, restated: Restated) -> str:
    """The flags of the fastest plan that fits, with as few kinds of change as will do: size and
    recomputation, then the planner, then the optimizer.
    """
    from partopt.search import contest
    from partopt.units import format_rate

    for optimizer in (problem.optimizer, "momentum", "sgd"):
        for names in (
            [planner],
            []
            if planner == "manual"
            else [name for name in contest.contestants(problem) if name != planner],
        ):
            found = list(_fitting(names, planner, optimizer, problem, restated))
            if found:
                speed, flags = max(found, key=lambda each: each[0])  # the first of equal ones
                return f"this fits:{flags} ({format_rate(speed, 'samples')})"
    return (
        "nothing tried fits: smaller measured microbatch sizes, --recompute always, other "
        "planners, --optimizer sgd; take larger devices"
    )


def _fitting(
    names: list[str], planner: str, optimizer: str, problem: Problem, restated: Restated
) -> Iterator[tuple[float, str]]:
    """Samples/s and flags of the plans that fit, at every smaller measured size, with and without
    recomputation.
    """
    from partopt.search import contest

    now, recompute_now = (
        problem.chain.microbatch_size,
        "auto" if problem.recompute_per_stage else "always" if problem.recompute else "never",
    )
    sizes = [m.microbatch_size for m in problem.profile.measured() if m.microbatch_size < now] + [
        now
    ]
    for name, size, recompute in itertools.product(names, reversed(sizes), ("never", "always")):
        with suppress(PartoptError):  # a --global-batch may be no multiple of that size
            plan = contest.decided(
                name, restated(microbatch_size=size, recompute=recompute, optimizer=optimizer)
            )
            if plan.fits:
                flags = "" if name == planner else f" --planner {name}"
                flags += "" if size == now else f" --microbatch-size {size}"
                flags += "" if recompute == recompute_now else f" --recompute {recompute}"
                flags += "" if optimizer == problem.optimizer else f" --optimizer {optimizer}"
                yield plan.predicted.samples_per_s, flags
