"""Published runs that differ in one lever alone, beside what partopt says that it is worth.

    python benchmarks/published_pairs.py [--rows]

Worth: 100 (1 - seconds with the lever / seconds without), in points. Both runs are of one table and
release, and agree in all else that is known of them; repeats are one run, of their mean. Each lever
in a line: pairs, in how many of those worth 2 points and more the sign is right, the medians of
what is published and computed, and of how far these are apart. A lever of which there is no pair
says so: nothing published holds what partopt says of it. `--rows` prints every pair.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

# a checkout in which nothing is installed
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.published_older import DATA, korthikanti_4, korthikanti_5, rows_of, titan_estimate
from benchmarks.published_rows import IGNORED, PUBLISHED
from benchmarks.published_trainers import read
from partopt.errors import PartoptError

SURE = 2.0  # points, from which the sign of a published worth is believed
RELEASE = re.compile(r"\b2\d\.\d\d(?:\.\d+)*\b|\b02-2\d\b")  # or a day, in the name of a run


class Run(NamedTuple):
    """A run, or several of the same: seconds, and all that another one must agree in."""

    case: str
    facts: Mapping[str, str]
    published_s: float
    computed_s: float


class Pair(NamedTuple):
    """What a lever is worth, in points."""

    case: str
    published: float
    computed: float

    @property
    def apart(self) -> float:
        """How far the two worths are apart, signed."""
        return self.computed - self.published


class Lever(NamedTuple):
    """A lever: its name, sets of columns that pairs differ in, and values of each first column.

    These are in order, the last one with most of the lever; runs of other values say nothing.
    Without values the slower run is first. It does nothing where a column is as `idle` says.
    """

    name: str
    columns: Sequence[tuple[str, ...]]
    values: Sequence[str] = ("no", "yes")
    idle: tuple[str, str] = ("", "")


AGAIN = ("full", "other", "selective", "none")
LEVERS = (
    Lever("8 bits for 16", [("bits",), ("bits", "scales")], ("16", "8")),
    Lever("a scale a tensor, not a block", [("scales",)], ("block", "block32", "tensor")),
    Lever("less recomputation", [("recompute",)], AGAIN),
    Lever("selective, with sequence parallelism", [("recompute", "sequence_parallel")], AGAIN),
    Lever("sequence-parallel", [("sequence_parallel",)], idle=("tp", "1")),
    Lever("compile", [("compile",)]),
    Lever("kernel of attention", [("kernel",)], ("torch", "masked", "fused", "flash1", "flash2")),
    Lever("kernel of norms", [("norm",)], ("eager", "kernel", "fused")),
    Lever("exchange-overlap", [("expert_overlap",)]),
    Lever("routing forced", [("routing",)], ("dropless", "balanced", "capacity 1.0")),
    Lever("async-tp, tp-overlap", [("tp_overlap",)], ("none", "async", "buffers")),
    Lever("loss", [("loss",)], ("eager", "plain", "compiled", "fused")),
    Lever("gradients in 16 bits", [("grad_bytes",), ("reduce_bytes",)], ("4", "2")),
    Lever("gradients' overlap", [("overlap",)]),
    Lever("sharded optimizer", [("sharded",)]),
    Lever("exchange", [("dispatch",)], ("alltoall", "deepep", "hybridep")),
    Lever("graphs", [("graphs",)], ("none", "router", "attn", "attn+router", "full")),
    Lever("fused-experts", [("fused_experts",)]),
    Lever("modules", [("recompute_modules",), ("recompute", "recompute_modules")], ()),
)


def runs_of(name: str) -> Iterator[Run]:
    """Runs of a file that went through and of which both times are known."""
    for found in read(DATA / name):
        row = found.row
        if found.ran and found.estimate and row["step_s"]:
            released = row.get("release") or " ".join(RELEASE.findall(row["run"]))
            facts = {k: v for k, v in row.items() if k not in {*PUBLISHED, *IGNORED}}
            facts |= {"table": row["table"], "release": released}
            yield Run(row["run"], facts, float(row["step_s"]), found.estimate.seconds)


def older_runs() -> Iterator[Run]:
    """Those of Korthikanti's tables and of torchtitan's; seconds of a block, of a token."""
    blocks: dict[str, list[tuple[float, float]]] = {}
    for case, published, computed in korthikanti_4():
        blocks.setdefault(case.rsplit(" ", 1)[0], []).append((1 / published, 1 / computed))
    for case, ways in blocks.items():
        parallel = "yes" if case == "sequence parallelism" else "no"
        seconds = map(sum, zip(*ways, strict=True))
        yield Run(f"one block, {case}", {"table": "4", "sequence_parallel": parallel}, *seconds)
    for case, published, computed in korthikanti_5():
        model, again = case.split()
        facts = {"table": "5", "model": model, "recompute": again, "sequence_parallel": "yes"}
        if again == "always":
            facts |= {"recompute": "full", "sequence_parallel": "no"}
        yield Run(case, facts, 1 / published, 1 / computed)
    for name in ("torchtitan-8b.csv", "torchtitan-8b-more.csv"):
        for row in rows_of(name):
            facts = {
                k: v for k, v in row.items() if k not in ("tokens_per_s_per_gpu", "memory_gib")
            }
            facts |= {"table": name, "bits": {"bf16": "16", "fp8": "8"}[row["precision"]]}
            del facts["precision"]
            tokens = int(row["fsdp"]) * int(row["local_batch"]) * int(row["sequence"])
            computed_s = titan_estimate(row).seconds * int(row["gpus"]) / tokens
            yield Run(
                " ".join(facts.values()), facts, 1 / float(row["tokens_per_s_per_gpu"]), computed_s
            )


def merge(runs: Iterable[Run]) -> list[Run]:
    """Repeats as one run, of their mean."""
    same: dict[tuple[tuple[str, str], ...], list[Run]] = {}
    for run in runs:
        same.setdefault(tuple(sorted(run.facts.items())), []).append(run)
    return [
        repeats[0]._replace(
            published_s=statistics.mean(run.published_s for run in repeats),
            computed_s=statistics.mean(run.computed_s for run in repeats),
        )
        for repeats in same.values()
    ]


def pairs_of(lever: Lever, runs: Iterable[Run]) -> Iterator[Pair]:
    """The pairs that differ in one of the lever's sets of columns, in all of these."""
    for columns in lever.columns:
        alike: dict[tuple[tuple[str, str], ...], list[Run]] = {}
        for run in runs:
            if run.facts.get(lever.idle[0]) == lever.idle[1]:
                continue
            known = {*columns} <= run.facts.keys()
            if known and (not lever.values or run.facts[columns[0]] in lever.values):
                rest = sorted((k, v) for k, v in run.facts.items() if k not in columns)
                alike.setdefault(tuple(rest), []).append(run)
        for group in alike.values():
            if lever.values:
                group.sort(key=lambda run: lever.values.index(run.facts[columns[0]]))
            else:
                group.sort(key=lambda run: -run.published_s)
            for before, after in combinations(group, 2):
                if all(before.facts[name] != after.facts[name] for name in columns):
                    yield Pair(
                        f"{before.case} -> {after.case}",
                        100 * (1 - after.published_s / before.published_s),
                        100 * (1 - after.computed_s / before.computed_s),
                    )


def sets_of_runs() -> dict[str, list[Run]]:
    """All runs, by where they are from."""
    return {
        "dense": merge(runs_of("runs.csv")),
        "older tables": merge(older_runs()),
        "experts": merge(runs_of("runs-experts.csv")),
    }


def line(name: str, where: str, pairs: Sequence[Pair]) -> str:
    """A lever in a line."""
    if not pairs:
        return f"{name:37} {where:12}    no pair"
    sure = [pair for pair in pairs if abs(pair.published) >= SURE]
    right = f"{sum(pair.published * pair.computed > 0 for pair in sure)}/{len(sure)}"
    figures = (statistics.median(pair[i] for pair in pairs) for i in (1, 2))
    apart = statistics.median(abs(pair.apart) for pair in pairs)
    medians = "".join(f"{figure:8.1f}" for figure in figures)
    return f"{name:37} {where:12} {len(pairs):5} {right:>8}{medians}{apart:8.1f}"


def main() -> None:
    """Print each lever, and all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", action="store_true", help="every pair")
    given = parser.parse_args()
    try:
        sets = sets_of_runs()
    except PartoptError as error:
        sys.exit(f"error: {error.message}\nhint:  {error.hint}")
    print(f"{'LEVER':37} {'RUNS':12} {'PAIRS':>5} {'SIGN':>8}{'PUBL.':>8}{'COMP.':>8}{'APART':>8}")
    every: dict[str, list[Pair]] = {where: [] for where in sets}
    for lever in LEVERS:
        found = {where: [*pairs_of(lever, runs)] for where, runs in sets.items()}
        for where, pairs in found.items():
            every[where] += pairs
            if pairs:
                print(line(lever.name, where, pairs))
            for pair in pairs if given.rows else ():
                print(f"    {pair.case:130} {pair.published:6.1f} {pair.computed:6.1f}")
        if not any(found.values()):
            print(line(lever.name, "", []))
    for where, pairs in every.items():
        print(line("all", where, pairs))


if __name__ == "__main__":
    main()
