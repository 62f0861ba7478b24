"""What memory a step really takes, found in ways that the profiler does not use."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.profiler import ProfilerActivity, profile, record_function

from partopt.cost.pricing import price
from partopt.cost.problem import CONTIGUOUS, Partition, consecutive, problem_of
from partopt.documents.profile import Profile
from partopt.profiler.step import run_loss
from partopt.profiler.tensors import tensors_in
from tests.helpers import flat

_RELEASE = "release of the graph"


def peak_bytes(model: nn.Module, inputs: Any, loss_fn: Any) -> int:
    """Peak bytes of a step by torch's tracker, or by the allocator where weights are frozen."""
    if all(parameter.requires_grad for parameter in model.parameters()):
        return tracked_peak_bytes(model, inputs, loss_fn)
    return allocated_peak_bytes(model, inputs, loss_fn)


def tracked_peak_bytes(model: nn.Module, inputs: Any, loss_fn: Any) -> int:
    """Peak bytes of tensors in a step that adds to earlier gradients, by torch's tracker.

    Without the model's buffers. Not for frozen parameters nor for sparse gradients.
    """
    run_loss(model, inputs, loss_fn).backward()
    tracker = MemTracker()
    tracker.track_external(model, *tensors_in(inputs))
    with tracker:
        run_loss(model, inputs, loss_fn).backward()
    [peaks] = [
        snapshot
        for device, snapshot in tracker.get_tracker_snapshot("peak").items()
        if device.type == "cpu"
    ]
    return int(peaks["Total"]) - _bytes(model.buffers())


def allocated_peak_bytes(model: nn.Module, inputs: Any, loss_fn: Any) -> int:
    """The same by the events of the allocator: temporaries inside kernels are in it too."""
    run_loss(model, inputs, loss_fn).backward()
    changes = _allocations(lambda: run_loss(model, inputs, loss_fn).backward())
    live, peak = 0, 0
    for change in changes:
        live += change
        peak = max(peak, live)
    held = [*model.parameters(), *tensors_in(inputs)]
    return peak + _bytes(held) + _bytes(each for each in model.parameters() if each.requires_grad)


def kept_bytes(model: nn.Module, inputs: Any, loss_fn: Any) -> int:
    """What the allocator takes back when the graph of a forward is dropped."""
    run_loss(model, inputs, loss_fn).backward()

    def forward_and_release() -> None:
        loss = run_loss(model, inputs, loss_fn)
        gc.collect()
        with record_function(_RELEASE):
            del loss
            gc.collect()

    changes = _allocations(forward_and_release)
    return -sum(change for change in changes[changes.index(0) :] if change < 0)


def modelled_bytes(profile: Profile) -> int:
    """What a plan says that one stage of all layers holds: weights, gradients and activations."""
    problem = problem_of(profile, flat(1), optimizer="sgd")
    whole = Partition(CONTIGUOUS, consecutive([0, problem.chain.layers]))
    return price(whole, problem, "manual").stages[0].memory.total_bytes


def _bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _allocations(run: Callable[[], Any]) -> list[int]:
    """Bytes given (above 0) and taken back (below 0) by the allocator; 0 where a release begins."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
        gc.collect()
    events = recorded.profiler.kineto_results.events()
    known = [event for event in events if event.name() in ("[memory]", _RELEASE)]
    known.sort(key=lambda event: event.start_ns())
    return [event.nbytes() if event.name() == "[memory]" else 0 for event in known]
