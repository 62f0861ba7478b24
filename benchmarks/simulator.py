"""Seconds and memory of the simulator: orders of published size executed with transfers on every
cut, one core.

    python benchmarks/simulator.py

Every row is run in a process of its own: the first call, which compiles or loads compiled code, is
made on a small order and reported apart; then the order is written once and simulated three times.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from itertools import pairwise

import numpy as np

# schedule, stages' replicas, microbatches, seconds to reach (0: none set)
ROWS = [
    ("1f1b", [1] * 64, 512, 0.3),
    ("1f1b", [1] * 512, 4096, 0.0),
    ("1f1b", [1] * 1024, 4096, 10.0),
    ("1f1b", [1] * 1024, 8192, 0.0),
    ("gpipe", [1] * 64, 512, 0.0),
    ("interleaved", [1] * 64, 512, 0.0),
    ("zbv", [1] * 64, 512, 0.0),
    ("dualpipe", [1] * 64, 512, 0.0),
    ("pipedream", [8] * 128, 8192, 0.0),
    ("pipedream", [512, 256, 128, 64, 32, 16, 8, 8], 65536, 0.0),
]
CHUNKS = 2  # stages that a device holds under the schedules that have several
REPEATS = 3


def main() -> None:
    """Print the table."""
    from machine import describe

    print(describe())
    print(f"\n{'schedule':13}{'devices':>8}{'microbatches':>14}{'actions':>12}", end="")
    print(
        f"{'first call':>13}{'order':>10}{'simulate':>11}{'to reach':>10}"
        f"{'an action':>11}{'memory':>9}"
    )
    for index, (name, replicas, microbatches, target) in enumerate(ROWS):
        row = json.loads(
            subprocess.run(
                [sys.executable, __file__, str(index)], check=True, capture_output=True, text=True
            ).stdout
        )
        goal = f"{target:g} s" if target else "-"
        each = row["median_s"] / row["actions"] * 1e9
        print(
            f"{name:13}{sum(replicas):8}{microbatches:14}{row['actions']:12,}"
            f"{row['first_s']:11.3f} s{row['order_s']:8.3f} s"
            f"{row['median_s']:9.3f} s{goal:>10}{each:8.0f} ns{row['peak_gb']:6.2f} GB",
            flush=True,
        )


def _row(name: str, replicas: list[int], microbatches: int) -> dict[str, float]:
    """Seconds of the first call, of writing the order and of simulating it, and the peak memory of
    the process.
    """
    from partopt.schedules import order
    from partopt.simulator.kernel import simulate

    first_s = _seconds(lambda: _simulated_small(name))
    layout = _layout(name, replicas, microbatches)
    start = time.perf_counter()
    written = order(name, layout)
    order_s = time.perf_counter() - start
    work = _work(layout.ranks, layout.devices)
    median_s = statistics.median(_seconds(lambda: simulate(written, work)) for _ in range(REPEATS))
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return {
        "actions": len(written.kind),
        "first_s": first_s,
        "order_s": order_s,
        "median_s": median_s,
        "peak_gb": peak_gb,
    }


def _seconds(run) -> float:  # type: ignore[no-untyped-def]
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _simulated_small(name: str) -> None:
    from partopt.schedules import order
    from partopt.simulator.kernel import simulate

    layout = _layout(name, [1, 1], 8)
    simulate(order(name, layout), _work(layout.ranks, layout.devices))


def _layout(name: str, replicas: list[int], microbatches: int):  # type: ignore[no-untyped-def]
    from partopt.schedules import SCHEDULES
    from partopt.schedules.placement import STRAIGHT, Placement, ranks_of

    shape = SCHEDULES[name].shape
    if shape == STRAIGHT:
        ranks = [
            list(range(start, stop)) for start, stop in pairwise(np.cumsum([0, *replicas]).tolist())
        ]
    else:
        ranks = ranks_of(shape, len(replicas), CHUNKS)
    return Placement(ranks, sum(replicas), microbatches)


def _work(ranks: list[list[int]], devices: int):  # type: ignore[no-untyped-def]
    """1 s and 2 s a microbatch on each stage over its replicas, a tenth of a second a message, one
    for an all-reduce.
    """
    from partopt.documents.topology import Device, Level, Topology
    from partopt.schedules.order import KINDS
    from partopt.simulator.work import Work

    r = np.array([len(own) for own in ranks], dtype=np.float64)
    seconds = np.zeros((len(KINDS), len(ranks)))
    for kind, each in (("F", 1.0), ("B", 2.0), ("I", 1.0), ("W", 1.0)):
        seconds[KINDS.index(kind)] = each * r
    level = Level(name="level", size=devices, bandwidth_bytes_per_s=1.0, latency_s=0.01)
    topology = Topology(name="benchmark", device=Device(name="device"), levels=[level])
    S = len(ranks)
    cuts, gradients, tied = np.full(S + 1, 0.1), np.full(S, 0.5), np.zeros(S)
    return Work(ranks, seconds, cuts, gradients, tied, topology)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(_row(*ROWS[int(sys.argv[1])][:3])))
    else:
        main()
