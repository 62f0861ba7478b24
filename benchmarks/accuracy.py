"""Predicted against measured on this machine: plans that sleep, and plans that compute.

    python benchmarks/accuracy.py [--quick]

Links are measured first, by `partopt topology measure`'s own code, and the plans are simulated on
what was found. `own times` puts the run's own times of all actions into the simulator. Goals:
sleeping stages 3 % in the mean for small messages, 5 % for 4 MB and for all-reduces, 3 % with own
times; stages that compute 8 %, 3 % with own times, and 5 % of their peak memory.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import accuracy_computing as computing
import accuracy_sleeping as sleeping
from machine import describe

from partopt import prepare_links
from partopt.documents.topology import Topology
from partopt.documents.training_run import Run
from partopt.units import format_bytes

KB, MB = 10**3, 10**6
SIZES = [4 * KB, 64 * KB, 400 * KB, MB, 4 * MB, 16 * MB]


def main() -> None:
    """Print the tables, their means, and what the machine did meanwhile."""
    quick = "--quick" in sys.argv
    print(describe())
    before = os.getloadavg()[0]
    topologies = {ranks: measure_links(ranks) for ranks in ((2,) if quick else (2, 3, 4))}
    print_sleeping(topologies, quick)
    if (os.cpu_count() or 1) >= computing.RANKS:
        print_computing(topologies[computing.RANKS], quick)
    print(f"\nload {before:.1f} before, {os.getloadavg()[0]:.1f} after; {os.cpu_count()} cores")


def measure_links(ranks: int) -> Topology:
    """The topology of so many ranks of this machine."""
    links = prepare_links(SIZES, ranks=ranks).fit(f"here-{ranks}", lambda _: None)
    level = links.topology.levels[0]
    print(
        f"links of {ranks} ranks: {level.bandwidth_bytes_per_s / 1e9:.2f} GB/s, "
        f"{level.latency_s * 1e6:.0f} us, {level.message_s * 1e6:.0f} us of a device for each "
        f"message, worst error of the fit {links.worst.error:+.0%}",
        flush=True,
    )
    return links.topology


def print_sleeping(topologies: dict[int, Topology], quick: bool) -> None:
    """The plans that sleep, one a line, and the means of their groups."""
    print(f"\n{'':22}{'schedule':16}{'shape':10}{'predicted':>11}{'measured':>11}", end="")
    print(f"{'error':>8}{'own times':>11}")
    errors: dict[str, list[tuple[float, float]]] = {}
    for found in sleeping.run_all(sleeping.cases(topologies, quick)):
        group, plan = found.case.group, found.case.plan
        error = found.predicted_s / found.measured_s - 1
        rest = found.own_s / found.measured_s - 1
        errors.setdefault(group, []).append((abs(error), abs(rest)))
        print(
            f"{group:22}{plan.schedule:16}{plan.shape:10}"
            f"{found.predicted_s * 1e3:8.1f} ms{found.measured_s * 1e3:8.1f} ms"
            f"{error:+8.1%}{rest:+11.1%}"
        )
    print(f"\n{'mean of the errors':22}{'predicted':>12}{'worst':>9}{'own times':>12}{'worst':>9}")
    for group, both in errors.items():
        print_means(group, both)


def print_means(group: str, errors: Sequence[tuple[float, float]]) -> None:
    """Means and worst of the errors of a group."""
    first, second = zip(*errors, strict=True)
    print(
        f"{group:22}{statistics.mean(first):12.1%}{max(first):9.1%}"
        f"{statistics.mean(second):12.1%}{max(second):9.1%}",
        flush=True,
    )


def print_computing(topology: Topology, quick: bool) -> None:
    """The plans that compute, one a line, with why they miss; and their memory, rank by rank."""
    ran: list[computing.Found] = []
    print()
    for model in computing.MODELS[:1] if quick else computing.MODELS:
        measured = computing.profile(model)
        alone, together = computing.step_s(measured.alone), computing.step_s(measured.together)
        print(
            f"{model.name}: {alone * 1e3:.1f} ms alone, {together * 1e3:.1f} ms while "
            f"{computing.RANKS} compute ({together / alone - 1:+.1%})",
            flush=True,
        )
        ran += computing.runs(measured, topology, quick)
    print(
        f"\n{'':6}{'schedule':16}{'shape':9}{'engine':9}{'predicted':>11}{'measured':>11}", end=""
    )
    print(f"{'error':>8}{'own times':>11}{'actions':>9}{'drift':>8}")
    for found in ran:
        run = found.run
        print(
            f"{_name(run)}{found.predicted_s * 1e3:8.1f} ms{run.measured_s * 1e3:8.1f} ms"
            f"{found.predicted_s / run.measured_s - 1:+8.1%}"
            f"{run.own_times_s / run.measured_s - 1:+11.1%}{computing.compute_error(found):+9.1%}"
            f"{found.drift:+8.1%}"
        )
        for why in computing.misses(found):
            print(f"{'':6}  {why}")
    print_memory([found.run for found in ran])
    print(f"\n{'mean of the errors':22}{'predicted':>12}{'worst':>9}{'own times':>12}{'worst':>9}")
    times = [
        (
            abs(found.predicted_s / found.run.measured_s - 1),
            abs(found.run.own_times_s / found.run.measured_s - 1),
        )
        for found in ran
    ]
    print_means("stages that compute", times)


def print_memory(ran: Sequence[Run]) -> None:
    """Predicted and counted peak memory of every rank."""
    print(f"\n{'':6}{'schedule':16}{'shape':9}{'engine':9}{'rank':>5}", end="")
    print(f"{'predicted':>11}{'counted':>11}{'error':>8}")
    for run in ran:
        for rank in run.ranks:
            predicted, counted = rank.predicted.peak_memory_bytes, rank.measured.peak_memory_bytes
            if predicted and counted:
                print(
                    f"{_name(run)}{rank.rank:5}{format_bytes(predicted):>11}"
                    f"{format_bytes(counted):>11}{predicted / counted - 1:+8.1%}"
                )
    errors = [abs(error) for run in ran for error in computing.memory_errors(run)]
    print(f"mean of the errors {statistics.mean(errors):.1%}, worst {max(errors):.1%}")


def _name(run: Run) -> str:
    plan = run.plan
    return f"{plan.model:6}{plan.schedule:16}{plan.shape:9}{run.engine:9}"


if __name__ == "__main__":
    main()
