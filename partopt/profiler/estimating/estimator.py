"""Estimating the layers of a model on a device that is not there.

A step runs on fake tensors, at full size and in no memory: observed as any other, then once more
under a clock that goes on by what each operation would take.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from typing import NoReturn

import msgspec
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from partopt.documents import Note
from partopt.documents.profile import Device, Estimated, Measurement, OperationShare
from partopt.errors import PartoptError
from partopt.profiler import fake
from partopt.profiler.backward_split import split_backward
from partopt.profiler.estimating.clock import RooflineClock
from partopt.profiler.estimating.kernels import kernels_of
from partopt.profiler.foreign_errors import describe
from partopt.profiler.group import exchanges_nothing
from partopt.profiler.measurer import Measurer, summarize
from partopt.profiler.precision import no_cast_cache
from partopt.profiler.step import Inputs, check_step
from partopt.profiler.structure import Structure, observe, track
from partopt.profiler.subject import Subject
from partopt.profiler.tensors import local_tensors
from partopt.profiler.timeline import Stepper
from partopt.profiler.tracker import Tracker

MOST_WITHOUT_RULE = 0.05  # of the time
# AdamW in one kernel, with moments and master weights in float32: reads gradient, weight and two
# moments, writes three of them and the weight in its own format
_OPTIMIZER_BYTES = 28


class Estimator(Measurer):
    """Estimates a subject whose clock is a RooflineClock."""

    input_gradient_steps = 1  # all are equal

    def __init__(self, subject: Subject, clock: RooflineClock) -> None:
        super().__init__(subject)
        self.clock = clock
        self._mode = fake.fake_mode()
        self.without_rule: list[OperationShare] = []

    def describe_device(self) -> Device:
        """The device that is not there, named as what it is."""
        device = self.clock.device
        return Device(
            name=f"{device.name} (estimated)", type=device.type, memory_bytes=device.memory_bytes
        )

    def describe_estimate(self) -> Estimated:
        """What the times were computed from."""
        device = self.clock.device
        links = self.clock.links
        return Estimated(
            device=device.name,
            sha256=device.sha256,
            topology=links.topology.name if links else None,
            without_rule=self.without_rule,
        )

    @contextlib.contextmanager
    def placed(self) -> Iterator[None]:
        """The context in which the parameters are fake, and have gradients to add to."""
        model, settings = self.subject.model, self.subject.settings
        fake.check_shapes(model)
        with (
            fake.fake_parameters(model, self._mode, settings.device, settings.dtype),
            fake.real_buffers(model, settings.device, settings.dtype),
        ):
            model.train()
            with self._mode:
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter.grad = torch.empty_like(parameter)
            yield

    def _see(self, inputs: Inputs) -> tuple[Tracker, Structure]:
        """The structure at full size."""
        subject, faked = self.subject, fake.fake_inputs(inputs, self._mode)
        try:
            with self._faked():
                tracker = self._tracker or track(subject, faked)
                with no_cast_cache():
                    structure = observe(subject, faked, tracker)
        except PartoptError:
            raise
        except Exception as error:
            self._explain(error, faked)
        if not self.layers:
            self.notes.append(_note(self.clock.device.name))
        return tracker, structure

    def _time(
        self, size: int, inputs: Inputs, tracker: Tracker, structure: Structure
    ) -> Measurement:
        """The estimate of one size."""
        subject = self.subject
        inputs = fake.fake_inputs(inputs, self._mode)
        stepper = Stepper(subject.model, inputs, subject.loss_fn, tracker, self.clock)
        with self._faked(), self.clock:
            self.clock.without_rule_s.clear()
            times = stepper.instrumented()
            if subject.group.ranks > 1 and not self.clock.exchanged_s:
                raise exchanges_nothing("in build, or estimate it without `group`")
            self._check_rules(times.step_s)
            parts = self._input_gradients(stepper)
        self.uneven |= {layer: tracker.layers[layer].name for layer in stepper.uneven}
        summary = summarize(size, structure, [times.step_s], [times], self._optimizer_step(), None)
        bare = msgspec.structs.replace(summary, step_s=None, coverage=None, overhead=None)
        return split_backward(bare, parts, 1.0)

    def _optimizer_step(self) -> float:
        """Seconds of an AdamW step, by its bytes."""
        trained = sum(
            part.numel()
            for each in self.subject.model.parameters()
            if each.requires_grad
            for part in local_tensors(each)
        )
        return _OPTIMIZER_BYTES * trained / self.clock.device.bandwidth_bytes_per_s

    @contextlib.contextmanager
    def _faked(self) -> Iterator[None]:
        """The context in which operations are fake, and those of the device; parameters are so."""
        with (
            fake.without_log(),
            self._mode,
            fake.fake_buffers(self.subject.model, self._mode),
            kernels_of(self.clock.device.type),
        ):
            yield

    def _check_rules(self, step_s: float) -> None:
        """Note the operations without a rule. PartoptError where they take too much of the time.

        The shares are the largest of all sizes.
        """
        shares = {each.operation: each.share for each in self.without_rule}
        for name, own_s in sorted(self.clock.without_rule_s.items()):
            shares[name] = max(shares.get(name, 0.0), own_s / step_s)
        self.without_rule = [
            OperationShare(operation=name, share=share) for name, share in shares.items()
        ]
        if sum(shares.values()) > MOST_WITHOUT_RULE:
            raise PartoptError(
                f"nothing is known of what {', '.join(shares)} computes but its bytes, and by "
                f"these it takes {sum(shares.values()):.0%} of the time",
                "measure the model: leave out `estimate`",
                code="no-rule",
                operations=list(shares),
                share=sum(shares.values()),
            )

    def _explain(self, error: Exception, inputs: Inputs) -> NoReturn:
        """Raise a PartoptError that says why a step on fakes failed, and where."""
        if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
            where = _find_module(error, self.subject.model)
            raise PartoptError(
                f"the code of {where} needs the values of a tensor ({error.func}), and an estimate "
                f"has none: it {describe(error)}",
                "leave out `.item()`, `.nonzero()` and the like, or measure the model: leave out "
                "`estimate`",
                code="reads-values",
                module=where,
                operation=str(error.func),
            ) from error
        with self._faked():
            check_step(self.subject.model, inputs, self.subject.loss_fn)
        raise error


def _note(device: str) -> Note:
    return Note(
        code="estimated",
        text=(
            f"the times are estimated for {device}, from operations, bytes and what its file says "
            "that it does in a second: nothing was measured"
        ),
        fields={"device": device},
    )


def _find_module(error: Exception, model: nn.Module) -> str:
    """The name of the innermost module of `model` whose code an exception passed."""
    names = {id(module): name for name, module in model.named_modules()}
    callers = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    found = [names[id(each)] for each in callers if id(each) in names]
    return next((f'"{name}"' for name in reversed(found) if name), "the model")
