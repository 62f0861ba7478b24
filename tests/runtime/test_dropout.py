"""Dropout switched off: of layers, of functions, of recurrent layers, and of nothing else."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from partopt import Job, solve
from partopt.errors import PartoptError
from partopt.profiler import measure_source
from partopt.profiler.source import find_model
from partopt.profiler.weightless import RandomNumbers
from partopt.runtime.check import WholeModel, without_dropout
from partopt.runtime.training import PlannedTraining
from tests.helpers import flat

x = torch.linspace(1, 2, 32).view(1, 2, 4, 4)


def attend(*given, **options):
    return functional.scaled_dot_product_attention(*given, **options)


DROPS = {
    "a layer": nn.Dropout(0.5),
    "a layer of channels": nn.Dropout2d(0.5),
    "a layer that keeps the variance": nn.FeatureAlphaDropout(0.5),
    "a function": lambda x: functional.dropout(x, 0.5),
    "a function, by name": lambda x: functional.alpha_dropout(x, p=0.5, training=True),
    "a function, by default": lambda x: functional.dropout(x),
    "attention": lambda x: attend(x, x, x, None, 0.5),
    "attention, by name": lambda x: attend(x, x, x, dropout_p=0.5, is_causal=True),
}
WHOLE = {"attention": attend(x, x, x), "attention, by name": attend(x, x, x, is_causal=True)}


@pytest.mark.parametrize("name", DROPS)
def test_nothing_is_dropped_meanwhile(name):
    before = RandomNumbers()
    with without_dropout():
        assert torch.equal(DROPS[name](x), WHOLE.get(name, x))
    assert not before.advanced()
    DROPS[name](x)
    assert before.advanced()  # afterwards as before


def test_recurrent_layers_and_attention_of_torch_drop_nothing():
    model = nn.ModuleList([nn.LSTM(4, 4, 3, dropout=0.5), nn.TransformerEncoderLayer(4, 2, 8)])
    before = RandomNumbers()
    with without_dropout(model):
        model[1](model[0](x[0])[0])
    assert not before.advanced()
    assert model[0].dropout == 0.5


NOISY = """
import torch
from torch import nn


class Noise(nn.Linear):
    def forward(self, x):
        return super().forward(x) + torch.randn_like(x)


def build():
    return nn.Sequential(*(Noise(4, 4) for _ in range(2)))


def example_inputs(size):
    return torch.ones(size, 4)
"""


def test_what_still_draws_random_numbers_cannot_be_compared(tmp_path):
    path = tmp_path / "noisy.py"
    path.write_text(NOISY)
    profile = measure_source(str(path), microbatch_sizes=[1], steps=1)
    plan = solve(Job(profile, flat(2), cuts=[1], replicas=[1, 1])).plan
    whole = WholeModel(PlannedTraining(plan, find_model(str(path)), 2), torch.device("cpu"), print)
    with pytest.raises(PartoptError, match="besides torch's dropout") as refused:
        whole.backward(0)
    assert "noise" in refused.value.hint
