"""How good plans for many devices are: beside the best known, and an independent search.

    python benchmarks/large.py [--effort E] [--equal] [PROBLEM ...]

The whole command `partopt plan` plans transformers and random chains on 72 to 1,024 devices whose
memory is often short. No plan of such a size can be proved the best: `best known` is the fastest
that any version or effort has found, `behind` how much slower this plan is. With `--equal` an
independent program, which knows no planner, looks for pipelines of equally many replicas that are
faster: of every number of stages the cuts whose slowest stage is fastest within the memory.
PROBLEMs are numbers, from 0. Seconds are those of the processor; a first plan, which compiles, is
not shown.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from command import LIMIT_S, Row, command_of, run
from machine import describe

from partopt import Job, Plan, Profile, Topology
from partopt.cost.memory import memory_table
from partopt.cost.pricing import price
from partopt.cost.problem import CONTIGUOUS, Partition, consecutive
from partopt.errors import PartoptError
from partopt.schedules import schedule
from partopt.search.warmup import simulate_with_best_warmup

FAST, MIDDLE, SLOW = ("380 GB/s", "50 GB/s"), ("50 GB/s", "25 Gb/s"), ("12 GB/s", "10 Gb/s")
BEST = Path(__file__).with_suffix(".json")  # samples/s of the best known plans, by problem
_AUTO = "--recompute auto"


def _row(profile: str, servers: int, rates: tuple[str, str], options: str) -> Row:
    words = options.replace("--", "").replace("schedule ", "").replace("microbatches", "M")
    return Row(f"{profile}, {8 * servers}, {words}", profile, (8, servers), rates, options)


GPT3, L70, L13 = "transformer 96 12288", "transformer 80 8192", "transformer 40 5120"
_1F1B, _GPIPE, _EACH = "--schedule 1f1b", "--schedule gpipe", "--microbatches"
PROBLEMS = [
    _row(GPT3, 128, FAST, f"{_1F1B} {_AUTO} {_EACH} 1536 --memory 80GB"),
    _row(GPT3, 64, FAST, f"{_1F1B} {_AUTO} {_EACH} 1536 --memory 96GB"),
    _row(GPT3, 128, FAST, f"{_1F1B} {_AUTO} {_EACH} 2048 --memory 141GB"),
    _row(GPT3, 48, FAST, f"{_GPIPE} {_AUTO} {_EACH} 768 --memory 96GB"),
    _row(GPT3, 32, MIDDLE, f"{_1F1B} {_AUTO} {_EACH} 512 --memory 180GB"),
    _row(L70, 12, FAST, f"{_1F1B} {_AUTO} {_EACH} 512 --memory 80GB"),
    _row(L70, 32, FAST, f"{_1F1B} {_EACH} 1024 --memory 80GB"),
    _row(L70, 32, FAST, f"{_1F1B} {_AUTO} {_EACH} 1024 --memory 40GB"),
    _row(L70, 128, FAST, f"{_1F1B} {_AUTO} {_EACH} 2048 --memory 64GB"),
    _row(L70, 20, MIDDLE, f"{_GPIPE} {_AUTO} {_EACH} 640 --memory 80GB"),
    _row(L70, 32, FAST, "--schedule pipedream-2bw --memory 80GB"),
    _row(L70, 32, FAST, "--schedule auto --global-batch 1024 --memory 80GB"),
    _row(L70, 128, FAST, "--schedule auto --global-batch 2048 --memory 80GB"),
    _row(L13, 10, FAST, f"{_1F1B} {_AUTO} {_EACH} 320 --memory 24GB"),
    _row(L13, 16, SLOW, f"{_1F1B} {_EACH} 512 --memory 32GB"),
    _row(L13, 64, MIDDLE, f"{_1F1B} {_AUTO} {_EACH} 2048 --memory 40GB"),
    _row(L13, 9, MIDDLE, "--schedule auto --global-batch 720 --memory 40GB"),
    _row("layers 300 1", 64, SLOW, f"{_1F1B} {_EACH} 1024 --memory 6GB"),
    _row("layers 90 2", 32, FAST, "--schedule pipedream-2bw --memory 2GB"),
    _row("layers 90 3", 16, FAST, f"--schedule interleaved {_EACH} 256 --memory 8GB"),
    _row("peaks 120 4", 32, FAST, f"{_1F1B} {_AUTO} {_EACH} 512 --memory 3GB"),
    _row("noise 200 5", 16, MIDDLE, f"{_1F1B} {_EACH} 512 --memory 4GB"),
    _row("noise 60 6", 32, FAST, f"{_GPIPE} {_AUTO} {_EACH} 512 --memory 4GB"),
    _row("layers 150 7", 128, FAST, f"{_1F1B} {_EACH} 2048 --memory 8GB"),
    _row("peaks 250 8", 12, SLOW, "--schedule pipedream --memory 6GB"),
    _row("noise 100 9", 32, MIDDLE, "--schedule pipedream"),
    _row("layers 75 10", 18, FAST, f"--schedule zb-h1 {_EACH} 288 --memory 4GB"),
    _row("noise 82 11", 10, SLOW, f"{_1F1B} {_AUTO} {_EACH} 160 --memory 1.2GB"),
    _row("peaks 64 12", 9, FAST, "--schedule pipedream-2bw --memory 1GB --recompute auto"),
    _row("layers 180 13", 32, MIDDLE, "--schedule auto --global-batch 512 --memory 5GB"),
]


def main() -> None:
    """Print the table, the mean of what plans are behind, and the seconds of all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("problems", nargs="*", type=int)
    parser.add_argument("--effort", default="normal")
    parser.add_argument("--equal", action="store_true")
    given = parser.parse_args()
    print(describe())
    print(f"\n{'partopt plan':76}{'stages':>9}{'samples/s':>11}{'best known':>11}{'behind':>8}")
    known = json.loads(BEST.read_text())
    with tempfile.TemporaryDirectory() as folder:  # any compiles
        planned(min(PROBLEMS, key=lambda row: row.sizes), Path(folder), "quick")
    behind, total_s = list[float](), 0.0
    for number in given.problems or range(len(PROBLEMS)):
        row = PROBLEMS[number]
        with tempfile.TemporaryDirectory() as folder:
            plan, seconds = planned(row, Path(folder), given.effort)
            rates = [plan.predicted.samples_per_s if plan is not None and plan.fits else 0.0]
            rates += equal_rates(row, Path(folder)) if given.equal else []
        best = known[row.name] = max(known.get(row.name, 0.0), *rates)
        BEST.write_text(json.dumps(known, indent=1) + "\n")
        behind.append(1 - rates[0] / best if best else 0.0)
        total_s += seconds
        print(
            f"{number:2} {row.name:73}{plan.shape if plan else '-':>9.9}{rates[0]:11.5g}"
            f"{best:11.5g}{behind[-1]:8.1%}{seconds:7.1f} s",
            flush=True,
        )
    mean = sum(behind) / len(behind)
    print(f"mean {mean:.2%}, worst {max(behind):.2%}, {total_s:.0f} s of the processor")


def planned(row: Row, folder: Path, effort: str) -> tuple[Plan | None, float]:
    """The plan of the whole command, None where there is none, and the processor's seconds."""
    path = folder / "plan.json"
    command = [*command_of(row, folder), "--effort", effort, "-o", str(path), "--force"]
    before_s, code = children_s(), run(command, LIMIT_S)
    if code not in (0, 1):
        raise SystemExit(f"{row.name}: {' '.join(command)}: exit {code}")
    return Plan.load(path) if path.exists() else None, children_s() - before_s


def children_s() -> float:
    """The processor's seconds of all processes that were started and have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def equal_rates(row: Row, folder: Path) -> Iterator[float]:
    """Samples/s of pipelines of equally many replicas, of any number of stages, simulated."""
    words = row.options.split()
    options = {a[2:].replace("-", "_"): b for a, b in zip(words[::2], words[1::2], strict=True)}
    if options["schedule"] in ("auto", "interleaved"):
        return
    numbers = {k: int(v) if v.isdigit() else v for k, v in options.items()}
    profile, topology = (
        Profile.load(folder / "profile.json"),
        Topology.load(folder / "cluster.yaml"),
    )
    for size in [measured.microbatch_size for measured in profile.measured()]:
        job = Job(profile, topology, microbatch_size=size, **numbers)
        yield from _equal(job)


def _equal(job: Job) -> Iterator[float]:
    problem, found = job.problem, []
    entry, P, N = schedule(problem.schedule), job.topology.devices, problem.chain.layers
    M = problem.microbatches
    modes = (False, True) if job.recompute == "auto" else (False,)
    prefixes = [problem.chain.busy_prefix(again) for again in modes]
    for S in range(1, min(N, P) + 1):
        r = next((r for r in range(P // S, 0, -1) if M is None or M % r == 0), 0)
        if r:
            counts = [entry.counts(s, [r] * S, M) for s in range(S)]
            cuts = _cuts(problem, prefixes, [c.held for c in counts], r, modes)
            if cuts is not None:
                n = 1 if M is None else M // r
                slowest, bounds, again = cuts
                found.append((slowest * (n + S - 1) / n / r, bounds, again, r))
    for _, bounds, again, r in sorted(found, key=lambda each: each[0])[:12]:
        stages = consecutive(bounds, [r] * (len(bounds) - 1))
        if len(modes) > 1:
            pairs = zip(stages, again, strict=True)
            stages = [replace(stage, recompute=mode) for stage, mode in pairs]
        try:
            plan = simulate_with_best_warmup(
                price(Partition(CONTIGUOUS, stages), problem, "manual")
            )
        except PartoptError:
            continue
        if plan.fits:
            yield plan.predicted.samples_per_s


def _cuts(problem, prefixes, held, r, modes):  # type: ignore[no-untyped-def]
    """The cuts whose slowest stage is fastest; None where none fit."""
    N, limit = problem.chain.layers, problem.memory_bytes or np.inf
    slowest, choices = np.where(np.arange(N + 1) == N, 0.0, np.inf), []
    ordered = np.triu(np.ones((N + 1, N + 1)), 1) > 0
    tables: dict[tuple[int, bool], np.ndarray] = {}
    for many in reversed(held):
        best, mode_of = np.full((N + 1, N + 1), np.inf), np.zeros((N + 1, N + 1), bool)
        for prefix, mode in zip(prefixes, modes, strict=True):
            key = many, mode
            if key not in tables:
                fits = memory_table(problem, many, r, mode) <= limit
                tables[key] = np.where(ordered & fits, prefix[None, :] - prefix[:, None], np.inf)
            better = tables[key] < best
            best, mode_of = np.where(better, tables[key], best), np.where(better, mode, mode_of)
        reach = np.maximum(best, slowest[None, :])
        stop = reach.argmin(axis=1)
        choices.append((stop, mode_of[np.arange(N + 1), stop]))
        slowest = reach.min(axis=1)
    if slowest[0] == np.inf:
        return None
    bounds, again = [0], []
    for stop, mode in reversed(choices):
        again.append(bool(mode[bounds[-1]]))
        bounds.append(int(stop[bounds[-1]]))
    return slowest[0], bounds, again


if __name__ == "__main__":
    main()
