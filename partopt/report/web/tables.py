"""The tables of the page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from partopt.documents.plan import Plan, RunnerUp
from partopt.documents.simulation import SimulationDocument
from partopt.documents.stage import Memory
from partopt.report.figures import speed_text
from partopt.report.pictures.colours import MEMORY
from partopt.report.ranks import format_ranks
from partopt.report.shares import MEANING, group_devices, time_parts
from partopt.report.topology import link_text
from partopt.units import format_bytes, format_seconds

# of computing and of the five ways to wait, apart in grey too
_PARTS = ("#0072B2", "#E69F00", "#F0E442", "#CC79A7", "#4D4D4D", "#D9D9D9")


class WebTable(NamedTuple):
    """A table: cells are texts or bars; the columns of `left` are aligned there.

    `colours` are those of the bars' parts, by the columns that have their numbers.
    """

    headings: Sequence[str]
    rows: list[list[Any]]
    left: Sequence[int]
    note: str = ""
    colours: Mapping[int, str] = {}


def share_table(document: SimulationDocument) -> WebTable:
    """Where the time of the devices goes, a row for those that hold the same stages."""
    parts = np.array([time_parts(each) for each in document.ranks]) / document.window_s
    words = [what for _, what in MEANING]
    rows = [
        [
            ", ".join(map(str, group.stages)),
            format_ranks(group.ranks),
            _bar(zip(words, group.parts.tolist(), _PARTS, strict=True)),
            *(f"{part:.1%}" if part else "-" for part in group.parts.tolist()),
            str(group.in_flight),
            format_bytes(group.memory_bytes),
        ]
        for group in group_devices(document.ranks, parts)
    ]
    headings = ["stages", "ranks", "time", *words, "in flight", "peak memory"]
    note = f"Shares of {format_seconds(document.window_s)}."
    return WebTable(headings, rows, (0, 1, 2), note, dict(enumerate(_PARTS, 3)))


def level_table(document: SimulationDocument) -> WebTable:
    """The links of each level, and how busy its busiest port is."""
    rows = [
        [
            level.name,
            link_text(level),
            f"{used.transfer_share:.1%}",
            f"{used.allreduce_share:.1%}",
            format_bytes(round(used.sent_bytes)),
        ]
        for level, used in zip(document.topology.levels, document.levels, strict=True)
    ]
    return WebTable(["level", "links", "messages", "all-reduces", "sent"], rows, (0, 1))


def stage_table(plan: Plan) -> WebTable:
    """The stages: their layers, ranks and times."""
    rows = [
        [
            str(s),
            f"{stage.start} to {stage.stop - 1}: {stage.modules[0]} .. {stage.modules[-1]}",
            format_ranks(stage.ranks),
            format_seconds(stage.forward_s),
            format_seconds(stage.backward_s),
            format_seconds(stage.allreduce_s) if stage.allreduce_s else "-",
            format_bytes(stage.output_bytes) if stage.output_bytes else "-",
            str(stage.in_flight),
            "recomputed" if stage.recompute else "kept",
        ]
        for s, stage in enumerate(plan.stages)
    ]
    headings = ["#", "layers", "ranks", "forward", "backward", "all-reduce", "sends"]
    note = "Seconds and bytes of one microbatch on one replica."
    return WebTable([*headings, "in flight", "activations"], rows, (0, 1, 2, 8), note)


def beside_table(plan: Plan) -> WebTable | None:
    """The plans that were found beside the plan, where it says them."""
    if not plan.runners_up:
        return None
    rows = [
        [
            each.planner,
            each.schedule,
            str(each.microbatch_size),
            each.shape,
            format_seconds(each.period_s),
            speed_text(each.samples_per_s, plan.profile.tokens_per_sample),
            format_bytes(each.peak_memory_bytes),
            "yes" if each.fits else "no",
        ]
        for each in [RunnerUp.of(plan), *plan.runners_up]
    ]
    headings = ["planner", "schedule", "microbatch", "shape", "period", "speed", "memory", "fits"]
    return WebTable(headings, rows, (0, 1, 3, 7))


def memory_table(plan: Plan) -> WebTable:
    """The memory of a device of each stage, by parts, against the limit."""
    limit = plan.memory_limit_bytes
    most = max([limit or 1, *(stage.memory.total_bytes for stage in plan.stages)])
    rows = [
        [
            str(s),
            _bar((name, size / most, MEMORY[name][0]) for name, size in _parts(stage.memory)),
            *(format_bytes(size) if size else "-" for _, size in _parts(stage.memory)),
            format_bytes(stage.memory.total_bytes),
        ]
        for s, stage in enumerate(plan.stages)
    ]
    note = "No limit is known." if limit is None else f"The limit is {format_bytes(limit)}."
    if plan.reserve.size_bytes:
        note += f" {format_bytes(plan.reserve.size_bytes)} more are reserved."
    headings = ["stage", "of the limit", *MEMORY, "all"]
    return WebTable(
        headings, rows, (0, 1), note, dict(enumerate((colour for colour, _ in MEMORY.values()), 2))
    )


def _parts(memory: Memory) -> list[tuple[str, int]]:
    return [(name, getattr(memory, f"{name}_bytes")) for name in MEMORY]


def _bar(parts: Iterable[tuple[str, float, str]]) -> dict[str, Any]:
    """Shares of 1 side by side."""
    return {
        "parts": [
            {"percent": f"{100 * share:.2f}", "colour": colour, "title": f"{name} {share:.1%}"}
            for name, share, colour in parts
            if share > 0
        ]
    }
