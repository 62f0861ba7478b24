"""`benchmarks/profiler_accuracy.py` runs; how near its two times are is for it to say."""

from __future__ import annotations

import re

from benchmarks.profiler_accuracy import RANGES, Case, row
from partopt.profiler.settings import check_settings


def test_a_row_has_a_range_of_each_quarter_and_an_error() -> None:
    settings = check_settings([1], "cpu", "float32", "auto", (), 1, None)
    name, layers, ranges, *figures = row(Case("mlp", 16, {"width": 32}), settings, 1).split()
    assert (name, int(ranges)) == ("mlp", RANGES)
    assert int(layers) >= RANGES
    assert len(re.findall(r"\d%", " ".join(figures))) == 5
