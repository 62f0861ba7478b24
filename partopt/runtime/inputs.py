"""The model's inputs of each microbatch, the same on every rank that needs them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from partopt.errors import PartoptError
from partopt.profiler.source import ModelSource
from partopt.profiler.tensors import Inputs, place
from partopt.profiler.weightless import RandomNumbers

SPREAD = 1_000_003  # a prime: neighbouring seeds and microbatches draw different numbers


class Microbatches:
    """The inputs of the microbatches of one replica of a stage, by their numbers over all steps.

    A model file's `data(rank, replicas)` gives those of a replica in their order. Without it the
    example inputs are drawn with a seed of the microbatch, so that every rank draws the same. They
    are kept for as many `uses`, or for good.
    """

    def __init__(
        self,
        source: ModelSource,
        replica: tuple[int, int],
        size: int,
        seed: int,
        device: torch.device,
        dtype: torch.dtype,
        uses: float = math.inf,
    ) -> None:
        self.source, self.size, self.seed = source, size, seed
        self.device, self.dtype = device, dtype
        self.rank, self.replicas = replica
        self.data: Iterator[Inputs] | None = None
        if source.data is not None:
            self.data = iter(source.replica_data(self.rank, self.replicas))
        self.taken = 0
        self.uses = uses
        self.made: dict[int, tuple[Inputs, float]] = {}  # with the uses that are left

    def __call__(self, number: int) -> Inputs:
        """The inputs of microbatch `number`, which is this replica's."""
        if number not in self.made:
            self.made[number] = self._make(number), self.uses
        inputs, left = self.made.pop(number)
        if left > 1:
            self.made[number] = inputs, left - 1
        return inputs

    def _make(self, number: int) -> Inputs:
        if self.data is None:
            return self.drawn(number)
        return place(self._next(number), self.device, self.dtype)

    def skip(self, microbatches: int) -> None:
        """Pass over what earlier runs have trained on: so many microbatches of all replicas."""
        if self.data is not None:
            for number in range(self.rank, microbatches, self.replicas):
                self._next(number)

    def _next(self, number: int) -> Inputs:
        assert self.data is not None
        try:
            for inputs in self.data:
                self.taken += 1
                if self.taken * self.replicas > number:
                    return inputs
        except Exception as error:
            raise PartoptError(
                f"{self.source.place}: data({self.rank}, {self.replicas}) failed at microbatch "
                f"{number}: {type(error).__name__}: {error}",
                "it yields the inputs of one microbatch after the other",
                code="model-code-failed",
            ) from error
        raise PartoptError(
            f"{self.source.place}: data({self.rank}, {self.replicas}) ended after {self.taken} "
            f"microbatches, before number {number}",
            "run fewer steps, or let it begin again",
            code="too-little-data",
        )

    def drawn(self, number: int) -> Inputs:
        """Example inputs, drawn with the seed of microbatch `number`."""
        before = RandomNumbers()
        RandomNumbers.seed(self.seed * SPREAD + number)
        try:
            return place(self.source.example_inputs(self.size), self.device, self.dtype)
        finally:
            before.restore()
