"""Plans against those of an earlier planner, problem by problem.

    python benchmarks/against.py [--family F] [--first N] [--write FILE]

`against.json` holds what commit 3633bec planned, the last with an exact search of two families:
seconds of a sample, or null where nothing fitted. Problems are random ones (`quality.draw`),
shipped profiles on the clusters that they are for, with and without recomputation and little
memory, and large ones. Where 1f1b had a warm-up of its own choice, it is left out: nobody runs it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from command import make_profile
from machine import describe
from quality import SCHEDULES, draw

import partopt as po
from partopt.documents.topology import Device, Level, Topology
from partopt.errors import PartoptError
from partopt.schedules import schedule

ROOT = Path(__file__).resolve().parent.parent
STORED = Path(__file__).with_suffix(".json")
CLUSTERS = ("dgx-h100", "dgx-a100", "v100-pcie", "v100-nvlink")
COUNTS = {"random": 60, "shipped": 90, "large": 12}
SEED = 21


def main() -> None:
    """Print the table, or write what is planned now."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--family", choices=list(COUNTS), action="append")
    parser.add_argument("--first", type=int, default=10**9, help="problems of each family")
    parser.add_argument("--write", help="a file for what is planned")
    given = parser.parse_args()
    print(describe())
    known = json.loads(STORED.read_text()) if STORED.exists() else {}
    found: dict[str, float | None] = {}
    for family in given.family or COUNTS:
        for number in range(min(given.first, COUNTS[family])):
            name = f"{family} {number}"
            began = time.process_time()
            job = draw_job(family, number)
            found[name], text = planned(job)
            took_s = time.process_time() - began
            before = known.get(name, "new")
            change = ""
            if isinstance(before, float) and isinstance(found[name], float):
                change = f"{100 * (found[name] / before - 1):+.2f} %"
            elif before != "new" and before != found[name]:
                change = "fits now" if before is None else "does not fit now"
            print(f"{name:12}{job.schedule:14}{change:>18}{took_s:8.1f} s  {text}", flush=True)
            if given.write:
                Path(given.write).write_text(json.dumps(found, indent=0))
    summarize(known, found)


def draw_job(family: str, number: int) -> po.Job:
    """The problem of that number."""
    random = np.random.default_rng((SEED, list(COUNTS).index(family), number))
    name = SCHEDULES[number % len(SCHEDULES)]
    if family == "random":
        return draw(random, name, "normal")[0]
    return (_shipped if family == "shipped" else _large)(random, name)


def _shipped(random: np.random.Generator, name: str) -> po.Job:
    """A shipped profile, on one to eight servers of a cluster that it may be planned for."""
    for job in _tries(random, name):
        if job is not None:
            return job
    raise AssertionError


def _tries(random: np.random.Generator, name: str) -> Iterator[po.Job | None]:
    files = sorted((ROOT / "profiles").glob("*.json"))
    while True:
        file = files[random.integers(len(files))]
        cluster = CLUSTERS[random.integers(len(CLUSTERS))]
        device = "h100" if "h100" in file.name else "a100" if "a100" in file.name else ""
        servers = int(random.choice([1, 2, 3, 4, 8]))
        share = float(random.choice([1.0, 0.5, 0.25]))
        recompute = str(random.choice(["never", "auto"]))
        M = int(random.choice([8, 32, 64]))
        if device and device not in cluster:
            yield None
            continue
        try:
            profile, topology = po.Profile.load(file), po.Topology.load(cluster, servers)
            yield po.Job(
                profile,
                topology,
                schedule=name,
                microbatches=None if schedule(name).asynchronous else M,
                memory=round(topology.device.memory_bytes * share),
                recompute=recompute,
            )
        except PartoptError:
            yield None


def _large(random: np.random.Generator, name: str) -> po.Job:
    """Many layers of any times, on 128 to 1,024 devices, some with little memory."""
    layers, servers = int(random.choice([48, 200, 600])), int(random.choice([16, 64, 128]))
    levels = [
        Level(name="server", size=8, bandwidth_bytes_per_s=380e9),
        Level(name="cluster", size=servers, bandwidth_bytes_per_s=50e9, latency_s=1e-5),
    ]
    topology = Topology(name="drawn", device=Device(name="device"), levels=levels)
    tight = bool(random.random() < 0.5)
    return po.Job(
        make_profile("layers", layers),
        topology,
        schedule=name,
        microbatches=None if schedule(name).asynchronous else 8 * servers,
        memory="20 GB" if tight else "80 GB",
    )


def planned(job: po.Job) -> tuple[float | None, str]:
    """Seconds of a sample of the best plan that fits, and the plan in a few words."""
    try:
        plan = po.solve(job).plan
    except PartoptError as error:
        return None, error.message
    words = f"{plan.profile.name}, {plan.topology.devices} devices, {plan.shape}"
    if not plan.fits or (plan.schedule == "1f1b" and not _own_warmup(plan)):
        return None, words
    return plan.predicted.period_s / plan.microbatch_size, words


def _own_warmup(plan: po.Plan) -> bool:
    """Whether the plan has the warm-up of 1F1B, for so many microbatches."""
    replicas, M = [stage.replicas for stage in plan.stages], plan.microbatches or 1
    behind = [-(-sum(replicas[s + 1 :]) // r) for s, r in enumerate(replicas)]
    usual = [min(own, -(-M // r) - 1) for own, r in zip(behind, replicas, strict=True)]
    return [stage.warmup for stage in plan.stages] == usual


def summarize(known: dict[str, float | None], found: dict[str, float | None]) -> None:
    """Print how the plans compare."""
    changes = [
        after / before - 1
        for name, after in found.items()
        if after is not None and (before := known.get(name)) is not None
    ]
    lost = sum(known.get(name) is not None and after is None for name, after in found.items())
    if changes:
        print(
            f"\n{len(changes)} plans: {100 * statistics.mean(changes):+.2f} % in the mean, "
            f"{sum(abs(each) <= 0.005 for each in changes)} within 0.5 %, "
            f"{sum(each < -0.01 for each in changes)} more than 1 % faster, "
            f"{sum(each > 0.01 for each in changes)} slower (worst {100 * max(changes):.1f} %); "
            f"{lost} fit no longer"
        )


if __name__ == "__main__":
    main()
