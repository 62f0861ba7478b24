"""A clock that goes on by what each operation would take on a device that is not there.

    t = max(flops / (peak * efficiency), bytes / bandwidth) + launch

The roofline of Williams, Waterman and Patterson (2009), for each operation of the step.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from partopt.documents.device import TF32, Roofline
from partopt.profiler.dataflow import wraps_tensors
from partopt.profiler.estimating.collectives import Interconnect, is_collective
from partopt.profiler.estimating.work import Work, work_of


class RooflineClock(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the seconds of the operations that run while it is active, most likely on fakes.

    `flops` are by kind of operation, `without_rule_s` the seconds of operations of which only the
    bytes are known. What ranks exchange takes time on the `links` of a group of them, and is done
    before anything else goes on; `exchanged_s` is all of it.
    """

    def __init__(self, device: Roofline, links: Interconnect | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.links = device, links
        self.now_s = Fraction(0)  # exact: layers that are alike take the same, wherever they are
        self.exchanged_s = 0.0
        self.bytes = 0
        self.launches = 0
        self.flops: Counter[str] = Counter()
        self.without_rule_s: defaultdict[str, float] = defaultdict(float)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation, and go on by what it takes."""
        if wraps_tensors(types):
            return NotImplemented
        options = kwargs or {}
        result = func(*args, **options)
        if is_collective(func):
            if self.links is not None:
                seconds = self.links.seconds(func, args, options, result)
                self.now_s += Fraction(seconds)
                self.exchanged_s += seconds
        elif func.namespace != "prim":  # questions to a tensor, not operations
            work = work_of(func, args, options, result)
            if work is not None:
                self._add(str(func.overloadpacket), work)
        return result

    def _add(self, name: str, work: Work) -> None:
        seconds = self.seconds(work)
        self.now_s += Fraction(seconds)
        self.bytes += work.bytes
        self.launches += 1
        self.flops[work.kind] += work.flops
        if not work.has_rule:
            self.without_rule_s[name] += seconds

    def seconds(self, work: Work) -> float:
        """Seconds that an operation takes. PartoptError where the device lacks its format."""
        device, compute_s = self.device, 0.0
        if work.flops:
            peak = device.peaks_flops[self._format(work)]
            compute_s = work.flops / (peak * getattr(device, work.kind))
        memory_s = work.bytes / device.bandwidth_bytes_per_s
        return max(compute_s, memory_s) + device.launch_s

    def _format(self, work: Work) -> str:
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

    def intervals_s(self, stamps: Sequence[Fraction]) -> list[float]:
        """Seconds between stamps."""
        return [float(later - earlier) for earlier, later in itertools.pairwise(stamps)]

    def hold(self, seconds: float) -> None:
        """Do nothing: no time passes but that of operations."""

    def idle_share(self) -> float | None:
        """None: nothing else takes time."""
        return None
