"""Seconds of the whole command `partopt plan`, from the start of the process to its end, one core.

    python benchmarks/command.py [ROW ... | draws | published]

Profiles and topologies are made in a temporary folder, from seeds. Every row runs twice, and the
second run, which finds its compiled code in the cache, is timed; a run is stopped after
`LIMIT_S` seconds. ROWs are numbers, from 0; by default all are run. `draws` are 1,000 layers of
three families, five of each; `published` the profiles of published models, on 32 to 1,024 devices.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from msgspec import structs

if TYPE_CHECKING:
    from partopt.documents.profile import Profile

LIMIT_S = 600
ONE_CORE = dict.fromkeys(("NUMBA_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
FAST, SLOW = ("380 GB/s", "50 GB/s"), ("12 GB/s", "10 Gb/s")
_AUTO = "--schedule auto --global-batch 1024"


class Row(NamedTuple):
    """What is planned, on levels of these sizes and rates, and the seconds that it should take."""

    name: str
    profile: str  # shipped, or the arguments of `make_profile`
    sizes: Sequence[int]  # innermost first
    rates: Sequence[str]
    options: str
    goal_s: float = math.inf


ROWS = [
    Row("shipped, 16 devices", "gpt2-small.cpu.float32", (4, 4), SLOW, "", 0.8),
    Row("1,000 layers, 8 x 128", "layers 1000", (8, 128), FAST, "--memory 40GB", 5),
    Row(
        "the same, 1f1b",
        "layers 1000",
        (8, 128),
        FAST,
        "--memory 20GB --schedule 1f1b --microbatches 512",
        10,
    ),
    Row("10,000 layers, 16,384", "layers 10000", (16384,), FAST, "--memory 420GB", 30),
    Row("10,000 layers, 8 x 2,048", "layers 10000", (8, 2048), FAST, "--memory 420GB", 30),
    Row("34 layers, 8 x 2,048", "layers 34", (8, 2048), FAST, "", 8),
    Row("200 layers, 8 x 2,048", "layers 200", (8, 2048), FAST, "", 8),
    Row(
        "96 tied blocks, 8 x 128",
        "tied 96",
        (8, 128),
        FAST,
        "--memory 80GB --schedule 1f1b --recompute auto --microbatches 1536",
        20,
    ),
    Row("80 blocks, auto, 256", "blocks 80", (8, 32), FAST, f"--memory 80GB {_AUTO}", 20),
    Row("80 blocks, auto, 1,024", "blocks 80", (8, 128), FAST, f"--memory 80GB {_AUTO}", 60),
    Row("400 layers, 8 x 32, slow", "layers 400", (8, 32), SLOW, "--memory 12GB", 20),
]
OPTIONS = ("--memory 40GB", "--memory 20GB --schedule 1f1b --microbatches 512")
DRAWS = [
    Row(f"1,000 {kind}, {seed}{own[13:29]}", f"{kind} 1000 {seed}", (8, 128), FAST, own, 10)
    for kind in ("layers", "noise", "peaks")
    for seed in range(1, 6)
    for own in OPTIONS
]
PUBLISHED = [
    Row(f"{name} on {servers * 8} {own[11:16]}", profile, (8, servers), FAST, own, 10)
    for name in ("gpt3-6.7b", "llama-7b", "mixtral-8x7b", "llama-70b")
    for profile in [f"{name}.h100-estimated.bfloat16"]
    for servers in (4, 16, 128)
    for own in ("--schedule pipedream-2bw --memory 80GB", "--schedule 1f1b --global-batch 2048")
]


def main(chosen: Sequence[str]) -> None:
    """Print the table."""
    from machine import describe

    named = {"draws": DRAWS, "published": PUBLISHED}
    rows = named.get(chosen[0]) if chosen else ROWS
    print(describe())
    print(f"\n{'partopt plan':34}{'to reach':>10}{'seconds':>10}{'exit':>6}")
    for row in rows or [ROWS[int(number)] for number in chosen]:
        with tempfile.TemporaryDirectory() as folder:
            seconds, code = run_row(row, Path(folder))
        print(f"{row.name:34}{row.goal_s:8g} s{seconds:8.2f} s{code:>6}", flush=True)


def run_row(row: Row, folder: Path) -> tuple[float, str]:
    """Seconds and exit code of a row's second run; `-` where it was stopped."""
    command = command_of(row, folder)
    for _ in range(2):
        start, code = time.perf_counter(), "-"
        try:
            code = str(run(command, LIMIT_S))
        except subprocess.TimeoutExpired:
            return time.perf_counter() - start, code
        seconds = time.perf_counter() - start
    return seconds, code


def command_of(row: Row, folder: Path) -> list[str]:
    """The command of a row, whose profile and topology are written to the folder."""
    from partopt.documents.topology import Topology

    levels = [
        f"  - {{name: level{k}, size: {size}, bandwidth: {rate}}}\n"
        for k, (size, rate) in enumerate(zip(row.sizes, row.rates, strict=False))
    ]
    device = "device: {name: H100-80GB, memory: 80 GB}"
    text = f"name: benchmark\n{device}\nlevels:\n{''.join(levels)}"
    Topology.parse(text.encode())
    (folder / "cluster.yaml").write_text(text)
    profile = row.profile
    if " " in profile:
        kind, *numbers = profile.split()
        profile = str(folder / "profile.json")
        make_profile(kind, *map(int, numbers)).save(profile)
    command = [sys.executable, "-m", "partopt", "plan", profile]
    return [*command, "--topology", str(folder / "cluster.yaml"), *row.options.split()]


def run(command: Sequence[str], limit_s: float) -> int:
    """The exit code of a command on one core; raises TimeoutExpired after `limit_s` seconds."""
    environment = os.environ | ONE_CORE
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
    done = subprocess.run(
        command, capture_output=True, check=False, timeout=limit_s, env=environment
    )
    return done.returncode


def make_profile(kind: str, count: int, seed: int = 0) -> Profile:
    """`count` layers of random times, sizes and weights, or equal blocks.

    Of random ones there are three families (`_random_layers`). Blocks lie between an embedding and
    a head, which share their weights where they are `tied`, and are measured at several sizes. Of
    a `transformer` the `seed` is its hidden size.
    """
    from partopt.documents.profile import Device, Layer, Measurement, Model, Profile

    if kind == "transformer":
        return _transformer(count, seed)
    sizes, shared = (1, 2, 4), kind == "tied"
    if kind in ("layers", "noise", "peaks"):
        sizes = (1,)
        forward_s, output_bytes, weights = _random_layers(kind, count, seed)
    else:
        forward_s = np.array([2e-4, *[5e-3] * count, 3e-3])
        output_bytes = np.array([*[8e6] * (count + 1), 4e3])
        weights = np.array([8e8, *[6e8] * count, 8e8])
    return Profile(
        model=Model(name="benchmark"),
        device=Device(name="none"),
        dtype="float32",
        layers=[
            Layer(
                name=f"layer{index}",
                type="Layer",
                parameter_bytes=int(size),
                shared_parameters=_tied(shared and index in (0, len(weights) - 1), int(size)),
            )
            for index, size in enumerate(weights)
        ],
        measurements=[
            Measurement(microbatch_size=size, **_measured(forward_s, output_bytes, size))
            for size in sizes
        ],
    )


def _transformer(blocks: int, hidden: int) -> Profile:
    """Blocks in bfloat16 on 2,048 tokens a sample, at 400 Tflop/s; an embedding and a head.

    A block keeps 34 bytes of every token for a channel (Korthikanti et al. 2022, with kernels of
    attention that keep no scores).
    """
    from partopt.documents.profile import Device, Model
    from tests.helpers import measurement, profile_of

    tokens, vocabulary, rate = 2048, 51200, 4e14
    block, table = 12 * hidden**2, vocabulary * hidden
    flops = [0.0, *[2.0 * block + 2 * tokens * hidden] * blocks, 2.0 * table]
    weights = [2 * table, *[2 * block] * blocks, 2 * table]
    kept = [0, *[34 * tokens * hidden] * blocks, 4 * tokens * vocabulary]
    output = [2 * tokens * hidden] * (blocks + 1) + [4]
    measured = [
        measurement(
            [1e-4 + size * tokens * each / rate for each in flops],
            [1e-4 + 2 * size * tokens * each / rate for each in flops],
            [size * each for each in output],
            size,
            stash_groups=[([n], size * each) for n, each in enumerate(kept)],
        )
        for size in (1, 2)
    ]
    profile = profile_of(measured, weights, name="transformer", dtype="bfloat16")
    return structs.replace(profile, model=Model(name="transformer"), device=Device(name="none"))


def _random_layers(kind: str, count: int, seed: int):  # type: ignore[no-untyped-def]
    """Log-normal times, activations and weights.

    Of `layers` activations decay and weights grow along the model; of `peaks` a few layers take ten
    times as long, and one cut in eight is small.
    """
    random = np.random.default_rng(seed)
    along = 3 * np.arange(count) / count if kind == "layers" else np.full(count, 1.5)
    forward_s = random.lognormal(0, 0.5, count) * 1e-3
    output_bytes = 1e8 * np.exp(-along) * random.lognormal(0, 0.3, count)
    weights = 1e6 * np.exp(along) * random.lognormal(0, 0.5, count)
    if kind == "peaks":
        forward_s[random.random(count) < 0.02] *= 10
        output_bytes[random.random(count) < 0.125] /= 10
    return forward_s, output_bytes, weights


def _tied(shared: bool, size: int):  # type: ignore[no-untyped-def]
    from partopt.documents.profile import SharedParameter

    return [SharedParameter(name="embedding", bytes=size)] if shared else []


def _measured(forward_s, output_bytes, size: int):  # type: ignore[no-untyped-def]
    """Layers and what they keep at a microbatch size; larger ones take less time a sample."""
    from partopt.documents.profile import LayerMeasurement, StashGroup

    return {
        "layers": [
            LayerMeasurement(
                forward_s=float(seconds * size**0.9),
                backward_s=float(2 * seconds * size**0.9),
                output_bytes=int(kept * size),
            )
            for seconds, kept in zip(forward_s, output_bytes, strict=True)
        ],
        "stash_groups": [
            StashGroup(layers=[index], bytes=int(kept * size))
            for index, kept in enumerate(output_bytes)
        ],
    }


if __name__ == "__main__":
    main(sys.argv[1:])
