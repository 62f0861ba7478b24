"""Running the forward of a model as one of its stages.

The model's own forward runs. Events of the stage run in it, those of others return placeholders,
and where an event of the stage is given a placeholder it gets the tensor that was received. After
the stage's last event the rest of the forward is left to others.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily

from partopt.errors import ANSWER_IS_NO, PartoptError
from partopt.profiler.step import default_loss, run_forward
from partopt.profiler.tensors import Inputs, Loss
from partopt.runtime.crossings import Cut
from partopt.runtime.events import Key, Record, is_question, name_of
from partopt.runtime.placeholder import Fetch, Placeholder, fill
from partopt.runtime.steps import Replaced, Step, find_results, steps_of
from partopt.runtime.units import TakenUnits, fire_hooks, observe_hooked


class _StageEnds(BaseException):
    """The stage has run its last event.

    Not an Exception, so that no model takes it for an error of its own.
    """


class StageForward(TorchFunctionMode):
    """The forward of layers [start, stop) of a recorded model."""

    def __init__(
        self,
        model: nn.Module,
        record: Record,
        start: int,
        stop: int,
        sends: Cut,
        loss_fn: Loss | None,
    ) -> None:
        super().__init__()
        self._model = model
        self._loss_fn = loss_fn
        self._record = record
        self._names = {module: name for name, module in model.named_modules()}
        self._span = (start, stop)
        self._ends_model = stop == len(record.layers)
        wanted: defaultdict[int, tuple[Key, ...]] = defaultdict(tuple)
        for key in sends.keys:
            wanted[key.event] += (key,)
        self._steps = steps_of(record, start, stop, wanted, self._fetch)
        self._last = max(
            (step.number for step in self._steps if start <= step.event.layer < stop), default=-1
        )
        self._units = TakenUnits(model, [key.name for key in record.layers], self._unit)
        self._inside = False
        self._next = 0
        self._received: Mapping[Key, Tensor] | None = None
        self._replaced: Replaced = {}
        self._made: dict[Key, Tensor] = {}

    def run(
        self, inputs: Inputs, received: Mapping[Key, Tensor]
    ) -> tuple[dict[Key, Tensor], Tensor | None]:
        """The results that leave the stage, of those that it makes; of the last stage the loss.

        Raises PartoptError where the forward takes another way than the recorded one.
        """
        self._next, self._received, self._replaced, self._made = 0, received, {}, {}

        def keep(placeholder: Placeholder) -> Tensor:
            """What was received, for checkpoints too, which run once more in the backward."""
            found = received.get(placeholder.key)
            return self._fetch(placeholder) if found is None else found

        self._renew(received, keep)
        loss: Tensor | None = None
        try:
            with self._units, self, contextlib.suppress(_StageEnds):
                output = run_forward(self._model, inputs)
                loss = (
                    default_loss(output) if self._loss_fn is None else self._loss_fn(output, inputs)
                )
            self._check_all_ran()
            return self._made, loss
        finally:
            self._renew(received, self._fetch)
            self._received, self._replaced, self._made = None, {}, {}
            self._inside = False

    def _renew(self, received: Mapping[Key, Tensor], fetch: Fetch) -> None:
        for key in received:
            stub = self._steps[key.event].stub
            assert stub is not None
            stub.renew(key.leaf, fetch)

    def _unit(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._inside:
            return forward(*args, **kwargs)
        step = self._step(name, name)
        if step.stub is not None:
            return self._skip(step, args, kwargs)
        if step.fills or self._replaced:
            args, kwargs = fill((args, kwargs), self._real)
        seen: list[tuple[str, Any]] = []
        self._inside = True
        try:
            with _pop_mode_temporarily():
                if step.wanted and step.event.observed:
                    with observe_hooked(self._names) as seen:
                        output = forward(*args, **kwargs)
                else:
                    output = forward(*args, **kwargs)
        finally:
            self._inside = False
        return self._finish(step, output, seen, args, kwargs)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the function between units where it is the stage's."""
        options = kwargs or {}
        if self._inside or is_question(func, args):
            return func(*args, **options)
        step = self._step(None, name_of(func))
        if step.stub is not None:
            return self._skip(step, args, options)
        if step.fills or self._replaced:
            args, options = fill((args, options), self._real)
        return self._finish(step, func(*args, **options), [], args, options)

    def _step(self, unit: str | None, name: str) -> Step:
        if self._next == len(self._steps):
            raise _differs(f"{name} comes after the last of its {self._next} recorded calls")
        step = self._steps[self._next]
        self._next += 1
        if step.event.unit != unit or step.event.name != name:
            layer = self._record.layer_name(step.event.layer)
            raise _differs(f'at {layer} it calls "{name}" and called "{step.event.name}"')
        return step

    def _skip(self, step: Step, args: Any, kwargs: Any) -> Any:
        assert step.stub is not None
        output, observed = step.stub.output(args, kwargs, self._replaced)
        for (name, _), value in zip(step.event.observed, observed, strict=True):
            fire_hooks(self._model.get_submodule(name), value)
        return output

    def _finish(
        self, step: Step, output: Any, seen: list[tuple[str, Any]], args: Any, kwargs: Any
    ) -> Any:
        if step.wanted or step.numbers:
            results = find_results(step.event, output, seen, args, kwargs)
            for key in step.wanted:
                self._made[key] = results[key.leaf]
            for leaf, value in step.numbers:
                self._check_number(step, results[leaf], value)
        if step.number == self._last and not self._ends_model:
            self._inside = True  # contexts that the model leaves are no calls of its forward
            raise _StageEnds
        return output

    def _fetch(self, placeholder: Placeholder) -> Tensor:
        """The tensor received for a placeholder."""
        return self._lookup(placeholder.key)

    def _real(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, Placeholder):
            return tensor.fetch(tensor)
        other = self._replaced.get(id(tensor))
        return tensor if other is None else self._lookup(other[1])

    def _lookup(self, key: Key) -> Tensor:
        if self._received is not None and key in self._received:
            return self._received[key]
        start, stop = self._span
        maker = self._record.layer_name(self._record.made_by(key))
        when = "" if self._received is not None else " after its forward"
        raise PartoptError(
            f"the stage of layers {start} to {stop - 1} reads{when} a tensor of {maker} that it "
            "was not given as an argument: an object keeps it, or a checkpoint between layers",
            "switch off activation checkpointing in the model, or keep both in one stage",
            ANSWER_IS_NO,
            code="cannot-cut",
            layers=[maker],
        )

    def _check_number(self, step: Step, now: Any, recorded: Any) -> None:
        if now != recorded:
            layer = self._record.layer_name(step.event.layer)
            raise _differs(
                f"{layer} returns {now!r} and returned {recorded!r}, which other stages rely on"
            )

    def _check_all_ran(self) -> None:
        end = len(self._steps) if self._ends_model else self._last + 1
        if self._next < end:
            missing = self._steps[self._next].event
            raise _differs(
                f'it ends before "{missing.name}" of {self._record.layer_name(missing.layer)}'
            )


def _differs(what: str) -> PartoptError:
    return PartoptError(
        f"the forward differs from the recorded one: {what}",
        "every microbatch has to take the same way through the model: fix shapes and modes, and "
        "switch off what skips layers at random",
        ANSWER_IS_NO,
        code="calls-vary",
    )
