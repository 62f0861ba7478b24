"""Memory that profiles say, against what a training step takes: one stage of all layers.

    python benchmarks/profiled_memory.py [NAME...]

For each model of the tests' zoo, and for examples of ordinary depth: what a plan says that one
stage of all layers holds (parameters, gradients, and at its peak what is kept for the backward and
what the layer that runs takes beside it), and the peak of the tensors of a bare step by torch's own
tracker. `kernels` is what the allocator's peak has beyond that: temporaries inside kernels of the
CPU, which no profile contains.
"""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from machine import describe

from partopt.profiler.tensors import tensors_in
from tests.profiler import witnesses
from tests.profiler.helpers import example
from tests.profiler.zoo import ZOO, Animal

MB = 1e6
TWELVE = {"layers": 12, "width": 128, "heads": 4, "context": 128, "vocabulary": 2000}
# example, its arguments, microbatch
DEEP: list[tuple[str, dict[str, int], int]] = [
    ("gpt", TWELVE, 2),
    ("gpt2", TWELVE, 2),
    ("bert", TWELVE, 2),
    ("resnet50", {"size": 96}, 4),
    ("vgg16", {"size": 96}, 4),
]


def main() -> None:
    """Print the table."""
    warnings.simplefilter("ignore")  # torch, torchvision and transformers warn of their own affairs
    logging.disable()
    torch.set_num_threads(1)
    print(f"{describe()}, torch {torch.__version__}\n")
    print(f"{'model':21}{'modelled':>12}{'measured':>12}{'modelled /':>12}{'kernels':>9}")
    for animal in ZOO:
        if animal.name in sys.argv[1:] or not sys.argv[1:]:
            print(_row(animal), flush=True)
    print()
    for name, arguments, size in DEEP:
        if name in sys.argv[1:] or not sys.argv[1:]:
            source = example(name, **arguments)
            deep = Animal(
                name, source.build, source.example_inputs, size=size, loss_fn=source.loss_fn
            )
            print(_row(deep), flush=True)


def _row(animal: Animal) -> str:
    if animal.sparse:
        return f"{animal.name:21}{'sparse gradients grow from step to step':>45}"
    model, inputs, profile = animal.observe()
    modelled = witnesses.modelled_bytes(profile)
    measured = witnesses.peak_bytes(model, inputs, animal.loss_fn)
    allocated = witnesses.allocated_peak_bytes(model, inputs, animal.loss_fn)
    sizes = "".join(f"{size / MB:9.3f} MB" for size in (modelled, measured))
    given = sum(tensor.untyped_storage().nbytes() for tensor in tensors_in(inputs))
    kernels = (allocated - measured) / (measured - given)
    return f"{animal.name:21}{sizes}{modelled / measured:12.4f}{kernels:9.1%}"


if __name__ == "__main__":
    main()
