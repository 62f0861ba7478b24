"""What a try of a layout is worth, whose time and bytes are computed: how likely it fits."""

from __future__ import annotations

from bisect import bisect_right
from statistics import NormalDist

from partopt.transformer.rates import USABLE

# needed bytes over usable ones, and how many of the published tries with as much went through, in
# steps of 0.05 of which these are the middles: 78 tries of Hagemann et al., bloom and torchtitan
# (benchmarks/published_trainers.py counts them)
_TRIES = ((0.775, 1.0), (0.825, 0.93), (0.925, 0.85), (0.975, 0.75), (1.025, 0.24), (1.075, 0.0))

# of the time, the computed gain of a layout over another against the published one, as a standard
# deviation: of 359 pairs of runs that differ in degrees half are off by more than 0.055
APART = 0.055 / NormalDist().inv_cdf(0.75)


def fits_chance(needed_bytes: float, memory_bytes: float) -> float:
    """How likely so many bytes fit a device with so many in its name; interpolated."""
    share = needed_bytes / (USABLE * memory_bytes)
    place = bisect_right(_TRIES, share, key=lambda known: known[0])
    if place in (0, len(_TRIES)):
        return _TRIES[min(place, len(_TRIES) - 1)][1]
    (low, before), (high, behind) = _TRIES[place - 1 : place + 1]
    return before + (behind - before) * (share - low) / (high - low)


def expected_gain(saved: float, chance: float) -> float:
    """The share of the time that a try saves in the mean, where nothing is lost by one that fails.

    `saved` is the computed share, off by a normal error; it fits by a `chance` (the expected
    improvement of Jones et al., 1998).
    """
    known = NormalDist(saved, APART)
    return chance * (saved * (1 - known.cdf(0.0)) + APART**2 * known.pdf(0.0))
