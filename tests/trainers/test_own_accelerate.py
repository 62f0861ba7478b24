"""Accelerate's prepare_pippy splits a model where the exported arguments say, on every rank."""

import types

import pytest
import torch
from torch import nn

from partopt import export_plan
from tests.trainers.models import names
from tests.trainers.own_code import as_rank, needs
from tests.trainers.plans import planned
from tests.trainers.readers import assigned

pytestmark = [needs("accelerate"), pytest.mark.filterwarnings("ignore")]


class Network(nn.Module):
    """Sixteen layers with the names of the plans' models."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Linear(2, 2)
        self.wpe = nn.Linear(2, 2)
        self.h = nn.ModuleList(nn.Linear(2, 2) for _ in range(12))
        self.ln_f = nn.LayerNorm(2)
        self.lm_head = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.wte, self.wpe, *self.h, self.ln_f, self.lm_head):
            x = layer(x)
        return x


def split(arguments, monkeypatch) -> list[list[str]]:
    """The layers of every rank."""
    from accelerate import inference

    ranks, found = arguments["num_chunks"], []
    for rank in range(ranks):
        state = types.SimpleNamespace(
            local_process_index=rank, num_processes=ranks, device=torch.device("cpu")
        )
        monkeypatch.setattr(inference, "PartialState", lambda state=state: state)
        with as_rank(rank, ranks):
            model = inference.prepare_pippy(
                Network(), **arguments, example_args=(torch.randn(1, 2),)
            )
            held = model.pippy_stage._stage.submod.named_parameters()
            found.append(list(dict.fromkeys(name.rpartition(".")[0] for name, _ in held)))
    return found


@pytest.mark.parametrize("cuts", [[6, 9, 12], [1, 14, 15], []])
def test_every_rank_has_the_layers_of_the_plan(cuts, monkeypatch):
    plan = planned(cuts)
    arguments = assigned(export_plan(plan, "accelerate").main, "ARGUMENTS")
    found = split(arguments, monkeypatch)
    assert found == [stage.modules for stage in plan.stages]
    assert [name for stage in found for name in stage] == names()


@pytest.mark.parametrize(
    "points", [["h.4", "h.7", "h.11"], ["h.4", "h.7", "h.12"], ["h.4", "h.7"], ["h.7", "h.4", "x"]]
)
def test_wrong_split_points_are_noticed(points, monkeypatch):
    plan = planned()
    with pytest.raises((AssertionError, AttributeError, IndexError, ValueError, RuntimeError)):
        wrong = {"split_points": points, "num_chunks": 4}
        assert split(wrong, monkeypatch) == [stage.modules for stage in plan.stages]
