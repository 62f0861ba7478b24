"""What one step shows of the layers, apart from time."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from partopt.documents.profile import Layer, StashGroup, Tensor
from partopt.profiler.branches import find_branching
from partopt.profiler.dataflow import DataflowMode, output_recorder
from partopt.profiler.ownership import (
    hook_layer_changes,
    hook_parting_nodes,
    next_node_number,
)
from partopt.profiler.parameters import describe_layers
from partopt.profiler.splitting import split_large_units
from partopt.profiler.stash import PartingGradients, StashRecorder, stash_groups
from partopt.profiler.step import Inputs, run_loss, zero_gradients
from partopt.profiler.subject import Subject
from partopt.profiler.tracker import Tracker
from partopt.profiler.transient import MemoryMode, new_garbage_only, transient_bytes
from partopt.profiler.units import called_modules, check_calls, choose_units

FORWARDS = 3  # whose calls are compared


@dataclass(frozen=True)
class Structure:
    """What one step shows of the layers at one microbatch size, apart from time."""

    layers: list[Layer]
    output_bytes: dict[int, int]
    flops: dict[int, int]
    tensors: list[Tensor]
    stash_groups: list[StashGroup]
    transient_bytes: dict[int, int]
    split_stash_bytes: dict[int, int]
    users: Mapping[str, set[int]]  # of the parameters
    recomputed: set[int]  # layers that compute activations again in the backward


def track(subject: Subject, inputs: Inputs) -> Tracker:
    """The tracker of the units that the settings choose."""
    forwards = [called_modules(subject.model, inputs) for _ in range(FORWARDS)]
    settings = subject.settings
    called = set(itertools.chain.from_iterable(forwards))
    by_rule = settings.granularity != "leaf" and not settings.units
    branching = find_branching(subject.model, inputs) if by_rule else ()
    units = choose_units(subject.model, called, settings.granularity, settings.units, branching)
    check_calls(forwards, units)
    if settings.granularity == "auto" and not settings.units:
        units = split_large_units(subject.model, inputs, subject.loss_fn, units, forwards[0])
    return Tracker(subject.model, units)


def observe(subject: Subject, inputs: Inputs, tracker: Tracker) -> Structure:
    """One step under observation: layers, tensors between them, what they keep and what passes."""
    output_bytes: dict[int, int] = {}
    flow = DataflowMode(subject.model, tracker)
    memory = MemoryMode(subject.model, inputs)
    stash = StashRecorder(subject.model, tracker, memory)
    parting = PartingGradients(memory)
    began = [(next_node_number(), 0)]

    def entered(layer: int) -> None:
        began.append((next_node_number(), layer))
        subject.group.settle()
        memory.enter(layer)

    def entered_backward(layer: int) -> None:
        subject.group.settle()
        memory.enter_backward(layer)

    had_gradients = any(parameter.grad is not None for parameter in subject.model.parameters())
    with memory, new_garbage_only():
        with tracker.discover(entered, output_recorder(output_bytes)), flow, stash.hooks():
            loss = run_loss(subject.model, inputs, subject.loss_fn)
        subject.group.settle()
        gc.collect()  # what only a cycle of references keeps is not kept
        kept = stash.kept(loss)
        memory.enter_backward(tracker.current)
        hook_layer_changes(loss, began, entered_backward)
        hook_parting_nodes(loss, began, parting.note)
        with memory.settled_gradients(subject.model):
            loss.backward()  # type: ignore[no-untyped-call]
    if had_gradients:
        zero_gradients(subject.model)
    else:
        subject.model.zero_grad(set_to_none=True)
    return Structure(
        describe_layers(subject.model, tracker, flow.users),
        output_bytes,
        flow.flops,
        flow.tensors(),
        stash_groups(kept),
        transient_bytes(
            memory.events, {each.block: min(each.layers) for each in kept if each.block is not None}
        ),
        parting.size_bytes,
        flow.users,
        memory.recomputed,
    )
