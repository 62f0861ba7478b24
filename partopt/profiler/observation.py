"""What one real step shows of the layers apart from time: tensors, memory, parameters, operations.

- *Tensors.* A storage is the layer's that wrote it; a view is its base's, a write in place renews
  it. Parameters and buffers belong to a module, the model's inputs to nobody: every stage reads
  them from the data loader. So does code between units that works on nothing but such inputs (an
  attention mask made from the ids): every stage can do it for itself.
- *Stash.* What autograd keeps for the backward counts once, with every layer that it is kept for: a
  convolution's result is the input of its ReLU. What a layer made and still lives when the forward
  has ended, although autograd does not know of it, is that layer's: a custom Function keeps it as
  `ctx.x`, or the model as an attribute. Parameters and buffers are kept anyway. What a checkpoint
  around a layer keeps for it is that layer's.
- *Transients.* All else that lives while a layer runs: partial results, the gradients of
  activations and of weights until they are added to the parameters', what a checkpoint computes
  again. Temporaries inside one kernel are not seen on the CPU; on CUDA the allocator's peak during
  an operation shows them.
- *Parameters.* Every one is on at least one layer, a shared one on every layer that uses it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from partopt.documents import profile
from partopt.errors import PartoptError
from partopt.profiler.group import RankGroup
from partopt.profiler.layers import Backward, Tracker, remove_after
from partopt.profiler.operations import Operation, StorageMap, Watch, storages_in
from partopt.profiler.settings import Subject
from partopt.profiler.step import run_loss
from partopt.profiler.tensors import Inputs, local_tensors, tensors_in

_SDPA = "_scaled_dot_product_"  # before the kernels' names of scaled_dot_product_attention


@dataclass(frozen=True)
class Structure:
    """What one step shows of the layers at one microbatch size, apart from time.

    Numbers are by layer; `attention` are the fused kernels of attention that ran.
    """

    layers: list[profile.Layer]
    output_bytes: dict[int, int]
    flops: dict[int, int]
    tensors: list[profile.Tensor]
    stash_groups: list[profile.StashGroup]
    transient_bytes: dict[int, int]
    split_stash_bytes: dict[int, int]
    attention: list[str]


def observe(subject: Subject, inputs: Inputs, tracker: Tracker) -> Structure:
    """One step under observation; of a group's ranks the memory of the one that holds the most.

    No gradients are left where there were none. Raises PartoptError, on every rank,
    where the ranks do not have the same layers.
    """
    model, group = subject.model, subject.group
    recorder, output_bytes = Recorder(model, tracker, inputs), dict[int, int]()

    def enter(layer: int) -> None:
        group.let_threads_finish()
        recorder.enter(layer)

    def leave(layer: int, output: Any) -> None:
        parts = local_tensors(output)
        output_bytes[layer] = sum(part.numel() * part.element_size() for part in parts)

    had_gradients = any(parameter.grad is not None for parameter in model.parameters())
    with recorder, new_garbage_only():
        with tracker.discover(enter, leave), recorder.saving():
            loss = run_loss(model, inputs, subject.loss_fn)
        group.let_threads_finish()
        gc.collect()  # what only a cycle of references keeps is not kept
        kept = recorder.find_kept(loss)
        recorder.layer, recorder.backward = tracker.current, True
        backward = Backward(loss, tracker.began)
        backward.call_at_changes(enter)
        backward.call_at_partings(recorder.note_parting)
        with recorder.freeing_gradients():
            loss.backward()  # type: ignore[no-untyped-call]
    if not had_gradients:
        model.zero_grad(set_to_none=True)
    structure = Structure(
        describe_layers(model, tracker, recorder.users),
        output_bytes,
        dict(recorder.flops),
        recorder.tensors(),
        stash_groups(kept),
        transient_bytes(
            recorder.events, {block.number: min(block.layers) for block in kept if block.was_made}
        ),
        dict(recorder.parting_bytes),
        sorted(recorder.attention),
    )
    return _combine(structure, group)


def observe_stash(subject: Subject, inputs: Inputs, tracker: Tracker) -> list[profile.StashGroup]:
    """What the layers keep as they run now: compiled, they compute some of it again.

    No operation is watched, so that compiled code runs as it is.
    """
    recorder = Recorder(subject.model, tracker, inputs)
    with tracker.watch(recorder.enter), recorder.saving():
        loss = run_loss(subject.model, inputs, subject.loss_fn)
    return stash_groups(recorder.find_kept(loss))


class StorageEvent(NamedTuple):
    """A block that a layer makes (`size_bytes` above 0) or that is freed (below 0)."""

    layer: int
    backward: bool
    block: int
    size_bytes: int


@dataclass
class StorageFlow:
    """What one layer wrote into a storage: who reads it, and which parts."""

    producer: int
    consumers: set[int] = field(default_factory=set)
    parts: dict[tuple[int, int], int] = field(default_factory=dict)  # (offset, elements) -> bytes
    gradient: bool = False  # something of it that is read has one


@dataclass(eq=False, slots=True)
class ObservedStorage:
    """A storage, and all that the step shows of it.

    `number` is its place among the events where the step made it, -1 where it was there before;
    `name` that of the parameter or buffer that it is, `layers` those that it is kept for.
    """

    size_bytes: int
    number: int = -1
    maker: int = 0
    name: str | None = None
    flow: StorageFlow | None = None
    layers: set[int] = field(default_factory=set)
    counted: bool = False  # as a gradient at a parting
    freed: bool = False  # or become the gradient of a parameter

    @property
    def was_made(self) -> bool:
        """Whether the step made it."""
        return self.number >= 0

    @property
    def lives(self) -> bool:
        """Whether the step made it, and it is there."""
        return self.was_made and not self.freed


class Recorder(Watch):
    """Records a step: `layer` is the one that runs, `backward` whether its backward does.

    `events` say when blocks are made and freed; of the forward `flops` has the operations of every
    layer, `users` the layers that use every parameter and `attention` the names of its fused
    kernels. `parting_bytes` are those of gradients where ways part in the backward.
    """

    def __init__(self, model: nn.Module, tracker: Tracker, inputs: Inputs = None) -> None:
        super().__init__()
        self.tracker = tracker
        self.layer, self.backward = 0, False
        self.events: list[StorageEvent] = []
        self.flops: Counter[int] = Counter()
        self.users: defaultdict[str, set[int]] = defaultdict(set)
        self.parting_bytes: Counter[int] = Counter()
        self.attention: set[str] = set()
        self._flows: list[tuple[StorageFlow, ObservedStorage]] = []
        self._kept_ahead: list[ObservedStorage] = []  # for the layer that is called next
        self._blocks = StorageMap(self._free)
        self._parameters = dict(model.named_parameters())
        for name, tensor in [*model.named_buffers(), *self._parameters.items()]:
            for part in storages_in(tensor):
                self._block(part).name = name
        for part in storages_in([*(p.grad for p in self._parameters.values()), inputs]):
            self._block(part)

    def _block(self, tensor: Tensor) -> ObservedStorage:
        """The block of a tensor; what is not known was there before."""
        block: ObservedStorage | None = self._blocks.get(tensor)
        if block is None:
            block = ObservedStorage(tensor.untyped_storage().nbytes())
            self._blocks.set(tensor, block)
        return block

    def enter(self, layer: int) -> None:
        """Charge what follows to `layer`, and what was kept ahead for it."""
        self.layer = layer
        for block in self._kept_ahead:
            block.layers.add(layer)
        self._kept_ahead.clear()

    def before(self, call: Operation) -> None:
        """Note what is read, and ask CUDA's allocator for the peak from here on."""
        devices = []
        for tensor in call.read:
            self._block(tensor)
            devices.append(tensor.device)
        self._device = next((device for device in devices if device.type == "cuda"), None)
        if self._device is not None:
            torch.cuda.reset_peak_memory_stats(self._device)

    def after(self, call: Operation) -> None:
        """Note what is made, what passed inside the operation, and in the forward who uses what."""
        for tensor in storages_in(call.result):
            if self._blocks.get(tensor) is None:
                size_bytes = tensor.untyped_storage().nbytes()
                self._blocks.set(tensor, ObservedStorage(size_bytes, len(self.events), self.layer))
                self._note(len(self.events), size_bytes)
        if self._device is not None:
            peak = torch.cuda.max_memory_allocated(self._device)
            if passing := int(peak - torch.cuda.memory_allocated(self._device)):
                number = len(self.events)
                self._note(number, passing)
                self._note(number, -passing)
        if not self.backward:
            self.flops[self.layer] += call.flops
            name = call.func._schema.name
            if "attention" in name or "attn" in name:
                self.attention.add(name.rpartition("::")[2].removeprefix(_SDPA))
            self._follow(call)

    def _follow(self, call: Operation) -> None:
        """Note what the operation reads of other layers and of parameters, and what it writes."""
        tied = self.tracker.inside_unit  # to a layer: what it reads of one ties it too
        for tensor in call.read:
            block = self._block(tensor)
            if block.name in self._parameters:
                self.users[block.name].add(self.layer)
                tied = True
            elif block.flow is not None:
                tied = True
                if block.flow.producer != self.layer:
                    size_bytes = tensor.numel() * tensor.element_size()
                    block.flow.consumers.add(self.layer)
                    block.flow.gradient |= tensor.requires_grad
                    block.flow.parts[int(tensor.storage_offset()), tensor.numel()] = size_bytes
        if not tied:
            return
        written = call.written
        in_place = tensors_in(written)
        for tensor in [*storages_in(written), *call.made]:
            block = self._block(tensor)
            others = block.flow is not None and block.flow.producer != self.layer
            renewed = others and any(tensor is argument for argument in in_place)
            if block.name is None and (block.flow is None or renewed):
                block.flow = StorageFlow(self.layer)
                self._flows.append((block.flow, block))

    def note_wrapped(self, call: Operation) -> None:
        """Note what has a gradient of tensors that wrap others, whose parts do not say so."""
        for tensor in tensors_in([call.arguments, call.options]) if not self.backward else ():
            for part in storages_in(tensor) if tensor.requires_grad else ():
                block = self._blocks.get(part)
                if block is not None and block.flow is not None:
                    block.flow.gradient = True

    def tensors(self) -> list[profile.Tensor]:
        """What crosses between layers, summed over tensors of the same producer and consumers.

        Those with a gradient are summed apart from those without. Of every storage the parts that
        are read cross, at most the whole of it.
        """
        merged: Counter[tuple[int, tuple[int, ...], bool]] = Counter()
        for flow, block in self._flows:
            if flow.consumers:
                size_bytes = min(sum(flow.parts.values()), block.size_bytes)
                merged[flow.producer, tuple(sorted(flow.consumers)), flow.gradient] += size_bytes
        return [
            profile.Tensor(producer=made, consumers=list(read), bytes=size, gradient=gradient)
            for (made, read, gradient), size in sorted(merged.items())
        ]

    def saving(self) -> saved_tensors_hooks:
        """The context of a forward of which to note what autograd keeps; its graph has to live."""

        def pack(tensor: Tensor) -> Tensor:
            ahead = not self.tracker.inside_unit and _saves_inputs(sys._getframe(1))
            for part in local_tensors(tensor):
                if part.layout is torch.strided:
                    block = self._block(part)
                    if ahead:
                        self._kept_ahead.append(block)
                    else:
                        block.layers.add(self.tracker.current)
            return tensor

        return saved_tensors_hooks(pack, lambda kept: kept)

    def find_kept(self, loss: Tensor) -> list[ObservedStorage]:
        """The blocks that are still kept now that the forward has ended, apart from the loss."""
        self.enter(self.tracker.current)
        of_loss = self._blocks.get(local_tensors(loss)[0])
        for block in self._blocks.values():
            if block.lives and not block.layers and block is not of_loss:
                block.layers.add(block.maker)
        return [block for block in self._blocks.values() if block.layers and block.name is None]

    def note_parting(self, layer: int, gradient: Tensor) -> None:
        """Count a gradient that arrives where a layer's weights part from its input, once."""
        for part in local_tensors(gradient):
            block = self._blocks.get(part)
            if block is not None and block.lives and not block.counted:
                block.counted = True
                self.parting_bytes[layer] += block.size_bytes

    @contextlib.contextmanager
    def freeing_gradients(self) -> Iterator[None]:
        """In this context a gradient is no longer transient once it is its parameter's."""

        def free(parameter: Tensor) -> None:
            for tensor in storages_in(parameter.grad):
                self._free(self._block(tensor))

        trained = [parameter for parameter in self._parameters.values() if parameter.requires_grad]
        handles = [parameter.register_post_accumulate_grad_hook(free) for parameter in trained]  # type: ignore[no-untyped-call]
        with remove_after(handles):
            yield

    def _free(self, block: ObservedStorage) -> None:
        if block.lives:
            block.freed = True
            self._note(block.number, -block.size_bytes)

    def _note(self, block: int, size_bytes: int) -> None:
        self.events.append(StorageEvent(self.layer, self.backward, block, size_bytes))


def _saves_inputs(frame: FrameType | None) -> bool:
    """Whether a checkpoint without re-entry keeps the inputs of what it calls next.

    Any torch saves them in this generator, some as a custom Function does.
    """
    files = torch.utils.checkpoint.__file__, torch.autograd.function.__file__
    while frame is not None and frame.f_code.co_filename in files:
        if frame.f_code.co_name == "_checkpoint_without_reentrant_generator":
            return True
        frame = frame.f_back
    return False


def stash_groups(kept: Iterable[ObservedStorage]) -> list[profile.StashGroup]:
    """Bytes kept, by the set of layers that keep them, and by who made what several keep."""
    merged: Counter[tuple[tuple[int, ...], int]] = Counter()
    for block in kept:
        layers = tuple(sorted(block.layers))
        maker = block.maker if block.was_made else 0  # a block of before is one of the inputs
        passed = len(layers) > 1 and maker < layers[0]
        merged[layers, maker if passed else -1] += block.size_bytes
    return [
        profile.StashGroup(
            layers=list(layers), bytes=size, producer=producer if producer >= 0 else None
        )
        for (layers, producer), size in sorted(merged.items())
        if size
    ]


def transient_bytes(events: Sequence[StorageEvent], kept: Mapping[int, int]) -> dict[int, int]:
    """For every layer, the peak while it runs beside what is kept for it and those before it.

    `kept` holds the blocks that are kept for the backward, and the first layer that one is kept
    for. What is kept is known at a layer's end in the forward, at its beginning in the backward;
    the larger peak of both counts. In bytes.
    """
    peaks, stash, live = Counter[int](), Counter[int](), 0

    def kept_until(last: int) -> int:
        return sum(size_bytes for layer, size_bytes in stash.items() if layer <= last)

    for (layer, backward), visit in itertools.groupby(events, lambda event: event[:2]):
        peak, before = live, kept_until(layer)
        for event in visit:
            live += event.size_bytes
            peak = max(peak, live)
            if event.block in kept:
                stash[kept[event.block]] += event.size_bytes
        peaks[layer] = max(peaks[layer], peak - (before if backward else kept_until(layer)))
    return dict(peaks)


def describe_layers(
    model: nn.Module, tracker: Tracker, used_by: Mapping[str, set[int]]
) -> list[profile.Layer]:
    """The layers with their parameters.

    A layer holds the parameters of its module and those that it was seen to use (`used_by`: name to
    layers), such as a positional embedding on the root or a head that multiplies by the embedding's
    weight. A parameter that nothing uses goes to the first layer, so that no byte is lost.
    """
    parameters = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    users = {name: set(used_by.get(name, ())) for name in parameters}
    for layer, key in enumerate(tracker.layers):
        for parameter in tracker.modules[key.name].parameters():
            users[names[id(parameter)]].add(layer)
    held: defaultdict[int, list[profile.SharedParameter]] = defaultdict(list)
    for name, parameter in parameters.items():
        parts = local_tensors(parameter)
        size_bytes = sum(part.numel() * part.element_size() for part in parts)
        frozen = not parameter.requires_grad
        for layer in users[name] or {0}:
            held[layer].append(profile.SharedParameter(name=name, bytes=size_bytes, frozen=frozen))
    return [
        profile.Layer(
            name=key.name,
            call=key.call,
            type=type(tracker.modules[key.name]).__name__,
            parameter_bytes=sum(p.bytes for p in held[layer]),
            frozen_bytes=sum(p.bytes for p in held[layer] if p.frozen),
            shared_parameters=[p for p in held[layer] if len(users[p.name]) > 1],
        )
        for layer, key in enumerate(tracker.layers)
    ]


def _combine(structure: Structure, group: RankGroup) -> Structure:
    """The structure with the memory of the rank that holds the most, all else this rank's."""
    ranks: list[Structure] = group.gather(structure)
    first, *_ = names = [
        [f"{layer.name} call {layer.call}" for layer in structure.layers] for structure in ranks
    ]
    for rank, found in enumerate(names):
        for layer, (one, other) in enumerate(
            itertools.zip_longest(first, found, fillvalue="no layer")
        ):
            if one != other:
                raise PartoptError(
                    f"the ranks of the group have other layers: layer {layer} is {one} on rank "
                    f"0, {other} on rank {rank}",
                    "each rank holds its part of every layer: build the same modules on all of "
                    "them",
                    code="ranks-disagree",
                    rank=rank,
                )
    fullest = max(
        ranks,
        key=lambda structure: (
            sum(layer.parameter_bytes for layer in structure.layers)
            + sum(kept.bytes for kept in structure.stash_groups)
            + max(structure.transient_bytes.values(), default=0)
        ),
    )
    return dataclasses.replace(
        structure,
        layers=fullest.layers,
        stash_groups=fullest.stash_groups,
        transient_bytes=fullest.transient_bytes,
        split_stash_bytes=fullest.split_stash_bytes,
    )


@contextlib.contextmanager
def new_garbage_only() -> Iterator[None]:
    """In this context `gc.collect` looks only at what was made in it, and is quick."""
    if gc.get_freeze_count():  # somebody keeps what was there before out of it already
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
