"""Memory that profiles say, against what a training step takes: one stage of all layers.

    python benchmarks/profiled_memory.py [NAME...]

For each model of the tests' zoo, and for examples of ordinary depth: parameters + gradients + stash
+ the largest transient, which is what a stage is charged; the same where each transient meets the
stash of the layers up to it alone, which is what the profile claims to be exact; and the peak of
the tensors of a bare step by torch's own tracker. `kernels` is what the allocator's peak has beyond
that: temporaries inside kernels of the CPU, which no profile contains. The zoo's models have few
blocks: their largest transient meets a stash of which much is gone, so that their first ratio is
further from 1.
"""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from machine import describe

from partopt.profiler.step import tensors_in
from tests.profiler import witnesses
from tests.profiler.helpers import example, structure
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
    print(f"{'model':21}{'modelled':>12}{'by layer':>12}{'measured':>12}", end="")
    print(f"{'modelled /':>12}{'by layer /':>12}{'kernels':>9}")
    for animal in ZOO:
        if animal.name in sys.argv[1:] or not sys.argv[1:]:
            print(_row(animal), flush=True)
    print()
    for name, arguments, size in DEEP:
        if name in sys.argv[1:] or not sys.argv[1:]:
            source = example(name, **arguments)
            deep = Animal(name, source.build, source.example_inputs, size, source.loss_fn)
            print(_row(deep), flush=True)


def _row(animal: Animal) -> str:
    if animal.sparse:
        return f"{animal.name:21}{'sparse gradients grow from step to step':>51}"
    torch.manual_seed(0)
    model, inputs = animal.build().train(), animal.inputs(animal.size)
    profile = structure(
        model,
        lambda size: inputs,
        animal.loss_fn,
        granularity="auto",
        microbatch_sizes=[animal.size],
    )
    modelled = witnesses.modelled_bytes(profile)
    by_layer = witnesses.modelled_bytes_by_layer(profile)
    measured = witnesses.peak_bytes(model, inputs, animal.loss_fn)
    allocated = witnesses.allocated_peak_bytes(model, inputs, animal.loss_fn)
    sizes = "".join(f"{size / MB:9.3f} MB" for size in (modelled, by_layer, measured))
    ratios = "".join(f"{size / measured:12.4f}" for size in (modelled, by_layer))
    given = sum(tensor.untyped_storage().nbytes() for tensor in tensors_in(inputs))
    return f"{animal.name:21}{sizes}{ratios}{(allocated - measured) / (measured - given):9.1%}"


if __name__ == "__main__":
    main()
