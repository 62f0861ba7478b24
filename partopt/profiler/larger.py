"""Measuring a model that is larger than memory.

Its layers, what passes between them and what they keep are observed on fake tensors, at full size
and in no memory. Then all units that are alike share one set of real weights, a few of them run in
place, loss and all, and the others have the measurements of these.
"""

from __future__ import annotations

import contextlib
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import msgspec
import torch
from torch import nn

from partopt.documents import Note
from partopt.documents.profile import Layer, Measurement, Profile, StashGroup
from partopt.errors import ANSWER_IS_NO, PartoptError
from partopt.profiler import fake
from partopt.profiler.classes import Call, CallRecorder, group_alike
from partopt.profiler.device import return_freed_memory
from partopt.profiler.free_memory import HEADROOM, Memory
from partopt.profiler.measurer import Measurer
from partopt.profiler.optimizer import time_steps
from partopt.profiler.out_of_memory import release_memory
from partopt.profiler.parameters import describe_layers
from partopt.profiler.precision import no_cast_cache
from partopt.profiler.sharing import SharedWeights
from partopt.profiler.shortening import choose_skipped, expand, skip_layers
from partopt.profiler.step import Inputs, check_step
from partopt.profiler.structure import Structure, observe, track
from partopt.profiler.subject import Subject
from partopt.profiler.timeline import LayerTimes, Stepper
from partopt.profiler.tracker import Tracker
from partopt.profiler.units import choose_units
from partopt.units import format_bytes

_COPIES = 4  # of a weight in an optimizer step beside it: its gradient, two moments, one temporary


class LargeMeasurer(Measurer):
    """Measures a subject whose weights are not in memory, within the memory that is free."""

    def __init__(self, subject: Subject, memory: Memory, resumed: Profile | None = None) -> None:
        super().__init__(subject, resumed)
        self.memory = memory
        self.measured_as: dict[int, int] = {}
        self._mode = fake.fake_mode()
        self._weights: SharedWeights | None = None
        self._calls: dict[int, Call] = {}
        self._reads_values = False  # the model's code does, and fakes have none

    @contextlib.contextmanager
    def placed(self) -> Iterator[None]:
        """The context in which the parameters are fake ones of the device and number format."""
        model, settings = self.subject.model, self.subject.settings
        fake.check_shapes(model)
        with (
            fake.fake_parameters(model, self._mode, settings.device, settings.dtype),
            fake.real_buffers(model, settings.device, settings.dtype),
        ):
            model.train()
            yield

    def _see(self, inputs: Inputs) -> tuple[Tracker, Structure]:
        """The structure at full size, once a step on the shared weights has run."""
        tracker, structure = self.observe_structure(inputs)
        if not self.layers:
            self.measured_as = choose_skipped(tracker, self._calls)
            self.notes.append(self._note(structure.layers))
        self._check_stash(structure)
        with self._running(tracker):
            check_step(self.subject.model, inputs, self.subject.loss_fn)
        self._shared.drop_unused_gradients()
        if not self._reads_values:
            groups = self._correct(structure.stash_groups, inputs, tracker)
            structure = replace(structure, stash_groups=groups)
        release_memory()  # observing leaves circles of objects that hold what was kept
        return tracker, replace(structure, layers=self._mark(structure.layers))

    def _time(
        self, size: int, inputs: Inputs, tracker: Tracker, structure: Structure
    ) -> Measurement:
        with self._running(tracker):
            measurement = super()._time(size, inputs, tracker, structure)
        return msgspec.structs.replace(measurement, peak_memory_bytes=None)

    def _alternate(self, stepper: Stepper, size: int) -> tuple[list[float], list[LayerTimes]]:
        """As of the whole model: the bare steps are lengthened as the instrumented ones are."""
        bare_s, instrumented = super()._alternate(stepper, size)
        whole = [expand(times, self.measured_as) for times in instrumented]
        longer = statistics.median(
            each.step_s / ran.step_s for each, ran in zip(whole, instrumented, strict=True)
        )
        return [step_s * longer for step_s in bare_s], whole

    def _input_gradients(self, stepper: Stepper) -> list[list[float]]:
        """As of the whole model."""
        return [
            [seconds[self.measured_as.get(layer, layer)] for layer in range(len(seconds))]
            for seconds in super()._input_gradients(stepper)
        ]

    def _time_optimizer(self, inputs: Inputs) -> float | None:
        """Seconds for the shared weights, each as often as it occurs.

        Gradients and moments are there for one list of weights at a time. None if they do not fit.
        """
        trained = [
            (members, [each for each in part if each.grad is not None])
            for members, part in self._shared.trained()
        ]
        self.subject.model.zero_grad(set_to_none=True)
        largest = max(each.nbytes for _, part in trained for each in part)
        if self._shared.bytes_with(1) + _COPIES * largest > self.memory.device_bytes:
            return None
        seconds = sum(
            members * self._time_list(own)
            for members, part in trained
            for own in _lists_within(largest, part)
        )
        return_freed_memory()
        return seconds

    def _time_list(self, weights: Sequence[nn.Parameter]) -> float:
        release_memory()  # the moments of the list before
        return_freed_memory()
        for each in weights:
            each.grad = torch.zeros_like(each)
        seconds = time_steps(weights, self.subject.clock)
        for each in weights:
            each.grad = None
        return seconds

    def observe_structure(self, inputs: Inputs) -> tuple[Tracker, Structure]:
        """What fakes show of the model, or where its code reads values, the shared weights."""
        if not self._reads_values:
            try:
                tracker, structure = self._observe_fake(inputs)
            except PartoptError:
                raise
            except Exception:  # whatever it is, the step on real tensors fails of it too, or not
                self._reads_values = True
            else:
                self._share(tracker.modules)
                return tracker, structure
        return self._observe_shared(inputs)

    def _observe_fake(self, inputs: Inputs) -> tuple[Tracker, Structure]:
        with self._faked():
            return self._observe(fake.fake_inputs(inputs, self._mode))

    def _observe_shared(self, inputs: Inputs) -> tuple[Tracker, Structure]:
        """The structure on the shared weights; parameters as the fakes have them."""
        subject, settings = self.subject, self.subject.settings
        names = {name for name, _ in subject.model.named_modules()}
        self._share(choose_units(subject.model, names, settings.granularity, settings.units))
        with self._running():
            check_step(subject.model, inputs, subject.loss_fn)
            tracker, structure = self._observe(inputs)
        sole = self._shared.sole_names()
        users = {name: layers for name, layers in structure.users.items() if name in sole}
        return tracker, replace(structure, layers=describe_layers(subject.model, tracker, users))

    def _observe(self, inputs: Inputs) -> tuple[Tracker, Structure]:
        tracker = self._tracker or track(self.subject, inputs)
        with no_cast_cache(), CallRecorder(tracker) as recorder:
            structure = observe(self.subject, inputs, tracker)
        self._calls = recorder.calls
        return tracker, structure

    def _correct(
        self, groups: Sequence[StashGroup], inputs: Inputs, tracker: Tracker
    ) -> list[StashGroup]:
        """What is kept, where real tensors take other ways than fakes.

        Kernels do (LSTM), and code that asks for fakes (the masks of transformers). What a layer
        that runs keeps more on real tensors is added to it and to those that are measured as it is.
        """
        with no_cast_cache(), self._faked(), self._skipping(tracker):
            fakes = observe(self.subject, fake.fake_inputs(inputs, self._mode), tracker)
        with no_cast_cache(), self._running(tracker):
            reals = observe(self.subject, inputs, tracker)
        kept = _by_layers(groups)
        more = _by_layers(reals.stash_groups)
        more.subtract(_by_layers(fakes.stash_groups))
        for layers, size in more.items():
            if not self.measured_as.keys() & set(layers):
                like = [(layer,) for layer, ran in self.measured_as.items() if layers == (ran,)]
                for each in [layers, *like]:
                    kept[each] += size
        return [
            StashGroup(layers=list(layers), bytes=size)
            for layers, size in sorted(kept.items())
            if size > 0
        ]

    def _share(self, units: Iterable[str]) -> None:
        """Choose the weights to share, once. Raises PartoptError where they do not fit."""
        if self._weights is not None:
            return
        modules = {name: self.subject.model.get_submodule(name) for name in units}
        groups = [[modules[name] for name in group] for group in group_alike(modules)]
        weights = SharedWeights(self.subject.model, groups)
        needed, free = int(HEADROOM * weights.bytes_with(2)), self.memory.device_bytes
        if needed > free:
            raise PartoptError(
                f"the weights of one layer of each kind take {format_bytes(needed)} with their "
                f"gradients, {format_bytes(int(free))} are free",
                "choose smaller layers with `granularity=leaf`, a smaller number format with "
                "`dtype=bfloat16`, or a device with more memory",
                ANSWER_IS_NO,
                code="out-of-memory",
                bytes=needed,
            )
        self._weights = weights

    def _check_stash(self, structure: Structure) -> None:
        """Raise MemoryError where what the layers that run keep does not fit beside the weights."""
        kept = sum(
            group.bytes
            for group in structure.stash_groups
            if any(layer not in self.measured_as for layer in group.layers)
        )
        largest = max(structure.output_bytes.values(), default=0)  # twice: its gradient too
        needed = self._shared.bytes_with(2) + kept + 2 * largest
        if HEADROOM * needed > self.memory.device_bytes:
            raise MemoryError(f"{needed} bytes do not fit")

    @contextlib.contextmanager
    def _faked(self) -> Iterator[None]:
        """The context in which operations are fake; parameters are so already."""
        with fake.without_log(), self._mode, fake.fake_buffers(self.subject.model, self._mode):
            yield

    @contextlib.contextmanager
    def _running(self, tracker: Tracker | None = None) -> Iterator[None]:
        """The context in which the model runs on the shared weights, by default all of it."""
        skipping = self._skipping(tracker) if tracker else contextlib.nullcontext()
        with self._shared.in_place(), fake.refuse_mixing(self._mode), skipping:
            yield

    def _skipping(self, tracker: Tracker) -> contextlib.AbstractContextManager[None]:
        modules = {layer: tracker.modules[tracker.layers[layer].name] for layer in self.measured_as}
        return skip_layers(modules, self._calls)

    @property
    def _shared(self) -> SharedWeights:
        assert self._weights is not None
        return self._weights

    def _mark(self, layers: Sequence[Layer]) -> list[Layer]:
        return [
            msgspec.structs.replace(layer, measured_as=self.measured_as.get(index))
            for index, layer in enumerate(layers)
        ]

    def _note(self, layers: Sequence[Layer]) -> Note:
        parameters = self.subject.model.parameters()
        whole, real = sum(each.nbytes for each in parameters), self._shared.bytes_with(1)
        return Note(
            code="larger-than-memory",
            text=(
                f"of the model's {format_bytes(whole)} of weights only {format_bytes(real)} were "
                f"in memory: layers that are alike shared them; {len(self.measured_as)} of "
                f"{len(layers)} layers did not run and have the measurements of a layer like them; "
                "the optimizer's time is that of the shared weights times their number"
            ),
            fields={
                "parameter_bytes": whole,
                "real_bytes": real,
                "layers_not_run": len(self.measured_as),
            },
        )


def _lists_within(most_bytes: int, weights: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """The weights in their order, in lists of at most so many bytes; each alone has no more."""
    own: list[nn.Parameter] = []
    for each in weights:
        if own and sum(other.nbytes for other in own) + each.nbytes > most_bytes:
            yield own
            own = []
        own.append(each)
    if own:
        yield own


def _by_layers(groups: Sequence[StashGroup]) -> Counter[tuple[int, ...]]:
    return Counter({tuple(group.layers): group.bytes for group in groups})
