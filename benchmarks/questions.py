"""Freer questions beside narrower ones: where does leaving a part open lose?

    python benchmarks/questions.py [--draw N] [--seed S]

Each case is a model on a cluster, asked as freely as can be, and with one part fixed after another.
A freer answer must reach `LEAST` of the narrower one; a row beside a plan under "auto" must be as
good as that schedule by name. Without `--draw` the cases are those below; drawn ones have other
models, clusters, batches and trainers. The exit code is 1 where one loses.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from machine import describe

import partopt
from partopt import Job, PartoptError, Plan, Profile, Topology

LEAST, ROW = 0.995, 0.99  # of the narrower answer
NOTHING = 0.0  # samples/s of a question to which nothing was found that fits


class Case(NamedTuple):
    """A model on a cluster, asked for a trainer or for `partopt run`, and what is fixed in turn."""

    profile: str
    topology: str
    servers: int | None
    trainer: str | None
    free: dict[str, Any]
    narrower: list[dict[str, Any]]


def layout(text: str) -> dict[str, Any]:
    """The option that fixes parts of a layout."""
    return {"layout": partopt.Layout.parse(text)}


L70 = ("llama-70b.h100-estimated.bfloat16", "dgx-h100", 4)
BATCH, SMALL = {"schedule": "auto", "global_batch": 512}, {"schedule": "auto", "global_batch": 64}
CASES = [
    Case(
        *L70,
        "megatron",
        BATCH,
        [
            {"recompute": "auto"},
            {"shard": "optimizer"},
            layout("pp=16,dp=2,shard=optimizer,chunks=1,recompute=always"),
            layout("pp=32,chunks=1,recompute=always"),
        ],
    ),
    Case(
        *L70,
        "megatron",
        BATCH | layout("pp=32,chunks=1"),
        [layout("pp=32,chunks=1,recompute=always")],
    ),
    Case(*L70, "torchtitan", BATCH, [{"shard": "parameters"}]),
    Case(*L70, "deepspeed", BATCH, [{"recompute": "always", "shard": "optimizer"}]),
    Case(
        *L70,
        None,
        SMALL,
        [{"recompute": "always"}, {"schedule": "interleaved", "chunks": 3, "recompute": "always"}],
    ),
    Case("llama-7b.h100-estimated.bfloat16", "dgx-h100", 2, None, SMALL, [{"schedule": "1f1b"}]),
    Case(
        "gnmt.v100-published.float32",
        "v100-pcie",
        None,
        None,
        {"schedule": "auto", "global_batch": 2048},
        [{"schedule": "gpipe"}],
    ),
    Case(
        "gnmt.v100-published.float32",
        "v100-nvlink",
        None,
        None,
        {"schedule": "auto", "global_batch": 1024},
        [{"schedule": "zbv"}, {"schedule": "interleaved"}],
    ),
    Case(
        "llama-70b.h100-estimated.bfloat16",
        "dgx-h100",
        16,
        None,
        {"schedule": "1f1b", "global_batch": 512},
        [{"recompute": "auto"}, {"recompute": "always"}],
    ),
]


def ask(case: Case, options: dict[str, Any]) -> tuple[Plan | None, list[Plan]]:
    """The plan that fits, None where none was found, and the plans beside it."""
    profile, topology = Profile.load(case.profile), Topology.load(case.topology, case.servers)
    try:
        job = Job(profile, topology, **options)
        found = partopt.solve_for(job, case.trainer) if case.trainer else partopt.solve(job)
    except PartoptError:
        return None, []
    return found.plan if found.fits else None, [own for own in found.alternatives if own.fits]


def drawn(rng: random.Random) -> Case:
    """A case of another model, cluster, batch or trainer."""
    profile, topology, servers = rng.choice(
        [
            ("llama-7b.h100-estimated.bfloat16", "dgx-h100", rng.choice([1, 2, 4])),
            ("llama-70b.h100-estimated.bfloat16", "dgx-h100", rng.choice([4, 8])),
            ("gpt3-6.7b.a100-estimated.bfloat16", "dgx-a100", rng.choice([1, 2, 4])),
            ("mixtral-8x7b.a100-estimated.bfloat16", "dgx-a100", rng.choice([2, 4])),
            ("t5-11b.a100-estimated.bfloat16", "dgx-a100", rng.choice([1, 2])),
            ("gnmt.v100-published.float32", rng.choice(["v100-pcie", "v100-nvlink"]), None),
            ("vgg16.v100-published.float32", rng.choice(["v100-pcie", "v100-nvlink"]), None),
        ]
    )
    published = "published" in profile
    batch = rng.choice([512, 1024, 2048] if published else [64, 128, 512])
    trainer = None if published else rng.choice([None, "megatron", "torchtitan", "deepspeed"])
    free = {"schedule": "auto", "global_batch": batch}
    narrower: list[dict[str, Any]] = [{"recompute": "always"}, {"recompute": "auto"}]
    narrower += [{"microbatch_size": rng.choice([1, 2] if not published else [32])}]
    if trainer is None:
        names = ["1f1b", "gpipe", "zb-h1", "interleaved", "zbv", "1f1b-eager"]
        narrower += [{"schedule": name} for name in rng.sample(names, 2)]
    else:
        narrower += [{"shard": rng.choice(partopt.TRAINERS[trainer].engine.shard)}]
        narrower += [layout(f"pp={rng.choice([2, 4, 8, 16])},chunks=1,recompute=always")]
    return Case(profile, topology, servers, trainer, free, narrower)


def compared(case: Case) -> Iterator[tuple[str, float, float, float]]:
    """What is asked, the freer answer, the narrower one in samples/s, and the share to reach."""
    plan, beside = ask(case, case.free)
    free = plan.predicted.samples_per_s if plan else NOTHING
    for part in case.narrower:
        other, _ = ask(case, case.free | part)
        yield str(part), free, other.predicted.samples_per_s if other else NOTHING, LEAST
    if case.free["schedule"] == "auto" and case.trainer is None:
        for row in beside:
            other, _ = ask(case, case.free | {"schedule": row.schedule})
            alone = other.predicted.samples_per_s if other else NOTHING
            yield f"row {row.schedule}", row.predicted.samples_per_s, alone, ROW


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draw", type=int, metavar="N", help="so many drawn cases instead")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    cases = [drawn(rng) for _ in range(arguments.draw)] if arguments.draw else CASES
    print(describe(), flush=True)
    asked, lost = 0, 0
    for case in cases:
        words = [
            case.profile,
            case.topology,
            case.servers or "",
            f"for {case.trainer or 'partopt'}",
        ]
        print(f"\n{' '.join(map(str, words))}, {case.free}")
        began = time.perf_counter()
        for what, free, narrow, least in compared(case):
            asked += 1
            lost += (worse := free < least * narrow)
            share = free / narrow if narrow else float("inf")
            print(
                f"  {what:64.64} {free:10.2f} {narrow:10.2f} {share:7.3f}{' LOSES' * worse}",
                flush=True,
            )
        print(f"  {time.perf_counter() - began:.0f} s")
    print(f"\n{lost} of {asked} lose")
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main())
