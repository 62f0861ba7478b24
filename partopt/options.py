"""What may be said of how a model is to be trained, every option declared once; and what not.

An option is a field of `Options`, whose type says what it may be and how the command line shows it.
A field of that name in `partopt.documents.plan.Request` carries it into problems and plans, and
back from there.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Collection, Mapping, Sequence
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NamedTuple,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from msgspec import structs

from partopt import units
from partopt.documents import check_option, refuse
from partopt.documents.engine import (
    OF_SCHEDULES,
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
from partopt.documents.profile import Count, Profile
from partopt.documents.stage import Buffers, Gradients, Shard
from partopt.documents.transformer import Calibration, Format
from partopt.errors import PartoptError, invalid, unknown, unknown_value
from partopt.schedules import SCHEDULES, schedule
from partopt.schedules.placement import LOOPED

Effort = Literal["quick", "normal", "thorough"]
EFFORTS: Final = get_args(Effort)  # the next one goes on where one ends

AUTO: Final = "auto"  # of a schedule: the best of all synchronous ones
MANUAL: Final = "manual"  # the planner of a given split
MOST, MOST_BYTES = 10**9, 10**18  # of anything that is counted; of memory
# facts of an engine that are one of several, and those that are some of several
_ONE_OF: dict[str, Collection[str]] = {
    "messages": get_args(Messages),
    "gradients": get_args(Gradients),
    "allreduce": get_args(AllReduce),
    "buffers": get_args(Buffers),
}
_SOME_OF: dict[str, Collection[str]] = {
    **dict.fromkeys(OF_SCHEDULES, SCHEDULES),
    "recompute": get_args(Recomputation),
    "shard": get_args(Shard),
}
FACTS = (*_SOME_OF, *_ONE_OF, "bucket", "optimizer_bytes", "reserve")
_MOST_STATE = 1000  # bytes of optimizer state for a parameter
CHUNKS = 2  # v by default
# what trainers of transformers take layers for, in the order of a model
LAYER_KINDS: Final = ("embedding", "block", "norm", "mtp", "head")
CHOSEN_BY_AUTO = ("planner", "stages", "chunks", "cuts", "replicas")
# parts of a layout that other options hold, which are not degrees
_HELD_ELSEWHERE = {"schedule": "schedule", "microbatch": "microbatch_size"}
_HELD_ELSEWHERE |= {"recompute": "recompute", "shard": "shard"}
# of a transformer: options that say parts of its layout, those that it alone has, and all
PARTS: Final = {option: part for part, option in _HELD_ELSEWHERE.items() if part != "schedule"}
PARTS["chunks"] = "chunks"
OF_TRANSFORMERS: Final = frozenset({"sequence", "dtype", "calibrate"})
_ALSO = ("trainer", "layout", "facts", "memory", "global_batch")
FOR_TRANSFORMERS: Final = OF_TRANSFORMERS.union(PARTS, _ALSO)

# headings in the help of planning verbs
BATCH, STAGES, MEMORY, TRAINER = "Schedule and batch", "Stages", "Memory of a device", "Trainer"


class Flag(NamedTuple):
    """How the command line shows an option: under which heading, and its value by which letter.

    A `rare` one is in the whole help alone; a `split` is for planning, not for comparing; one
    `apart` is for the verbs that ask for it.
    """

    heading: str
    letter: str
    help: str
    rare: bool = False
    split: bool = False
    apart: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How a model is to be trained. The help of a flag says what its option is.

    `schedule="auto"` is the best synchronous one. A synchronous schedule needs M `microbatches` or
    a `global_batch` of G samples. `cuts` and `replicas`, a split of your own, imply the planner
    "manual". What is None is chosen: `recompute` as with "auto", and `shard` where a trainer is
    named; a named planner has "never", `partopt run` shares nothing. The blocks of which
    `recompute` may be a number lie between `block_bounds`.
    `memory` may be bytes, and `cost` a number for each layer. `layout` fixes any part of the
    plan's: what other options say too, and degrees. `trainer` is the one that plans name, `engine`
    what its engine does; `facts` replace some of it, as `with_facts` says. `partopt.job_for` sets
    the two together.

    Of a transformer alone: samples have `sequence` tokens, products are in the format `dtype`, by
    default bfloat16, `calibrate` is what was measured of its trainer's block: a profile, one for
    every kind of block by its name, or as a plan has it. It has no options but these, `layout` and
    its parts, `global_batch`, `memory`, `trainer` and `facts`, also of how the trainer runs it;
    `memory` is by default 95 % of a device.
    """

    planner: Annotated[
        str | None, Flag(STAGES, "NAME", "Which planner (default: the best of all).", split=True)
    ] = None
    cuts: Annotated[
        Sequence[int] | None, Flag(STAGES, "5,9", "Your own split: where stages begin.", split=True)
    ] = None
    replicas: Annotated[
        Sequence[int] | None,
        Flag(STAGES, "1,2,1", "Replicas of its stages (default: one each).", split=True),
    ] = None
    schedule: Annotated[str, Flag(BATCH, "NAME", "1f1b, gpipe, .. or auto.")] = "pipedream"
    global_batch: Annotated[int | None, Flag(BATCH, "G", "Samples of a synchronous iteration.")] = (
        None
    )
    microbatches: Annotated[int | None, Flag(BATCH, "M", "Instead of `global_batch`.")] = None
    microbatch_size: Annotated[
        int | None, Flag(BATCH, "B", "Samples (default: the fastest measured size).")
    ] = None
    chunks: Annotated[
        int | None,
        Flag(BATCH, "V", "Stages on a device, where it is interleaved (default: 2).", rare=True),
    ] = None
    stages: Annotated[
        int | None,
        Flag(
            STAGES, "S", "How many, where a planner takes that (default: one a device).", rare=True
        ),
    ] = None
    cut_at: Annotated[
        Sequence[str],
        Flag(STAGES, "GLOB", "Stages begin only with layers of such names (repeat).", rare=True),
    ] = ()
    replication: Annotated[
        Replication,
        Flag(
            STAGES,
            "WORD",
            "Replicas of the stages: free (any), uniform (equally many) or none (one).",
            rare=True,
        ),
    ] = "free"
    tied: Annotated[
        Tied,
        Flag(
            STAGES,
            "WORD",
            "Layers that share parameters: exchange gradients, or stay together.",
            rare=True,
        ),
    ] = "exchange"
    cost: Annotated[
        str | Sequence[float],
        Flag(STAGES, "KIND", "What GPipe balances: time, flops, parameters or a FILE.", rare=True),
    ] = "time"
    effort: Annotated[
        Effort,
        Flag(STAGES, "WORD", "How long plans are improved: quick, normal, thorough.", rare=True),
    ] = "normal"
    memory: Annotated[
        str | int | None, Flag(MEMORY, "SIZE", "Limit, such as 40GB (default: the topology's).")
    ] = None
    recompute: Annotated[
        Recompute | int | None,
        Flag(MEMORY, "WORD|N", "Activations: never, always, auto, or N blocks."),
    ] = None
    optimizer: Annotated[
        Optimizer, Flag(MEMORY, "WORD", "sgd, momentum, adam, adam8bit, adafactor.")
    ] = "adam"
    shard: Annotated[
        Shard | None, Flag(MEMORY, "WORD", "ZeRO: optimizer, gradients, parameters.")
    ] = None
    block_bounds: Sequence[int] | None = None
    layout: Annotated[
        Layout,
        Flag(TRAINER, "PART=N,..", "Fix any part of it, such as pp=4,chunks=2,dp=1.", apart=True),
    ] = dataclasses.field(default_factory=Layout)
    trainer: str = PARTOPT
    engine: Engine = OWN
    facts: Mapping[str, object] = dataclasses.field(default_factory=dict)
    sequence: Annotated[
        int | None, Flag(TRAINER, "S", "Tokens of a sample (k = 1024, M = 1024^2).", apart=True)
    ] = None
    dtype: Annotated[
        Format | None,
        Flag(
            TRAINER,
            "FORMAT",
            "Of a configuration's products (default: bfloat16).",
            rare=True,
            apart=True,
        ),
    ] = None
    calibrate: Profile | Mapping[str, Profile | Calibration] | None = None

    @property
    def first(self) -> int | None:
        """How many blocks of a stage are made again, where `recompute` is their number."""
        return self.recompute if isinstance(self.recompute, int) else None

    @property
    def planner_name(self) -> str | None:
        """The planner, which a given split implies; None for the best of all."""
        splits = self.cuts is not None or self.replicas is not None
        return MANUAL if splits else self.planner


class Kind(NamedTuple):
    """What an option may be: one of `words`, a number that `counts`, a list of `items`; or else.

    `flag` is that of the command line, `None` where it has none.
    """

    words: tuple[str, ...]
    counts: bool
    items: type | None
    optional: bool
    flag: Flag | None


@functools.cache
def kinds() -> dict[str, Kind]:
    """The kinds of options, by name, as its type says it."""
    found = {}
    for name, hint in get_type_hints(Options, include_extras=True).items():
        hint, *flags = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        words = tuple(w for part in parts if get_origin(part) is Literal for w in get_args(part))
        lists = [get_args(part)[0] for part in parts if get_origin(part) is Sequence]
        text = str in parts  # what it may say is checked where it is used
        found[name] = Kind(
            words=words,
            counts=int in parts and not text,
            items=None if text or not lists else lists[0],
            optional=type(None) in parts,
            flag=flags[0] if flags else None,
        )
    return found


def normalise(options: Options) -> Options:
    """The options that hold all that is said, by other options too: by `layout` and `facts`.

    Of the layout the degrees are left. Raises PartoptError for the first option that is invalid or
    contradicts another.
    """
    for name, kind in kinds().items():
        _check_alone(name, getattr(options, name), kind)
    _check_parts(options)
    engine = with_facts(options.engine, options.facts)
    for fact in OF_SCHEDULES:
        for name in getattr(engine, fact):
            _known(fact, name, SCHEDULES)
    said, layout = _said_by_layout(options), options.layout
    degrees = structs.replace(layout, **dict.fromkeys(_HELD_ELSEWHERE))
    said |= {"engine": engine, "layout": degrees}
    for name, kind in kinds().items():
        if kind.items is int and getattr(options, name) is not None:
            said[name] = list(getattr(options, name))
    found = dataclasses.replace(options, **said)
    _check_split(found)
    if found.schedule == AUTO:
        _check_auto(found)
    else:
        _check_schedule(found)
    return found


def normalise_layout(options: Options) -> Options:
    """The options of a transformer, whose `layout` holds all parts that other options say.

    Its `dtype` may be one of the facts, as a switch is. Raises PartoptError for the first option
    that is invalid or contradicts the layout.
    """
    facts: dict[str, Any] = dict(options.facts)
    options = dataclasses.replace(options, dtype=facts.pop("dtype", options.dtype), facts=facts)
    for name, kind in kinds().items():
        _check_alone(name, getattr(options, name), kind)
    _check_parts(options)
    layout = layout_with(options.layout, vars(options))
    parts: dict[str, Any] = dict.fromkeys(PARTS)
    return dataclasses.replace(options, schedule=AUTO, layout=layout, **parts)


def layout_with(layout: Layout, options: Mapping[str, Any]) -> Layout:
    """The layout with the parts that `options` say. PartoptError where it says something else."""
    parts = {option: part for option, part in PARTS.items() if options.get(option) is not None}
    for option, part in parts.items():
        value, said = options[option], getattr(layout, part)
        if said not in (None, value):
            what, hint = f"`{option}={value}`: `layout` says {part}={said}", "give one of them"
            raise PartoptError(what, hint, code="contradiction", option=option)
    return structs.replace(layout, **{part: options[option] for option, part in parts.items()})


def with_facts(engine: Engine, facts: Mapping[str, object]) -> Engine:
    """The engine with `facts` in place of those it has, values as people write them.

    `waits`, `in_turn`, `recompute` and `shard` are names, "1f1b,gpipe", where "none" alone is no
    schedule; `bucket` and `reserve` are bytes or "50 MB", `optimizer_bytes` a number. Raises
    PartoptError for an unknown fact or value.
    """
    changes: dict[str, object] = {}
    for name, value in facts.items():
        text = str(value)
        if name in _ONE_OF:
            changes[name] = _known(name, text, _ONE_OF[name])
        elif name in _SOME_OF:
            words = [] if text == "none" and name in OF_SCHEDULES else text.split(",")
            changes[name] = tuple(_known(name, word.strip(), _SOME_OF[name]) for word in words)
        elif name == "optimizer_bytes":
            changes[name] = _state_bytes(value)
        elif name in FACTS:
            given = value if isinstance(value, int) else text
            changes[f"{name}_bytes"] = parse_bytes(name, given, least=int(name == "bucket"))
        else:
            raise unknown(f"no fact `{name}` of an engine", name, FACTS, code="unknown-fact")
    return structs.replace(engine, **changes)


def _known(name: str, value: str, known: Collection[str]) -> str:
    if value not in known:
        raise unknown_value(name, value, known)
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


def check_count(name: str, value: object) -> None:
    """Raise PartoptError unless the option is a whole number from 1 to MOST."""
    check_option(name, value, Count, "give 1 or more")
    if isinstance(value, int) and value > MOST:
        raise invalid(name, _shorten(value), "is too large", f"give {MOST:,} or less")


def _shorten(value: int) -> str:
    """A number, in powers of ten where it has too many digits to read."""
    return str(value) if value < 10**18 else f"10^{int(math.log10(value))}"


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


def _check_alone(name: str, value: object, kind: Kind) -> None:
    """Raise PartoptError unless the option is of its kind."""
    if value is None and kind.optional:
        return
    if kind.counts and (not kind.words or isinstance(value, int)):
        check_count(name, value)
    elif kind.words and value not in kind.words:
        raise unknown_value(name, value, kind.words)
    elif kind.items is not None:
        listed = isinstance(value, Sequence) and not isinstance(value, str)
        if not listed or not all(type(entry) is kind.items for entry in value):  # type: ignore[attr-defined]
            items = "names" if kind.items is str else "whole numbers"
            raise invalid(name, value, f"must be a list of {items}", "for example [5, 9, 12]")


def _check_parts(options: Options) -> None:
    """Raise PartoptError unless the layout and the engine are right in all their fields."""
    examples = {Layout: "partopt.Layout(pp=4)", Engine: 'partopt.TRAINERS["megatron"].engine'}
    for name, kind in (("layout", Layout), ("engine", Engine)):
        given = getattr(options, name)
        if not isinstance(given, kind):
            what = f"must be a{'n' * (kind is Engine)} {kind.__name__}"
            raise invalid(name, type(given).__name__, what, f"`{examples[kind]}` is one")
        refuse(given.faults(), f"`{name}`" if kind is Layout else name)


def _said_by_layout(options: Options) -> dict[str, Any]:
    """The options that the layout sets.

    Raises PartoptError where an option says something else, or the schedule has another number of
    stages on a device.
    """
    layout, name = options.layout, options.layout.schedule or options.schedule
    found: dict[str, Any] = {
        option: getattr(layout, part) for part, option in _HELD_ELSEWHERE.items()
    }
    if name != AUTO:
        entry, v = schedule(name), layout.chunks
        stages_a_device = entry.stages_a_device(v or options.chunks or CHUNKS)
        if entry.shape == LOOPED:
            found["chunks"] = v
        if v not in (None, stages_a_device):
            able = "`schedule=interleaved` or `schedule=auto`"
            what = f"{name} has {stages_a_device} on each device"
            raise invalid("layout", f"chunks={v}", what, f"chunks={stages_a_device}, or {able}")
        if options.planner_name != MANUAL:  # whose split says how many stages
            if entry.shape != LOOPED or v or options.chunks:
                found["stages"] = layout.pp and layout.pp * stages_a_device
            found["replication"] = layout.dp and ("none" if layout.dp == 1 else "uniform")
    said = {option: value for option, value in found.items() if value is not None}
    for option, value in said.items():
        stated = getattr(options, option)
        if stated not in (getattr(Options, option), value):
            what, hint = f"`{option}={stated}`: `layout` says {value}", "drop one or the other"
            raise _conflict(option, what, hint)
    return said


def _check_split(options: Options) -> None:
    """A given split goes with the planner `manual` alone, and fixes the boundaries."""
    splits = options.cuts is not None or options.replicas is not None
    if splits and options.planner not in (None, MANUAL):
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
    if options.engine.buffers == "all":
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
        )
