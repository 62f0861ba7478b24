"""Estimating the layers of a model on a device that is not there.

One step runs on fake tensors, at full size and in no memory: observed as any other, then once more
under a clock that goes on by what every operation would take,

    t = max(flops / (peak * efficiency), bytes / bandwidth) + launch

the roofline of Williams, Waterman and Patterson (2009). An operation of eager PyTorch is a kernel:
it reads its arguments and writes its results. Views are free. What indexes a table reads as much of
it as it returns, and an element that is repeated by a stride of 0 is read once. Operations of
`aten` whose arithmetic is not counted wait for memory; of any other nothing is known but its bytes.
"""

from __future__ import annotations

import contextlib
import math
import os
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Annotated, Any, NamedTuple, NoReturn

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from partopt import documents
from partopt.documents import Note
from partopt.documents.device import TF32, Roofline
from partopt.documents.profile import Device, Estimated, Measurement, Model, OperationShare, Profile
from partopt.errors import PartoptError
from partopt.profiler import weightless
from partopt.profiler.as_trained import no_cast_cache
from partopt.profiler.device import Clock
from partopt.profiler.layer_choice import track
from partopt.profiler.layers import Tracker
from partopt.profiler.measuring import Measurer, errors_name, profile_of
from partopt.profiler.observation import Structure, observe
from partopt.profiler.operations import Operation, Watch, storages_in
from partopt.profiler.settings import ProfileSettings, Subject, check_model, check_name
from partopt.profiler.source import describe, find_model
from partopt.profiler.step import Stepper, check_step
from partopt.profiler.summary import TimedSteps, summarize
from partopt.profiler.tensors import Inputs, Loss, local_tensors, with_labels

MOST_WITHOUT_RULE = 0.05  # of the time
# AdamW in one kernel, with moments and master weights in float32: reads gradient, weight and two
# moments, writes three of them and the weight in its format
_OPTIMIZER_BYTES = 28
_ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
# the table, the first argument, is read at the places that are asked for
_GATHERS = {"embedding", "gather", "index", "index_select", "nll_loss_forward", "take"}
# the first argument is written at the places that are given
_SCATTERS = {"index_add_", "index_copy_", "index_put_", "scatter_", "scatter_add_"}
# in place, but what was there is not read
_FILLS = {"bernoulli_", "copy_", "fill_", "normal_", "random_", "uniform_", "zero_"}
# of aten, with arithmetic that neither a formula nor bytes tell
_UNCOUNTED = ("_cdist", "_cudnn_rnn", "_fft", "_linalg", "_pdist", "cholesky", "linalg", "mkldnn")


class OperationWork(NamedTuple):
    """What an operation does; `kind` says which of a device's efficiencies it has.

    `has_rule` is False where nothing is known of it but its bytes.
    """

    kind: str
    flops: int
    bytes: int
    dtype: torch.dtype
    has_rule: bool = True

    @classmethod
    def of(cls, call: Operation) -> OperationWork | None:
        """What an operation does; None where no kernel runs."""
        name = str(call.func._schema.name).rpartition("::")[2]
        read, made = list(call.read), call.made
        if name in _ALLOCATES or not (call.func._schema.is_mutable or made):
            return None
        flops, kind = call.flops, "memory"
        if flops and "attention" in name:
            kind = "attention_backward" if "backward" in name else "attention_forward"
            # the formula is that of the whole square
            flops //= 2 if call.argument("is_causal") else 1
        elif flops:
            kind = "convolution" if "convolution" in name else "matmul"
        results = storages_in(call.result)
        floating = [tensor.dtype for tensor in [*read, *results] if tensor.is_floating_point()]
        return cls(
            kind,
            flops,
            _moved_bytes(name, call, read, made),
            floating[0] if floating else torch.float32,
            bool(flops) or (call.func.namespace == "aten" and not name.startswith(_UNCOUNTED)),
        )


def _moved_bytes(name: str, call: Operation, read: list[Tensor], made: list[Tensor]) -> int:
    """Bytes that are read and written."""
    results = sum(map(_extent, made))
    if name.startswith("new_") or name.endswith("_like"):
        return results  # the shape of the argument is read, and no more
    written = list(storages_in(call.written))
    targets = {id(tensor) for tensor in written}
    others = {id(tensor): _extent(tensor) for tensor in read if id(tensor) not in targets}
    held = sum(map(_extent, written))
    if name in _GATHERS:
        table = id(call.arguments[0])
        others[table] = min(others.get(table, 0), results)
    elif name in _SCATTERS:
        held = min(held, max(others.values(), default=0))
    return results + sum(others.values()) + held * (1 if name in _FILLS else 2)


def _extent(tensor: Tensor) -> int:
    """Bytes of the distinct elements of a tensor."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, stride in sizes if stride) * tensor.element_size()


class RooflineClock(Watch, Clock):
    """Counts the seconds of the operations that run while it is active, most likely on fakes.

    `flops` are by kind of operation, `without_rule_s` the seconds of operations of which only the
    bytes are known.
    """

    def __init__(self, device: Roofline) -> None:
        super().__init__()
        self.device = device
        self.now_s = Fraction(0)  # exact: layers that are alike take the same, wherever they are
        self.bytes = 0
        self.launches = 0
        self.flops: Counter[str] = Counter()
        self.without_rule_s: defaultdict[str, float] = defaultdict(float)

    def after(self, call: Operation) -> None:
        """Go on by what the operation takes."""
        if (work := OperationWork.of(call)) is not None:
            seconds = self.seconds(work)
            self.now_s += Fraction(seconds)
            self.bytes += work.bytes
            self.launches += 1
            self.flops[work.kind] += work.flops
            if not work.has_rule:
                self.without_rule_s[str(call.func.overloadpacket)] += seconds

    def seconds(self, work: OperationWork) -> float:
        """Seconds that an operation takes. PartoptError where the device lacks its format."""
        device, compute_s = self.device, 0.0
        if work.flops:
            peak = device.peaks_flops[self._format(work)]
            compute_s = work.flops / (peak * getattr(device, work.kind))
        return max(compute_s, work.bytes / device.bandwidth_bytes_per_s) + device.launch_s

    def _format(self, work: OperationWork) -> str:
        """The number format whose peak counts: float32 may be multiplied as TF32."""
        name = str(work.dtype).removeprefix("torch.")
        if name == "float32" and TF32 in self.device.peaks_flops:
            precise = (
                not torch.backends.cudnn.allow_tf32
                if work.kind == "convolution"
                else torch.get_float32_matmul_precision() == "highest"
            )
            return name if precise else TF32
        self.device.check_dtype(name)
        return name

    def stamp(self) -> Fraction:
        """The seconds so far."""
        return self.now_s


class Estimator(Measurer):
    """Estimates a subject whose clock is a RooflineClock."""

    def __init__(self, subject: Subject, resumed: Profile | None = None) -> None:
        super().__init__(subject, resumed)
        assert isinstance(subject.clock, RooflineClock)
        self.clock = subject.clock
        self.without_rule: list[OperationShare] = []
        self._mode = weightless.fake_mode()

    def describe_device(self) -> Device:
        """The device that is not there, named as what it is."""
        device = self.clock.device
        return Device(
            name=f"{device.name} (estimated)", type=device.type, memory_bytes=device.memory_bytes
        )

    def describe_estimate(self) -> Estimated:
        """What the times were computed from."""
        device = self.clock.device
        return Estimated(device=device.name, sha256=device.sha256, without_rule=self.without_rule)

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """The context in which the parameters are fake, and have gradients to add to."""
        model, settings = self.subject.model, self.subject.settings
        with (
            weightless.fake_parameters(
                model, self._mode, settings.torch_device, settings.torch_dtype
            ),
            weightless.real_buffers(model, settings.torch_device, settings.torch_dtype),
        ):
            model.train()
            with self._mode:
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter.grad = torch.empty_like(parameter)
            yield

    @contextlib.contextmanager
    def _fake(self) -> Iterator[None]:
        """The context in which operations are fake, and those of the device; parameters are so."""
        with (
            weightless.without_log(),
            self._mode,
            weightless.fake_buffers(self.subject.model, self._mode),
            weightless.kernels_of(self.clock.device.type),
        ):
            yield

    def see(self, inputs: Inputs) -> tuple[Tracker, Structure]:
        """The structure at full size."""
        subject, faked = self.subject, weightless.fake_inputs(inputs, self._mode)
        try:
            with self._fake():
                tracker = self.tracker or track(subject, faked)
                with no_cast_cache():
                    structure = observe(subject, faked, tracker)
        except PartoptError:
            raise
        except Exception as error:
            self._explain(error, faked)
        if not self.layers:
            name = self.clock.device.name
            text = (
                f"the times are estimated for {name}, from operations, bytes and what its file "
                "says that it does in a second: nothing was measured"
            )
            self.notes.append(Note(code="estimated", text=text, fields={"device": name}))
        return tracker, structure

    def time(
        self, size: int, inputs: Inputs, tracker: Tracker, structure: Structure
    ) -> Measurement:
        """The estimate of one size."""
        subject, clock = self.subject, self.clock
        faked = weightless.fake_inputs(inputs, self._mode)
        stepper = Stepper(subject.model, faked, subject.loss_fn, tracker, clock)
        with self._fake(), clock:
            clock.without_rule_s.clear()
            times = stepper.time_layers()
            self._check_rules(times.step_s)
            steps = TimedSteps([times.step_s], [times], stepper.input_parts(1))  # all are equal
        self.uneven |= {layer: tracker.layers[layer].name for layer in stepper.uneven}
        trained = [parameter for parameter in subject.model.parameters() if parameter.requires_grad]
        numbers = sum(part.numel() for part in local_tensors(trained))
        optimizer_s = _OPTIMIZER_BYTES * numbers / clock.device.bandwidth_bytes_per_s
        summary = summarize(size, structure, steps, optimizer_s, None)
        return replace(summary, step_s=None, coverage=None, overhead=None)

    def _check_rules(self, step_s: float) -> None:
        """Note the operations without a rule. PartoptError where they take too much of the time.

        The shares are the largest of all sizes.
        """
        shares = {entry.operation: entry.share for entry in self.without_rule}
        for name, spent_s in sorted(self.clock.without_rule_s.items()):
            shares[name] = max(shares.get(name, 0.0), spent_s / step_s)
        self.without_rule = [
            OperationShare(operation=name, share=share) for name, share in shares.items()
        ]
        if sum(shares.values()) > MOST_WITHOUT_RULE:
            raise PartoptError(
                f"nothing is known of what {', '.join(shares)} computes but its bytes, and by "
                f"these it takes {sum(shares.values()):.0%} of the time",
                "measure the model: leave out `estimate`",
                code="no-rule",
            )

    def _explain(self, error: Exception, inputs: Inputs) -> NoReturn:
        """Raise a PartoptError that says why a step on fakes failed, and where."""
        model = self.subject.model
        if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
            where = _find_module(error, model)
            raise PartoptError(
                f"the code of {where} needs the values of a tensor ({error.func}), and an estimate "
                f"has none: it {describe(error)}",
                "leave out `.item()`, `.nonzero()` and the like, or measure the model: leave out "
                "`estimate`",
                code="reads-values",
                module=where,
            ) from error
        with self._fake():
            check_step(model, inputs, self.subject.loss_fn)
        raise error


def _find_module(error: Exception, model: nn.Module) -> str:
    """The name of the innermost module of `model` whose code an exception passed."""
    names = {id(module): name for name, module in model.named_modules()}
    callers = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    found = [names[id(caller)] for caller in callers if id(caller) in names]
    return next((f'"{name}"' for name in reversed(found) if name), "the model")


# --- what is estimated ----------------------------------------------------------------------------


def estimate(
    model: nn.Module,
    example_inputs: Callable[[int], Inputs],
    device: str | os.PathLike[str],
    *,
    loss_fn: Loss | None = None,
    name: str | None = None,
    calibrate: float | None = None,
    **options: Any,
) -> Profile:
    """What every layer of `model` would take on `device`, a device file or a shipped name.

    Nothing is measured: one step at every microbatch size runs on fake tensors, and each operation
    takes what a roofline says. `dtype` is by default bfloat16, float32 under `autocast` or where
    the device does not compute in bfloat16. `calibrate` is the seconds of a step, forward and
    backward, measured at the first size: all times are scaled to it. The model is left where it is.
    All else, and the errors, are as in `measure`, without `steps` and `compile`; what needs the
    values of tensors is refused too.
    """
    roofline = Roofline.load(device)
    settings = _settings_of(roofline, calibrate, **options)
    check_model(model, example_inputs, loss_fn)
    inputs_of, loss = with_labels(model, example_inputs, loss_fn)
    subject = Subject(model, inputs_of, loss, settings, RooflineClock(roofline))
    identity = Model(name=check_name(name) or type(model).__name__)
    return _scale_to(profile_of(subject, identity, measurer=Estimator), calibrate)


def estimate_source(
    source: str | os.PathLike[str],
    device: str | os.PathLike[str],
    *,
    arguments: Mapping[str, Any] | None = None,
    name: str | None = None,
    calibrate: float | None = None,
    **options: Any,
) -> Profile:
    """What the model that `source` names would take on `device`; it is built without weights.

    `source`, `arguments` and `name` are as in `measure_source`; all else is as in `estimate`.
    """
    roofline = Roofline.load(device)
    settings, title = _settings_of(roofline, calibrate, **options), check_name(name)
    found = find_model(source, arguments)
    identity = Model(name=title or found.name, entry=found.entry, arguments=found.arguments)
    with errors_name(found):
        model = weightless.build_weightless(found.build)
        clock = RooflineClock(roofline)
        subject = Subject(model, found.example_inputs, found.loss_fn, settings, clock)
        return _scale_to(profile_of(subject, identity, measurer=Estimator), calibrate)


def _settings_of(
    device: Roofline, calibrate: float | None, dtype: str | None = None, **options: Any
) -> ProfileSettings:
    """The settings of a step on fakes of the CPU, in number formats that the device has."""
    if calibrate is not None:
        hint = "give the seconds of a forward and a backward, without the optimizer"
        expected = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
        documents.check_option("calibrate", calibrate, expected, hint)
    if dtype is None:
        usual = "bfloat16"  # in which models are trained on what computes in it
        fast = options.get("autocast") is None and usual in device.peaks_flops
        dtype = usual if fast else "float32"
    settings = ProfileSettings(device="cpu", steps=1, compile=False, dtype=dtype, **options)
    device.check_dtype(settings.dtype)
    if settings.autocast is not None:
        device.check_dtype(settings.autocast, "autocast")
    return settings


def _scale_to(profile: Profile, seconds: float | None) -> Profile:
    """The estimated profile with all times scaled, so that a step takes `seconds`.

    The step is the forward and the backward of one microbatch of the smallest size.
    """
    if seconds is None or profile.estimated is None:
        return profile
    layers = profile.measured()[0].layers
    scale = seconds / sum(layer.forward_s + layer.backward_s for layer in layers)

    def scale_times(part: Any, *names: str) -> Any:
        times = {name: getattr(part, name) for name in names}
        return replace(part, **{name: time_s * scale for name, time_s in times.items() if time_s})

    layer_times = ("forward_s", "backward_s", "backward_input_s")
    return replace(
        profile,
        estimated=replace(profile.estimated, scale=scale, calibrated_s=float(seconds)),
        measurements=[
            replace(
                scale_times(measurement, "optimizer_s"),
                layers=[scale_times(layer, *layer_times) for layer in measurement.layers],
            )
            for measurement in profile.measurements
        ],
    )
