"""Seconds and memory of the planners on random chains of published shape, one core, and of the command line from a cold start.

    python benchmarks/planners.py

A chain has log-normal times, activations that decay and weights that grow along the model, as convolutional networks have them. Every row
is run in a process of its own: the first call, which compiles or loads compiled code, is reported apart from the median of the following.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time

import numpy as np

_1F1B = {"schedule": "1f1b", "microbatches": 512}
# planner, layers, sizes of the levels (innermost first), stages (0: as many as devices), seconds to reach (0: none set), and what else
# the problem says: the memory limits are ones that one stage on all devices exceeds
ROWS = [
    ("optimal", 1000, (8, 128), 0, 1.0, {"memory_bytes": 40 * 10**9}),
    ("optimal", 2000, (8, 128), 0, 0.0, {"memory_bytes": 80 * 10**9}),
    ("optimal", 1000, (8, 256), 0, 0.0, {"memory_bytes": 40 * 10**9}),
    ("optimal", 10000, (16384,), 0, 5.0),
    ("optimal", 10000, (8, 2048), 0, 15.0, {"memory_bytes": 420 * 10**9}),
    ("optimal", 1000, (8, 128), 0, 0.0, {"schedule": "1f1b", "microbatches": 1024}),
    ("optimal", 1000, (8, 128), 0, 10.0, {**_1F1B, "memory_bytes": 20 * 10**9}),
    ("optimal", 2000, (8, 128), 0, 0.0, {**_1F1B, "memory_bytes": 40 * 10**9}),
    ("optimal", 1000, (8, 256), 0, 0.0, {**_1F1B, "memory_bytes": 20 * 10**9}),
    ("optimal", 100, (8, 128), 0, 0.0, {**_1F1B, "replication": "uniform"}),
    ("optimal", 100, (8, 128), 0, 0.0, {**_1F1B, "memory_bytes": 2 * 10**9, "recompute_per_stage": True}),
    ("pipedream", 200, (8, 8), 0, 1.0),
    ("pipedream", 1000, (8, 128), 0, 5.0),
    ("pipedream", 2000, (8, 128), 0, 0.0),
    ("pipedream", 1000, (8, 256), 0, 0.0),
    ("pipedream", 1000, (4, 8, 16), 0, 0.0),
    ("pipedream", 500, (256,), 0, 0.0),
    ("gpipe", 3000, (64,), 64, 1.0),
    ("gpipe", 6000, (64,), 64, 0.0),
    ("torchgpipe", 3000, (64,), 64, 0.0),
    ("straight", 1000, (8, 8), 0, 0.0),
]
COMMANDS = [
    (["--help"], 0.2),
    (["plan", "gpt.cpu.float32", "--topology", "v100-pcie"], 1.0),
]
REPEATS = 5


def main() -> None:
    """Print the tables."""
    from machine import describe

    print(describe())
    print(f"\n{'planner':12}{'layers':>7}{'devices':>12}{'first call':>13}{'then':>11}{'to reach':>10}{'memory':>9}")
    for index, (planner, layers, sizes, _, target, *_) in enumerate(ROWS):
        output = subprocess.run([sys.executable, __file__, str(index)], check=True, capture_output=True, text=True).stdout
        row = json.loads(output)
        goal = f"{target:g} s" if target else "-"
        devices = " x ".join(map(str, sizes))
        print(
            f"{planner:12}{layers:7}{devices:>12}{row['first_s']:11.3f} s{row['median_s']:9.3f} s{goal:>10}{row['peak_mb']:6.0f} MB",
            flush=True,
        )
    print(f"\n{'command, from a cold start with warm caches':56}{'median':>9}{'to reach':>10}")
    for arguments, target in COMMANDS:
        print(f"{'partopt ' + ' '.join(arguments):56}{_command_s(arguments):7.2f} s{target:8g} s")


def _command_s(arguments: list[str]) -> float:
    """Median seconds of the command as a process."""
    seconds = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "partopt", *arguments], check=False, capture_output=True)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def _row(planner: str, layers: int, sizes: tuple[int, ...], stages: int, options: dict[str, object]) -> dict[str, float]:
    """First and median seconds of one planner, and the peak memory of the process."""
    from partopt import planners
    from partopt.cost.problem import Problem

    seconds = []
    for seed in range(REPEATS + 1):
        chain = _chain(layers, seed)
        problem = Problem(profile=None, topology=_topology(sizes), chain=chain, stages=stages or None, **options)  # type: ignore[arg-type]
        start = time.perf_counter()
        planners.partition(planner, problem)
        seconds.append(time.perf_counter() - start)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return {"first_s": seconds[0], "median_s": statistics.median(seconds[1:]), "peak_mb": peak_mb}


def _chain(layers: int, seed: int):  # type: ignore[no-untyped-def]
    from partopt.cost.chain import Chain
    from partopt.cost.ranges import RangeSum

    random = np.random.default_rng(seed)
    position = np.arange(layers) / layers
    forward = random.lognormal(0, 0.5, layers) * 1e-3
    outputs = 1e8 * np.exp(-3 * position) * random.lognormal(0, 0.3, layers)
    return Chain(
        names=[f"layer{index}" for index in range(layers)],
        microbatch_size=1,
        f=forward,
        g=2 * forward,
        gw=forward,
        a=np.concatenate([[0.0], outputs[:-1], [0.0]]),
        parameter_bytes=RangeSum(1e6 * np.exp(3 * position) * random.lognormal(0, 0.5, layers)),
        stash_bytes=RangeSum(outputs),
    )


def _topology(sizes: tuple[int, ...]):  # type: ignore[no-untyped-def]
    from partopt.topology import Device, Level, Topology

    rates = (380e9, 50e9, 12.5e9)
    levels = [Level(name=f"level{k}", size=size, bandwidth_bytes_per_s=rates[k]) for k, size in enumerate(sizes)]
    return Topology(name="benchmark", device=Device(name="device"), levels=levels)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        row = ROWS[int(sys.argv[1])]
        print(json.dumps(_row(*row[:4], row[5] if len(row) > 5 else {})))
    else:
        main()
