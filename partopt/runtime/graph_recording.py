"""Recording a model by torch.export: what each node of its graph reads, makes and writes to.

The graph runs once on tensors without memory. Each node becomes an event, as each call does in
`partopt.runtime.recording`, so that the same rules say what crosses a cut, and where there is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from partopt.errors import PartoptError
from partopt.profiler.foreign_errors import describe
from partopt.profiler.step import Inputs, Loss
from partopt.profiler.tracker import LayerKey
from partopt.runtime.buffer_uses import BufferUses, written_by
from partopt.runtime.event_builder import Before, EventBuilder
from partopt.runtime.events import EVERYWHERE, Key, storage_of
from partopt.runtime.exporting import Exported, export, without_memory
from partopt.runtime.graph_record import GraphRecord, Step
from partopt.runtime.input_form import InputForm
from partopt.runtime.marks import ENTER, LEAVE, Switches, cannot_export, is_mark
from partopt.runtime.recording import holders

_NUMBER = "{1} reads a number that {0} computes"
_LOSS = "{1} reads the loss, which {0} computes"


def export_model(
    model: nn.Module, inputs: Inputs, loss_fn: Loss | None, layers: Sequence[LayerKey]
) -> GraphRecord:
    """What one forward and loss do on the `inputs` of a microbatch, as `layers` divide it.

    As `record_model`, by torch.export. Nothing is computed, and the model may lack its weights.
    Raises PartoptError where torch.export cannot follow the model.
    """
    form = InputForm(inputs)
    tensors = form.tensors(inputs)
    device = next((each.device for each in tensors), torch.device("cpu"))
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)
    with without_memory(model, mode, device):
        exported = export(model, form, tensors, loss_fn, layers)
        observer = _Observer(model, exported, layers)
        try:
            observer.observe(tensors, mode)
        except PartoptError:
            raise
        except Exception as error:
            raise cannot_export(f"the graph of torch.export {describe(error)}") from error
        return observer.record(form)


class _Observer(fx.Interpreter):
    """Runs a graph on fakes."""

    def __init__(self, model: nn.Module, exported: Exported, layers: Sequence[LayerKey]) -> None:
        super().__init__(exported.module)
        self._model, self._exported, self._layers = model, exported, layers
        self._builder = EventBuilder(model)
        self._uses = BufferUses(dict(model.named_buffers()), len(layers))
        self._switches = Switches()
        self._steps: list[Step] = []
        self._layer, self._inside = 0, False
        self._no_tensors: dict[fx.Node, int] = {}  # layers of nodes whose value is no tensor
        self._hidden: dict[tuple[int, int], str] = {}
        # by their storage: numbers of inputs, names of what is the same in each forward
        self._inputs: dict[int, int] = {}
        self._fixed: dict[int, str] = {}
        self._written_inputs: set[int] = set()

    def observe(self, tensors: Sequence[Tensor], mode: FakeTensorMode) -> None:
        """Run the graph, on inputs like these."""
        fakes = [mode.from_tensor(each) for each in tensors]
        self._inputs = {storage_of(each): number for number, each in enumerate(fakes)}
        constants = {
            name: mode.from_tensor(each) for name, each in self._exported.constants.items()
        }
        known: dict[str, Mapping[str, Tensor]] = {
            "parameter": dict(self._model.named_parameters(remove_duplicate=False)),
            "buffer": dict(self._model.named_buffers(remove_duplicate=False)),
            "attribute": constants,
            "literal": constants,
            "input": {str(number): each for number, each in enumerate(fakes)},
        }
        self._fixed = {
            storage_of(each): name
            for kind in ("parameter", "attribute")
            for name, each in known[kind].items()
        }
        given = [known[source.kind][source.name] for source in self._exported.sources.values()]
        self.args_iter = iter(given)
        try:
            with mode, torch.enable_grad():
                for node in self.graph.nodes:  # `run` would start a thread
                    self.env[node] = self.run_node(node)
                    for used in self.user_to_last_uses.get(node, ()):
                        del self.env[used]
        finally:
            self._switches.close()

    def record(self, form: InputForm) -> GraphRecord:
        """What was seen."""
        # what is no tensor is followed, too: it crosses no cut that `hidden` allows
        events = tuple(replace(each, value=False, opaque="") for each in self._builder.events)
        return GraphRecord(
            tuple(self._layers),
            events,
            self._builder.likeness,
            {**dict(self._uses.hidden()), **self._hidden},
            holders(self._model, self._layers, events),
            self._uses.changed,
            self._exported,
            form,
            tuple(self._steps),
            self._loss,
            frozenset(self._written_inputs),
        )

    def run_node(self, n: fx.Node) -> Any:
        """Run a node, and note what it does."""
        if n.op == "output":
            self._note_loss(self.env[n.args[0][0]])  # type: ignore[index]
        if n.op in ("placeholder", "output"):
            return super().run_node(n)
        if n.op == "get_attr":
            raise cannot_export("an operator has a graph of its own")
        if n.target is ENTER:
            self._layer, self._inside = n.args[0], True  # type: ignore[assignment]
        elif n.target is LEAVE:
            self._inside = False
        elif is_mark(n):
            self._switches.run(n)
            self._steps.append(Step(n, EVERYWHERE, {}, {}))
        else:
            return self._run_operator(n)
        return None

    def _run_operator(self, node: fx.Node) -> Any:
        given = {each: self.env[each] for each in node.all_input_nodes}
        given |= self._views_written(node)
        tensors = {each: value for each, value in given.items() if isinstance(value, Tensor)}
        followed = [value for each, value in given.items() if not self._is_kept(each)]
        before = self._builder.before(followed, followed)
        layer = self._layer_of(node, before)
        versions = {each: value._version for each, value in tensors.items()}
        reads = self._keys(tensors)
        output = super().run_node(node)
        self._builder.add(before, _name(node), None, layer, output, [], set())
        written = {each for each, value in tensors.items() if value._version != versions[each]}
        changed = [tensors[each] for each in written | _written_to(node) if each in tensors]
        self._uses.note(self._uses.names(tensors.values()), self._uses.names(changed), layer)
        self._note_written(tensors[each] for each in written)
        self._note_numbers(node, layer, output)
        makes = {key: each for each, key in self._keys(tensors).items() if reads.get(each) != key}
        makes |= dict.fromkeys(self._keys({node: output}).values(), node)
        self._steps.append(Step(node, layer, reads, makes))
        return output

    def _views_written(self, node: fx.Node) -> dict[fx.Node, Tensor]:
        """What lies in the memory that a node writes to, and is read later."""
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable:
            return {}
        places = {
            storage_of(self.env[each])
            for each in node.all_input_nodes
            if isinstance(self.env[each], Tensor)
        }
        return {
            each: value
            for each, value in self.env.items()
            if isinstance(value, Tensor) and storage_of(value) in places
        }

    def _layer_of(self, node: fx.Node, before: Before) -> int:
        """The layer of a node: that which runs, unless every stage does it."""
        if self._inside:
            return self._layer
        if node.target is torch.ops.aten.copy_.default and self._is_kept(node.args[0]):
            # a buffer that the model replaces is written to at the end of the graph
            key = self._builder.key_of(self.env[node.args[1]])  # type: ignore[index]
            return EVERYWHERE if key is None else self._builder.events[key.event].layer
        drawn = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        tied = self._builder.is_tied(before) or any(
            self._no_tensors.get(each, EVERYWHERE) != EVERYWHERE
            or self._uses.is_changed(self.env[each])
            for each in node.all_input_nodes
        )
        return self._layer if tied or drawn else EVERYWHERE

    def _is_kept(self, node: Any) -> bool:
        """Whether a node is a buffer, or another tensor that is there before the forward."""
        source = self._exported.sources.get(node)
        return source is not None and source.kind in ("buffer", "attribute", "literal")

    def _keys(self, tensors: Mapping[fx.Node, Any]) -> dict[fx.Node, Key]:
        keys = {node: self._builder.key_of(value) for node, value in tensors.items()}
        return {node: key for node, key in keys.items() if key is not None}

    def _note_written(self, tensors: Iterable[Tensor]) -> None:
        for place in map(storage_of, tensors):
            if place in self._fixed:
                raise cannot_export(f'the forward writes to "{self._fixed[place]}"')
            if place in self._inputs:
                self._written_inputs.add(self._inputs[place])

    def _note_numbers(self, node: fx.Node, layer: int, output: Any) -> None:
        if not isinstance(output, Tensor):
            self._no_tensors[node] = layer
        for each in node.all_input_nodes:
            maker = self._no_tensors.get(each, EVERYWHERE)
            if maker not in (EVERYWHERE, layer):
                self._hidden[maker, layer] = _NUMBER

    def _note_loss(self, loss: Tensor) -> None:
        key = self._builder.key_of(loss)
        if key is None:
            raise cannot_export("the loss depends on no layer")
        self._loss, last = key, len(self._layers) - 1
        maker = self._builder.events[key.event].layer
        if maker != last:
            self._hidden[max(maker, 0), last] = _LOSS


def _name(node: fx.Node) -> str:
    return getattr(node.target, "_opname", node.name)


def _written_to(node: fx.Node) -> set[fx.Node]:
    """The arguments that a node changes, running statistics among them."""
    schema = getattr(node.target, "_schema", None)
    found = [] if schema is None else written_by(schema, node.args, node.kwargs)
    return {each for each in found if isinstance(each, fx.Node)}
