"""How good plans of large problems are: those of normal effort beside those of many times the work.

    python benchmarks/large.py [PROBLEM ...]

The whole command `partopt plan` plans models of some 400 to 500 layers on 96 to 256 devices over
links of several rates, at `--effort normal` and at `--effort thorough`; PROBLEMs are numbers, from
0. No plan of such a size can be proved the best: `longer` is what the normal effort leaves to be
gained by patience, `gap` what lies between its plan and the bound.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from command import LIMIT_S, SLOW, Row, command_of, run
from machine import describe

from partopt.documents.plan import Plan

MIDDLE, FAST = ("50 GB/s", "25 Gb/s"), ("300 GB/s", "100 Gb/s")
_1F1B = "--schedule 1f1b --microbatches"
PROBLEMS = [
    Row("400 layers, 8 x 32, slow", "layers 400", (8, 32), SLOW, "--memory 12GB"),
    Row("420 layers, 8 x 32, middle", "layers 420", (8, 32), MIDDLE, "--memory 12GB"),
    Row("440 layers, 8 x 16, slow", "layers 440", (8, 16), SLOW, "--memory 16GB"),
    Row("460 layers, 8 x 32, fast", "layers 460", (8, 32), FAST, "--memory 10GB"),
    Row("480 layers, 4 x 32, middle", "layers 480", (4, 32), MIDDLE, "--memory 14GB"),
    Row("500 layers, 8 x 24, slow", "layers 500", (8, 24), SLOW, "--memory 20GB"),
    Row("410, 8 x 16, middle, 1f1b", "layers 410", (8, 16), MIDDLE, f"--memory 12GB {_1F1B} 512"),
    Row("430, 8 x 16, slow, 1f1b", "layers 430", (8, 16), SLOW, f"--memory 14GB {_1F1B} 256"),
]
EFFORTS = ("normal", "thorough")


def main(chosen: Sequence[int]) -> None:
    """Print the table, and the mean of what is left."""
    print(describe())
    print(
        f"\n{'partopt plan':28}{'period':>10}{'gap':>7}{'seconds':>9}{'longer':>11}{'seconds':>9}"
    )
    left = []
    for number in chosen or range(len(PROBLEMS)):
        (plan, own_s), (better, more_s) = (planned(PROBLEMS[number], each) for each in EFFORTS)
        assert plan.certificate is not None
        period_s, least_s = plan.predicted.period_s, better.predicted.period_s
        left.append(least_s / period_s - 1)
        print(
            f"{PROBLEMS[number].name:28}{1e3 * period_s:7.2f} ms{plan.certificate.gap:7.0%}"
            f"{own_s:7.1f} s{left[-1]:+11.1%}{more_s:7.1f} s",
            flush=True,
        )
    print(f"{'mean':54}{sum(left) / len(left):+11.1%}")


def planned(problem: Row, effort: str) -> tuple[Plan, float]:
    """The plan of the whole command, and its seconds."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        command = [*command_of(problem, Path(folder)), "--effort", effort, "-o", str(path)]
        start = time.perf_counter()
        code = run(command, LIMIT_S)
        assert code == 0, f"{problem.name}: exit {code}"
        return Plan.load(path), time.perf_counter() - start


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]])
