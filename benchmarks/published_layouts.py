"""Published layouts of transformers, beside the first that partopt's search finds.

    python benchmarks/published_layouts.py [RUNS.csv] [--rows]

A question is a model, a cluster, a batch and a number format; its published layouts are the rows of
the file that ran. For each: by how much the best of these is slower than the first of all layouts
that fit, both in closed form. The last column is the seconds of the search. A row is `LOST` where a
published layout that fits is faster than the first: a freer question must not be answered worse.
RUNS.csv is as for `published_trainers.py`. Of a file of experts, `runs-experts.csv`, the questions
are the newest runs of every model on every device, with the facts of their trainer; blocks are cut
freely, and 15 % of the memory is left.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# a checkout in which nothing is installed
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from msgspec import structs

from benchmarks.published_older import DATA
from benchmarks.published_rows import USUAL, estimate_of, training_of
from partopt.documents.engine import Layout
from partopt.errors import PartoptError
from partopt.transformer.columns import Question
from partopt.transformer.iteration import Estimate
from partopt.transformer.layouts import ROOM, find_layouts
from partopt.transformer.rates import PLANNED

# what layouts, and what else of a row, are chosen; a question is all the rest
CHOSEN = {"run", "status", "step_s", "memory_bytes", "tp", "cp", "ep", "pp", "chunks", "dp"}
CHOSEN |= {"microbatch", "recompute", "sharded", "sequence_parallel"}
TABLES = ("dgxc", "blackwell")  # of recipes, whose authors chose the layout
NEAR = (1.0001, 1.03, 1.05, 1.1)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The best published layout of a question, the first of the search, and its seconds."""

    name: str
    published: Estimate
    fits: bool
    first: Estimate
    tried: int
    took_s: float

    @property
    def behind(self) -> float:
        """How much slower the published layout is than the first."""
        return self.published.seconds / self.first.seconds

    @property
    def lost(self) -> bool:
        """Whether the search answers worse than the published layout, which fits."""
        return self.fits and self.behind < 1 - 1e-9


def answer(rows: Sequence[Mapping[str, str]]) -> Answer | None:
    """What the search says of a question; None where nothing is computed of it, or nothing fits."""
    try:
        known = [estimate_of(row) for row in rows]
    except PartoptError:
        return None
    row = USUAL | {name: value for name, value in rows[0].items() if value}
    limit, work = PLANNED * float(row["device_memory"]), training_of(row)
    if work.is_unequal:
        practice = structs.replace(work.practice, ends="free")
        work = dataclasses.replace(work, practice=practice)
    published = min(known, key=lambda own: (own.memory_bytes > limit, own.seconds))
    room, began = ROOM * float(row["device_memory"]), time.perf_counter()
    batch = int(row["global_batch"])
    found = find_layouts(work, Question(int(row["gpus"]), batch, limit, Layout(), True, room))
    took_s = time.perf_counter() - began
    if not found.fitting:
        return None
    return Answer(
        name=row["run"],
        published=published,
        fits=published.memory_bytes <= (room if work.model.experts else limit),
        first=found.fitting[0],
        tried=found.tried,
        took_s=took_s,
    )


def newest(rows: Iterable[dict[str, str]]) -> dict[object, list[dict[str, str]]]:
    """The newest run of every model and device of a file of experts, those of releases first."""
    found = dict[object, list[dict[str, str]]]()
    for row in rows:
        pair = row["model"], row["device_name"]
        known = found.get(pair, [{"table": "", "release": ""}])[0]
        ages = [(one["table"] == "bridge", one["release"]) for one in (row, known)]
        if row["status"] == "ok" and ages[0] > ages[1]:
            found[pair] = [row]
    return found


def say(layout: Layout) -> str:
    """A layout in a few letters."""
    named = {"t": layout.tp, "c": layout.cp, "e": layout.ep, "x": layout.etp, "p": layout.pp}
    named |= {"v": layout.chunks, "n": layout.dp}
    words = [f"{name}{value}" for name, value in named.items() if value not in (None, 1)]
    again = {"never": "", "selective": f" {layout.modules or 'some'}", "always": " all"}
    return " ".join([*words, f"b{layout.microbatch}"]) + again.get(
        str(layout.recompute), f" {layout.recompute}"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("file", nargs="?", type=Path, default=DATA / "runs.csv")
    parser.add_argument("--rows", action="store_true", help="print every question")
    given = parser.parse_args()
    questions = defaultdict[object, list[dict[str, str]]](list)
    with given.file.open() as file:
        rows = [*csv.DictReader(file)]
    if "release" in rows[0]:
        questions |= newest(rows)
    else:
        for row in rows:
            dense = row.get("experts", "0") in ("", "0")
            if row["table"] in TABLES and row["status"] == "ok" and dense:
                key = tuple(value for name, value in row.items() if name not in CHOSEN)
                questions[key].append(row)
    answers = [own for rows in questions.values() if (own := answer(rows))]
    if given.rows:
        print("BEHIND TRIED  TOOK  PUBLISHED | FIRST | RUN")
        for own in sorted(answers, key=lambda own: own.behind):
            fits = "" if own.fits else " (does not fit)"
            print(
                f"{own.behind - 1:+6.1%} {own.tried:5} {own.took_s:4.1f}s  "
                f"{say(own.published.layout)}{fits} | {say(own.first.layout)} | {own.name}"
                f"{'  LOST' * own.lost}"
            )
    # of experts, what takes more than is left of the memory is published, too
    behind = [own.behind for own in answers if own.fits or "release" in rows[0]]
    first, near, close, far = (sum(own <= most for own in behind) for most in NEAR)
    print(
        f"{len(questions)} questions, {len(answers)} with a plan that fits; the published layout "
        f"fits in {len(behind)}: it is first in {first}, within 3 % in {near}, within 5 % in "
        f"{close}, within 10 % in {far}; behind {statistics.median(behind) - 1:.1%} in the median, "
        f"{max(behind) - 1:.1%} at worst; LOST {sum(own.lost for own in answers)}; a search "
        f"took at most {max(own.took_s for own in answers):.1f} s"
    )


if __name__ == "__main__":
    main()
