"""One rank of a training by an exported pipeline, under torchrun: FOLDER has it as `planned.py`.

Rank 0 prints the losses of three steps, and those of the whole model in one process.
"""

import copy
import importlib
import json
import os
import sys
from typing import Any

import deepspeed
import torch
from torch import nn

STEPS, RATE = 3, 0.1


def distance(output: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return (output - wanted).square().mean()


def alone(network: nn.Module, batch: list[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
    """The losses of the model in one process."""
    optimizer = torch.optim.SGD(network.parameters(), lr=RATE)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = torch.stack([distance(network(given), wanted) for given, wanted in batch]).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    # an operator that it would compile for processes of one machine
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    sys.path.insert(0, sys.argv[1])
    planned: Any = importlib.import_module("planned")
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    torch.manual_seed(0)
    layers = [nn.Embedding(5, 4), *(nn.Linear(4, 4) for _ in range(15))]
    whole = nn.Sequential(*copy.deepcopy(layers))
    pipeline = planned.PlannedPipeline(layers, loss_fn=distance)
    config = planned.CONFIG | {"optimizer": {"type": "SGD", "params": {"lr": RATE}}}
    engine, *_ = deepspeed.initialize(model=pipeline, config=config)
    d, k = pipeline.mpu().get_data_parallel_world_size(), pipeline.mpu().get_data_parallel_rank()
    count = d * config["gradient_accumulation_steps"]
    batch = [(torch.randint(0, 5, (1, 3)), torch.randn(1, 3, 4)) for _ in range(count)]
    losses = [float(engine.train_batch(data_iter=iter(batch[k::d]))) for _ in range(STEPS)]
    if os.environ["RANK"] == "0":
        print("LOSSES", json.dumps([losses, alone(whole, batch)]))


if __name__ == "__main__":
    main()
