"""What the options of a job may be, alone and together."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from msgspec.structs import replace

from partopt import units
from partopt.documents import check_option, refuse
from partopt.documents.engine import (
    OWN,
    PARTOPT,
    AllReduce,
    Engine,
    Layout,
    Messages,
    Recomputation,
    Recompute,
)
from partopt.documents.plan import Optimizer, Replication, Tied
from partopt.documents.profile import Count
from partopt.documents.stage import Buffers, Gradients, Shard
from partopt.errors import PartoptError, did_you_mean
from partopt.schedules import SCHEDULES, schedule
from partopt.schedules.layout import LOOPED

Effort = Literal["quick", "normal", "thorough"]

AUTO: Final = "auto"  # of a schedule: the best of all synchronous ones
MANUAL: Final = "manual"  # the planner of a split of one's own
_CHOICES: dict[str, tuple[str, ...]] = {
    "replication": get_args(Replication),
    "recompute": get_args(Recompute),
    "optimizer": get_args(Optimizer),
    "shard": get_args(Shard),
    "tied": get_args(Tied),
    "effort": get_args(Effort),
}
_COUNTS = ("microbatch_size", "microbatches", "global_batch", "stages", "chunks")
MOST, MOST_BYTES = 10**9, 10**18  # of anything that is counted; of memory
# facts of an engine that are one of several, and those that are some of several
_ONE_OF: dict[str, Collection[str]] = {
    "messages": get_args(Messages),
    "gradients": get_args(Gradients),
    "allreduce": get_args(AllReduce),
    "buffers": get_args(Buffers),
}
_SOME_OF: dict[str, Collection[str]] = {
    "waits": SCHEDULES,
    "recompute": get_args(Recomputation),
    "shard": get_args(Shard),
}
FACTS = (*_SOME_OF, *_ONE_OF, "bucket", "optimizer_bytes", "reserve")
_MOST_STATE = 1000  # bytes of optimizer state for a parameter
_LISTS = {
    "cut_at": (str, "names"),
    "cuts": (int, "whole numbers"),
    "replicas": (int, "whole numbers"),
    "block_bounds": (int, "whole numbers"),
}
CHUNKS = 2  # v by default
CHOSEN_BY_AUTO = ("planner", "stages", "chunks", "cuts", "replicas")


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a model is to be trained.

    `schedule` is a name, or "auto" for the best synchronous one; `planner` a name, or None for the
    best plan of all (the planner "manual" with `cuts`). `microbatch_size` is b, by default the
    measured size with the fastest plan; a synchronous schedule needs M `microbatches` or a
    `global_batch` of G samples. `replication` says what replicas stages may have, `recompute`
    whether they re-materialise activations ("auto": the planner chooses the stages; None: "never",
    and both under `schedule="auto"`; a number: that many of its first blocks, which lie between
    `block_bounds`). `optimizer` is for its memory; `shard` says what the replicas of a stage hold a
    share of: its optimizer state, and gradients. `memory` is the limit of a device, bytes or
    "76 GB", by default the topology's. `stages` and `chunks` (v, of looped schedules) are how many;
    `cut_at` are patterns of the layers that a stage may begin with; `tied`
    says whether stages may part layers that share parameters. `cuts` and `replicas` are a split of
    your own: the first layer of every stage but the first, and the replicas of each. `cost` is what
    GPipe's heuristics balance: measured time, flops, parameters, or a number for each layer.
    `effort` is how long the optimal planner's plan is improved in the simulator. `layout` fixes any
    part of the plan's: what other options say too, and degrees. `trainer` is the
    one that plans name, `engine` what its engine does; `facts` replace some of it, as `with_facts`
    says. `partopt.job_for` sets the two together.
    """

    schedule: str = "pipedream"
    planner: str | None = None
    microbatch_size: int | None = None
    microbatches: int | None = None
    global_batch: int | None = None
    replication: Replication = "free"
    recompute: Recompute | int | None = None
    block_bounds: Sequence[int] | None = None
    optimizer: Optimizer = "adam"
    shard: Shard = "none"
    memory: str | int | None = None
    stages: int | None = None
    chunks: int | None = None
    cut_at: Sequence[str] = ()
    tied: Tied = "exchange"
    cuts: Sequence[int] | None = None
    replicas: Sequence[int] | None = None
    cost: str | Sequence[float] = "time"
    effort: Effort = "normal"
    layout: Layout = field(default_factory=Layout)
    trainer: str = PARTOPT
    engine: Engine = OWN
    facts: Mapping[str, object] = field(default_factory=dict)

    @property
    def engine_run(self) -> Engine:
        """The engine with the facts that replace its own."""
        return with_facts(self.engine, self.facts)

    @property
    def first(self) -> int | None:
        """How many blocks of each stage are made again, where `recompute` is their number."""
        return self.recompute if isinstance(self.recompute, int) else None

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
    if options.first is not None:
        check_count("recompute", options.first)
    for name, choices in _CHOICES.items():
        value = getattr(options, name)
        if name == "recompute" and (value is None or type(value) is int):
            continue
        if value not in choices:
            raise invalid(name, value, f"unknown {name}", did_you_mean(str(value), choices))
    for name in _LISTS:
        _check_list(name, getattr(options, name))
    _check_engine(options)
    _check_split(options)
    if options.schedule == AUTO:
        _check_auto(options)
    else:
        _check_schedule(options)


def with_facts(engine: Engine, facts: Mapping[str, object]) -> Engine:
    """The engine with `facts` in place of its own, values as people write them.

    `waits`, `recompute` and `shard` are names, "1f1b,gpipe", where "none" alone is no schedule;
    `bucket` and `reserve` are bytes or "50 MB", `optimizer_bytes` a number. Raises PartoptError for
    an unknown fact or value.
    """
    changes: dict[str, object] = {}
    for name, value in facts.items():
        text = str(value)
        if name in _ONE_OF:
            changes[name] = _known(name, text, _ONE_OF[name])
        elif name in _SOME_OF:
            words = [] if (name, text) == ("waits", "none") else text.split(",")
            changes[name] = tuple(_known(name, word.strip(), _SOME_OF[name]) for word in words)
        elif name == "optimizer_bytes":
            changes[name] = _state_bytes(value)
        elif name in FACTS:
            given = value if isinstance(value, int) else text
            changes[f"{name}_bytes"] = parse_bytes(name, given, least=int(name == "bucket"))
        else:
            hint = did_you_mean(name, FACTS)
            raise PartoptError(f"no fact `{name}` of an engine", hint, code="unknown-fact")
    return replace(engine, **changes)


def check_layout(layout: object) -> None:
    """Raise PartoptError unless it is a layout whose fields have the right types."""
    if not isinstance(layout, Layout):
        what, hint = "must be a Layout", "`partopt.Layout(pp=4)` is one"
        raise invalid("layout", type(layout).__name__, what, hint)
    refuse(layout.faults(), "`layout`")


def requests_of(layout: Layout, name: str, chunks: int | None) -> dict[str, object]:
    """The options that a layout sets, beside a schedule of this `name` and the option `chunks`.

    Raises PartoptError where the schedule has another number of stages on a device.
    """
    name = layout.schedule or name
    found: dict[str, object] = {
        "schedule": layout.schedule,
        "microbatch_size": layout.microbatch,
        "recompute": layout.recompute,
        "shard": layout.shard,
    }
    if name != AUTO:
        entry, v = schedule(name), layout.chunks
        own = entry.stages_a_device(v or chunks or CHUNKS)
        if entry.shape == LOOPED:
            found["chunks"] = v
        if v not in (None, own):
            able = "`schedule=interleaved` or `schedule=auto`"
            what = f"{name} has {own} on each device"
            raise invalid("layout", f"chunks={v}", what, f"chunks={own}, or {able}")
        found["stages"] = layout.pp and layout.pp * own
        found["replication"] = layout.dp and ("none" if layout.dp == 1 else "uniform")
    return {option: value for option, value in found.items() if value is not None}


def _known(name: str, value: str, known: Collection[str]) -> str:
    if value not in known:
        raise invalid(name, value, f"unknown {name}", did_you_mean(value, known))
    return value


def _state_bytes(value: object) -> float:
    """Bytes of optimizer state that a parameter may have."""
    try:
        number = float(str(value))
    except ValueError:
        number = math.nan
    if not 0 <= number <= _MOST_STATE:
        hint = f"give 0 to {_MOST_STATE} bytes for each parameter: adam keeps 8"
        raise invalid("optimizer_bytes", value, "must be a number of bytes", hint)
    return number


def _check_engine(options: Options) -> None:
    """Raise PartoptError unless `engine` is one, of schedules that there are, and `facts` are."""
    engine = options.engine
    if not isinstance(engine, Engine):
        hint = '`partopt.TRAINERS["megatron"].engine` is one'
        raise invalid("engine", type(engine).__name__, "must be an Engine", hint)
    refuse(engine.faults(), "engine")
    for name in options.engine_run.waits:
        _known("waits", name, SCHEDULES)


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
    if options.engine_run.buffers == "all":
        raise _conflict(
            "buffers",
            f"`buffers=all`: {options.schedule} is asynchronous, its microbatches have no end",
            "choose `schedule=1f1b`, or `buffers=flight`",
        )
    for name in ("microbatches", "global_batch"):
        if getattr(options, name) is not None:
            raise _conflict(
                name,
                f"`{name}`: {options.schedule} is asynchronous and has no iterations",
                f"drop `{name}`, or choose `schedule=1f1b`",
            )


def _check_iteration(options: Options, example: str) -> None:
    if options.microbatches is not None and options.global_batch is not None:
        raise _conflict(
            "schedule",
            f"`schedule={options.schedule}`: `microbatches` and `global_batch` are both given",
            "drop one or the other",
        )
    if options.microbatches is None and options.global_batch is None:
        raise PartoptError(
            f"`schedule={options.schedule}`: needs either `microbatches` or `global_batch`",
            example,
            code="microbatches-needed",
            option="schedule",
            schedule=options.schedule,
        )
