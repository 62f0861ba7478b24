"""What cannot be run, said before any process starts."""

from __future__ import annotations

import os

import torch

from partopt.documents.plan import Plan
from partopt.errors import PartoptError, did_you_mean
from partopt.runtime.processes import is_under_torchrun
from partopt.runtime.torch_engine import can_say
from partopt.runtime.training import Training, record_training
from partopt.runtime.updates import check_tied, tied_stages
from partopt.schedules import schedule
from partopt.simulator.execution import execute as simulate

ENGINES = ("auto", "torch", "partopt")
ROUNDS = 8  # of an asynchronous plan in a step, times what is in flight


def check_run(plan: Plan, steps: int, microbatches: int | None) -> int:
    """The microbatches of a step, where the plan can run; PartoptError where it cannot."""
    if steps < 1:
        raise refused("steps", steps, "at least 1")
    if plan.topology.group is not None:
        raise PartoptError(
            f"a plan for groups of {plan.topology.group.ranks} ranks: a group is not run yet",
            "plan with a profile of one rank",
            code="cannot-run",
        )
    check_tied(plan, list(tied_stages(plan)))
    if not schedule(plan.schedule).asynchronous:
        assert plan.microbatches is not None
        if microbatches is not None and microbatches != plan.microbatches:
            raise refused("microbatches", microbatches, f"those of the plan: {plan.microbatches}")
        _check_shards(plan, None)
        return plan.microbatches
    passing = microbatches or ROUNDS * plan.noam * plan.stages[0].replicas
    _check_shards(plan, passing)
    return passing


def _check_shards(plan: Plan, microbatches: int | None) -> None:
    """Raise PartoptError where replicas cannot hold the shards that the plan says.

    `microbatches` pass through an asynchronous plan, whose replicas send each other weights after
    every round. Where one would have to be done before another can be, they would wait for ever, as
    in an exchange that blocks.
    """
    shard = plan.shard
    if shard in ("gradients", "parameters"):
        raise PartoptError(
            f"a plan with `shard={shard}` is simulated and exported, and not run: replicas hold "
            f"whole {shard} here",
            "run one with `shard=optimizer`, or export the plan to a trainer",
            code="cannot-run",
        )
    if shard != "none" and microbatches is not None:
        try:
            simulate(plan.with_engine(allreduce="blocking"), microbatches)
        except PartoptError as error:
            raise PartoptError(
                f"{plan.schedule} of {plan.shape} with `shard={shard}`: replicas of a stage would "
                "wait for each other for ever, to get the weights of a round",
                "plan with `shard=none`, or with `schedule=1f1b`",
                code="cannot-run",
            ) from error


def check_data(training: Training) -> None:
    """Refuse data of replicas that do not get the same number of microbatches each."""
    if training.source.data is not None:
        for s, stage in enumerate(training.plan.stages):
            if training.microbatches % stage.replicas:
                raise PartoptError(
                    f"stage {s}: {training.microbatches} microbatches a step are no multiple of "
                    f"its {stage.replicas} replicas, each of which has its own data",
                    "plan for a multiple, or leave data(rank, replicas) out",
                    code="uneven-data",
                )


def choose_engine(name: str, plan: Plan) -> str:
    """The engine: torch's pipeline runtime where it can run the plan, or partopt's own.

    Raises PartoptError for one that is unknown, or cannot run it.
    """
    if name not in ENGINES:
        raise PartoptError(
            f"`engine={name}`: unknown engine",
            did_you_mean(name, ENGINES),
            code="invalid-option",
            option="engine",
        )
    reason = can_say(plan)
    if name == "torch" and reason is not None:
        raise PartoptError(
            f"`engine=torch`: {reason}",
            "`engine=partopt` runs every plan",
            code="torch-cannot-run",
            option="engine",
        )
    return name if name != "auto" else "torch" if reason is None else "partopt"


def check_ranks(ranks: int) -> int:
    """How many of the plan's ranks run on this host; PartoptError for a world of another size."""
    if not is_under_torchrun():
        return ranks
    world = int(os.environ["WORLD_SIZE"])
    if world != ranks:
        raise PartoptError(
            f"the plan has {ranks} ranks, torchrun started {world}",
            f"start {ranks} in all, on all machines together",
            code="other-world-size",
        )
    return int(os.environ.get("LOCAL_WORLD_SIZE", world))


def check_model(training: Training) -> None:
    """Refuse a model that is not the plan's, or cannot be cut so, before any process starts."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # processes are forked, which threads do not survive
    try:
        record_training(training, torch.device("cpu"))
    finally:
        torch.set_num_threads(threads)


def refused(option: str, value: object, allowed: str) -> PartoptError:
    """The error of an option with a value that is not possible."""
    return PartoptError(
        f"`{option}={value}`: not possible", f"give {allowed}", code="invalid-option", option=option
    )
