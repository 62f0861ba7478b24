"""Which ranges of a trace are the layers of a profile, or the stages of a plan."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from partopt.documents.profile import Profile
from partopt.errors import PartoptError
from partopt.importers.torch_profile.trace import ANNOTATION, RANGES, Event, Trace
from partopt.importers.torch_profile.work import Work
from partopt.printable import printable

_MODULE = re.compile(r"nn\.Module: (?P<type>.+)_(?P<instance>[0-9]+)")
_ACTION = re.compile(r"PP:(?P<stage>[0-9]{1,6})(?P<kind>[FBIW])(?P<microbatch>[0-9]{1,9})")
_ROUNDING = 1.0  # microseconds: times of nested ranges are rounded one by one
_RECORD = (
    "record the modules with torch.profiler.profile(with_stack=True), or name the layers: "
    "with torch.profiler.record_function(NAME) around the module's call"
)


@dataclass(frozen=True)
class Range:
    """An event that is layer `layer`, for the `turn`-th time: a microbatch's pass."""

    event: Event
    layer: int
    turn: int


@dataclass(frozen=True)
class Action:
    """One action of a pipeline: F, B, or of a split backward I and W, of a stage."""

    event: Event
    stage: int
    kind: str


def layer_ranges(trace: Trace, work: list[Work], onto: Profile) -> tuple[list[Range], list[Event]]:
    """The forward passes of the layers in order of time, and all ranges inside backwards.

    Ranges that bear the name of a layer come first; where there are none, the modules in the order
    in which they are called. Raises PartoptError where layers are inside one another or overlap.
    """
    events = list(trace.of(*RANGES))
    forward, again = _split_by_backward(events, work)
    found = _named(forward, onto, trace.where) or _modules(forward, onto, trace.where)
    _refuse_overlaps([each.event for each in found], trace.where)
    return found, again


def actions(trace: Trace) -> list[Action]:
    """The actions of `torch.distributed.pipelining`, `PP:0F0` to `PP:1W3`, in order of time."""
    found = [
        Action(event, int(match["stage"]), match["kind"])
        for event in trace.of(*RANGES)
        if (match := _ACTION.fullmatch(event.name))
    ]
    _refuse_overlaps([each.event for each in found], trace.where)
    return found


def _split_by_backward(events: list[Event], work: list[Work]) -> tuple[list[Event], list[Event]]:
    """The events outside backwards on their own thread, and those inside: computed again."""
    backwards: dict[int | str, list[Work]] = defaultdict(list)
    for each in work:
        if each.backward:
            backwards[each.thread].append(each)
    inside: list[Event] = []
    outside: list[Event] = []
    position: dict[int | str, int] = defaultdict(int)
    for event in events:
        own, at = backwards[event.tid], position[event.tid]
        while at < len(own) and own[at].end <= event.start:
            at += 1
        position[event.tid] = at
        within = at < len(own) and own[at].start <= event.start
        (inside if within else outside).append(event)
    return outside, inside


def _named(events: list[Event], onto: Profile, where: str) -> list[Range]:
    """The ranges that bear the name of a layer; the calls of one take turns."""
    calls: dict[str, list[int]] = defaultdict(list)
    for index, layer in enumerate(onto.layers):
        calls[layer.name].append(index)
    seen: dict[str, int] = defaultdict(int)
    found = []
    for event in events:
        if event.cat == ANNOTATION and event.name in calls:
            turn, call = divmod(seen[event.name], len(calls[event.name]))
            seen[event.name] += 1
            found.append(Range(event, calls[event.name][call], turn))
    passes = {name: count / len(calls[name]) for name, count in seen.items()}
    if len(set(passes.values())) > 1 or not all(count.is_integer() for count in passes.values()):
        fewest, most = min(passes, key=passes.__getitem__), max(passes, key=passes.__getitem__)
        raise _unmatched(
            f"{where}: not as many passes of every layer: {seen[fewest]} ranges of "
            f"{fewest} ({len(calls[fewest])} a pass), {seen[most]} of {most} "
            f"({len(calls[most])} a pass)"
        )
    return found


def _modules(events: list[Event], onto: Profile, where: str) -> list[Range]:
    """The calls of modules that are the layers, by their types in order of execution.

    A call inside a layer is no layer. The same instance must be the same layer every time.
    """
    found: list[Range] = []
    instances: dict[str, str] = {}
    end = float("-inf")
    for event in events:
        match = _MODULE.fullmatch(event.name)
        turn, expected = divmod(len(found), len(onto.layers))
        if not match or event.start < end or match["type"] != onto.layers[expected].type:
            continue
        name = onto.layers[expected].name
        if instances.setdefault(event.name, name) != name:
            raise _unmatched(
                f"{where}: {printable(event.name)} is layer {instances[event.name]} and "
                f"layer {name}"
            )
        found.append(Range(event, expected, turn))
        end = event.end - _ROUNDING
    if len(found) % len(onto.layers):
        layer = onto.layers[len(found) % len(onto.layers)]
        raise _unmatched(
            f"{where}: after {len(found)} calls of layers, no call of a {layer.type}, which is "
            f"layer {layer.name}"
        )
    return found


def _unmatched(message: str) -> PartoptError:
    return PartoptError(message, _RECORD, code="layers-not-in-trace")


def no_layers(missing: list[str]) -> PartoptError:
    """The error for layers that no trace has a range of."""
    names = ", ".join(missing[:12]) + (", ..." if len(missing) > 12 else "")
    return _unmatched(f"the traces have no range of {len(missing)} layers: {names}")


def _refuse_overlaps(events: list[Event], where: str) -> None:
    threads: dict[int | str, list[Event]] = defaultdict(list)
    for event in events:
        threads[event.tid].append(event)
    faults = list(itertools.chain.from_iterable(map(_overlaps, threads.values())))
    if faults:
        raise PartoptError.together([fault.at(where) for fault in faults], file=where)


def _overlaps(events: list[Event]) -> Iterator[PartoptError]:
    for first, second in itertools.pairwise(events):
        if second.start < first.end - _ROUNDING:
            yield PartoptError(
                f'"{printable(second.name)}" begins at {second.start:.3f} us, before '
                f'"{printable(first.name)}" of the same thread has ended',
                "layers and stages run one after the other: name each module once",
                code="overlapping-ranges",
            )
