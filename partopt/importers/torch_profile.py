"""Times of stages from traces of `torch.profiler`, put into the profile of the plan that ran.

torch names the actions of a schedule as its runtime executes them (`PP:0F0`). What was computed
while one ran, on any thread, is the time of its stage, which its layers share as they did before. A
kernel of a GPU belongs to the moment at which it was launched. Messages are not computing. Bytes of
parameters and activations, and what crosses between layers, are the profile's.
"""

from __future__ import annotations

import bisect
import gzip
import io
import itertools
import math
import re
import statistics
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence

import msgspec

from partopt import documents
from partopt.documents.files import PathLike, read_bytes
from partopt.documents.plan import Plan
from partopt.documents.profile import Device, LayerMeasurement, Profile
from partopt.errors import PartoptError
from partopt.importers.times import measurement_of, spread, with_times
from partopt.printable import printable

LARGEST = 1 << 29  # bytes of JSON: read, they take ten times as many
_GZIP = b"\x1f\x8b"
_OPERATION, _ANNOTATION = "cpu_op", "user_annotation"
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_READ = frozenset((_OPERATION, _ANNOTATION, *_LAUNCHES, *_ON_DEVICE))
_MESSAGES = ("c10d::", "gloo:", "nccl", "ncclDevKernel", "ncclKernel")
_ACTION = re.compile(r"PP:(?P<stage>[0-9]{1,6})(?P<kind>[FBIW])(?P<microbatch>[0-9]{1,9})")
_STEP, _UPDATE = "ProfilerStep#", "Optimizer.step#"
_WARM = 3  # steps, of which the first is left out
_ROUNDING = 1.0  # microseconds: times of nested ranges are rounded one by one

Seconds = defaultdict[tuple[str, int], list[float]]  # by kind (F, B, I, W; U: updates) and stage


class EventLinks(msgspec.Struct, frozen=True):
    """What links a kernel to its launch; a part is missing where it does not apply."""

    external: int | None = msgspec.field(default=None, name="External id")
    correlation: int | None = None


class TraceEvent(msgspec.Struct, frozen=True):
    """An event: microseconds from some origin, the thread, and what it is linked by."""

    name: str = ""
    ph: str = ""
    cat: str = ""
    tid: int | str = ""
    ts: float = math.nan
    dur: float = math.nan
    args: EventLinks = EventLinks()

    @property
    def end(self) -> float:
        """Microseconds at which it ends."""
        return self.ts + self.dur


class DeviceProperties(msgspec.Struct, frozen=True):
    """The device as the trace names it."""

    name: str = ""
    memory_bytes: int | None = msgspec.field(default=None, name="totalGlobalMem")


class Trace(msgspec.Struct, frozen=True):
    """The events of one process in order of time, and the devices of the machine."""

    events: list[TraceEvent] = msgspec.field(name="traceEvents")
    devices: list[DeviceProperties] = msgspec.field(default_factory=list, name="deviceProperties")

    def of(self, *categories: str) -> Iterator[TraceEvent]:
        """The events of these categories, by their start; of equal ones the longest first."""
        return (event for event in self.events if event.cat in categories)


def import_times(
    paths: Sequence[PathLike], onto: Profile, plan: Plan, *, device: str | None = None
) -> Profile:
    """The profile `onto` at the microbatch size of `plan`, with the times of its stages.

    Each of `paths` is the trace of one process. Times are medians over the actions, the first of
    three or more steps left out. Raises PartoptError for what is not a trace, and where it lacks
    stages of the plan.
    """
    measured = measurement_of(onto, plan.microbatch_size)
    if plan.stages[-1].stop != len(measured.layers):
        raise PartoptError(
            f"the plan has {plan.stages[-1].stop} layers, the profile {len(measured.layers)}",
            "give the plan that ran, and the profile that it was made from",
            code="plan-of-another-profile",
        )
    wheres, seconds, left_out = [str(path) for path in paths], Seconds(list), False
    traces = [_load(path) for path in paths]
    for trace, where in zip(traces, wheres, strict=True):
        left_out |= _add_actions(trace, where, seconds)
    planned = set(range(len(plan.stages)))
    found = {stage for kind, stage in seconds if kind != "U"}
    if found != planned:
        missing = ", ".join(str(stage) for stage in sorted(planned - found))
        unknown = ", ".join(str(stage) for stage in sorted(found - planned))
        what = f"no action of stage {missing}" if missing else f"the plan has no stage {unknown}"
        raise PartoptError(
            f"of the plan's {len(planned)} stages the traces have others: {what}",
            "give the traces of all ranks, and the plan that ran",
            code="stages-not-in-trace",
        )
    layers: list[LayerMeasurement] = []
    for number, stage in enumerate(plan.stages):
        forward_s, backward_s, weight_s = _medians(seconds, number)
        if stage.recompute:
            backward_s = max(backward_s - forward_s, 0.0)
        of_stage = measured.layers[stage.start : stage.stop]
        layers += spread(of_stage, forward_s, backward_s, weight_s)
    passes = min(len(seconds["F", stage]) for stage in planned)
    text = (
        f"times are medians of {passes} passes in {', '.join(wheres)}"
        + (", the first step left out" if left_out else "")
        + f"; bytes are those of {onto.model.name} on {onto.device.name}"
    )
    note = documents.Note(code="times-of-a-trace", text=text, fields={"traces": wheres})
    updates = seconds.get(("U", 0))
    optimizer_s = statistics.median(updates) if updates else None
    profile = with_times(onto, measured, layers, optimizer_s, _device(traces, device), [note])
    documents.refuse(profile.faults(), ", ".join(wheres))
    return profile


def _add_actions(trace: Trace, where: str, seconds: Seconds) -> bool:
    """Add the seconds of the actions of one process; whether its first step was left out."""
    ranges = list(trace.of(_ANNOTATION))
    actions = [(event, match) for event in ranges if (match := _ACTION.fullmatch(event.name))]
    if not actions:
        raise PartoptError(
            f"{where}: no action of a pipeline: no range such as PP:0F0",
            "torch names them where its runtime executes a schedule (load_csv, interleaved and "
            "zero-bubble schedules)",
            code="stages-not-in-trace",
        )
    _refuse_overlaps([event for event, _ in actions], where)
    steps = [event.ts for event in ranges if event.name.startswith(_STEP)]
    begin = steps[1] if len(steps) >= _WARM else -math.inf
    work = _work_of(trace)

    def inside(event: TraceEvent) -> float:
        """Seconds of the work that begins while the event runs."""
        low, high = (bisect.bisect_left(work, (at, 0.0)) for at in (event.ts, event.end))
        return sum(work_s for _, work_s in work[low:high])

    for event, match in actions:
        if event.ts >= begin:
            seconds[match["kind"], int(match["stage"])].append(inside(event))
    for event in ranges:
        if event.name.startswith(_UPDATE):
            seconds["U", 0].append(inside(event))
    return begin > -math.inf


def _work_of(trace: Trace) -> list[tuple[float, float]]:
    """When a piece of computing began, in microseconds, and its seconds, in order of time.

    On a GPU these are the kernels, at their launches; on a CPU the operations that are in no other
    one of their thread.
    """
    kernels = list(trace.of(*_ON_DEVICE))
    found, ends = list[tuple[float, float]](), defaultdict[int | str, float](lambda: -math.inf)
    for event in trace.of(_OPERATION) if not kernels else ():
        if event.ts >= ends[event.tid]:
            ends[event.tid] = event.end
            if not event.name.startswith(_MESSAGES):
                found.append((event.ts, event.dur / 1e6))
    launches = {launch.args.correlation: launch.ts for launch in trace.of(*_LAUNCHES)}
    callers = {operation.args.external: operation.ts for operation in trace.of(_OPERATION)}
    for kernel in kernels:
        if not kernel.name.startswith(_MESSAGES):
            links = kernel.args
            at = launches.get(links.correlation) if links.correlation is not None else None
            if at is None and links.external is not None:
                at = callers.get(links.external)
            found.append((kernel.ts if at is None else at, kernel.dur / 1e6))
    return sorted(found)


def _medians(seconds: Seconds, stage: int) -> tuple[float, float, float | None]:
    """Forward and backward of a stage, and of the latter the part for the weights.

    That is known where the trace has the two parts of a backward, which are added up.
    """
    median = {
        kind: statistics.median(seconds[kind, stage])
        for kind in "FBIW"
        if seconds.get((kind, stage))
    }
    if "F" in median and "B" in median:
        return median["F"], median["B"], None
    if median.keys() >= {"F", "I", "W"}:
        return median["F"], median["I"] + median["W"], median["W"]
    raise PartoptError(
        f"stage {stage}: the traces have no whole pass of it",
        "record whole training steps, forward and backward",
        code="no-backward-in-trace",
    )


def _device(traces: Sequence[Trace], name: str | None) -> Device:
    """The device that computed: a GPU where there are kernels."""
    if not any(True for trace in traces for _ in trace.of(*_ON_DEVICE)):
        return Device(name=name or "CPU of a trace", type="cpu")
    known = next((device for trace in traces for device in trace.devices), DeviceProperties())
    name = name or known.name or "GPU of a trace"
    return Device(name=name, type="cuda", memory_bytes=known.memory_bytes)


def _refuse_overlaps(events: Sequence[TraceEvent], where: str) -> None:
    for _, of_thread in itertools.groupby(sorted(events, key=_thread), _thread):
        for first, second in itertools.pairwise(of_thread):
            if second.ts < first.end - _ROUNDING:
                raise PartoptError(
                    f"{where}: {printable(second.name)} begins at {second.ts:.3f} us, before "
                    f"{printable(first.name)} of the same thread has ended",
                    "stages run one after the other: record one pipeline at a time",
                    code="overlapping-ranges",
                )


def _thread(event: TraceEvent) -> str:
    return str(event.tid)


def _load(path: PathLike) -> Trace:
    """The trace in a file, compressed or not; `-` is standard input.

    Raises PartoptError for what is not a trace and, with its number, for an event without a time.
    """
    where = str(path)
    try:
        content = read_bytes(path, LARGEST)
        if content.startswith(_GZIP):
            content = gzip.GzipFile(fileobj=io.BytesIO(content)).read(LARGEST + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise _malformed(f"{where}: cannot be uncompressed: {error}") from None
    except PartoptError as error:
        if error.code != "input-too-large":
            raise
        content = b" " * (LARGEST + 1)
    if len(content) > LARGEST:
        raise PartoptError(
            f"{where}: more than {LARGEST >> 20} MiB",
            "record fewer steps: torch.profiler.schedule(wait=1, warmup=1, active=5)",
            code="trace-too-large",
        )
    try:
        trace = msgspec.json.decode(content, type=Trace, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        fault = str(error) if content.strip() else "the file is empty"
        if isinstance(error, msgspec.ValidationError) and "traceEvents[" not in fault:
            fault = 'no list "traceEvents": not a trace of torch.profiler'
        raise _malformed(f"{where}: {fault}") from None
    read = [event for event in trace.events if event.ph == "X" and event.cat in _READ]
    for event in read:
        if not (math.isfinite(event.ts) and 0 <= event.dur < math.inf):
            raise _malformed(
                f"{where}: traceEvents[{trace.events.index(event)}] "
                f'"{printable(event.name[:60])}": no time: ts {event.ts}, dur {event.dur}'
            )
    if not any(event.cat == _OPERATION for event in read):
        raise _malformed(f"{where}: no operations: not a trace of torch.profiler")
    return Trace(sorted(read, key=lambda event: (event.ts, -event.dur)), trace.devices)


def _malformed(message: str) -> PartoptError:
    return PartoptError(
        message,
        "record again, with ProfilerActivity.CPU, on a GPU with ProfilerActivity.CUDA too: "
        "torch.profiler.profile(...).export_chrome_trace(PATH)",
        code="malformed-trace",
    )
