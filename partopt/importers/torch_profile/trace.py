"""The Chrome trace that `torch.profiler` writes: what of it says who computed for how long.

Of the complete events (`ph` "X") these are read, times in microseconds:

    cpu_op                        an operation; `Sequence number` links a backward to its forward
    user_annotation               a range of `record_function`, a step, an optimizer's step
    python_function               `nn.Module: Block_0`, a module's call (`with_stack=True`)
    cuda_runtime, cuda_driver     a launch; its `correlation` is that of the kernel
    kernel, gpu_memcpy, gpu_memset    what ran on the device
"""

from __future__ import annotations

import gzip
import io
import math
import re
import zlib
from collections.abc import Iterator

import msgspec

from partopt.documents.files import PathLike, read_bytes
from partopt.errors import PartoptError
from partopt.printable import printable

LARGEST = 1 << 29  # bytes of JSON: read, they take ten times as many
_GZIP = b"\x1f\x8b"
_RECORD = "record it again: torch.profiler.profile(...).export_chrome_trace(PATH)"
OPERATION = "cpu_op"
ANNOTATION = "user_annotation"
RANGES = (ANNOTATION, "python_function")
LAUNCHES = ("cuda_runtime", "cuda_driver")
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_READ = frozenset((OPERATION, *RANGES, *LAUNCHES, *ON_DEVICE))


class Arguments(msgspec.Struct, frozen=True):
    """What links events; each is missing where it does not apply."""

    sequence: int | None = msgspec.field(default=None, name="Sequence number")
    external: int | None = msgspec.field(default=None, name="External id")
    correlation: int | None = None


class Event(msgspec.Struct, frozen=True):
    """An event: microseconds from some origin, the thread, and what it is linked by."""

    name: str = ""
    ph: str = ""
    cat: str = ""
    tid: int | str = ""
    ts: float | None = None
    dur: float | None = None
    args: Arguments | None = None

    @property
    def start(self) -> float:
        """Microseconds at which it starts."""
        assert self.ts is not None
        return self.ts

    @property
    def length(self) -> float:
        """Microseconds that it takes."""
        assert self.dur is not None
        return self.dur

    @property
    def end(self) -> float:
        """Microseconds at which it ends."""
        return self.start + self.length


class DeviceProperties(msgspec.Struct, frozen=True):
    """The device as the trace names it."""

    name: str = ""
    memory_bytes: int | None = msgspec.field(default=None, name="totalGlobalMem")


class Trace(msgspec.Struct, frozen=True):
    """The events of one process in order of time, and the devices of the machine."""

    events: list[Event] = msgspec.field(name="traceEvents")
    devices: list[DeviceProperties] = msgspec.field(default_factory=list, name="deviceProperties")
    where: str = ""

    def of(self, *categories: str) -> Iterator[Event]:
        """The events of these categories, by their start; of equal ones the longest first."""
        return (event for event in self.events if event.cat in categories)


def load(path: PathLike) -> Trace:
    """The trace in the file `path`, compressed or not; `-` is standard input.

    Raises PartoptError for what is not a trace and, with their number and name, for events that
    have no time.
    """
    where = str(path)
    content = _uncompressed(_read(path), where)
    try:
        trace = msgspec.json.decode(content, type=Trace, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _malformed(error, content, where) from None
    faults = [
        _fault(f"{where}: traceEvents[{number}] {_quoted(event)}: {what}", "invalid-event")
        for number, event in enumerate(trace.events)
        if _is_read(event) and (what := _what_is_wrong(event))
    ]
    if faults:
        raise PartoptError.together(faults, file=where)
    events = sorted(filter(_is_read, trace.events), key=lambda event: (event.start, -event.length))
    if not any(event.cat == OPERATION for event in events):
        raise PartoptError(
            f"{where}: no operations: not a trace of torch.profiler",
            "record with ProfilerActivity.CPU, on a GPU with ProfilerActivity.CUDA too",
            code="malformed-trace",
        )
    return Trace(events, trace.devices, where)


def _read(path: PathLike) -> bytes:
    try:
        return read_bytes(path, LARGEST)
    except PartoptError as error:
        raise _too_large(str(path)) if error.code == "input-too-large" else error from None


def _uncompressed(content: bytes, where: str) -> bytes:
    if content.startswith(_GZIP):
        try:
            content = gzip.GzipFile(fileobj=io.BytesIO(content)).read(LARGEST + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise _fault(f"{where}: cannot be uncompressed: {error}") from None
    if len(content) > LARGEST:
        raise _too_large(where)
    return content


def _too_large(where: str) -> PartoptError:
    return PartoptError(
        f"{where}: more than {LARGEST >> 20} MiB",
        "record fewer steps: torch.profiler.schedule(wait=1, warmup=1, active=5)",
        code="trace-too-large",
        path=where,
    )


def _malformed(error: Exception, content: bytes, where: str) -> PartoptError:
    """What cannot be decoded, with the event that it is in."""
    text = str(error)
    if not content.strip():
        text = "the file is empty"
    elif found := re.search(r"\$\.traceEvents\[(\d+)\](?:\.(\w+))?", text):
        field = f"{found[2]}: " if found[2] else ""
        text = f"traceEvents[{found[1]}]: {field}{text.partition(' - at')[0]}"
    elif "traceEvents" in text or isinstance(error, msgspec.ValidationError):
        text = 'no list "traceEvents": not a trace of torch.profiler'
    return _fault(f"{where}: {text}")


def _fault(message: str, code: str = "malformed-trace") -> PartoptError:
    return PartoptError(message, _RECORD, code=code)


def _is_read(event: Event) -> bool:
    return event.ph == "X" and event.cat in _READ


def _what_is_wrong(event: Event) -> str | None:
    for field, value in (("ts", event.ts), ("dur", event.dur)):
        if value is None:
            return f"no {field}"
        if not math.isfinite(value):
            return f"{field}: {value} is not finite"
    if event.length < 0:
        return f"dur: {event.length:g} is negative"
    return None


def _quoted(event: Event) -> str:
    return f'"{printable(event.name[:60])}"'
