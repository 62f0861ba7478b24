"""Seconds and memory of the planners on random chains of published shape, one core, and of the
command line from a cold start; or, with `--draws`, of drawn questions of `--schedule auto`.

    python benchmarks/planners.py [--draws [NUMBER ...]]

A chain has log-normal times, activations that decay and weights that grow along the model, as
convolutional networks have them. Every row is run in a process of its own: the first call, which
compiles or loads compiled code, is reported apart from the median of the following.

Draws are shipped profiles on 4 to 64 devices of shipped topologies, their memory short or not; the
whole command is asked, after one that fills the cache. NUMBERs are those of draws, from 0.
"""

from __future__ import annotations

import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from partopt.documents.topology import Topology

# bytes/s of the levels: NVLink and InfiniBand, PCIe and 10 Gb/s Ethernet
FAST, SLOW = (380e9, 50e9, 12.5e9), (12e9, 1.25e9, 1.25e9)
SIZES = (1, 2, 4, 8)  # samples in a microbatch, of auto
_1F1B = {"schedule": "1f1b", "microbatches": 512}
# planner, layers, sizes of the levels (innermost first), seconds to reach (0: none set), and what
# else the problem says: the memory limits
# are ones that one stage on all devices exceeds; auto is --schedule auto over 4 microbatch sizes,
# with --recompute auto
ROWS: list[tuple[str, int, tuple[int, ...], float, dict[str, Any]]] = [
    ("optimal", 1000, (8, 128), 1.0, {"memory_bytes": 40 * 10**9}),
    ("optimal", 2000, (8, 128), 0.0, {"memory_bytes": 80 * 10**9}),
    ("optimal", 4000, (8, 128), 0.0, {"memory_bytes": 160 * 10**9}),
    ("optimal", 1000, (8, 256), 0.0, {"memory_bytes": 40 * 10**9}),
    ("optimal", 1000, (8, 512), 0.0, {"memory_bytes": 40 * 10**9}),
    ("optimal", 10000, (16384,), 5.0, {}),
    ("optimal", 10000, (8, 2048), 15.0, {"memory_bytes": 420 * 10**9}),
    ("optimal", 1000, (8, 128), 10.0, {**_1F1B, "memory_bytes": 20 * 10**9}),
    ("optimal", 2000, (8, 128), 0.0, {**_1F1B, "memory_bytes": 40 * 10**9}),
    ("optimal", 1000, (8, 256), 0.0, {**_1F1B, "memory_bytes": 20 * 10**9}),
    ("optimal", 100, (8, 128), 0.0, {**_1F1B, "replication": "uniform"}),
    (
        "optimal",
        100,
        (8, 128),
        0.0,
        {**_1F1B, "memory_bytes": 2 * 10**9, "recompute": "auto"},
    ),
    ("optimal", 100, (8, 8), 0.0, {"rates": SLOW}),
    ("optimal", 100, (8, 8), 0.0, {"rates": SLOW, "memory_bytes": 3 * 10**9}),
    ("optimal", 200, (8, 16), 0.0, {"rates": SLOW, "memory_bytes": 6 * 10**9}),
    ("optimal", 400, (8, 32), 0.0, {"rates": SLOW, "memory_bytes": 12 * 10**9}),
    ("auto", 100, (8, 8), 2.0, {}),
    ("auto", 100, (8, 8), 0.0, {"memory_bytes": 3 * 10**9}),
    ("pipedream", 200, (8, 8), 1.0, {}),
    ("pipedream", 1000, (8, 128), 5.0, {}),
    ("pipedream", 2000, (8, 128), 0.0, {}),
    ("pipedream", 1000, (8, 256), 0.0, {}),
    ("pipedream", 1000, (4, 8, 16), 0.0, {}),
    ("pipedream", 500, (256,), 0.0, {}),
    ("gpipe", 3000, (64,), 1.0, {"stages": 64}),
    ("gpipe", 6000, (64,), 0.0, {"stages": 64}),
    ("torchgpipe", 3000, (64,), 0.0, {"stages": 64}),
    ("straight", 1000, (8, 8), 0.0, {}),
]
COMMANDS = [
    (["--help"], 0.2),
    (["plan", "gpt.cpu.float32", "--topology", "v100-pcie"], 1.0),
]
REPEATS = 5
DRAWS = 28
# topologies of the draws, by what their profiles were made for, and what a device's
# memory may be
DRAWN = {
    "a100": [("dgx-a100", ("", "", "20GB", "40GB"))],
    "h100": [("dgx-h100", ("", "", "24GB", "48GB"))],
    "": [("v100-nvlink", ("", "", "6GB", "10GB")), ("v100-pcie", ("", "", "4GB", "8GB"))],
}


def main() -> None:
    """Print the tables."""
    from machine import describe

    print(describe())
    print(
        f"\n{'planner':11}{'layers':>6}{'devices':>12}  "
        f"{'problem':19}{'first':>8}{'then':>9}{'reach':>6}{'memory':>8}"
    )
    for index, (planner, layers, sizes, target, options) in enumerate(ROWS):
        output = subprocess.run(
            [sys.executable, __file__, str(index)], check=True, capture_output=True, text=True
        ).stdout
        row = json.loads(output)
        goal = f"{target:g} s" if target else "-"
        devices = " x ".join(map(str, sizes))
        print(
            f"{planner:11}{layers:6}{devices:>12}  {_problem(options):19}"
            f"{row['first_s']:6.2f} s{row['median_s']:7.3f} s{goal:>6}"
            f"{row['peak_mb']:5.0f} MB {row['status']}",
            flush=True,
        )
    print(f"\n{'command, from a cold start with warm caches':56}{'median':>9}{'to reach':>10}")
    for arguments, target in COMMANDS:
        print(f"{'partopt ' + ' '.join(arguments):56}{_command_s(arguments):7.2f} s{target:8g} s")


def draws() -> list[list[str]]:
    """The arguments of `partopt plan` of each draw."""
    rng, found = random.Random(0), list[list[str]]()
    folder = Path(__file__).parents[1] / "profiles"
    profiles = sorted(path.name.removesuffix(".json") for path in folder.glob("*.json"))
    while len(found) < DRAWS:
        profile = rng.choice(profiles)
        device = next(name for name in DRAWN if f".{name}" in profile)
        topology, memories = rng.choice(DRAWN[device])
        servers, batch = rng.choice((1, 2, 4, 8)), rng.choice((256, 512, 1024, 2048))
        words = [profile, "--topology", topology, "--servers", str(servers)]
        words += ["--schedule", "auto", "--global-batch", str(batch)]
        memory, again = rng.choice(memories), rng.random() < 0.3
        words += ["--memory", memory] if memory else []
        found.append([*words, *(["--recompute", "auto"] if again else [])])
    return found


def ask_draws(chosen: Sequence[int]) -> None:
    """Print seconds and samples/s of the draws, and their median and worst."""
    from partopt.documents.plan import Plan

    every, wall_s, processor_s = draws(), list[float](), list[float]()
    print(f"{'draw':>4}{'seconds':>9}{'processor':>11}{'samples/s':>12}  question")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        for number in [*(chosen or range(DRAWS))[:1], *(chosen or range(DRAWS))]:
            path.unlink(missing_ok=True)
            command = [sys.executable, "-m", "partopt", "plan", *every[number], "-o", str(path)]
            start, before = time.perf_counter(), os.times()
            subprocess.run(command, check=False, capture_output=True)
            after = os.times()
            wall_s.append(time.perf_counter() - start)
            processor_s.append(sum(after[2:4]) - sum(before[2:4]))
            rate = Plan.load(path).predicted.samples_per_s if path.exists() else 0.0
            if len(wall_s) > 1:
                print(
                    f"{number:4}{wall_s[-1]:9.2f}{processor_s[-1]:11.2f}{rate:12.4f}  "
                    f"{' '.join(every[number])}",
                    flush=True,
                )
    for name, number in (("median", statistics.median), ("worst", max), ("sum", sum)):
        print(f"{name:6}{number(wall_s[1:]):7.2f}{number(processor_s[1:]):11.2f}")


def _command_s(arguments: list[str]) -> float:
    """Median seconds of the command as a process."""
    seconds = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "partopt", *arguments], check=False, capture_output=True
        )
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def _problem(options: dict[str, Any]) -> str:
    """What a row's problem is, beside its size."""
    words = [
        "slow" if "rates" in options else "",
        f"{options['schedule']}" if "schedule" in options else "",
        f"{options['memory_bytes'] // 10**9} GB" if "memory_bytes" in options else "",
        options.get("replication", ""),
        "recompute" if "recompute" in options else "",
        f"K={options['stages']}" if "stages" in options else "",
    ]
    return " ".join(word for word in words if word)


def _row(
    planner: str, layers: int, sizes: tuple[int, ...], options: dict[str, Any]
) -> dict[str, Any]:
    """First and median seconds of one planner, the peak memory of the process, and what its
    certificates say.
    """
    from partopt import planners
    from partopt.cost.problem import Problem

    seconds, statuses = [], set()
    topology = _topology(sizes, options.pop("rates", FAST))
    for seed in range(REPEATS + 1):
        if planner == "auto":
            seconds.append(_auto_s(layers, seed, topology, options))
            continue
        problem = Problem(profile=None, topology=topology, chain=_chain(layers, seed)).with_(
            **options
        )  # type: ignore[arg-type]
        start = time.perf_counter()
        found = planners.decide(planner, problem)
        seconds.append(time.perf_counter() - start)
        proved = found.certificate
        statuses.add(proved.status.split()[0] if proved and planner == "optimal" else "")
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return {
        "first_s": seconds[0],
        "median_s": statistics.median(seconds[1:]),
        "peak_mb": peak_mb,
        "status": " ".join(sorted(statuses)),
    }


def _auto_s(layers: int, seed: int, topology: Topology, options: dict[str, Any]) -> float:
    """Seconds of the search for a schedule."""
    from partopt import solve
    from partopt.documents.profile import (
        Device,
        Layer,
        LayerMeasurement,
        Measurement,
        Model,
        Profile,
        StashGroup,
    )
    from partopt.job import Job

    chain = _chain(layers, seed)
    weights = [chain.parameter_bytes(layer, layer + 1) for layer in range(layers)]
    measurements = [
        Measurement(
            microbatch_size=size,
            layers=[
                LayerMeasurement(
                    forward_s=float(f * size**0.8),
                    backward_s=float(g * size**0.8),
                    output_bytes=int(a * size),
                )
                for f, g, a in zip(chain.f, chain.g, chain.a[1:], strict=True)
            ],
            stash_groups=[
                StashGroup(layers=[layer], bytes=int(a * size))
                for layer, a in enumerate(chain.a[1:])
            ],
        )
        for size in SIZES
    ]
    names = [
        Layer(name=name, type="Layer", parameter_bytes=int(weight))
        for name, weight in zip(chain.names, weights, strict=True)
    ]
    profile = Profile(
        model=Model(name="chain"),
        device=Device(name="none"),
        dtype="float32",
        layers=names,
        measurements=measurements,
    )

    job = Job(
        profile,
        topology,
        schedule="auto",
        global_batch=512,
        recompute="auto",
        memory=options.get("memory_bytes"),
    )
    start = time.perf_counter()
    solve(job)
    return time.perf_counter() - start


def _chain(layers: int, seed: int):  # type: ignore[no-untyped-def]
    from partopt.cost.chain import Chain
    from partopt.cost.ranges import RangeMax, RangeSum

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
        back=np.concatenate([[0.0], outputs[:-1], [0.0]]),
        tensors=np.ones((2, layers + 1)),
        trained_bytes=RangeSum(1e6 * np.exp(3 * position) * random.lognormal(0, 0.5, layers)),
        frozen_bytes=RangeSum(np.zeros(layers)),
        stash_bytes=RangeSum(outputs),
        transient_bytes=RangeMax(np.zeros(layers)),
        parting=np.zeros(layers),
        layer_bytes=RangeMax(np.zeros(layers)),
    )


def _topology(sizes: tuple[int, ...], rates: tuple[float, ...] = FAST) -> Topology:
    from partopt.documents.topology import Device, Level, Topology

    levels = [
        Level(name=f"level{k}", size=size, bandwidth_bytes_per_s=rates[k])
        for k, size in enumerate(sizes)
    ]
    return Topology(name="benchmark", device=Device(name="device"), levels=levels)


if __name__ == "__main__":
    if "--draws" in sys.argv:
        ask_draws([int(word) for word in sys.argv[2:]])
    elif len(sys.argv) > 1:
        planner, layers, sizes, _, options = ROWS[int(sys.argv[1])]
        print(json.dumps(_row(planner, layers, sizes, options)))
    else:
        main()
