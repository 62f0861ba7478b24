"""Plans that must not be slower than others: a larger choice beside a part of it.

    python benchmarks/relations.py [PROFILE ...]

Every plan of a job that allows less is one that a job which allows more may give, no slower: a
schedule named, stages counted, equal replicas, half of the memory, half of the servers, links of
half the speed. Where the search in the simulator misses what it found there, a row says by how much
the larger choice is slower. Profiles are shipped ones, on four servers of four devices.
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
CLUSTER = "v100-pcie"
SLOWER = 1e-3  # what is told


def main(profiles: Sequence[str]) -> None:
    """Print the relations that do not hold, and how many do."""
    print(describe(), flush=True)
    held = told = 0
    for name in profiles or PROFILES:
        for whole, parts in relations(po.Profile.load(name)):
            most = po.solve(whole).plan
            for what, part in parts.items():
                try:
                    least = po.solve(part).plan
                except PartoptError as error:
                    print(f"{name}, {what}: {error.message}", flush=True)
                    continue
                slower = least.predicted.samples_per_s / most.predicted.samples_per_s - 1
                if slower <= SLOWER or not least.fits:
                    held += 1
                    continue
                told += 1
                print(
                    f"{name}, {what}: {100 * slower:.1f} % slower, {most.shape} of "
                    f"{most.schedule} and not {least.shape} of {least.schedule}",
                    flush=True,
                )
    print(f"\n{held} hold, {told} do not")


def relations(profile: po.Profile) -> Iterator[tuple[po.Job, dict[str, po.Job]]]:
    """Jobs, and each with less allowed, by what that is."""
    topology = po.Topology.load(CLUSTER)
    batch = 32 * profile.measured()[-1].microbatch_size
    auto = po.Job(profile, topology, schedule="auto", global_batch=batch)
    yield auto, {f"auto beside {name}": auto.with_(schedule=name) for name in SCHEDULES}
    halves = [
        replace(level, bandwidth_bytes_per_s=level.bandwidth_bytes_per_s / 2)
        for level in topology.levels
    ]
    for name in (*SCHEDULES, "pipedream"):
        size = None if name == "pipedream" else batch
        whole = po.Job(profile, topology, schedule=name, global_batch=size)
        parts = {f"{stages} stages": whole.with_(stages=stages) for stages in (2, 4, 8)}
        parts["equal replicas"] = whole.with_(replication="uniform")
        parts["half the memory"] = whole.with_(memory="8 GB")
        parts["half the speed"] = whole.with_(topology=replace(topology, levels=halves))
        parts["half the servers"] = whole.with_(topology=po.Topology.load(CLUSTER, servers=2))
        yield whole, {f"{name}, {what}": part for what, part in parts.items()}


if __name__ == "__main__":
    main(sys.argv[1:])
