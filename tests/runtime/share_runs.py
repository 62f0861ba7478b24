"""Runs of plans whose replicas share the optimizer's state: `python -m tests.runtime.share_runs`.

It pickles their documents, by what is shared, and the losses of runs that go on from their
checkpoints under the same plan and others.
"""

from __future__ import annotations

import pickle
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from partopt import Job, Plan, measure_source, run_source, solve
from partopt.documents.profile import Profile
from partopt.documents.training_run import Run
from tests.helpers import flat
from tests.runtime.test_run import MODEL

# one layer has a number alone and what does not train
TEXT = MODEL.replace("width=8", "width=65").replace(
    "nn.Tanh())", "nn.LayerNorm(width), Scale(), nn.Tanh())"
)
TEXT += """

class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.fixed = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x):
        return self.scale * x + self.fixed.sum() - 3
"""
SHARED = ("none", "optimizer")
STEPS, SAVED = 5, 3
# from the checkpoint of which to which shares and replicas
RESUMED: tuple[tuple[str, str, list[int]], ...] = (
    ("optimizer", "optimizer", [2, 1]),
    ("optimizer", "optimizer", [1, 2]),
    ("optimizer", "none", [1, 1]),
    ("none", "optimizer", [3]),
)


class Outcome(NamedTuple):
    """What came of the runs."""

    runs: dict[str, Run]
    resumed: list[list[float]]  # losses


def plan_of(profile: Profile, shard: str, replicas: Sequence[int]) -> Plan:
    """A plan in whose buckets there is a parameter each."""
    options = {"schedule": "1f1b", "microbatches": 5, "optimizer": "adam", "shard": shard}
    cuts = [2][: len(replicas) - 1]
    job = Job(profile, flat(sum(replicas)), cuts=cuts, replicas=list(replicas), **options)
    return solve(job).plan.with_engine(bucket_bytes=1)


def main() -> Outcome:
    """What came of the runs."""
    torch.set_num_threads(1)  # processes are forked
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = folder / "model.py"
        model.write_text(TEXT)
        profile = measure_source(model, microbatch_sizes=[2], steps=1, granularity="block")

        def run(shard: str, replicas: Sequence[int], **options: object) -> Run:
            found = run_source(plan_of(profile, shard, replicas), model, **options)
            assert found is not None
            return found.document

        runs = {}
        for shard in SHARED:
            kept = {"save": str(folder / shard), "every": SAVED}
            runs[shard] = run(shard, [2, 1], steps=STEPS, check=True, engine="partopt", **kept)
            shutil.rmtree(folder / shard / f"step-{STEPS}")
        resumed = [
            run(shard, replicas, steps=STEPS - SAVED, resume=str(folder / first)).losses
            for first, shard, replicas in RESUMED
        ]
        return Outcome(runs, resumed)


if __name__ == "__main__":
    from tests.runtime import share_runs  # under the name by which the outcome is unpickled

    Path(sys.argv[1]).write_bytes(pickle.dumps(share_runs.main()))
