"""A layout in words, and what it makes again: long, in a few letters, and in columns."""

from __future__ import annotations

from partopt.documents.engine import Layout
from partopt.documents.plan import Plan
from partopt.documents.stage import Stage, stages_text
from partopt.printable import shorten
from partopt.report.text import Column

_AGAIN = {"never": "-", "always": "all", "selective": "some"}


def layout_text(layout: Layout) -> str:
    """A layout in words: `tp 8, pp 4 x 5 chunks, dp 1, microbatch 1`, and how it saves memory."""
    again = layout.recompute
    said = f"recompute {again} blocks" if isinstance(again, int) else f"recompute {again}"
    said += f" {layout.modules}" if layout.modules else ""
    words = [_degrees(layout, " x {} chunks"), f"dp {layout.dp}", f"microbatch {layout.microbatch}"]
    return ", ".join([*words, said, f"shard {layout.shard}"])


def layout_name(layout: Layout) -> str:
    """A layout in few letters: `tp 8, pp 4x5, dp 2, mb 1`, and what it makes again."""
    words = [degrees_text(layout), f"dp {layout.dp}", f"mb {layout.microbatch}"]
    again = layout.modules or _again(layout, " blocks")
    return ", ".join(words + ([] if again == "-" else [f"{again} again"]))


def degrees_text(layout: Layout) -> str:
    """The degrees of a layout that are not of its replicas: `tp 8, pp 4x5`."""
    return _degrees(layout, "x{}")


def _degrees(layout: Layout, chunks: str) -> str:
    """Those that are not of replicas; context and experts where there are some."""
    rare = [(name, getattr(layout, name) or 1) for name in ("cp", "ep", "etp")]
    words = [f"tp {layout.tp}", *(f"{name} {degree}" for name, degree in rare if degree > 1)]
    return ", ".join([*words, f"pp {_pipeline(layout, chunks)}"])


def _pipeline(layout: Layout, chunks: str = "x{}") -> str:
    """Devices of a pipeline, and the chunks of one where it has several: `4x5`."""
    several = (layout.chunks or 1) > 1
    return f"{layout.pp}{chunks.format(layout.chunks) if several else ''}"


def _again(layout: Layout, blocks: str = "") -> str:
    """What of a block, or of how many `blocks`, is made again; a dash for nothing."""
    return _AGAIN.get(str(layout.recompute), f"{layout.recompute}{blocks}")


def degree_columns(experts: bool) -> list[Column]:
    """The parts of the layout of a row, of experts too if there are some."""
    return [
        Column("TP", lambda row: str(row.layout.tp)),
        Column("CP", lambda row: str(row.layout.cp)),
        *([Column("EP", lambda row: str(row.layout.ep))] if experts else []),
        Column("PP", lambda row: _pipeline(row.layout)),
        Column("DP", lambda row: str(row.layout.dp)),
        Column("MB", lambda row: str(row.layout.microbatch)),
        Column("AGAIN", lambda row: _again(row.layout)),
    ]


def grid_text(plan: Plan, shape: str) -> str:
    """Pipelines side by side x devices of each, x stages of a device where it has several.

    `shape` is how unequal replicas of the stages are written.
    """
    if len({stage.replicas for stage in plan.stages}) > 1:
        return shape
    held = plan.stages_by_rank()
    chunks = len(next(iter(held.values())))
    pipelines = plan.stages[0].replicas // plan.copies
    return f"{pipelines}x{len(held) // pipelines}" + (f"x{chunks}" if chunks > 1 else "")


def again_text(plan: Plan) -> str:
    """What stages recompute, in a word: `never`, `always`, `some` of them, `first 3` blocks."""
    again = plan.layout.recompute
    return f"first {again}" if isinstance(again, int) else "some" if again == "auto" else str(again)


def where_again(plan: Plan) -> str:
    """Where activations are recomputed: in some stages, or the first blocks of these."""
    recomputing = [s for s, stage in enumerate(plan.stages) if stage.recompute]
    counts = [plan.stages[s].blocks_again for s in recomputing]
    where = stages_text(recomputing)
    if isinstance(plan.layout.recompute, int):
        counts, where = [plan.layout.recompute], "each stage"
    elif all(plan.stages[s].first_again is None for s in recomputing):
        return shorten(where, 40)
    first = "block" if counts == [1] else f"{shorten('-'.join(map(str, counts)), 20)} blocks"
    return f"the first {first} of {shorten(where, 40)}"


def stage_again(stage: Stage) -> str:
    """What is made again of a stage that recomputes."""
    whole = stage.first_again is None
    return "recomputed" if whole else f"{stage.first_again} of {stage.blocks} blocks recomputed"
