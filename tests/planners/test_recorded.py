"""What every planner decides, and what stages cost: what it was is what it is.

`tests/golden/decisions.jsonl` holds, a line a job, the cuts and ranks of each planner, what it
proves and why it refuses, and what the arrays of costs add up to. Whoever changes one on purpose
runs `pytest tests/planners/test_recorded.py --update`, and says why.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

import partopt as po
from partopt import planners
from partopt.errors import PartoptError
from partopt.planners import PLANNERS, optimal
from partopt.planners.costs import StageCosts
from tests.golden.jobs import JOBS
from tests.golden.records import record_test
from tests.helpers import ROOT

pytestmark = pytest.mark.slow

SHAPES = 12  # of the dynamic program that are recorded


def decisions(name: str) -> dict[str, object]:
    """What the planners decide for a job."""
    profile, topology, options, *_ = JOBS[name]
    problem = po.Job(profile, topology, **options).problem
    found: dict[str, object] = {}
    for planner in PLANNERS:
        if planner == "manual":
            continue
        try:
            decision = planners.decide(planner, problem)
        except PartoptError as error:
            found[planner] = error.message
            continue
        proof, partition = decision.certificate, decision.partition
        found[planner] = {
            "family": partition.family,
            "stages": [
                [own.start, own.stop, own.ranks[0], own.ranks[-1], len(own.ranks), own.recompute]
                for own in partition.stages
            ],
            "proof": proof and [proof.objective_s, proof.lower_bound_s, proof.scope, proof.proof],
            "notes": [note.text for note in decision.notes],
        }
    return found


def costs(name: str) -> dict[str, object]:
    """What the plans of the dynamic program are estimated at, and the stages of the first cost."""
    profile, topology, options, *_ = JOBS[name]
    own = StageCosts(po.Job(profile, topology, **options).problem.coarsen())
    shapes = optimal.plans(own)[:SHAPES]
    rows = [
        [
            [*shape.bounds, *shape.counts, *shape.idle, *shape.recompute],
            *map(finite, (own.slowest_s(shape), own.estimate_s(shape), own.ports_s(shape))),
            [
                [total(seconds), total(room) if least else None, least]
                for seconds, room, least in own.of_shape(shape)
            ],
        ]
        for shape in shapes
    ]
    again = [optimal.recut(own, shape) for shape in shapes]
    waits = [[total(own.wait(k)), total(own.hold(k))] for k in range(len(topology.levels) + 1)]
    rooms = [total(own.room(r, False)) for r in (1, 2, 3)]
    return {
        "shapes": rows,
        "recut": [shape and list(shape.bounds) for shape in again],
        "waits": waits,
        "rooms": rooms,
    }


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def total(table: np.ndarray) -> list[float]:
    """How many entries are finite, and their sum weighed by their places."""
    flat = np.ravel(table)
    (places,) = np.nonzero(np.isfinite(flat) & (flat < 1e8))
    return [len(places), float(flat[places].sum()), float((flat[places] * places).sum())]


def both(name: str) -> dict[str, object]:
    overlaps = JOBS[name][2].get("schedule") not in ("gpipe", "naive")
    return {"decisions": decisions(name)} | ({"costs": costs(name)} if overlaps else {})


test_planners_decide_what_they_decided = record_test(
    ROOT / "tests/golden/decisions.jsonl", JOBS, both
)
