"""What the options of a job may be, alone and together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from partopt import units
from partopt.documents import check_option
from partopt.documents.plan import Optimizer, Replication, Tied
from partopt.documents.profile import Count
from partopt.documents.stage import Buffers, Gradients, Shard
from partopt.errors import PartoptError, did_you_mean
from partopt.schedules import SCHEDULES, schedule
from partopt.schedules.layout import LOOPED

Recompute = Literal["never", "always", "auto"]
Comm = Literal["auto", "overlap", "serial"]
Messages = Literal["packed", "split"]
AllReduce = Literal["overlap", "blocking"]
Effort = Literal["quick", "normal", "thorough"]

# of a schedule: the best of all synchronous ones; of `comm`: what the schedule's engines do
AUTO: Final = "auto"
MANUAL: Final = "manual"  # the planner of a split of one's own
_CHOICES: dict[str, tuple[str, ...]] = {
    "replication": get_args(Replication),
    "recompute": get_args(Recompute),
    "optimizer": get_args(Optimizer),
    "gradients": get_args(Gradients),
    "buffers": get_args(Buffers),
    "shard": get_args(Shard),
    "tied": get_args(Tied),
    "comm": get_args(Comm),
    "messages": get_args(Messages),
    "allreduce": get_args(AllReduce),
    "effort": get_args(Effort),
}
_COUNTS = ("microbatch_size", "microbatches", "global_batch", "stages", "chunks")
MOST, MOST_BYTES = 10**9, 10**18  # of anything that is counted; of memory
_MOST_STATE = 1000  # bytes of optimizer state for a parameter
_LISTS = {
    "cut_at": (str, "names"),
    "cuts": (int, "whole numbers"),
    "replicas": (int, "whole numbers"),
}
CHOSEN_BY_AUTO = ("planner", "stages", "chunks", "cuts", "replicas")


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a model is to be trained.

    `schedule` is a name, or "auto" for the best synchronous one; `planner` a name, or None for the
    best plan of all (the planner "manual" with `cuts`). `microbatch_size` is b, by default the
    measured size with the fastest plan; a synchronous schedule needs M `microbatches` or a
    `global_batch` of G samples. `replication` says what replicas stages may have, `recompute`
    whether they re-materialise activations ("auto": the planner chooses the stages; None: "never",
    and both under `schedule="auto"`). `optimizer` is for its memory, or `optimizer_bytes` of state
    for each parameter; `gradients` are kept in float32 or as the parameters are. `buffers` says
    whether all microbatches of an iteration have receive buffers or those in flight, `shard` what
    the replicas of a stage hold a share of: its optimizer state, and gradients. `memory` is the
    limit of a device, bytes or "76 GB", by default the topology's; `reserve` are bytes of it that
    no plan may use, by default as `partopt.cost.memory` says. `stages` and `chunks` (v, of looped
    schedules) are how many; `cut_at` are patterns of the layers that a stage may begin with; `tied`
    says whether stages may part layers that share parameters. `cuts` and `replicas` are a split of
    your own: the first layer of every stage but the first, and the replicas of each. `comm` and
    `allreduce` say whether devices wait for their messages ("auto": as engines that run the
    schedule do) and for their gradients, which synchronous schedules exchange in buckets of so many
    bytes, as the backward makes them; `messages` whether the tensors of a cut are one or several;
    `cost` is what GPipe's heuristics balance: measured time, flops, parameters, or a number for
    each layer. `effort` is how long the optimal planner's plan is improved in the simulator.
    """

    schedule: str = "pipedream"
    planner: str | None = None
    microbatch_size: int | None = None
    microbatches: int | None = None
    global_batch: int | None = None
    replication: Replication = "free"
    recompute: Recompute | None = None
    optimizer: Optimizer = "adam"
    optimizer_bytes: float | None = None
    gradients: Gradients = "parameters"
    buffers: Buffers = "flight"
    shard: Shard = "none"
    memory: str | int | None = None
    reserve: str | int | None = None
    stages: int | None = None
    chunks: int | None = None
    cut_at: Sequence[str] = ()
    tied: Tied = "exchange"
    cuts: Sequence[int] | None = None
    replicas: Sequence[int] | None = None
    comm: Comm = "auto"
    messages: Messages = "packed"
    allreduce: AllReduce = "overlap"
    bucket: str | int = "25 MiB"
    cost: str | Sequence[float] = "time"
    effort: Effort = "normal"

    @property
    def planner_name(self) -> str | None:
        """The planner, which a split of one's own implies; None for the best of all."""
        own = self.cuts is not None or self.replicas is not None
        return MANUAL if own else self.planner


def check_options(options: Options) -> None:
    """Raise PartoptError for the first option that is invalid or contradicts another."""
    for name in _COUNTS:
        if getattr(options, name) is not None:
            check_count(name, getattr(options, name))
    for name, choices in _CHOICES.items():
        value = getattr(options, name)
        if value not in choices and not (name == "recompute" and value is None):
            raise invalid(name, value, f"unknown {name}", did_you_mean(str(value), choices))
    for name in _LISTS:
        _check_list(name, getattr(options, name))
    _check_optimizer_bytes(options.optimizer_bytes)
    _check_split(options)
    if options.schedule == AUTO:
        _check_auto(options)
    else:
        _check_schedule(options)


def check_count(name: str, value: object) -> None:
    """Raise PartoptError unless the option is a whole number from 1 to MOST."""
    check_option(name, value, Count, "give 1 or more")
    if isinstance(value, int) and value > MOST:
        raise invalid(name, _shorten(value), "is too large", f"give {MOST:,} or less")


def _shorten(value: int) -> str:
    """A number, in powers of ten where it has too many digits to read."""
    return str(value) if value < 10**18 else f"10^{int(math.log10(value))}"


def invalid(option: str, value: object, what: str, hint: str) -> PartoptError:
    """The error of an option with an invalid value."""
    return PartoptError(
        f"`{option}={value}`: {what}", hint, code="invalid-option", option=option, value=value
    )


def parse_bytes(option: str, given: str | int, least: int = 1) -> int:
    """Bytes that an option gives, from a quantity or bytes. PartoptError unless `least` or more."""
    try:
        size = units.parse_bytes(given) if isinstance(given, str) else given
    except PartoptError as error:
        raise error.at(f"`{option}`") from None
    if not isinstance(size, int) or isinstance(size, bool) or size < least:
        sign = "positive" if least else "0 or more"
        raise invalid(option, given, f"must be {sign}", 'write "40 GB", or bytes')
    if size > MOST_BYTES:
        shown = given if isinstance(given, str) else _shorten(given)
        raise invalid(option, shown, "is too large", 'write "40 GB", or bytes')
    return size


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


def _check_optimizer_bytes(value: object) -> None:
    """Raise PartoptError unless `value` is None or bytes that a parameter may have."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (number and 0 <= value <= _MOST_STATE):  # type: ignore[operator]
        hint = f"give 0 to {_MOST_STATE} bytes for each parameter: adam keeps 8"
        raise invalid("optimizer_bytes", value, "must be a number of bytes", hint)


def _check_split(options: Options) -> None:
    """A split of one's own goes with the planner `manual` alone, and fixes the boundaries."""
    own = options.cuts is not None or options.replicas is not None
    if own and options.planner not in (None, MANUAL):
        raise _conflict(
            "planner",
            f"`planner={options.planner}`: `cuts` and `replicas` go with `planner=manual`",
            "drop one or the other",
        )
    if options.planner_name == MANUAL and options.cut_at:
        raise _conflict(
            "cut_at",
            "`cut_at`: `cuts` already fixes the boundaries",
            "drop `cut_at`, or `cuts` and `replicas`",
        )


def _check_auto(options: Options) -> None:
    for name in CHOSEN_BY_AUTO:
        if getattr(options, name) is not None:
            raise _conflict(
                name,
                f"`{name}`: `schedule=auto` chooses that itself",
                f"drop `{name}`, or name a schedule",
            )
    if options.replication != "free":
        raise _conflict(
            "replication",
            f"`replication={options.replication}`: `schedule=auto` tries all grids",
            "drop `replication`, or name a schedule",
        )
    _check_iteration(options, "for example `global_batch=512`")


def _check_schedule(options: Options) -> None:
    entry = schedule(options.schedule)
    if options.chunks is not None and entry.shape != LOOPED:
        able = [f"`schedule={name}`" for name in SCHEDULES if schedule(name).shape == LOOPED]
        raise _conflict(
            "chunks",
            f"`chunks`: not for {options.schedule}",
            f"choose {' or '.join(able)}",
        )
    if not entry.asynchronous:
        _check_iteration(options, "for example `microbatches=64`")
        return
    if options.buffers == "all":
        raise _conflict(
            "buffers",
            f"`buffers=all`: {options.schedule} is asynchronous, its microbatches have no end",
            "drop `buffers`, or choose `schedule=1f1b`",
        )
    for name in ("microbatches", "global_batch"):
        if getattr(options, name) is not None:
            raise _conflict(
                name,
                f"`{name}`: {options.schedule} is asynchronous and has no iterations",
                f"drop `{name}`, or choose `schedule=1f1b`",
            )


def _check_iteration(options: Options, example: str) -> None:
    if (options.microbatches is None) == (options.global_batch is None):
        raise PartoptError(
            f"`schedule={options.schedule}`: needs either `microbatches` or `global_batch`",
            example,
            code="microbatches-needed",
            option="schedule",
            schedule=options.schedule,
        )
