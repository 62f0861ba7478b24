"""What a unit reads that it was not given: parameters, and tensors hidden in objects."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from partopt.profiler.operations import Operation, StorageMap, Watch, storages_in
from partopt.profiler.tensors import Inputs, local_tensors
from partopt.runtime.events import IN_AN_OBJECT


class UnitReads(Watch):
    """Knows which layer made which storage, and sees what is read while a unit runs.

    A stage follows tensors by the arguments of calls. What a unit reads beside them, because an
    earlier one left it in an object, no other stage could be sent: `hidden` are pairs of the layer
    that made such a tensor and the one that read it, and how.
    """

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        super().__init__()
        self.hidden: dict[tuple[int, int], str] = {}
        self._makers = StorageMap()
        self._constants = StorageMap()
        self._layer = 0
        self._given: set[int] = set()
        self._touched: set[str] = set()
        for tensor in [*model.buffers(), *local_tensors(inputs)]:
            self._note_constant(tensor, "")
        for name, parameter in model.named_parameters():
            self._note_constant(parameter, name)

    def _note_constant(self, tensor: Tensor, name: str) -> None:
        for part in storages_in(tensor):
            names: tuple[str, ...] = self._constants.get(part) or ()
            self._constants.set(part, (*names, name) if name else names or ("",))

    def maker(self, tensor: Tensor) -> int | None:
        """The layer that made the storage of `tensor`; None where none did."""
        found = [self._makers.get(part) for part in storages_in(tensor)]
        return next((layer for layer in found if layer is not None), None)

    def note_made(self, tensors: Sequence[Tensor], layer: int) -> None:
        """Note that `layer` made these, unless their storages are known."""
        for tensor in storages_in(tensors):
            if self._constants.get(tensor) is None and self._makers.get(tensor) is None:
                self._makers.set(tensor, layer)

    @contextlib.contextmanager
    def of(self, layer: int, given: Sequence[Tensor]) -> Iterator[set[str]]:
        """Watch a unit; it gives the names of the parameters that the unit turns out to read."""
        self._layer, self._touched = layer, set()
        self._given = {part.untyped_storage()._cdata for part in storages_in(given)}
        with self:
            yield self._touched

    def before(self, call: Operation) -> None:
        """Note what the operation reads."""
        for tensor in call.read:
            self._note_read(tensor)

    def after(self, call: Operation) -> None:
        """Note what it made."""
        self.note_made(list(storages_in(call.result)), self._layer)

    def _note_read(self, tensor: Tensor) -> None:
        names = self._constants.get(tensor)
        if names is not None:
            self._touched.update(name for name in names if name)
            return
        maker = self._makers.get(tensor)
        given = tensor.untyped_storage()._cdata in self._given
        if maker is not None and maker != self._layer and not given:
            self.hidden[maker, self._layer] = IN_AN_OBJECT
