"""The most bytes of tensors that a rank holds at once on a CPU, counted in one step of a run.

On CUDA the allocator counts them. Here a dispatch mode sees every storage that an operation makes
or reads, and when it is freed. Temporaries within one kernel and what torch.distributed keeps for
itself are not seen. What is computed stays the same; how long it takes does not, so that the step
is not timed.
"""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor

from partopt.profiler.as_trained import unwrap_compiled
from partopt.profiler.operations import Operation, StorageMap, Watch, storages_in
from partopt.profiler.tensors import tensors_in
from partopt.runtime.training import RankTraining

COUNTED = 1  # the step: all state of optimizers is there from the second one on
FEWEST = 4  # steps of a run, of which others are left to time


def counted_step(pipeline: RankTraining, steps: int) -> int | None:
    """The step of a run in which to count; None on CUDA, in a short run, and for compiled modules.

    Those would run as they are not compiled, and round otherwise.
    """
    compiled = any(
        unwrap_compiled(module) is not module or module._compiled_call_impl is not None
        for stage in pipeline.stages.values()
        for module in stage.model.modules()
    )
    counts = pipeline.context.device.type == "cpu" and steps >= FEWEST and not compiled
    return COUNTED if counts else None


class TensorMemory(Watch):
    """While it is active, `peak_bytes` is the most that lived at once, `held` among it."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._lock = threading.RLock()  # what was sent is freed by another thread
        self._known = StorageMap(self._free)
        self._note(held)

    def before(self, call: Operation) -> None:
        """Note what the operation reads."""
        self._note([call.arguments, call.options])

    def after(self, call: Operation) -> None:
        """Note what it made."""
        self._note(call.result)

    def _note(self, value: Any) -> None:
        for tensor in storages_in(value):
            if not tensor.is_meta and self._known.get(tensor) is None:
                size_bytes = tensor.untyped_storage().nbytes()
                self._known.set(tensor, size_bytes)
                self._add(size_bytes)

    def _free(self, size_bytes: int) -> None:
        self._add(-size_bytes)

    def _add(self, size_bytes: int) -> None:
        with self._lock:
            self.live_bytes += size_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)


def held_by(pipeline: RankTraining) -> list[Tensor]:
    """The tensors that a rank holds between steps; parameters of other stages have no memory."""
    models = [stage.model for stage in pipeline.stages.values()]
    held: list[Tensor] = [parameter for model in models for parameter in model.parameters()]
    held += [buffer for model in models for buffer in model.buffers()]
    held += [tensor.grad for tensor in held if tensor.grad is not None]
    states = [
        state for optimizer in pipeline.optimizers.values() for state in optimizer.state.values()
    ]
    return held + [tensor for state in states for tensor in tensors_in(state)]
