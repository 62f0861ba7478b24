"""Configurations of others beside what a person expects of them: read rightly, asked, or wrong.

    python benchmarks/scripts.py LIST FOLDER [--function N=NAME ..] [--only N,..] [--change]

LIST is a table with the columns number, trainer, answer, expected and set; `--function` names that
of a program with several. The answer is a `page`
with the expected values, `refuse`, or `ask`: the file alone is refused, and with the values of
`set` it is a page. FOLDER holds the file of every number, alone in a folder of that name. A
difference is silent where no note or error says it. With `--change` the best layout on these
devices is set in the file, which is read again. The exit code is 1 where something is silent.
"""

from __future__ import annotations

import argparse
import collections
import csv
import json
import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import partopt
from partopt import Job, PartoptError, Topology
from partopt.documents.transformer import Transformer

_MODEL = ("blocks", "hidden", "heads", "kv_heads", "head_size", "ffn", "vocabulary", "experts")
_OTHER_NAMES = {"topk": "experts_per_token", "expert_ffn": "expert_ffn"}
_DIVISOR = 128
_USUAL = {"recompute": "never"}  # of parts that a layout does not have: 1 of degrees


def read(row: Mapping[str, str], file: Path, given: Mapping[str, str]) -> tuple[Job, list[str]]:
    """The job of a file on as many devices as are expected of it, and the notes on the reading."""
    expected = json.loads(row["expected"] or "{}")
    ranks = math.prod(expected.get(degree) or 1 for degree in ("tp", "cp", "pp", "dp"))
    topology = Topology.load("dgx-h100").resize(ranks if ranks > 1 else 16)
    text, function = file.read_text(errors="replace"), row.get("function")
    job, notes = partopt.read_job(row["trainer"], text, topology, given, function=function)
    return job, [*notes]


def compare(job: Job, expected: Mapping[str, Any]) -> list[str]:
    """What a job has other than is expected."""
    model, layout = job.model, job.layout
    assert isinstance(model, Transformer)
    found = {name: getattr(model, name) for name in _MODEL}
    found |= {name: getattr(model, field) for name, field in _OTHER_NAMES.items()}
    for part in ("tp", "cp", "ep", "pp", "chunks", "microbatch", "recompute"):
        found[part] = getattr(layout, part) or _USUAL.get(part, 1)
    found |= {"sequence": job.sequence, "global_batch": job.global_batch, "format": job.dtype}
    found["ffn"] = model.ffn or None
    found["dp"] = job.topology.devices // math.prod(found[part] for part in ("tp", "cp", "pp"))
    filled = range(_DIVISOR * found["tp"])  # words that fill up the parts of tensor ranks
    return [
        f"{name} {found[name]} for {value}"
        for name, value in expected.items()
        if found.get(name) is not None and value not in (None, found[name])
        if not (name == "vocabulary" and found[name] - value in filled)
    ]


def judge(row: Mapping[str, str], file: Path) -> tuple[str, list[str]]:
    """How a file is read, and what differs and is said; right, asked for more, told or silent."""
    expected, given = json.loads(row["expected"] or "{}"), json.loads(row["set"] or "{}")
    answered, said, unasked = dict[str, str](), list[str](), list[str]()
    while True:
        try:
            job, notes = read(row, file, answered)
            break
        except PartoptError as refused:
            said.append(refused.message)
        if row["answer"] == "page" or not expected:
            return "asked" if row["answer"] == "page" else "right", said
        names = {name for name in given if re.search(rf"\b{name}\b", spell(said[-1]))}
        if not names - answered.keys():
            unasked = [name for name in given if name not in answered]
            if not unasked:
                return "asked", said
        answered |= {name: given[name] for name in names or unasked}
    said += [*(f"not asked for {name}" for name in unasked), *notes]
    differs = compare(job, expected) if expected else ["page of it"]
    asked = bool(answered) and not unasked
    verdict = "right" if not differs and asked == (row["answer"] == "ask") else "told"
    words = spell(" ".join(said))
    silent = [one for one in differs if one.partition(" ")[0] not in words]
    return "silent" if silent else verdict, [*differs, *said]


def spell(text: str) -> str:
    """A text whose flags are names."""
    return text.replace("--", "").replace("-", "_")


def change(row: Mapping[str, str], file: Path) -> str:
    """What is left to do by hand where the best layout is set in a file; nothing where it says all.

    What was given beside the file is changed there.
    Raises PartoptError where there is no page.
    """
    given = json.loads(row["set"] or "{}")
    job, _ = read(row, file, given)
    judged = partopt.judge_layout(job)
    if judged.best is None:
        return "no best layout"
    text, function = file.read_text(errors="replace"), row.get("function")
    changes = partopt.change_text(text, judged.plan, judged.best, given, function)
    by_hand = [name for name, *_ in changes.by_hand if spell(name) not in given]
    return "" if changes.says_all and not by_hand else "; ".join(changes.describe())


def main() -> int:
    """Read, compare and count."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("list", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--function", action="append", default=[], metavar="N=NAME")
    parser.add_argument("--only", default="", metavar="N,..")
    parser.add_argument("--change", action="store_true")
    options = parser.parse_args()
    functions = dict(pair.split("=") for pair in options.function)
    only, counts = {*filter(None, options.only.split(","))}, collections.Counter[str]()
    with options.list.open(newline="") as rows:
        for row in csv.DictReader(rows):
            number = row["number"]
            if only and number not in only:
                continue
            files = [*(options.folder / number).glob("*")]
            if len(files) != 1:
                counts["missing"] += 1
                continue
            row["function"] = functions.get(number)
            verdict, why = judge(row, files[0])
            counts[verdict] += 1
            print(f"{number} {verdict} ({row['answer']})", *why, sep="\n    ", flush=True)
            if options.change and row["expected"]:
                try:
                    left = change(row, files[0])
                except PartoptError:
                    continue
                counts["changed by hand" if left else "changed"] += 1
                print(f"    changed; {left}" if left else "    changed", flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return bool(counts["silent"])


if __name__ == "__main__":
    sys.exit(main())
