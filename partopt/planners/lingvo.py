"""The partition of GPipe's published program in Lingvo, by cumulative cost.

Layer l goes to stage min(int(prefix_l / total * K), K-1), where `prefix_l` includes layer l itself.
Nothing is optimised, and a layer that carries more than one stage's share leaves stages empty: the
plan omits them, and a note gives their number.
"""

from __future__ import annotations

import numpy as np

from partopt.cost.problem import CONTIGUOUS, Decision, Partition, Problem, consecutive
from partopt.documents import Note
from partopt.planners.placing import stage_count


def plan(problem: Problem) -> Decision:
    """The partition by cumulative cost into at most K stages, one device a stage."""
    K = stage_count(problem)
    prefix = np.cumsum(problem.cell_costs())
    stage = np.minimum((prefix / prefix[-1] * K).astype(int), K - 1)
    begins = np.flatnonzero(np.diff(stage)) + 1
    empty = K - 1 - len(begins)
    text = f"lingvo: {empty} of {K} stages are empty: their devices stay idle"
    notes = [Note(code="empty-stages", text=text, fields={"empty": empty, "stages": K})]
    partition = Partition(CONTIGUOUS, consecutive([0, *begins.tolist(), len(stage)]))
    return Decision(partition, notes=notes if empty else ())
