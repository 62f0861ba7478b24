"""The error budget of the optimal planner.

Every tolerance, which error it covers, and why it is enough.

Costs are sums of double-precision numbers, each rounded to `EPSILON`. A probe and the formulas that
price a plan add up the same costs in another order, so a plan that just meets a bound for one may
just miss it for the other. Three rules keep that from being visible.

1. *Pruning is loose, decisions are strict.* A tolerance that leaves something out (`DEVICE`,
   `BYTES`, `PACE`) only ever keeps too much: what is kept is then held to the exact condition.
   However many of them are met on one path, each costs time and none changes an answer.
2. *What a plan takes is always priced by the formulas*, never by the bound that it was found with:
   errors of the probe do not reach the objective.
3. *Bounds are never asked for closer than `SUM`.* The search ends `2 * SUM` below the best plan,
   and the floors that it begins with lie `SUM` too low. These are all that stand between the lower
   bound and the objective, less than 1e-11 together, and `OPTIMAL` is ten times that.

So the largest error of a certificate is `OPTIMAL`, a ten-billionth: a tenth of a nanosecond in a
second. Measured times have four or five digits.
"""

from __future__ import annotations

from typing import Final

EPSILON: Final = 1e-15
"""Relative: one rounding of a product or a sum, 2.2e-16, four times over.

A bound is enlarged by it once and compared once, as `a + M b <= T` with `M b <= T - a`.
"""

SUM: Final = 1e-12
"""Relative: the same costs added up in two orders.

Prefix sums of N terms differ from the sum by at most N roundings of 1.1e-16, on average by their
square root: 1e-12 covers 9,000 roundings that all go one way, and chains of 10^8 layers otherwise.
"""

PACE: Final = 1e-12
"""Relative: of the quotient from which the fewest replicas that are in time are counted.

One division and one rounding to a whole number; `C / r > T` is tested again afterwards. Within an
iteration it admits a stage that exceeds it by at most as much, which is `SUM`.
"""

OPTIMAL: Final = 1e-10
"""Relative: how near to its lower bound a plan is called optimal; see rule 3."""

DEVICE: Final = 1e-6
"""Devices: by how much a bound on devices is loosened before it is rounded to a whole number.

Devices are counted as sums of C / T over layers. Up to 10^6 devices and 10^4 layers the sum is off
by 1e-16 * 10^4 * 10^6 = 1e-6 at the very worst. As no count lies between, nothing else is let in.
"""

ROUNDED_BYTES: Final = 2.0
"""Bytes: the terms of a stage's memory that grow with the microbatches in flight, each rounded to
whole bytes: three of them, half a byte each; the exact sum is tested afterwards."""

FITS_BYTES: Final = 8.0
"""Bytes: all five terms of a stage's memory rounded, and 1e-16 of 10^15 bytes for their sums."""

MET: Final = 1e-6
"""Relative: how near to its lower bound a simulated plan is called optimal.

The simulator adds up the actions of a run, one after the other, and a bound the layers of a stage.
"""

TINY: Final = 1e-300
"""In place of a zero to divide by, where the quotient is then bounded by something else."""
