"""Measurements made up from known figures, with noise."""

import random

from partopt.documents.links import AllReduceSample, LevelSamples, LinkMeasurement, MessageSample
from partopt.runtime.link_fit import levels_of

SIZES = (4_000, 64_000, 1_000_000, 4_000_000, 16_000_000)
LATENCY_S, BANDWIDTH, OVERHEAD_S, COPY = 50e-6, 3e9, 10e-6, 20e9
STEP_S, RING_BANDWIDTH = 80e-6, 2e9


def level_samples(
    level,
    noise=0.0,
    seconds_of=lambda size: LATENCY_S + size / BANDWIDTH,
):
    draw = random.Random(1)

    def noisy(seconds):
        return seconds * (1 + noise * draw.uniform(-1, 1))

    messages = [
        MessageSample(size, noisy(seconds_of(size)), noisy(OVERHEAD_S + size / COPY))
        for size in SIZES
    ]
    reduced = [
        AllReduceSample(r, size, noisy(2 * (r - 1) * (STEP_S + size / r / RING_BANDWIDTH)))
        for r in map(len, level.allreduces)
        for size in SIZES
    ]
    return LevelSamples(level.name, level.size, tuple(messages), tuple(reduced))


def measurement(*levels, ranks=4, **fields):
    """A measurement of an idle host."""
    given = {"backend": "gloo", "load": 0.0, "cores": 8, "hosts": ("h",) * ranks} | fields
    return LinkMeasurement(
        device="CPU",
        memory_bytes=10**9,
        ranks=ranks,
        levels=levels,
        **given,  # type: ignore[arg-type]
    )


def server(ranks=4):
    """The level inside a server."""
    return levels_of(ranks, ranks)[0]
