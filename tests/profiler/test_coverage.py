"""Real time: the layers add up to the bare step.

Shares of it are asserted, never seconds; a machine at work gets three tries.
"""

from __future__ import annotations

import pytest

from partopt.profiler import measure_source
from tests.profiler.helpers import EXAMPLES, layer_seconds, needs_torchvision

MODELS = {
    "gpt": ({"layers": 4, "width": 256, "context": 64}, 2),
    "vgg16": ({"size": 64, "classes": 10}, 2),
    "resnet50": ({"size": 64, "classes": 10}, 2),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torchvision")
@pytest.mark.parametrize(
    "name",
    [
        "gpt",
        pytest.param("vgg16", marks=needs_torchvision),
        pytest.param("resnet50", marks=needs_torchvision),
    ],
)
def test_the_layers_cover_the_bare_step_within_ten_percent(name: str) -> None:
    arguments, size = MODELS[name]
    tries = []
    for _ in range(3):
        [measurement] = measure_source(
            EXAMPLES / f"{name}.py",
            arguments=arguments,
            microbatch_sizes=[size],
            steps=7,
            device="cpu",
        ).measurements
        assert measurement.coverage == pytest.approx(
            layer_seconds(measurement) / measurement.step_s
        )
        tries.append(measurement.coverage)
        if 0.9 <= measurement.coverage <= 1.1:
            return
    pytest.fail(f"coverage {tries}")
