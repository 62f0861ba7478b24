"""Something that a simulation points at."""

from __future__ import annotations

from typing import Literal

from partopt import documents


class Finding(documents.Part, frozen=True, kw_only=True):
    """Something to point at.

    `value`, in `unit`, is the number on which it rests; `change` is what to do about it.

    With a `fault` the plan cannot run, a `loss` costs time, a `risk` may cost some that is not
    simulated.
    """

    kind: str
    severity: Literal["fault", "loss", "risk"]
    value: float
    unit: str
    text: str
    change: str
