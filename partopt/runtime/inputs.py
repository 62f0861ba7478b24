"""The model's inputs of each microbatch, the same on every rank that needs them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from partopt.errors import PartoptError
from partopt.profiler.load import ModelSource
from partopt.profiler.random_numbers import RandomNumbers
from partopt.profiler.step import Inputs, place

SPREAD = 1_000_003  # a prime: neighbouring seeds and microbatches draw different numbers


class Microbatches:
    """The inputs of the microbatches of one replica of a stage, by their numbers over all steps.

    A model file's `data(rank, replicas)` gives those of a replica in their order. Without it the
    example inputs are drawn with a seed of the microbatch, so that every rank draws the same.
    """

    def __init__(
        self,
        source: ModelSource,
        replica: tuple[int, int],
        size: int,
        seed: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.source, self.size, self.seed = source, size, seed
        self.device, self.dtype = device, dtype
        self.rank, self.replicas = replica
        self.data: Iterator[Inputs] | None = None
        if source.data is not None:
            self.data = iter(source.replica_data(self.rank, self.replicas))
        self.taken = 0
        self.made: dict[int, Inputs] = {}

    def __call__(self, number: int) -> Inputs:
        """The inputs of microbatch `number`, which is this replica's."""
        if number not in self.made:
            if self.data is None:
                self.made[number] = self.drawn(number)
            else:
                self.made[number] = place(self._next(number), self.device, self.dtype)
        return self.made[number]

    def forget(self) -> None:
        """Drop the inputs of the steps so far."""
        self.made.clear()

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
