"""Plans that must not be slower than others: a larger choice beside a part of it.

    python benchmarks/relations.py [PROFILE ...]

Every plan of a job that allows less is one that a job which allows more may give: another schedule
named, stages counted, equal replicas, half of the memory, half of the servers, links of half the
speed. Where the search in the simulator misses what it found there, a row says by how much the
larger choice is slower. Profiles are shipped ones, on four servers of four devices.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from machine import describe
from msgspec.structs import replace

import partopt as po
from partopt.errors import PartoptError

PROFILES = ("gnmt.v100-published.float32", "vgg16.v100-published.float32", "gpt2-small.cpu.float32")
SCHEDULES = ("1f1b", "1f1b-eager", "gpipe", "zb-h1")
SLOWER = 1e-3  # what is told


def main(profiles: Sequence[str]) -> None:
    """Print the relations that do not hold, and how many do."""
    print(describe(), flush=True)
    held = told = 0
    for name in profiles or PROFILES:
        topology = po.Topology.load("v100-pcie")
        for what, whole, part in relations(po.Profile.load(name), topology):
            try:
                least = po.solve(part).plan
                most = po.solve(whole).plan
            except PartoptError as error:
                print(f"{name}, {what}: {error.message}", flush=True)
                continue
            slower = least.predicted.samples_per_s / most.predicted.samples_per_s - 1
            held += slower <= SLOWER or not least.fits
            if slower > SLOWER and least.fits:
                told += 1
                print(
                    f"{name}, {what}: {100 * slower:.1f} % slower, {most.shape} of "
                    f"{most.schedule} and not {least.shape} of {least.schedule}",
                    flush=True,
                )
    print(f"\n{held} hold, {told} do not")


def relations(profile: po.Profile, topology: po.Topology) -> Iterator[tuple[str, po.Job, po.Job]]:
    """What is left out, the job, and the job that leaves it out."""
    largest = profile.measured()[-1].microbatch_size
    auto = po.Job(profile, topology, schedule="auto", global_batch=32 * largest)
    for name in SCHEDULES:
        yield f"auto beside {name}", auto, auto.with_(schedule=name)
    half = [
        replace(level, bandwidth_bytes_per_s=level.bandwidth_bytes_per_s / 2)
        for level in topology.levels
    ]
    fewer = [
        *topology.levels[:-1],
        replace(topology.levels[-1], size=topology.levels[-1].size // 2),
    ]
    for name in (*SCHEDULES, "pipedream"):
        batch = None if name == "pipedream" else 32 * largest
        whole = po.Job(profile, topology, schedule=name, global_batch=batch)
        for stages in (2, 4, 8):
            yield f"{name}, {stages} stages", whole, whole.with_(stages=stages)
        yield f"{name}, equal replicas", whole, whole.with_(replication="uniform")
        yield f"{name}, half the memory", whole, whole.with_(memory="8 GB")
        for what, levels in (("half the speed", half), ("half the servers", fewer)):
            yield f"{name}, {what}", whole, whole.with_(topology=replace(topology, levels=levels))


if __name__ == "__main__":
    main(sys.argv[1:])
