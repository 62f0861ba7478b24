"""What fills the fullest device of a plan, part by part, as a bar against its memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from partopt.documents.plan import Plan
from partopt.documents.stage import Stage, stages_text
from partopt.report.limit import against_limit
from partopt.report.width import columns
from partopt.units import format_bytes

_CELLS = 60
_LABEL = 9  # columns before every line
# what a part is called, and its cell in a bar, without block characters the second one
_PARTS = {
    "parameters": ("parameters", "█P"),
    "gradients": ("gradients", "▓G"),
    "optimizer": ("optimizer", "▒O"),
    "activations": ("activations", "░A"),
    "buffers": ("buffers", "=="),
    "transient": ("transient", "++"),
    "free": ("free", "·."),
    "reserve": ("reserved", "xx"),
}
_WHY = {"assumed": " (1 GB and 3 %)", "measured": " (the profiled peak beyond the formulas')"}


def memory_lines(plan: Plan, ascii_only: bool = False) -> Iterator[str]:
    """The fullest device against its limit: in all, as a bar, and part by part."""
    peak, fullest = plan.peak_memory_bytes, stages_text(plan.fullest_stages)
    limit = against_limit(peak, plan.memory_limit_bytes)
    yield f"{format_bytes(peak)} on each device of {fullest}{limit}"
    limit_bytes, reserved = plan.memory_limit_bytes, plan.reserve.size_bytes
    free = 0 if limit_bytes is None else max(0, limit_bytes - peak)
    held = device_parts([plan.stages[s] for s in plan.fullest_stages])
    whole = held | {"free": free, "reserve": reserved}
    sizes = {name: size for name, size in whole.items() if size > 0}
    marks = [_PARTS[name][1][ascii_only] for name in sizes]
    yield _bar(list(sizes.values()), marks)
    why = _WHY.get(plan.reserve.basis, "")
    yield from _pack(
        f"{mark} {_PARTS[name][0]} {format_bytes(size)}{why if name == 'reserve' else ''}"
        for mark, (name, size) in zip(marks, sizes.items(), strict=True)
    )


def _pack(words: Iterable[str]) -> Iterator[str]:
    """Words with commas between them in as few lines as hold them, none broken."""
    line = ""
    for word in words:
        if line and len(line) + len(word) + 3 > columns() - _LABEL:
            yield line + ","
            line = ""
        line += f"{', ' if line else ''}{word}"
    yield line


def device_parts(stages: Sequence[Stage]) -> dict[str, int]:
    """Bytes of each part on a device that holds `stages`, of which one backward runs at a time."""
    held = [stage.memory for stage in stages]
    return {
        "parameters": sum(own.parameters_bytes for own in held),
        "gradients": sum(own.gradients_bytes for own in held),
        "optimizer": sum(own.optimizer_bytes for own in held),
        "activations": sum(own.activations_bytes for own in held),
        "buffers": sum(own.buffers_bytes for own in held),
        "transient": max(own.transient_bytes for own in held),
    }


def _bar(sizes: Sequence[int], marks: Sequence[str]) -> str:
    """Cells in proportion to the sizes, each part's ending where it would, rounded."""
    room = min(_CELLS, columns() - _LABEL)
    whole, done, cells = sum(sizes), 0, ""
    for size, mark in zip(sizes, marks, strict=True):
        done += size
        cells += mark * (round(room * done / whole) - len(cells))
    return cells
