"""What a page begins with: the model, the cluster and the plan."""

from __future__ import annotations

from typing import NamedTuple

from partopt.documents.plan import Plan
from partopt.documents.simulation import SimulationDocument
from partopt.documents.topology import Topology
from partopt.printable import shorten
from partopt.report.table import label_lines
from partopt.report.topology import cluster_lines
from partopt.report.width import stretch
from partopt.units import format_bytes

_SHAPE_WIDTH = 40  # on a page of 80


class Head(NamedTuple):
    """What the head of a page says; `shape` are the replicas of the stages."""

    model: str
    layers: int
    parameter_bytes: int
    microbatch_size: int
    topology: Topology
    planner: str
    stages: int
    shape: str
    schedule: str

    def __str__(self) -> str:
        """The model, the cluster, its groups if any, and the plan in a line each."""
        weights = format_bytes(self.parameter_bytes)
        each = "" if self.topology.group is None else " a rank"
        stages = "stage" if self.stages == 1 else "stages"
        return label_lines(
            [
                (
                    "model",
                    f"{self.model}: {self.layers} layers, {weights} of parameters{each}, "
                    f"microbatch {self.microbatch_size}",
                ),
                *cluster_lines(self.topology),
                (
                    "plan",
                    f"{self.planner}: {self.stages} {stages}, "
                    f"{shorten(self.shape, stretch(_SHAPE_WIDTH))}, schedule {self.schedule}",
                ),
            ]
        )


def head_of_plan(plan: Plan) -> Head:
    """The head of a plan's page."""
    return Head(
        plan.profile.name,
        plan.stages[-1].stop,
        plan.profile.parameter_bytes,
        plan.microbatch_size,
        plan.topology,
        plan.planner,
        len(plan.stages),
        plan.shape,
        plan.schedule,
    )


def head_of_simulation(document: SimulationDocument) -> Head:
    """The head of a simulation's page."""
    return Head(*(getattr(document, name) for name in Head._fields))
