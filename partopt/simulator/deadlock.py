"""The error of an order whose devices wait for each other."""

from __future__ import annotations

from collections.abc import Sequence

from partopt.errors import PartoptError
from partopt.schedules.order import Order


def deadlock_error(order: Order, reached: Sequence[int]) -> PartoptError:
    """The error of an order that deadlocks; `reached` is the action that each rank has come to."""
    stuck = [rank for rank in range(order.ranks) if reached[rank] < order.rows[rank + 1]]
    first = min(stuck, key=lambda rank: (reached[rank] - order.rows[rank], rank))
    action = order.name(reached[first])
    waiting = ", ".join(
        f"rank {rank} at {order.name(reached[rank])}" for rank in stuck[:4] if rank != first
    )
    others = f"; {waiting} wait too" if waiting else ""
    return PartoptError(
        f"the schedule deadlocks: rank {first} waits at {action} for ever{others}",
        "an action needs its input from an action that comes first in its own rank's row",
        code="deadlock",
        rank=first,
        action=action,
    )
