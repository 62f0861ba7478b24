"""A plan of each kind, of small problems, with the problem that it was made for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import structs

from partopt.cost.problem import Problem, problem_of
from partopt.documents.plan import Plan, RunnerUp
from partopt.search.contest import plan_alone
from partopt.search.effort import SearchParams
from partopt.simulator.prediction import complete_prediction
from tests.helpers import BLOCKING, chain_profile, flat, two_level, uniform_profile, with_memory_of
from tests.search.problems import best_by_schedule

Made = tuple[Plan, Problem]
SYNCHRONOUS = {"schedule": "1f1b", "microbatches": 6}
TIED = {"names": list("abcdef"), "shared": [("weight", [0, 3], 10**5)]}


def manual(**options: Any) -> Made:
    """Six equal layers on four devices, by default as 2-1-1."""
    problem = problem_of(
        options.pop("profile", uniform_profile(6)),
        flat(4, 10e9, memory_bytes=10**9),
        cuts=options.pop("cuts", (2, 4)),
        replicas=options.pop("replicas", (2, 1, 1)),
        **options,
    )
    return plan_alone("manual", problem, SearchParams.at("quick"))[0], problem


def plan_of(name: str, profile: dict[str, Any] | None = None, **options: Any) -> Made:
    """Layers of 1 to 4 ms on two servers of two, all of whose devices every planner uses."""
    chain = chain_profile(
        [1e-3, 4e-3, 2e-3, 1e-3, 3e-3, 1e-3],
        **{
            "output_bytes": [10**6] * 6,
            "parameter_bytes": [10**5] * 6,
            "stash_groups": [((layer,), 10**7) for layer in range(6)],
        }
        | (profile or {}),
    )
    topology = options.pop("topology", two_level(2, 2, memory_bytes=10**9))
    problem = problem_of(chain, topology, **options)
    plan = plan_alone(name, problem, SearchParams.at("quick"))[0]
    return complete_prediction(plan), problem


def grid(**options: Any) -> Made:
    """The best of all schedules for eight layers, or under one that is named."""
    name = options.pop("name", None)
    problem = problem_of(
        uniform_profile(8),
        flat(4, 1e9),
        microbatches=8,
        schedule="1f1b",
        **options,
    )
    plans = best_by_schedule([problem])
    plan = next(plan for plan in plans if name in (None, plan.schedule))
    plan = structs.replace(plan, runners_up=[RunnerUp.of(plans[-1])])
    return plan, problem.with_(schedule=plan.schedule)


KINDS: dict[str, Callable[[], Made]] = {
    "optimal": lambda: plan_of("optimal"),
    "optimal, an iteration": lambda: plan_of(
        "optimal",
        {"output_bytes": [3 * 10**6] * 6},
        topology=flat(4, 1e9, memory_bytes=10**9),
        **SYNCHRONOUS,
    ),
    "optimal, requested": lambda: plan_of(
        "optimal", stages=2, cut_at=[0, 2, 4], replication="uniform", recompute="auto"
    ),
    "optimal, nested": lambda: plan_of(
        "optimal",
        {"output_bytes": [5 * 10**6] * 6, "parameter_bytes": [10**6] * 6},
        **SYNCHRONOUS,
    ),
    "optimal, a deeper warm-up": lambda: plan_of(
        "optimal", {"output_bytes": [10**4] * 6}, engine=BLOCKING
    ),
    "optimal, some recompute": lambda: plan_of(
        "optimal",
        {"output_bytes": [10**4] * 6},
        topology=flat(3, 1e9, memory_bytes=6 * 10**7),
        recompute="auto",
    ),
    "optimal, tied": lambda: plan_of("optimal", TIED, replication="none"),
    "optimal, in shares": lambda: plan_of("optimal", shard="parameters", **SYNCHRONOUS),
    "optimal, equal replicas": lambda: plan_of("optimal", replication="uniform", **SYNCHRONOUS),
    "pipedream": lambda: plan_of("pipedream"),
    "straight": lambda: plan_of("straight", stages=4),
    "data_parallel": lambda: plan_of("data_parallel"),
    "gpipe": lambda: plan_of("gpipe", stages=4, costs=[1.0, 2.0, 3.0, 1.0, 1.0, 1.0]),
    "interleaved": lambda: plan_of("gpipe", schedule="interleaved", microbatches=4, chunks=1),
    "dualpipe": lambda: plan_of("gpipe", schedule="dualpipe", microbatches=8, replication="none"),
    "manual": manual,
    "frozen and transient": lambda: manual(
        profile=with_memory_of(uniform_profile(6), [4 * 10**5] * 6, list(range(1, 7)))
    ),
    "split backwards": lambda: manual(
        profile=with_memory_of(uniform_profile(6), [0] * 6, [0] * 6, split_stash_bytes=10**5),
        cuts=(3,),
        replicas=(2, 2),
        schedule="zb-h1",
        microbatches=8,
    ),
    "a deeper warm-up": lambda: manual(engine=BLOCKING),
    "grid": grid,
    "grid, chunks": lambda: grid(name="interleaved"),
}
