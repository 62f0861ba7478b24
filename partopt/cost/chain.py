"""The model as a chain of N layers at one microbatch size.

It gives what a range of layers computes, holds and keeps, and what crosses the cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from partopt.cost.microbatch import best_microbatch_size, measurement_at
from partopt.cost.ranges import Group, RangeMax, RangeSum
from partopt.cost.recomputed_blocks import Blocks
from partopt.documents.profile import Profile, Tensor

# N        layers
# b        samples in a microbatch
# f, g     forward and backward seconds of a layer, for one microbatch
# gw       the part of g that the gradients of the weights take; half of g if not measured
# a        bytes that cross a cut, N+1 entries: cut c lies between layers c-1 and c, and
#          a[0] = a[N] = 0
# back     bytes of gradients that cross it back: of the tensors that have one

SIXTEEN_BIT = {"bfloat16", "float16"}


@dataclass(frozen=True, eq=False)
class Chain:
    """The layers of a profile at microbatch size b, as arrays.

    Seconds and bytes are for one microbatch.
    """

    names: list[str]
    microbatch_size: int
    f: NDArray[np.float64]  # shape (N,)
    g: NDArray[np.float64]  # shape (N,)
    gw: NDArray[np.float64]  # shape (N,)
    a: NDArray[np.float64]  # shape (N+1,)
    back: NDArray[np.float64]  # shape (N+1,)
    # tensors that cross a cut, and those of them with a gradient, shape (2, N+1)
    tensors: NDArray[np.float64]
    trained_bytes: RangeSum  # W(i, j): parameters with a gradient
    frozen_bytes: RangeSum  # Z(i, j): parameters without one
    stash_bytes: RangeSum  # stash(i, j)
    # transient(i, j), beside the stash of the whole range: layers free theirs as they are done
    transient_bytes: RangeMax
    # of every layer, what a backward in two parts keeps between them beside the stash, shape (N,)
    parting: NDArray[np.float64]
    layer_bytes: RangeMax  # of all parameters of a layer
    optimizer_s: float = 0.0
    sixteen_bit: bool = False
    # of every layer, the optimizer's step where every backward ends with one, shape (N,)
    stepping: NDArray[np.float64] | None = None
    # where an engine makes blocks again one by one; None where it makes whole stages again
    blocks: Blocks | None = None

    @cached_property
    def compute_prefix(self) -> NDArray[np.float64]:
        """Seconds of the layers before a cut, shape (N+1,).

        `compute_s` is the difference of two entries.
        """
        seconds = self.f + self.g
        if self.stepping is not None:
            seconds = seconds + self.stepping
        return np.concatenate([[0.0], np.cumsum(seconds)])

    @cached_property
    def forward_prefix(self) -> NDArray[np.float64]:
        """Forward seconds of the layers before a cut, shape (N+1,)."""
        return np.concatenate([[0.0], np.cumsum(self.f)])

    def with_steps(self) -> Chain:
        """The chain whose backwards end with the optimizer's step of their parameters.

        It takes a layer's share of the trained bytes, tied ones in the first of their layers.
        """
        before = self.trained_bytes.row(0, self.layers)
        if not self.optimizer_s or not before[-1]:
            return self
        return replace(self, stepping=np.diff(before) / before[-1] * self.optimizer_s)

    def with_blocks(self, bounds: Sequence[int] | None) -> Chain:
        """The chain whose blocks, between `bounds`, are made again one by one; None: all layers."""
        bounds = range(self.layers + 1) if bounds is None else bounds
        blocks = Blocks(bounds, self.f, self.a[:-1], self.stash_bytes, self.transient_bytes)
        return replace(self, blocks=blocks)

    def steps_s(self, i: int, j: int) -> float:
        """Seconds of the steps that end the backwards of layers [i, j)."""
        return 0.0 if self.stepping is None else float(self.stepping[i:j].sum())

    @cached_property
    def _weight_prefix(self) -> NDArray[np.float64]:
        return np.concatenate([[0.0], np.cumsum(self.gw)])

    @cached_property
    def traffic(self) -> NDArray[np.float64]:
        """Bytes that cross a cut one way, the mean of activations and gradients; shape (N+1,).

        A microbatch passes every cut both ways, and a port of both directions carries the mean or
        more in one of them.
        """
        return (self.a + self.back) / 2

    @property
    def layers(self) -> int:
        """N."""
        return len(self.f)

    @property
    def tied(self) -> Sequence[Group]:
        """The parameters with a gradient that several layers use."""
        return self.trained_bytes.groups

    def parameter_bytes(self, i: int, j: int) -> float:
        """Bytes of all parameters of layers [i, j), trained and frozen."""
        return self.trained_bytes(i, j) + self.frozen_bytes(i, j)

    def transient(self, split: bool) -> RangeMax:
        """Bytes of a range beside its stash while its backward runs.

        A backward in two parts frees nothing before the second: `split`, no layer is done with its
        stash while another runs.
        """
        return self.transient_bytes.alone if split else self.transient_bytes

    @cached_property
    def parting_prefix(self) -> NDArray[np.float64]:
        """Bytes that the layers before a cut keep between the parts, shape (N+1,)."""
        return np.concatenate([[0.0], np.cumsum(self.parting)])

    def split_stash(self, i: int, j: int) -> float:
        """Bytes that layers [i, j) keep between the parts of a backward, beside the stash.

        None from the first layer on: that has no gradient to send on, and no first part.
        """
        return float(self.parting_prefix[j] - self.parting_prefix[i]) if i else 0.0

    @property
    def split_stash_table(self) -> NDArray[np.float64]:
        """`split_stash` of every i and j, shape (N+1, N+1); meaningless where j < i."""
        table: NDArray[np.float64] = self.parting_prefix[None, :] - self.parting_prefix[:, None]
        table[0] = 0.0
        return table

    @property
    def again_prefix(self) -> NDArray[np.float64]:
        """Seconds of the layers before a cut that recomputation takes, shape (N+1,)."""
        return self.forward_prefix if self.blocks is None else self.blocks.again_prefix

    def busy_prefix(self, recompute: bool) -> NDArray[np.float64]:
        """`compute_prefix`, with all that is computed again if `recompute`; shape (N+1,)."""
        return self.compute_prefix + self.again_prefix if recompute else self.compute_prefix

    def passing_prefix(self, split: bool, recompute: bool) -> NDArray[np.float64]:
        """Backward seconds of the layers before a cut until their gradient leaves, shape (N+1,).

        Where backwards are `split` the gradients of the weights come later; with `recompute` what
        is computed again comes first.
        """
        prefix = self.compute_prefix - self.forward_prefix
        if split:
            prefix = prefix - self._weight_prefix
        return prefix + self.again_prefix if recompute else prefix

    def gradients_prefix(self, split: bool) -> NDArray[np.float64]:
        """Backward seconds of the layers before a cut in which gradients of weights appear.

        Shape (N+1,). Where backwards are `split` that is the second part alone.
        """
        return self._weight_prefix if split else self.compute_prefix - self.forward_prefix

    def forward_s(self, i: int, j: int) -> float:
        """Forward seconds of layers [i, j)."""
        return float(self.forward_prefix[j] - self.forward_prefix[i])

    def compute_s(self, i: int, j: int, recompute: bool = False) -> float:
        """C(i, j): forward and backward seconds of layers [i, j), and of steps that end these.

        With `recompute` also what is computed again.
        """
        prefix = self.busy_prefix(recompute)
        return float(prefix[j] - prefix[i])


def coarsen(chain: Chain, boundaries: Sequence[int]) -> Chain:
    """The chain whose layers are the ranges between `boundaries`, which run from 0 to N."""
    starts = list(boundaries[:-1])
    return replace(
        chain,
        names=[chain.names[start] for start in starts],
        f=np.add.reduceat(chain.f, starts),
        g=np.add.reduceat(chain.g, starts),
        gw=np.add.reduceat(chain.gw, starts),
        a=chain.a[list(boundaries)],
        back=chain.back[list(boundaries)],
        tensors=chain.tensors[:, list(boundaries)],
        trained_bytes=chain.trained_bytes.over(boundaries),
        frozen_bytes=chain.frozen_bytes.over(boundaries),
        stash_bytes=chain.stash_bytes.over(boundaries),
        transient_bytes=chain.transient_bytes.over(boundaries),
        parting=np.add.reduceat(chain.parting, starts),
        stepping=None if chain.stepping is None else np.add.reduceat(chain.stepping, starts),
        layer_bytes=chain.layer_bytes.over(boundaries),
        blocks=None if chain.blocks is None else chain.blocks.over(boundaries),
    )


def chain_of(profile: Profile, microbatch_size: int | None = None) -> Chain:
    """The chain of `profile` at `microbatch_size`.

    The default is the measured size with the most samples/s on one device.

    Raises PartoptError for a size that was not measured and does not lie between two that were, or
    that ran out of memory.
    """
    size = best_microbatch_size(profile) if microbatch_size is None else microbatch_size
    measurement = measurement_at(profile, size)
    N, outputs = len(profile.layers), enumerate(measurement.layers[:-1])
    tensors = measurement.tensors or [  # of a chain: a layer's output goes to the next
        Tensor(producer=k, consumers=[k + 1], bytes=layer.output_bytes) for k, layer in outputs
    ]
    with_gradient = [tensor for tensor in tensors if tensor.gradient]
    # without a measured stash producers and consumers of a tensor are assumed to keep it
    kept = [Group(group.layers, group.bytes) for group in measurement.stash_groups] or [
        Group([tensor.producer, *tensor.consumers], tensor.bytes) for tensor in tensors
    ]
    stash_bytes = RangeSum(np.zeros(N), kept)
    return Chain(
        names=[layer.name for layer in profile.layers],
        microbatch_size=size,
        f=np.array([layer.forward_s for layer in measurement.layers]),
        g=np.array([layer.backward_s for layer in measurement.layers]),
        gw=np.array(
            [
                layer.backward_s / 2
                if layer.backward_input_s is None
                else layer.backward_s - layer.backward_input_s
                for layer in measurement.layers
            ]
        ),
        a=_crossing(tensors, N),
        back=_crossing(with_gradient, N),
        tensors=np.array([_crossing(some, N, 1) for some in (tensors, with_gradient)]),
        trained_bytes=_parameters(profile, frozen=False),
        frozen_bytes=_parameters(profile, frozen=True),
        stash_bytes=stash_bytes,
        transient_bytes=RangeMax(
            [layer.transient_bytes for layer in measurement.layers], stash_bytes
        ),
        parting=np.array([float(layer.split_stash_bytes) for layer in measurement.layers]),
        layer_bytes=RangeMax([layer.parameter_bytes for layer in profile.layers]),
        optimizer_s=measurement.optimizer_s or 0.0,
        sixteen_bit=profile.dtype in SIXTEEN_BIT,
    )


def _parameters(profile: Profile, frozen: bool) -> RangeSum:
    """Bytes of the parameters that are frozen, or of those that are not."""
    sizes = []
    for layer in profile.layers:
        shared = sum(
            parameter.bytes for parameter in layer.shared_parameters if parameter.frozen == frozen
        )
        trained = layer.parameter_bytes - layer.frozen_bytes
        sizes.append((layer.frozen_bytes if frozen else trained) - shared)
    return RangeSum(sizes, _tied(profile, frozen))


def _tied(profile: Profile, frozen: bool) -> list[Group]:
    """The tied parameters, frozen or not; those of the same layers are one group."""
    layers: dict[str, list[int]] = {}
    size_bytes: dict[str, int] = {}
    for index, layer in enumerate(profile.layers):
        for parameter in layer.shared_parameters:
            if parameter.frozen == frozen:
                layers.setdefault(parameter.name, []).append(index)
                size_bytes.setdefault(parameter.name, parameter.bytes)
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, members in layers.items():
        groups.setdefault(tuple(members), []).append(name)
    return [
        Group(members, sum(size_bytes[name] for name in names), names)
        for members, names in groups.items()
    ]


def _crossing(tensors: list[Tensor], layers: int, counted: int = 0) -> NDArray[np.float64]:
    """a_c: bytes of every tensor produced before cut c and consumed at or after it, once.

    Or its weight, `counted`, instead of its bytes. Shape (N+1,).
    """
    steps = np.zeros(layers + 2)
    for tensor in tensors:
        steps[tensor.producer + 1] += counted or tensor.bytes
        steps[max(tensor.consumers) + 1] -= counted or tensor.bytes
    return np.cumsum(steps)[: layers + 1]
