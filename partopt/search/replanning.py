"""A plan made again, from what it records and its profile."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from msgspec import UNSET

from partopt import planners
from partopt.cost.pricing import price
from partopt.cost.problem import (
    CONTIGUOUS,
    NESTED,
    Decision,
    Partition,
    Problem,
    Progress,
    are_consecutive,
    partition_of,
    problem_from_plan,
)
from partopt.documents.plan import Certificate, Plan
from partopt.documents.profile import Profile
from partopt.errors import PartoptError
from partopt.planners import PLANNERS
from partopt.schedules import schedule
from partopt.schedules.placement import STRAIGHT, chunks_of, placement_of
from partopt.search.bound import certify_simulated
from partopt.search.warmup import simulate_at_warmup
from partopt.simulator.execution import check_actions
from partopt.simulator.prediction import complete_prediction
from partopt.transformer.closed_form import modelled_again

# a user's split; the grids of `schedule=auto`, which are not decided by one planner
UNPROVED = ("manual", "grid")


@dataclass(frozen=True, eq=False)
class Recomputation:
    """What a plan was made from, and the plan made again from that and its profile.

    Each is computed when it is first asked for; PartoptError where it cannot be.
    """

    plan: Plan
    profile: Profile
    progress: Progress

    @cached_property
    def problem(self) -> Problem:
        """What the plan was made for."""
        check_layout(self.plan)
        problem = problem_from_plan(self.plan, self.profile)
        return problem.with_(progress=self.progress, transformer=modelled_again(self.plan))

    @cached_property
    def partition(self) -> Partition:
        """The plan's stages."""
        return partition_of(self.plan, self.problem.recompute_per_stage)

    @cached_property
    def simulated(self) -> Plan:
        """The plan's stages, priced and simulated at its warm-ups."""
        priced = price(self.partition, self.problem, self.plan.planner)
        found = simulate_at_warmup(priced, [stage.warmup for stage in self.plan.stages])
        completed = self.plan.predicted.allreduce_ports is not UNSET
        return complete_prediction(found) if completed else found

    @cached_property
    def decision(self) -> Decision:
        """What the planner decides, run again."""
        return planners.decide(self.plan.planner, self.problem)

    @cached_property
    def certificate(self) -> Certificate | None:
        """What is known of the plan's stages, the bound as recorded; None where nothing is.

        Nothing is of a plan that does not fit, whatever planner made it.
        """
        recorded, planner = self.plan.certificate, self.plan.planner
        if planner in UNPROVED or not self.simulated.fits:
            return None
        if planner != "optimal":
            return self.decision.certificate
        lower = recorded.lower_bound_s if recorded else 0.0
        return certify_simulated(self.simulated, lower, self.problem).certificate

    @property
    def objective_s(self) -> float | None:
        """What the planner minimises, of the plan's stages; None where it proves nothing."""
        return self.certificate.objective_s if self.certificate else None


def check_layout(plan: Plan) -> None:
    """Raise PartoptError where the schedule cannot run this layout or is too long to simulate.

    Also where its planner does not plan for the schedule.
    """
    entry = schedule(plan.schedule)
    if plan.planner in PLANNERS and not PLANNERS[plan.planner].plans_for(plan.schedule):
        raise PartoptError(
            f"{plan.planner}: not a planner for {plan.schedule}", code="inconsistent-plan"
        )
    if entry.asynchronous != (plan.microbatches is None):
        raise PartoptError(
            f"{plan.microbatches} microbatches an iteration under {plan.schedule}",
            code="inconsistent-plan",
        )
    in_order = are_consecutive([stage.ranks for stage in plan.stages])
    if plan.family == NESTED and in_order:
        raise PartoptError("nested: all ranks are consecutive", code="inconsistent-plan")
    if plan.family not in ((CONTIGUOUS, NESTED) if entry.shape == STRAIGHT else (entry.shape,)):
        raise PartoptError(
            f"{plan.family}: not a family of plans for {plan.schedule}", code="inconsistent-plan"
        )
    check_actions(plan)
    chunks_of(placement_of(plan, plan.microbatches or 1), entry.shape, entry.uneven)
