"""How far a profile moves when other processes use its core: busy loops beside it, on one core.

    python benchmarks/busy_core.py

Each row is one profile of examples/gpt.py. `layers` is the sum of the layers' times, processor
time; `wall` is what the same steps took by the clock on the wall. The rows alternate between no
load and load, so that a drift of the machine shows as one between rows without load.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

# a checkout in which nothing is installed
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import partopt
from partopt.documents.profile import Profile
from partopt.units import format_seconds

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = {"layers": 4, "width": 256, "context": 128}
LOOP = "while True: pass"


def measure_beside(loops: int, steps: int) -> Profile:
    """The profile while `loops` busy loops run on the same core."""
    others = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(loops)]
    try:
        return partopt.measure_source(
            ROOT / "examples" / "gpt.py",
            arguments=SETTINGS,
            microbatch_sizes=[2],
            steps=steps,
            device="cpu",
        )
    finally:
        for other in others:
            other.kill()
            other.wait()


def main() -> None:
    """Print a row for each number of busy loops."""
    from machine import describe

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loops", type=int, nargs="*", default=[0, 1, 0, 3, 0])
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # the loops inherit it
    print(describe())
    print("| busy loops | layers | against the first row | wall | had the core |")
    print("|---|---|---|---|---|")
    first_s = 0.0
    for loops in arguments.loops:
        profile = measure_beside(loops, arguments.steps)
        [measured] = profile.measured()
        layers_s = sum(layer.forward_s + layer.backward_s for layer in measured.layers)
        first_s = first_s or layers_s
        share = 1 - max(
            (n.fields["idle_share"] for n in profile.notes if n.code == "busy-machine"), default=0.0
        )
        print(
            f"| {loops} | {format_seconds(layers_s)} | {layers_s / first_s - 1:+.1%} | "
            f"{format_seconds(layers_s / share)} | {share:.0%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
