"""A heap for compiled code: what is least first."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt.cost.compiled import compiled


class Heap(NamedTuple):
    """Entries by time, then by number."""

    time: NDArray[np.float64]
    number: NDArray[np.int64]
    size: NDArray[np.int64]  # entries in it, shape (1,)


def heap_of(most: int) -> Heap:
    """An empty heap with room for so many entries."""
    return Heap(np.zeros(most), np.zeros(most, dtype=np.int64), np.zeros(1, dtype=np.int64))


@compiled(inline="always")
def push(heap, time, number):  # type: ignore[no-untyped-def]
    """Put an entry into the heap."""
    child = heap.size[0]
    heap.size[0] += 1
    while child > 0:
        parent = (child - 1) // 2
        if (heap.time[parent], heap.number[parent]) <= (time, number):
            break
        heap.time[child], heap.number[child] = heap.time[parent], heap.number[parent]
        child = parent
    heap.time[child], heap.number[child] = time, number


@compiled(inline="always")
def pop(heap):  # type: ignore[no-untyped-def]
    """Take the first entry out of the heap: its time and its number."""
    first = heap.time[0], heap.number[0]
    heap.size[0] -= 1
    count = heap.size[0]
    time, number = heap.time[count], heap.number[count]
    place = 0
    while True:
        child = 2 * place + 1
        if child >= count:
            break
        if child + 1 < count and (heap.time[child + 1], heap.number[child + 1]) < (
            heap.time[child],
            heap.number[child],
        ):
            child += 1
        if (time, number) <= (heap.time[child], heap.number[child]):
            break
        heap.time[place], heap.number[place] = heap.time[child], heap.number[child]
        place = child
    heap.time[place], heap.number[place] = time, number
    return first
