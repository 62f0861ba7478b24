"""What is printed of a plan that does not fit its devices: by how much, and what would help."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from partopt.errors import ANSWER_IS_NO, PartoptError

if TYPE_CHECKING:
    from partopt import Job, Plan


def does_not_fit(plan: Plan, job: Job, command: Callable[[Mapping[str, Any]], str]) -> PartoptError:
    """The error of a plan that does not fit; its hint is a command with which one does.

    `command` gives the command that plans the job with some options changed.
    """
    import partopt
    from partopt.report.phrases import speed_text

    fitting = partopt.find_fitting(job, plan)
    if fitting is not None:
        speed = speed_text(fitting.samples_per_s, plan.profile.tokens_per_sample)
        hint = f"this fits ({speed}): {command(fitting.options)}"
    else:
        tried = ", ".join(partopt.list_tried(job, plan))
        hint = f"nothing tried fits: {tried}; take larger devices" if tried else _LARGER
    return PartoptError(
        f"the plan does not fit: {_excess(plan)}", hint, ANSWER_IS_NO, code="does-not-fit"
    )


_LARGER = "take larger devices, or more of them"


def no_schedule_fits(plan: Plan, job: Job) -> PartoptError:
    """The error where the fastest plan of all schedules does not fit, and no other does."""
    smaller = any(m.microbatch_size < plan.microbatch_size for m in job.profile.measured())
    ways = {
        "smaller microbatches": job.microbatch_size is not None and smaller,
        "`recompute=always`": job.recompute == "never",
    }
    return PartoptError(
        f"no schedule fits: of the fastest, {_excess(plan)}",
        ", or ".join([_LARGER, *(way for way, may_help in ways.items() if may_help)]),
        ANSWER_IS_NO,
        code="does-not-fit",
    )


def _excess(plan: Plan) -> str:
    from partopt.documents.stage import stages_text
    from partopt.units import format_bytes

    limit, peak = plan.memory_limit_bytes, plan.peak_memory_bytes
    assert limit is not None
    return (
        f"a device of {stages_text(plan.fullest_stages)} needs {format_bytes(peak)}, "
        f"which exceeds the limit by {format_bytes(peak - limit)}"
    )
