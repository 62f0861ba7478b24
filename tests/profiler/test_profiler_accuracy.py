"""`benchmarks/profiler_accuracy.py` runs; how near its two times are is for it to say."""

import re

import torch
from msgspec.structs import replace
from torch import nn

from benchmarks.profiler_accuracy import RANGES, Case, record_calls, row
from partopt.profiler.settings import Settings
from tests.helpers import uniform_profile


def test_a_row_has_a_range_of_each_quarter_and_an_error():
    settings = Settings(microbatch_sizes=[1], device="cpu", steps=1)
    name, layers, ranges, *figures = row(Case("mlp", 16, {"width": 32}), settings, 1).split()
    assert (name, int(ranges)) == ("mlp", RANGES)
    assert int(layers) >= RANGES
    assert len(re.findall(r"\d%", " ".join(figures))) == 5


def test_a_piece_of_a_unit_goes_on_with_the_modules_before_the_next():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    profile = uniform_profile(2)
    names = ["0", "2"]
    layers = [replace(layer, name=name) for layer, name in zip(profile.layers, names, strict=True)]
    calls = record_calls(model, replace(profile, layers=layers), torch.ones(1, 4))
    assert [[call.module for call in own] for own in calls] == [[model[0], model[1]], [model[2]]]
