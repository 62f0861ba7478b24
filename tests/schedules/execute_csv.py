"""Executes CSV files on two processes with torch and prints `RANK:NAME` of every one whose
gradients are right: FOLDER NAME:CHUNKS..
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
import torch.multiprocessing

MICROBATCHES, WIDTH = 4, 3


def gradients_of(rank: int, folder: str, name: str, v: int) -> bool:
    """Whether the gradients of the stages on this rank are those of the model run whole."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    path = Path(folder) / f"{name}.csv"
    firsts = [cell.split(";")[0] for cell in path.read_text().splitlines()[rank].split(",")]
    held = sorted({int(cell.strip("(").split("F")[0]) for cell in firsts if "F" in cell})
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2 * v)]
    inputs, targets = (torch.randn(MICROBATCHES, WIDTH, dtype=torch.float64) for _ in range(2))
    whole, loss_fn = torch.nn.Sequential(*layers), torch.nn.functional.mse_loss
    loss_fn(whole(inputs), targets).backward()
    expected = [each.grad.clone() for s in held for each in layers[s].parameters()]
    whole.zero_grad()
    stages = [PipelineStage(layers[s], s, 2 * v, torch.device("cpu")) for s in held]
    schedule = _PipelineScheduleRuntime(stages, MICROBATCHES, loss_fn=loss_fn)
    schedule._load_csv(str(path), format="compute_only")
    target = {"target": targets} if 2 * v - 1 in held else {}
    schedule.step(*([inputs] if 0 in held else []), **target)
    found = [each.grad for s in held for each in layers[s].parameters()]
    return all(map(torch.allclose, found, expected))


def work(rank: int, folder: str, cases: list[str]) -> None:
    """One process: every case in turn."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    for case in cases:
        name, _, chunks = case.partition(":")
        if gradients_of(rank, folder, name, int(chunks)):
            (Path(folder) / f"{name}.{rank}").touch()
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    folder, *cases = sys.argv[1:]
    given = {"args": (folder, cases), "nprocs": 2}
    torch.multiprocessing.start_processes(work, start_method="fork", **given)
    for name in (case.partition(":")[0] for case in cases):
        for rank in (0, 1):
            if (Path(folder) / f"{name}.{rank}").exists():
                print(f"{rank}:{name}")
