"""`benchmarks/profiler_accuracy.py` runs; how near its two times are is for it to say."""

import re

import torch
from msgspec.structs import replace
from torch import nn

from benchmarks.profiler_accuracy import RANGES, Case, ranges, record_calls, row
from partopt.profiler.settings import ProfileSettings
from tests.helpers import chain_profile, uniform_profile


def test_a_row_has_ranges_and_their_errors():
    """Four, unless the machine held a layer up for longer than a quarter of the step."""
    settings = ProfileSettings(microbatch_sizes=[1], device="cpu", steps=1)
    name, layers, parts, *figures = row(Case("mlp", 16, {"width": 32}), settings, 1).split()
    assert name == "mlp"
    assert 1 <= int(parts) <= RANGES <= int(layers)
    assert len(re.findall(r"\d%", " ".join(figures))) == 5


def test_ranges_end_with_each_quarter_of_the_time():
    for seconds, found in (
        ([1.0] * 8, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        ([9.0, 1.0, 1.0, 1.0], [(0, 1), (1, 2), (2, 3), (3, 4)]),
        ([1.0, 1.0, 1.0, 9.0], [(0, 3), (3, 4)]),
        ([1.0], [(0, 1)]),
    ):
        assert ranges(chain_profile(seconds)) == found


def test_a_piece_of_a_unit_goes_on_with_the_modules_before_the_next():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    profile = uniform_profile(2)
    names = ["0", "2"]
    layers = [replace(layer, name=name) for layer, name in zip(profile.layers, names, strict=True)]
    calls = record_calls(model, replace(profile, layers=layers), torch.ones(1, 4))
    assert [[call.module for call in own] for own in calls] == [[model[0], model[1]], [model[2]]]
