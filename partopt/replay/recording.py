"""Recording one real forward and loss of a model: its events, see `partopt.replay.events`."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily

from partopt.errors import PartoptError
from partopt.profiler.layers import LayerKey
from partopt.profiler.source import explain
from partopt.profiler.step import loss_of_output, run_forward
from partopt.profiler.tensors import Inputs, Loss, tensors_in
from partopt.profiler.weightless import RandomNumbers, replace_attribute
from partopt.replay.buffers import BufferState, BufferUses, buffer_slots
from partopt.replay.event_builder import Call, EventBuilder, NewTree, UnitWatch
from partopt.replay.events import EVERYWHERE, IN_A_CHECKPOINT, Event, Record, is_question, name_of
from partopt.replay.unit_calls import LayerOrder, TakenUnits, observe_hooked
from partopt.replay.weightless import StandIns, stand_ins


def record_model(
    model: nn.Module, inputs: Inputs, loss_fn: Loss | None, layers: Sequence[LayerKey]
) -> Record:
    """What one forward and loss do on the `inputs` of a microbatch, as `layers` divide it.

    The model may lack its weights (on the meta device, or fake): then next to nothing is computed.
    It runs on the device of the inputs; mode, autocast and shapes have to be those of the stages.
    Buffers and random numbers are afterwards as before. Raises PartoptError where the model does
    not call the layers in their order.
    """
    device = next((tensor.device for tensor in tensors_in(inputs)), torch.device("cpu"))
    loss_fn, need_weights = loss_fn or loss_of_output, set[type]()
    while True:
        numbers, buffers = RandomNumbers(), BufferState([])
        try:
            with (
                explain("recording the forward"),
                torch.enable_grad(),
                stand_ins(model, device) as weightless,
            ):
                try:
                    buffers = BufferState(buffer_slots(model))
                    recorder = _Recorder(model, inputs, layers, weightless, need_weights)
                    with recorder.watch():
                        loss_fn(run_forward(model, inputs), inputs)
                    return recorder.record(buffers)
                finally:
                    buffers.restore()
        except _NeedsWeights as failed:
            need_weights.add(failed.kind)
        except NewTree:  # into which torch's trees look from now on
            pass
        finally:
            numbers.restore()


class _NeedsWeights(BaseException):
    """A unit of this class does not run on fakes.

    Not an Exception, so that no model takes it for one of its errors.
    """

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.kind = kind


class _Recorder(TorchFunctionMode):
    """Watches one forward."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Inputs,
        layers: Sequence[LayerKey],
        weightless: StandIns | None,
        need_weights: Collection[type],
    ) -> None:
        super().__init__()
        self._order, self._layers = LayerOrder(layers), tuple(layers)
        self._weightless, self._need_weights = weightless, need_weights
        self._modules = {module: name for name, module in model.named_modules()}
        self._units = TakenUnits(model, [key.name for key in layers], self._unit)
        self._model = model
        self._watch = UnitWatch(model, inputs)
        self._builder = EventBuilder(model, self._watch)
        self._buffers = BufferUses(len(layers))
        self._inside = False
        self._functions: dict[int, str] = {}  # around layers, by the first one
        self._checkpoints: dict[Any, int] = {}  # the layers in which they begin

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """The context of the forward."""
        apply = vars(Function)["apply"]  # a class method, written in Python or not

        def note(kind: type[Function], *args: Any, **kwargs: Any) -> Any:
            before = self._order.entered
            output = apply.__get__(None, kind)(*args, **kwargs)
            if self._order.entered > before:
                self._functions[before] = f"the autograd function {kind.__name__}"
            return output

        with replace_attribute(Function, "apply", classmethod(note)), self._units, self:
            yield

    def record(self, buffers: BufferState) -> Record:
        """What was seen, of `buffers` that were as they are in there before."""
        self._order.check_all_called()
        builder = self._builder
        for name, now in buffers.replaced().items():
            layer = builder.maker(now)
            if layer == EVERYWHERE:
                self._buffers.note_late({name}, builder.entered_before(now))
            else:
                self._buffers.note(set(), {name}, layer)
        return Record(
            self._layers,
            tuple(builder.events),
            builder.likeness,
            dict(self._buffers.hidden()) | self._watch.hidden,
            _holders(self._model, self._layers, builder.events),
            None if self._weightless else frozenset(buffers.changed()),
            _hook(self._modules, self._layers) | self._functions,
        )

    def _unit(self, name: str, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if self._inside:
            return forward(*args, **kwargs)
        with _pop_mode_temporarily():
            layer, given = self._order.enter(name), (args, kwargs)
            if self._weightless is None:
                return self._run_unit(name, forward, layer, given, given)
            unit = self._model.get_submodule(name)
            if type(unit) in self._need_weights:
                with self._weightless.real_weights(unit):
                    return self._run_unit(name, forward, layer, given, given)
            try:
                faked, real = self._weightless.enter(given)
                return self._run_unit(name, forward, layer, given, faked, real)
            except PartoptError:
                raise
            except Exception as error:  # it needs values, or an operation has no rule for fakes
                raise _NeedsWeights(type(unit)) from error

    def _run_unit(
        self,
        name: str,
        forward: Callable[..., Any],
        layer: int,
        given: Any,
        run: Any,
        real: dict[int, Tensor] | None = None,
    ) -> Any:
        """Run a unit on the arguments `run`, and note it as run on those `given`."""
        call = Call.of(given, run)
        self._note_checkpoint(layer)
        self._builder.note_hidden(call, len(self._layers) - 1)
        self._inside = True
        try:
            with (
                observe_hooked(self._modules) as seen,
                self._watch.of(layer, call.tensors) as touched,
            ):
                output = forward(*run[0], **run[1])
        finally:
            self._inside = False
        self._buffers.note(touched.buffers, touched.written, layer)
        if self._weightless:
            output = self._weightless.leave(output, real or {})
        self._builder.add(call, name, layer, output, seen, touched.parameters)
        return output

    def _note_checkpoint(self, layer: int) -> None:
        """Note the layers of a checkpoint around several, by the hooks that it sets."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if hooks and hooks[0].__module__ == torch.utils.checkpoint.__name__:
            first = self._checkpoints.setdefault(hooks[0], layer)
            if first != layer:
                self._watch.hidden[first, layer] = IN_A_CHECKPOINT

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the function between units, and note it."""
        options = kwargs or {}
        if self._inside or is_question(func, args):
            return func(*args, **options)
        call = Call.of((args, options), (args, options))
        numbers = RandomNumbers()
        with self._watch.of(None) as touched:
            output = func(*args, **options)
        if self._weightless:
            output = self._weightless.leave(output, {})
        # numbers drawn at random would differ from stage to stage
        tied = self._builder.is_tied(call) or numbers.advanced()
        self._builder.note_hidden(call, len(self._layers) - 1)
        layer = self._order.current if tied else EVERYWHERE
        self._buffers.note(touched.buffers, touched.written, layer)
        if layer == EVERYWHERE:
            self._buffers.note_late(touched.written, self._order.entered)
        else:
            self._note_checkpoint(layer)
        self._builder.add(call, name_of(func), layer, output)
        return output


def _hook(modules: Mapping[nn.Module, str], layers: Sequence[LayerKey]) -> dict[int, str]:
    """The full backward hooks on modules that are layers or hold some, by their first layer."""
    found: dict[int, str] = {}
    for module, name in modules.items():
        full = module._backward_hooks and module._is_full_backward_hook
        if full or module._backward_pre_hooks:
            inside = (i for i, key in enumerate(layers) if f"{key.name}.".startswith(f"{name}."))
            first = 0 if name == "" else next(inside, None)
            if first is not None:
                where = f'"{name}"' if name else "the model"
                found[first] = f"a full backward hook on {where}"
    return found


def _holders(
    model: nn.Module, layers: Sequence[LayerKey], events: Sequence[Event]
) -> dict[str, frozenset[int]]:
    """The layers that hold every distinct parameter; what nothing uses is of the first."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held: defaultdict[str, set[int]] = defaultdict(set)
    for layer, key in enumerate(layers):
        for parameter in model.get_submodule(key.name).parameters():
            held[names[id(parameter)]].add(layer)
    for event in events:
        for name in event.parameters:
            held[name].add(event.layer)
    return {name: frozenset(held[name] or {0}) for name in names.values()}
