"""torch: a program for torchrun on torch's pipeline runtime, and the order of a pipeline alone.

The program cuts stages out of any model by replay (`partopt.runtime`), and torch executes the
order. A file with an order names no schedule: it is of the one that has this order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from msgspec import UNSET, structs

from partopt.configurations.settings import Settings
from partopt.documents import encode
from partopt.documents.engine import OF_TORCH, Layout
from partopt.documents.plan import Plan
from partopt.errors import PartoptError
from partopt.schedules import SCHEDULES, order, schedule
from partopt.schedules import placement as places
from partopt.schedules.entry import Schedule
from partopt.schedules.placement import placement_of
from partopt.schedules.torch_csv import to_csv
from partopt.trainers.parts import Part
from partopt.trainers.sources import Sources
from partopt.trainers.trainer import Asked, Says, Stated, Text, Trainer, plain

_MOST = 1_000_000  # microbatches times stages of an order
_FORWARD = re.compile(r"\(?([0-9]{1,7})F[0-9]")
_ACTION = re.compile(r"([0-9]{1,7})[FBIW]([0-9]{1,7})")
# a stage is on one rank of a pipeline; 1F1B comes first
_ABLE = [
    name
    for name, entry in SCHEDULES.items()
    if not entry.asynchronous and entry.shape != places.MIRRORED
]
SYNCHRONOUS: dict[str, str | None] = dict.fromkeys(["1f1b", *_ABLE])

# S, P, M   stages, devices and microbatches of the one pipeline that a file is of

_PROGRAM = '''"""The pipeline of {name}: {stages} stages on {ranks} ranks, schedule {schedule}.

    torchrun --nproc-per-node {ranks} {stem}.py MODEL.py

MODEL.py is the file that was profiled. {stem}.plan.json is the plan; {stem}.csv is the order that
torch executes, for people to read.
"""

import sys
from pathlib import Path

import torch

from partopt import PartoptError, Plan
from partopt.runtime.own_loop import train_with

STEPS, RATE = 10, 1e-3
ARGUMENTS = {{}}  # of the model's build


def loop(pipeline):
    """Train on one rank; `pipeline.parameters` are those of its stages, by name."""
    optimizer = pipeline.make_optimizer(lambda params: torch.optim.AdamW(params, lr=RATE))
    for step in range(STEPS):
        loss = pipeline.step()  # an iteration of {microbatches} microbatches of {size}
        optimizer.step()
        if pipeline.rank == 0:
            print(f"step {{step + 1}}: loss {{loss:.6g}}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        plan = Plan.load(Path(__file__).with_suffix(".plan.json"))
        train_with(loop, plan, sys.argv[1], arguments=ARGUMENTS, engine="torch")
    except PartoptError as error:
        sys.exit(f"error: {{error}}\\nhint:  {{error.hint}}")
'''


def csv_of(plan: Plan) -> str:
    """The CSV of one pipeline of the plan, joined actions as they are."""
    placement = replace(placement_of(plan), in_turn=False)
    return to_csv(order(plan.schedule, placement), placement)


def csv_faults(plan: Plan) -> list[str]:
    """Actions of the plan's order that torch does not have."""
    if schedule(plan.schedule).recomputes and any(stage.recompute for stage in plan.stages):
        return [f"{plan.schedule} recomputes while it waits, and torch has no action for that"]
    return []


def _write(plan: Plan, parts: Sequence[Part], stem: str) -> Text:
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


def _write_order(plan: Plan, parts: Sequence[Part], stem: str) -> Text:
    """A row a rank of one pipeline; every pipeline has the same file."""
    return Text(csv_of(plan))


def _read_order(settings: Settings, asked: Asked) -> Stated:
    """P and the order; where the stages begin is not in the file."""
    rows = _rows(settings.text)
    actions = _ACTION.findall(settings.text)
    if not actions:
        raise PartoptError(
            "no actions",
            "a cell is a stage, one of F B I W and a microbatch, like 2F0",
            code="malformed-layout",
        )
    P, S, M = len(rows), *(max(int(action[i]) for action in actions) + 1 for i in (0, 1))
    if S * M > _MOST:
        raise PartoptError(
            f"{S} stages and {M} microbatches: more than {_MOST:,} forwards",
            "give an order of fewer microbatches",
            code="too-many-actions",
        )
    for entry, warmups in _candidates(rows, S):
        try:
            ranks = places.ranks_of(entry.shape, P, S // P)
            placed = places.Placement(ranks, P, M, warmup=warmups)
            if len(ranks) == S and _rows(to_csv(order(entry.name, placed), placed)) == rows:
                return Stated(
                    layout=Layout(pp=P, schedule=entry.name),
                    stages=S,
                    microbatches=M,
                    warmups=warmups,
                )
        except PartoptError:
            continue  # it cannot run so many stages or microbatches
    raise PartoptError(
        f"the order of {S} stages on {P} devices is that of no schedule of partopt",
        "plan the stages under a schedule that places them alike, then `simulate` the plan with "
        "`schedule=FILE`",
        code="unknown-order",
    )


def _rows(text: str) -> list[list[str]]:
    """The cells of every device that are not empty."""
    lines = text.rstrip().splitlines()
    return [[cell.strip() for cell in line.split(",") if cell.strip()] for line in lines]


def _candidates(
    rows: Sequence[Sequence[str]], stages: int
) -> Iterator[tuple[Schedule, list[int] | None]]:
    """Schedules with their usual warm-ups, then those that take others with those of the rows."""
    able = [entry for name, entry in SCHEDULES.items() if name in SYNCHRONOUS]
    yield from ((entry, None) for entry in able)
    if len(rows) == stages:
        kinds = [[_FORWARD.match(cell) is not None for cell in row] for row in rows]
        warmups = [(row.index(False) if False in row else len(row)) - 1 for row in kinds]
        yield from ((entry, warmups) for entry in able if entry.takes_warmup)


TORCH = Trainer(
    name="torch",
    summary="torch: a program for torchrun on torch's pipeline runtime, for any model",
    tried="torch 2.13.0",
    schedules=SYNCHRONOUS,
    says=Says(recomputed="each", orders=()),
    engine=OF_TORCH,
    sources=Sources("torch"),
    write=_write,
    suffix=".py",
    faults=csv_faults,
)
TORCH_CSV = Trainer(
    name="torch-csv",
    summary="torch: the order alone, for _PipelineScheduleRuntime",
    tried="torch 2.13.0",
    schedules=SYNCHRONOUS,
    says=Says(recomputed="each", orders=(), degrees={"tp": "as the stages are made"}),
    engine=structs.replace(
        OF_TORCH, shard=("none",), whole_sums=UNSET
    ),  # whoever runs the order has the optimizer
    sources=Sources("torch", "torch-csv"),
    write=_write_order,
    suffix=".csv",
    faults=csv_faults,
    read=_read_order,
    reads="torch: an order for _PipelineScheduleRuntime, with the cuts beside it",
    example="order.csv",
)
