"""torch: a program that runs under torchrun, on torch's pipeline runtime, and can be edited.

The stages are cut out of any model by replay (`partopt.runtime`), and torch executes the order.
"""

from __future__ import annotations

from collections.abc import Sequence

from partopt.documents import encode
from partopt.documents.plan import Plan
from partopt.exporters.blocks import Part
from partopt.exporters.target import ANYWHERE, Target, Text, plain
from partopt.exporters.torch_csv import SYNCHRONOUS, csv_faults, csv_of

_PROGRAM = '''"""The pipeline of {name}: {stages} stages on {ranks} ranks, schedule {schedule}.

    torchrun --nproc-per-node {ranks} {stem}.py MODEL.py

MODEL.py is the file that was profiled. {stem}.plan.json is the plan; {stem}.csv is the order that
torch executes, for people to read.
"""

import sys
from pathlib import Path

import torch

from partopt import Plan
from partopt.runtime.own_loop import train_with

STEPS, RATE = 10, 1e-3
ARGUMENTS = {{}}  # of the model's build


def loop(pipeline):
    """Train on one rank; `pipeline.parameters` are those of its stages, by name."""
    optimizer = torch.optim.AdamW(pipeline.parameters.values(), lr=RATE)
    for step in range(STEPS):
        loss = pipeline.step()  # an iteration of {microbatches} microbatches of {size}
        optimizer.step()
        if pipeline.rank == 0:
            print(f"step {{step + 1}}: loss {{loss:.6g}}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    plan = Plan.load(Path(__file__).with_suffix(".plan.json"))
    train_with(loop, plan, sys.argv[1], arguments=ARGUMENTS, engine="torch")
'''


def write(plan: Plan, parts: Sequence[Part], stem: str) -> Text:
    """The program, and beside it the plan and the order."""
    program = _PROGRAM.format(
        name=plain(plan.profile.name),
        stem=plain(stem),
        stages=len(plan.stages),
        ranks=plan.world_size,
        schedule=plan.schedule,
        microbatches=plan.microbatches,
        size=plan.microbatch_size,
    )
    beside = {".plan.json": encode(plan).decode(), ".csv": csv_of(plan)}
    return Text(program, beside, ["it needs partopt where it runs"])


TARGET = Target(
    name="torch",
    summary="torch: a program for torchrun on torch's pipeline runtime, for any model",
    tried="torch 2.13.0",
    write=write,
    suffix=".py",
    schedules=SYNCHRONOUS,
    cuts=ANYWHERE,
    replicas="equal",
    recompute="each",
    ranks=(),
    faults=csv_faults,
)
