"""Factors of a sum of columns whose relative errors are small, whatever single points do."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_ROUNDS = 30
_TUNING = 1.5  # times the median error: from there an error counts linearly
_LEAST = 0.01  # errors below this always count as squares


def fit_factors(columns: Floats, target: Floats, scale: Floats) -> tuple[Floats, float]:
    """Factors >= 0 of `columns`, shape (points, factors), whose sum comes near to `target`.

    Errors are shares of `scale`. Least squares with Huber's weights (Huber, 1964), a few times
    over: a single point far off moves the factors little. Also gives the mean absolute error.
    """
    A, y = columns / scale[:, None], target / scale
    lengths = np.sqrt((A**2).sum(axis=0))  # seconds and seconds a byte differ by many digits
    lengths[lengths == 0] = 1.0
    A = A / lengths
    weights, errors = np.ones(len(y)), np.zeros(len(y))
    factors = np.zeros(A.shape[1])
    for _ in range(_ROUNDS):
        factors = _least_squares(A * weights[:, None] ** 0.5, y * weights**0.5)
        errors = np.abs(A @ factors - y)
        bound = max(_LEAST, _TUNING * float(np.median(errors)))
        weights = np.minimum(1.0, bound / np.maximum(errors, bound))
    return factors / lengths, float(errors.mean())


def _least_squares(A: Floats, y: Floats) -> Floats:
    """The factors >= 0 of least squares: of a few columns, some that are used and others at 0."""
    best, least = np.zeros(A.shape[1]), float(y @ y)
    for count in range(1, A.shape[1] + 1):
        for used in map(list, itertools.combinations(range(A.shape[1]), count)):
            factors = np.linalg.lstsq(A[:, used], y, rcond=None)[0]
            square = float(((A[:, used] @ factors - y) ** 2).sum())
            if (factors >= 0).all() and square < least * (1 - 1e-9):
                best, least = np.zeros(A.shape[1]), square
                best[used] = factors
    return best
