"""Whether more work finds faster plans of small problems, where links are slow.

    python benchmarks/slow_links.py [--problems N] [--seed N]

There the formulas order plans badly, and bounds are far below what runs. The problems are GNMT,
measured on V100s, on servers of four under four schedules, and those that `quality.py` draws with
two levels of slow links or buses. Each is planned with `--effort normal` and `thorough`, which does
six to twenty times as much in the simulator; `more` is by how much that is faster.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterator

import numpy as np
from machine import describe
from quality import SCHEDULES, draw

import partopt as po
from partopt.errors import PartoptError

GNMT = {"1f1b": 64, "1f1b-eager": 64, "gpipe": 64, "pipedream": None}  # microbatches


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--problems", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(describe())
    print(f"\n{'problem':44}{'normal':>14}{'above':>8}{'thorough':>14}{'more':>8}")
    print(f"{'':44}{'':>14}{'bound':>8}")
    gains = []
    for name, job in itertools.chain(gnmt(), itertools.islice(drawn(given.seed), given.problems)):
        found = [po.solve(job.with_(effort=effort)) for effort in ("normal", "thorough")]
        normal_s, thorough_s = (each.plan.predicted.period_s for each in found)
        certificate = found[0].certificate
        above = "-" if certificate is None else f"{100 * certificate.gap:.1f} %"
        gains.append(normal_s / thorough_s - 1)
        print(
            f"{name:44}{1e3 * normal_s:11.4g} ms{above:>8}{1e3 * thorough_s:11.4g} ms"
            f"{100 * gains[-1]:6.1f} %",
            flush=True,
        )
    print(f"\nmore: mean {100 * statistics.mean(gains):.1f} %, most {100 * max(gains):.1f} %")


def gnmt() -> Iterator[tuple[str, po.Job]]:
    """The published profile on 16 devices."""
    profile = po.Profile.load("gnmt.v100-published.float32")
    topology = po.Topology.load("v100-pcie")
    for name, microbatches in GNMT.items():
        yield (
            f"GNMT, 4 x 4, {name}",
            po.Job(profile, topology, schedule=name, microbatches=microbatches),
        )


def drawn(seed: int) -> Iterator[tuple[str, po.Job]]:
    """Problems with two levels of links that are not fast, and a plan that fits."""
    for number in itertools.count():
        random = np.random.default_rng((seed, number))
        job, kinds = draw(random, SCHEDULES[number % len(SCHEDULES)], "quick")
        if "2 levels" not in kinds or "fast links" in kinds:
            continue
        try:
            fits = po.solve(job).plan.fits
        except PartoptError:
            continue
        if fits:
            size = f"{len(job.profile.layers)} layers, {job.topology.devices} devices"
            yield f"{size}, {kinds[1]}, {kinds[0]}", job


if __name__ == "__main__":
    main()
