"""A profile of each animal of the zoo, against what is known of it and what a step takes."""

import gc

import pytest
import torch

from partopt.profiler.tensors import tensors_in
from tests.profiler import witnesses
from tests.profiler.helpers import names, needs_torchvision, needs_transformers
from tests.profiler.zoo import ZOO

RANDOM_STATE_BYTES = 5056  # of the CPU's generator
SCALARS_BYTES = 64  # of a loss


def needs(animal):
    module = getattr(getattr(animal.build, "func", animal.build), "__module__", "")
    wanted = {"vision": needs_torchvision, "language": needs_transformers}
    return [mark for end, mark in wanted.items() if module.endswith(end)]


@pytest.fixture
def quick():
    """One thread, and no collection of what was there before: the witnesses collect often."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.freeze()
    yield
    torch.set_num_threads(threads)


# what torch, torchvision and transformers warn of is their own affair
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "animal", [pytest.param(each, id=each.name, marks=needs(each)) for each in ZOO]
)
def test_the_zoo(animal):
    model, inputs, profile = animal.observe()
    [measurement] = profile.measurements
    assert list(profile.faults()) == []
    noted = {note.code for note in profile.notes} - {"hook-overhead", "uneven-steps"}
    assert noted == ({"optimizer-not-timed"} if animal.sparse else set())

    assert len(profile.layers) == animal.layers
    producers = [
        len({each.producer for each in measurement.tensors if crosses(each, cut)})
        for cut in range(1, len(measurement.layers))
    ]
    assert (min(producers), max(producers)) == (1, animal.producers)
    operations = [layer.forward_flops or 0 for layer in measurement.layers]
    assert profile.layers[operations.index(max(operations))].name == animal.heaviest
    assert not any("_orig_mod" in name for name in names(profile))

    weights = list(model.parameters())
    assert profile.parameter_bytes() == bytes_of(weights)
    frozen = sum(layer.frozen_bytes for layer in profile.layers)
    assert frozen == bytes_of(each for each in weights if not each.requires_grad)

    # stash and transients against the allocator, and against torch's tracker where it works
    given = bytes_of(tensors_in(inputs))  # counted in the stash where they are kept
    kept = witnesses.kept_bytes(model, inputs, animal.loss_fn)
    states = animal.random_states * RANDOM_STATE_BYTES
    stash = sum(group.bytes for group in measurement.stash_groups)
    assert -states - SCALARS_BYTES <= stash - kept <= given
    if not animal.sparse:
        peak = witnesses.peak_bytes(model, inputs, animal.loss_fn)
        assert peak - given - 0.001 * peak <= witnesses.modelled_bytes(profile) <= 1.001 * peak


def crosses(tensor, cut):
    return tensor.producer < cut <= max(tensor.consumers)


def bytes_of(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
