"""Running a stage of an exported model: the nodes of its layers, as a graph of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx, nn
from torch.nn.modules.dropout import _DropoutNd

from partopt.profiler.step import Inputs
from partopt.runtime.crossings import Cut
from partopt.runtime.events import EVERYWHERE, Key
from partopt.runtime.exporting import MODEL, Source
from partopt.runtime.graph_record import GraphRecord, Step
from partopt.runtime.marks import Switches, is_mark, mark_of

# What a placeholder of the stage's graph stands for: a source, a tensor received, or the model's
# module whose probability of dropout counts
Given = Source | Key | nn.Module


class GraphForward:
    """The forward of layers [start, stop) of an exported model."""

    def __init__(
        self, model: nn.Module, record: GraphRecord, start: int, stop: int, sends: Cut
    ) -> None:
        self._record = record
        self._ends_model = stop == len(record.layers)
        own = range(start, stop)
        part = _Part(model, record, own)
        made = [key for key in sends.keys if record.made_by(key) in own]
        self._keys = [record.loss] if self._ends_model else made
        self._module = part.module(self._keys)
        self._sources = [self._source(model, given) for given in part.given]

    def run(
        self, inputs: Inputs, received: Mapping[Key, Tensor]
    ) -> tuple[dict[Key, Tensor], Tensor | None]:
        """The results that leave the stage, of those that it makes; of the last stage the loss.

        Raises PartoptError for inputs of another form than those that were exported.
        """
        tensors = self._record.form.tensors(inputs)
        switches = Switches()
        try:
            results = self._module(
                switches, *(source(tensors, received) for source in self._sources)
            )
        finally:
            switches.close()
        if self._ends_model:
            return {}, results[0]
        return dict(zip(self._keys, results, strict=True)), None

    def _source(
        self, model: nn.Module, given: Given
    ) -> Callable[[Sequence[Tensor], Mapping[Key, Tensor]], Any]:
        """How a placeholder's value is found, given the tensors of inputs and those received."""
        if isinstance(given, nn.Module):
            return lambda _tensors, _received: given.p
        if isinstance(given, Key):
            return lambda _tensors, received: received[given]
        if given.kind == "input":
            number = int(given.name)
            copies = number in self._record.written_inputs
            return lambda tensors, _: tensors[number].clone() if copies else tensors[number]
        if given.kind == "literal":
            constant = self._record.exported.constants[given.name]
            return lambda _tensors, _received: constant
        holder, _, name = given.name.rpartition(".")
        module = model.get_submodule(holder)
        slots: dict[str, Any] = vars(module)
        if given.kind != "attribute":
            slots = module._parameters if given.kind == "parameter" else module._buffers
        # looked up each time: another version of a weight may be in its place
        return lambda _tensors, _received: slots[name]


class _Part:
    """The graph of some layers, as it is copied from that of the model."""

    def __init__(self, model: nn.Module, record: GraphRecord, own: range) -> None:
        self._model, self._record = model, record
        self.given: list[Given] = []
        self.values: dict[Key, fx.Node] = {}
        self._nodes: dict[fx.Node, fx.Node] = {}  # by that which is copied
        self._placeholders: dict[Given, fx.Node] = {}
        self._graph = fx.Graph()
        self._switches = self._graph.placeholder("switches")
        self._last = self._switches
        for step in record.steps:
            if step.layer == EVERYWHERE or step.layer in own:
                self._copy(step)

    def module(self, results: Sequence[Key]) -> fx.GraphModule:
        """The graph as a module, which takes what is `given` behind the switches."""
        self._graph.output(tuple(self.values[key] for key in results))
        self._graph.eliminate_dead_code(lambda node: node.is_impure() or node.op == "call_method")
        return fx.GraphModule(self._record.exported.module, self._graph)

    def _copy(self, step: Step) -> None:
        node = step.node
        if is_mark(node):
            self._graph.call_method(mark_of(node), (self._switches, *node.args))
            return
        copied = self._graph.node_copy(node, lambda each: self._value(each, step.reads))
        self._nodes[node] = copied
        self._let_module_drop(copied)
        for key, each in step.makes.items():
            self.values[key] = copied if each is node else self._value(each, step.reads)

    def _value(self, node: fx.Node, reads: Mapping[fx.Node, Key]) -> fx.Node:
        """What stands in this graph for an argument."""
        key = reads.get(node)
        if key is not None:
            if key not in self.values:
                self.values[key] = self._placeholder(key)
            return self.values[key]
        if node in self._nodes:
            return self._nodes[node]
        source = self._record.exported.sources.get(node)
        assert source is not None
        return self._placeholder(source)

    def _placeholder(self, given: Given) -> fx.Node:
        if given not in self._placeholders:
            with self._graph.inserting_after(self._last):
                self._last = self._graph.placeholder(f"given_{len(self.given)}")
            self.given.append(given)
            self._placeholders[given] = self._last
        return self._placeholders[given]

    def _let_module_drop(self, copied: fx.Node) -> None:
        """Have the module of a dropout say each time how much it drops, as its forward does."""
        stack = copied.meta.get("nn_module_stack") or {}
        path = next((name for name, _ in reversed(stack.values())), "")
        module = _find(self._model, path.removeprefix(MODEL))
        if isinstance(module, _DropoutNd) and "dropout" in str(copied.target):
            copied.update_arg(1, self._placeholder(module))


def _find(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None
