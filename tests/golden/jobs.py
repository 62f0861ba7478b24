"""Jobs of small models, one of each kind of cluster, memory and engine, for what is recorded."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

import partopt as po
from partopt import planners
from partopt.documents.plan import Plan
from partopt.documents.profile import Profile
from partopt.documents.topology import AllReduceRates, Topology
from tests.helpers import flat, measurement, profile_of, two_level, with_memory_of

SERVERS = two_level(4, 2, 12e9, 1.25e9, memory_bytes=10**9)
SYNCHRONOUS = {"schedule": "1f1b", "microbatches": 16}
OF_PLANNERS = {"cost", "stages", "tied", "cut_at"}


def model(layers: int, seed: int, sizes: tuple[int, ...] = (1,), tied: bool = False) -> Profile:
    """Activations that decay and weights that grow along the layers, as in most of vision."""
    draw, position = np.random.default_rng(seed), np.arange(layers) / layers
    forward = draw.lognormal(0, 0.5, layers) * 1e-3
    outputs = (1e7 * np.exp(-3 * position) * draw.lognormal(0, 0.3, layers)).astype(int)
    weights = (2e6 * np.exp(3 * position) * draw.lognormal(0, 0.5, layers)).astype(int)
    measured = [
        measurement(
            (forward * b**0.8).tolist(),
            (2 * forward * b**0.8).tolist(),
            (b * outputs).tolist(),
            b,
            optimizer_s=2e-3,
            stash_groups=[((n,), int(3 * b * size)) for n, size in enumerate(outputs)],
        )
        for b in sizes
    ]
    shared = [("tied", [0, layers - 1], int(min(weights[0], weights[-1])))] if tied else []
    return profile_of(measured, weights.tolist(), shared=shared)


def branched(layers: int, seed: int) -> Profile:
    """A model whose outputs are read far behind, with parameters that are frozen, memory beside the
    backwards, and backwards in two parts.
    """
    draw, plain = np.random.default_rng(seed), model(layers, seed, (2, 4), tied=True)
    transient = draw.integers(0, 5 * 10**6, layers).tolist()
    frozen = [own.parameter_bytes // 3 * (not own.shared_parameters) for own in plain.layers]
    heavy = with_memory_of(plain, frozen, transient, split_stash_bytes=10**5)

    def tensors(each: msgspec.Struct) -> msgspec.Struct:
        read = [(n, [n + 1, *([n + 3] if n % 3 == 0 else [])]) for n in range(layers - 3)]
        chained = measurement(
            [1.0] * layers,
            tensors=[(n, own, 10**5 * each.microbatch_size * (n + 1)) for n, own in read],
        )
        parts = [
            msgspec.structs.replace(
                own,
                backward_input_s=own.backward_s * (0.3 + 0.05 * (n % 5)),
                forward_flops=10**9 * (n + 1),
            )
            for n, own in enumerate(each.layers)
        ]
        given = [
            msgspec.structs.replace(own, gradient=own.producer % 4 > 0) for own in chained.tensors
        ]
        return msgspec.structs.replace(
            each, layers=parts, tensors=given, peak_memory_bytes=3 * 10**9
        )

    return msgspec.structs.replace(heavy, measurements=[tensors(own) for own in heavy.measurements])


def slow_messages(cluster: Topology) -> Topology:
    """The cluster of known devices, with messages that take of them, and rates of all-reduces."""
    levels = [
        msgspec.structs.replace(
            level,
            latency_s=2e-5 * k,
            overhead_s=1e-5 * k,
            copy_bytes_per_s=4e10 / k,
            allreduce=AllReduceRates(bandwidth_bytes_per_s=5e9 / k, latency_s=5e-5),
        )
        for k, level in enumerate(cluster.levels, start=1)
    ]
    device = msgspec.structs.replace(
        Topology.load("dgx-h100").device,
        memory_bytes=cluster.device.memory_bytes,
        price_per_hour=2.5,
    )
    return msgspec.structs.replace(cluster, levels=levels, device=device)


def plan_by_hand(name: str) -> Plan:
    """The plan of a job with its own cuts and replicas, without what planners alone look at."""
    profile, topology, options, cuts, replicas = JOBS[name]
    kept = {key: own for key, own in options.items() if key not in OF_PLANNERS}
    job = po.Job(profile, topology, cuts=cuts, replicas=replicas, **kept)
    return planners.plan("manual", job.problem)


# a name: the profile, the cluster, options of a job, and cuts and replicas of one's own
JOBS: dict[str, tuple[Profile, Topology, dict[str, Any], list[int], list[int]]] = {
    "asynchronous": (model(12, 1), SERVERS, {}, [4, 9], [5, 2, 1]),
    "of slow messages": (
        branched(12, 2),
        slow_messages(two_level(2, 3, 1e10, 2e9, inner_links=2, outer_bus=True)),
        {"facts": {"waits": "pipedream"}},
        [5, 8],
        [2, 3, 1],
    ),
    "buffered twice": (
        model(10, 3),
        flat(4, 2e9),
        {"schedule": "pipedream-2bw", "facts": {"allreduce": "blocking"}},
        [6],
        [3, 1],
    ),
    "1f1b": (branched(10, 4), SERVERS, SYNCHRONOUS, [3, 7], [3, 3, 2]),
    "of a bus": (
        model(9, 5, tied=True),
        two_level(2, 2, 5e9, 5e8, outer_latency=1e-4, inner_bus=True, outer_bus=True),
        SYNCHRONOUS | {"facts": {"waits": "1f1b", "bucket": "1MiB"}},
        [2, 5],
        [2, 1, 1],
    ),
    "of little memory": (
        model(12, 6),
        flat(5, 3e9),
        SYNCHRONOUS | {"memory": "200 MB", "recompute": "auto"},
        [4, 7],
        [1, 2, 2],
    ),
    "of blocks": (
        branched(12, 7),
        flat(4, 3e9, memory_bytes=2 * 10**9),
        SYNCHRONOUS
        | {"recompute": 2, "block_bounds": [1, 4, 7, 10], "facts": {"recompute": "none,blocks"}},
        [4, 8],
        [1, 2, 1],
    ),
    "of shares": (
        branched(12, 8),
        SERVERS,
        SYNCHRONOUS | {"shard": "gradients", "facts": {"gradients": "float32", "buffers": "all"}},
        [6],
        [4, 4],
    ),
    "of shared parameters": (
        model(12, 9),
        slow_messages(SERVERS),
        SYNCHRONOUS | {"shard": "parameters", "recompute": "always"},
        [6],
        [4, 4],
    ),
    "gpipe": (
        branched(9, 10),
        flat(4, 2e9, 1e-4),
        {"schedule": "gpipe", "microbatches": 6},
        [5],
        [2, 2],
    ),
    "naive": (
        model(8, 11),
        flat(3, 2e9),
        {"schedule": "naive", "microbatches": 4},
        [2, 5],
        [1, 1, 1],
    ),
    "split": (
        branched(11, 12),
        flat(4, 2e9, 1e-5),
        {"schedule": "zb-h1", "microbatches": 8},
        [2, 5, 9],
        [1] * 4,
    ),
    "of flops": (branched(9, 13), flat(3, 2e9), SYNCHRONOUS | {"cost": "flops"}, [3, 6], [1, 1, 1]),
    "alike": (
        model(14, 14),
        SERVERS,
        SYNCHRONOUS | {"replication": "uniform"},
        [4, 7, 10],
        [2] * 4,
    ),
    "without replicas": (
        model(14, 15, tied=True),
        flat(5, 1e9),
        SYNCHRONOUS | {"replication": "none", "stages": 4, "tied": "together"},
        [4, 7, 10],
        [1] * 4,
    ),
    "many ranks": (
        model(10, 16),
        two_level(8, 4, 5e10, 5e9, 1e-5, 2e-5),
        SYNCHRONOUS | {"microbatches": 64},
        [4, 7],
        [16, 12, 4],
    ),
    "many ranks of little memory": (
        model(9, 17, tied=True),
        two_level(8, 9, 5e10, 5e9),
        {"memory": "400 MB"},
        [4, 7],
        [40, 24, 8],
    ),
    "many ranks on a bus": (
        model(9, 31),
        two_level(8, 9, 5e10, 5e9, outer_bus=True),
        {"memory": "400 MB"},
        [4, 7],
        [40, 24, 8],
    ),
    "of few places to cut": (
        model(12, 18),
        SERVERS,
        SYNCHRONOUS | {"cut_at": ["layer3", "layer5", "layer8", "layer9"], "cost": "parameters"},
        [3, 8],
        [3, 4, 1],
    ),
}
