"""What is printed of a plan that does not fit its devices: by how much, and what would help."""

from __future__ import annotations

from typing import TYPE_CHECKING

from partopt.errors import ANSWER_IS_NO, PartoptError

if TYPE_CHECKING:
    from partopt import Job, Plan

_NOTHING_FITS = (
    "nothing tried fits: smaller measured microbatch sizes, --recompute always, other planners, "
    "--optimizer sgd; take larger devices"
)


def does_not_fit(plan: Plan, job: Job) -> PartoptError:
    """The error of a plan that does not fit; its hint names flags with which a plan does."""
    import partopt
    from partopt.units import format_rate

    fitting = partopt.find_fitting(job, plan)
    hint = _NOTHING_FITS
    if fitting is not None:
        flags = [f"--{name.replace('_', '-')} {value}" for name, value in fitting.options.items()]
        hint = f"this fits: {' '.join(flags)} ({format_rate(fitting.samples_per_s, 'samples')})"
    return PartoptError(
        f"the plan does not fit: {_excess(plan)}", hint, ANSWER_IS_NO, code="does-not-fit"
    )


def no_schedule_fits(plan: Plan) -> PartoptError:
    """The error where the fastest plan of all schedules does not fit, and no other does."""
    return PartoptError(
        f"no schedule fits: of the fastest, {_excess(plan)}",
        "take larger devices, more of them, or smaller microbatches",
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
