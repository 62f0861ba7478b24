"""How a model is cut into stages: by replay, and by torch.export where replay refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from partopt.errors import PartoptError
from partopt.profiler.step import Inputs, Loss
from partopt.profiler.tracker import LayerKey
from partopt.runtime.crossings import check_cuts
from partopt.runtime.events import Record
from partopt.runtime.graph_recording import export_model
from partopt.runtime.recording import record_model


def record_cut(
    model: nn.Module,
    inputs: Inputs,
    loss_fn: Loss | None,
    layers: Sequence[LayerKey],
    cuts: Sequence[int],
) -> Record:
    """What one forward and loss do, as stages run it that begin at the layers `cuts`.

    It is that of replay (`record_model`), or where that cannot be cut so a graph (`export_model`),
    which says why. Raises PartoptError with both reasons where there is none.
    """
    record = record_model(model, inputs, loss_fn, layers)
    try:
        check_cuts(record, cuts)
        return record
    except PartoptError as error:
        refusal = error
    try:
        graph = export_model(model, inputs, loss_fn, layers)
        check_cuts(graph, cuts)
        return replace(graph, replay_refused=refusal.message)
    except PartoptError as error:
        raise PartoptError(
            f"{refusal.message}; nor by torch.export: {error.message}",
            refusal.hint,
            code="cannot-cut",
            **refusal.fields,
        ) from error
