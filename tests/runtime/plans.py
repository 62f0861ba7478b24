"""Plans of every schedule for 1 to 4 ranks, a layer a stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from partopt.documents.plan import Plan
from partopt.schedules import SCHEDULES
from partopt.schedules.placement import LOOPED, MIRRORED, STRAIGHT
from tests.helpers import flat
from tests.simulator.plans import chunked, plan_of

NETWORK = flat(16, 1e9)


def straight(name: str, replicas: Sequence[int], microbatches: int, **options: Any) -> Plan:
    """Stages with these replicas; asynchronous where the schedule is."""
    M = None if SCHEDULES[name].asynchronous else microbatches
    return plan_of(
        replicas, schedule=name, microbatches=M, **{"topology": flat(sum(replicas), 1e9)} | options
    )


def looped(name: str, P: int, v: int, microbatches: int, d: int = 1, **options: Any) -> Plan:
    """Several stages on each of P devices, d pipelines side by side."""
    made = chunked(name, P, v, microbatches, d, **{"topology": NETWORK} | options)
    return replace(made, topology=flat(P * d, 1e9), family=family_of(name))


def family_of(name: str) -> str:
    return "mirrored" if SCHEDULES[name].shape == MIRRORED else "chunked"


def all_plans(ranks: int) -> list[tuple[str, Plan, int | None]]:
    """A plan of every schedule on `ranks` devices, with a name, and its microbatches where it is
    asynchronous.
    """
    found = []
    for name, entry in SCHEDULES.items():
        M = 2 * ranks + 2 if entry.shape in (STRAIGHT, MIRRORED) else 4 * ranks
        if entry.shape == STRAIGHT:
            plan = straight(name, [1] * ranks, M)
        else:
            chunks = 1 if entry.shape == MIRRORED else 2
            plan = looped(name, ranks, chunks if entry.shape == MIRRORED else 2, M)
        found.append((name, plan, M if entry.asynchronous else None))
        if entry.shape == LOOPED and ranks == 2:
            found.append((f"{name}-3", looped(name, 2, 3, 4), None))
            found.append((f"{name}-2x2", looped(name, 2, 2, 4, d=2), None))
    return found
