"""A profile of each animal of the zoo, against what is known of it and what a step takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from partopt.documents.profile import Measurement, Profile
from partopt.profiler.observation import new_garbage_only
from partopt.profiler.tensors import tensors_in
from tests.profiler import witnesses
from tests.profiler.helpers import names, needs_torchvision, needs_transformers
from tests.profiler.zoo import ZOO, Animal

RANDOM_STATE_BYTES = 5056  # of the CPU's generator
SCALARS_BYTES = 64  # of a loss


def needs(animal: Animal) -> list[Any]:
    module = getattr(getattr(animal.build, "func", animal.build), "__module__", "")
    return (
        [needs_torchvision] * module.endswith("vision")
        + [needs_transformers] * module.endswith("language")
    )  # fmt: skip


@pytest.fixture
def quick() -> Iterator[None]:
    """One thread, and no collection of what was there before: the witnesses collect often."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with new_garbage_only():
        yield
    torch.set_num_threads(threads)


# what torch, torchvision and transformers warn of is their own affair
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "animal", [pytest.param(each, id=each.name, marks=needs(each)) for each in ZOO]
)
def test_the_zoo(animal: Animal) -> None:
    model, inputs, profile = animal.observe()
    [measurement] = profile.measurements
    assert list(profile.faults()) == []
    expected = {"optimizer-not-timed"} if animal.sparse else set()
    expected |= {"recomputes-itself"} if animal.random_states else set()
    assert noted(profile) == expected

    expected = animal.expected
    assert len(profile.layers) == expected.layers
    producers = producers_at_cuts(measurement)
    assert (min(producers), max(producers)) == (1, expected.producers)
    operations = [layer.forward_flops or 0 for layer in measurement.layers]
    heaviest = profile.layers[operations.index(max(operations))].name
    assert expected.heaviest in (heaviest, None)
    assert not any("_orig_mod" in name for name in names(profile))

    weights = list(model.parameters())
    assert profile.parameter_bytes() == bytes_of(weights)
    frozen = sum(layer.frozen_bytes for layer in profile.layers)
    assert frozen == bytes_of(each for each in weights if not each.requires_grad)

    check_memory(animal, profile, model, inputs)


def check_memory(animal: Animal, profile: Profile, model: Any, inputs: Any) -> None:
    """Stash and transients against the allocator, and against torch's tracker where it works."""
    [measurement] = profile.measurements
    given = bytes_of(tensors_in(inputs))  # counted in the stash where they are kept
    kept = witnesses.kept_bytes(model, inputs, animal.loss_fn)
    states = animal.random_states * RANDOM_STATE_BYTES
    assert -states - SCALARS_BYTES <= witnesses.stash_bytes(measurement) - kept <= given
    if animal.sparse:  # the gradients of a sparse table grow from step to step
        return
    peak = witnesses.peak_bytes(model, inputs, animal.loss_fn)
    assert peak - given - 0.001 * peak <= witnesses.modelled_bytes(profile) <= 1.001 * peak


def noted(profile: Profile) -> set[str]:
    """Codes of the notes; times mean nothing here."""
    return {note.code for note in profile.notes} - {"hook-overhead", "uneven-steps"}


def producers_at_cuts(measurement: Measurement) -> list[int]:
    return [
        len({each.producer for each in measurement.tensors if crosses(each, cut)})
        for cut in range(1, len(measurement.layers))
    ]


def crosses(tensor: Any, cut: int) -> bool:
    return bool(tensor.producer < cut <= max(tensor.consumers))


def bytes_of(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
