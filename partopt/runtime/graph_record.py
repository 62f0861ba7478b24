"""One forward of a model as a graph of torch.export, as stages see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx

from partopt.runtime.events import Key, Record
from partopt.runtime.exporting import Exported
from partopt.runtime.input_form import InputForm


class Step(NamedTuple):
    """A node of the graph, and its layer.

    `reads` are the results among its arguments, by the nodes that stand for them; `makes` are the
    nodes that stand for its own results, which are itself and arguments that it wrote to.
    """

    node: fx.Node
    layer: int
    reads: Mapping[fx.Node, Key]
    makes: Mapping[Key, fx.Node]


@dataclass(frozen=True)
class GraphRecord(Record):
    """One forward with its loss, whose events are the `steps` of a graph.

    `loss` is its result; `written_inputs` are the tensors of the inputs that it writes to, by their
    numbers.
    """

    exported: Exported
    form: InputForm
    steps: Sequence[Step]
    loss: Key
    written_inputs: frozenset[int]
