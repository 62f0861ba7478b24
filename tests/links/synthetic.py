"""Measurements made up from known figures, with noise."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from partopt.links.layout import ALL, BOTH, ONE, SERVERS, MeasuredLevel, levels_of
from partopt.links.samples import (
    AllReduceSample,
    HandlingSample,
    LevelSamples,
    LinkMeasurement,
    MessageSample,
)

SIZES = (4_000, 64_000, 1_000_000, 4_000_000, 16_000_000)
SWITCHED = {ONE: 1, BOTH: 1, ALL: 1, SERVERS: 4}  # messages of a link, one after the other
LATENCY_S, BANDWIDTH, OVERHEAD_S, COPY = 50e-6, 3e9, 10e-6, 20e9
STEP_S, RING_BANDWIDTH = 80e-6, 2e9


def level_samples(
    level: MeasuredLevel,
    in_turn: Mapping[str, int],
    noise: float = 0.0,
    seconds_of: Callable[[int], float] = lambda size: LATENCY_S + size / BANDWIDTH,
    on_a_bus: bool = False,
) -> LevelSamples:
    """Samples of a level whose n-th message waits for the n - 1 before it."""
    draw = random.Random(1)

    def noisy(seconds: float) -> float:
        return seconds * (1 + noise * draw.uniform(-1, 1))

    sender = {size: OVERHEAD_S + size / COPY for size in SIZES}
    messages = [
        MessageSample(
            traffic,
            size,
            noisy(seconds_of(size) + (in_turn[traffic.label] - 1) * size / BANDWIDTH),
        )
        for traffic in level.traffic
        for size in SIZES
    ]
    handling = [HandlingSample(size, noisy(sender[size]), 2 * seconds_of(size)) for size in SIZES]
    reduced = []
    for ranks in map(len, level.allreduces):
        shared = ranks if on_a_bus else 1
        for size in SIZES:
            seconds = 2 * (ranks - 1) * (STEP_S + shared * size / ranks / RING_BANDWIDTH)
            reduced.append(AllReduceSample(ranks, size, noisy(seconds)))
    return LevelSamples(level.name, level.size, tuple(messages), tuple(handling), tuple(reduced))


def measurement(*levels: LevelSamples, ranks: int = 4, **fields: object) -> LinkMeasurement:
    """A measurement of an idle host."""
    given = {"backend": "gloo", "load": 0.0, "cores": 8, "hosts": ("h",) * ranks} | fields
    return LinkMeasurement(
        device="CPU",
        memory_bytes=10**9,
        ranks=ranks,
        levels=levels,
        **given,  # type: ignore[arg-type]
    )


def server(ranks: int = 4) -> MeasuredLevel:
    """The level inside a server."""
    return levels_of(ranks, ranks)[0]
