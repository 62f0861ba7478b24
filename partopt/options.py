"""What the options of a job may be, alone and together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal, get_args

from partopt import units
from partopt.documents.plan import Optimizer, Replication, Tied
from partopt.errors import PartoptError, did_you_mean
from partopt.schedules import SCHEDULES, schedule
from partopt.schedules.layout import LOOPED

if TYPE_CHECKING:
    from partopt.job import Job

Recompute = Literal["never", "always", "auto"]
Comm = Literal["overlap", "serial"]
AllReduce = Literal["overlap", "blocking"]

AUTO: Final = "auto"  # the schedule that is chosen among all synchronous ones
MANUAL: Final = "manual"  # the planner of a split of one's own
_CHOICES: dict[str, tuple[str, ...]] = {
    "replication": get_args(Replication),
    "recompute": get_args(Recompute),
    "optimizer": get_args(Optimizer),
    "tied": get_args(Tied),
    "comm": get_args(Comm),
    "allreduce": get_args(AllReduce),
}
_COUNTS = ("microbatch_size", "microbatches", "global_batch", "stages", "chunks")
_LISTS = {
    "cut_at": (str, "names"),
    "cuts": (int, "whole numbers"),
    "replicas": (int, "whole numbers"),
}
_CHOSEN_BY_AUTO = ("planner", "stages", "chunks", "cuts", "replicas")


def check_options(job: Job) -> None:
    """Raise PartoptError for the first option that cannot be, or contradicts another."""
    for name in _COUNTS:
        check_count(name, getattr(job, name))
    for name, choices in _CHOICES.items():
        value = getattr(job, name)
        if value not in choices and not (name == "recompute" and value is None):
            raise invalid(name, value, f"unknown {name}", did_you_mean(str(value), choices))
    for name in _LISTS:
        _check_list(name, getattr(job, name))
    _check_split(job)
    if job.schedule == AUTO:
        _check_auto(job)
    else:
        _check_schedule(job)


def check_count(name: str, value: object) -> None:
    """Raise PartoptError unless `value`, of the option `name`, is None or a whole number from 1."""
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise invalid(name, value, "must be a whole number of at least 1", "give 1 or more")


def invalid(option: str, value: object, what: str, hint: str) -> PartoptError:
    """The error of an option with a value that it cannot have."""
    return PartoptError(
        f"`{option}={value}`: {what}", hint, code="invalid-option", option=option, value=value
    )


def parse_memory(given: str | int) -> int:
    """Bytes of the limit of a device, from a quantity or bytes. PartoptError unless positive."""
    try:
        limit = units.parse_bytes(given) if isinstance(given, str) else given
    except PartoptError as error:
        raise error.at("`memory`") from None
    if not isinstance(limit, int) or isinstance(limit, bool) or limit <= 0:
        raise invalid("memory", given, "must be positive", 'write "40 GB", or bytes')
    return limit


def _conflict(option: str, message: str, hint: str) -> PartoptError:
    return PartoptError(message, hint, code="conflicting-options", option=option)


def _check_list(name: str, value: object) -> None:
    """Raise PartoptError unless `value` is None or a sequence of what the option lists."""
    kind, words = _LISTS[name]
    if value is None:
        return
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    if not listed or not all(type(each) is kind for each in value):  # type: ignore[attr-defined]
        raise invalid(name, value, f"must be a list of {words}", "for example [5, 9, 12]")


def _check_split(job: Job) -> None:
    """A split of one's own goes with the planner `manual` alone, and fixes the boundaries."""
    own = job.cuts is not None or job.replicas is not None
    if own and job.planner not in (None, MANUAL):
        raise _conflict(
            "planner",
            f"`planner={job.planner}`: `cuts` and `replicas` go with `planner=manual`",
            "drop one or the other",
        )
    if job.planner_name == MANUAL and job.cut_at:
        raise _conflict(
            "cut_at",
            "`cut_at`: `cuts` already fixes the boundaries",
            "drop `cut_at`, or `cuts` and `replicas`",
        )


def _check_auto(job: Job) -> None:
    for name in _CHOSEN_BY_AUTO:
        if getattr(job, name) is not None:
            raise _conflict(
                name,
                f"`{name}`: `schedule=auto` chooses that itself",
                f"drop `{name}`, or name a schedule",
            )
    if job.replication != "free":
        raise _conflict(
            "replication",
            f"`replication={job.replication}`: `schedule=auto` tries all grids",
            "drop `replication`, or name a schedule",
        )
    _check_exchange(job, "synchronous schedules exchange")
    _check_iteration(job, "for example `global_batch=512`")


def _check_schedule(job: Job) -> None:
    entry = schedule(job.schedule)
    if job.chunks is not None and entry.shape != LOOPED:
        able = [f"`schedule={name}`" for name in SCHEDULES if schedule(name).shape == LOOPED]
        raise _conflict(
            "chunks",
            f"`chunks`: not for {job.schedule}",
            f"choose {' or '.join(able)}",
        )
    if not entry.asynchronous:
        _check_exchange(job, f"{job.schedule} exchanges")
        _check_iteration(job, "for example `microbatches=64`")
        return
    for name in ("microbatches", "global_batch"):
        if getattr(job, name) is not None:
            raise _conflict(
                name,
                f"`{name}`: {job.schedule} is asynchronous and has no iterations",
                f"drop `{name}`, or choose `schedule=1f1b`",
            )


def _check_exchange(job: Job, who: str) -> None:
    """A synchronous schedule exchanges gradients once, when nothing else is left to do."""
    if job.allreduce == "blocking":
        raise _conflict(
            "allreduce",
            f"`allreduce=blocking`: {who} gradients when its last backward is done",
            "drop `allreduce`",
        )


def _check_iteration(job: Job, example: str) -> None:
    if (job.microbatches is None) == (job.global_batch is None):
        raise PartoptError(
            f"`schedule={job.schedule}`: needs either `microbatches` or `global_batch`",
            example,
            code="microbatches-needed",
            option="schedule",
            schedule=job.schedule,
        )
