"""Runs of a small GPT that count their memory: `python -m tests.runtime.memory_runs FILE`.

It pickles their documents, by schedule and engine.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import torch

from partopt import Job, measure_source, run_source, solve
from partopt.documents.training_run import Run
from tests.helpers import ROOT, flat

GPT = ROOT / "examples/gpt.py"
ARGUMENTS = {"layers": 4, "width": 64, "heads": 4, "context": 64, "vocabulary": 500}
RUNS = (("1f1b", "partopt"), ("gpipe", "torch"))


def main() -> dict[tuple[str, str], Run]:
    torch.set_num_threads(1)  # processes are forked
    profile = measure_source(GPT, arguments=ARGUMENTS, microbatch_sizes=[4], steps=1)
    options = {"cuts": [3], "replicas": [1, 1], "microbatches": 4, "optimizer": "adam"}
    found = {}
    for schedule, engine in RUNS:
        plan = solve(Job(profile, flat(2), schedule=schedule, **options)).plan
        run = run_source(plan, GPT, arguments=ARGUMENTS, steps=4, engine=engine)
        assert run is not None
        found[schedule, engine] = run.document
    return found


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(pickle.dumps(main()))
