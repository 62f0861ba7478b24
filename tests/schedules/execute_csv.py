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

    rows = (Path(folder) / f"{name}.csv").read_text().splitlines()
    held = sorted(
        {
            int(cell.strip("(").split("F")[0])
            for cell in rows[rank].split(",")
            if "F" in cell.split(";")[0]
        }
    )
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2 * v)]
    inputs, targets = (torch.randn(MICROBATCHES, WIDTH, dtype=torch.float64) for _ in range(2))
    whole = torch.nn.Sequential(*layers)
    torch.nn.functional.mse_loss(whole(inputs), targets).backward()
    expected = {s: [parameter.grad.clone() for parameter in layers[s].parameters()] for s in held}
    whole.zero_grad()
    stages = [PipelineStage(layers[s], s, 2 * v, torch.device("cpu")) for s in held]
    schedule = _PipelineScheduleRuntime(stages, MICROBATCHES, loss_fn=torch.nn.functional.mse_loss)
    schedule._load_csv(str(Path(folder) / f"{name}.csv"), format="compute_only")
    schedule.step(
        *([inputs] if 0 in held else []), **({"target": targets} if 2 * v - 1 in held else {})
    )
    return all(
        torch.allclose(parameter.grad, right)
        for s in held
        for parameter, right in zip(layers[s].parameters(), expected[s], strict=True)
    )


def work(rank: int, folder: str, cases: list[str]) -> None:
    """One process: every case in turn."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2
    )
    for case in cases:
        name, _, chunks = case.partition(":")
        if gradients_of(rank, folder, name, int(chunks)):
            (Path(folder) / f"{name}.{rank}").touch()
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    folder, *cases = sys.argv[1:]
    torch.multiprocessing.spawn(work, args=(folder, cases), nprocs=2)
    for case in cases:
        for rank in (0, 1):
            if (Path(folder) / f"{case.partition(':')[0]}.{rank}").exists():
                print(f"{rank}:{case.partition(':')[0]}")
