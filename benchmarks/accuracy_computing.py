"""Plans for real models on two ranks: profiled, planned and run by partopt's own code.

Each process has one thread, and there are no more than cores. Profiles are measured alone, and by
as many processes at once as a plan has ranks, which share caches and memory as a run does; how far
the first is from the second is what the sharing costs. Virtual machines are faster in one minute
than in the next: each run is between two of the second, and what is predicted is the mean of both.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import torch
from machine import watch_others

from partopt import TRAINERS, Job, Plan, measure_source, run_source, solve
from partopt.documents.profile import Profile
from partopt.documents.stage import Stage
from partopt.documents.topology import Topology
from partopt.documents.training_run import Run

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
RANKS = 2
STEPS = 12  # one warms up, one counts memory
MICROBATCHES = 8
WITHIN, OWN, MEMORY = 0.08, 0.03, 0.05  # the goals
OTHERS = 0.05  # of the cores: what other programs take from there on is told


class Model(NamedTuple):
    """A model of examples/, its size, and the samples in its microbatch."""

    name: str
    microbatch: int
    arguments: dict[str, int]

    @property
    def source(self) -> Path:
        """Its file."""
        return EXAMPLES / f"{self.name}.py"


MODELS = [
    Model("mlp", 256, {"width": 512, "layers": 12}),
    Model("gpt", 4, {"layers": 6, "width": 128, "heads": 4, "context": 128, "vocabulary": 1000}),
]
STRAIGHT = {"stages": RANKS, "replication": "none"}
REPLICAS = {"cuts": [], "replicas": [RANKS]}
# a schedule, how it lies on the ranks, the engine
CASES: list[tuple[str, dict[str, object], str]] = [
    ("1f1b", STRAIGHT, "partopt"),
    ("1f1b", STRAIGHT, "torch"),
    ("gpipe", STRAIGHT, "partopt"),
    ("gpipe", STRAIGHT, "torch"),
    ("zb-h1", STRAIGHT, "partopt"),
    ("zb-h1", STRAIGHT, "torch"),
    ("interleaved", {"replication": "none", "chunks": 2}, "partopt"),
    ("pipedream", STRAIGHT, "partopt"),
    ("pipedream-2bw", STRAIGHT, "partopt"),
    ("1f1b", REPLICAS, "partopt"),
    ("1f1b", REPLICAS, "torch"),
]


class Found(NamedTuple):
    """A run of a plan, which is priced by the profiles before and behind the run.

    `drift` is how much longer the step was behind it; `others` is the share of the cores that other
    programs took meanwhile.
    """

    run: Run
    priced: tuple[Plan, Plan]
    drift: float
    others: float | None

    @property
    def predicted_s(self) -> float:
        """Seconds of an iteration, or asynchronous of a microbatch."""
        return mean(plan.predicted.iteration_s or plan.predicted.period_s for plan in self.priced)


class Profiles(NamedTuple):
    """A model measured by one process alone, and by all ranks at once."""

    model: Model
    alone: Profile
    together: Profile


def profile(model: Model) -> Profiles:
    """Measure a model both ways, in processes of their own."""
    alone, together = (_measure_at_once(model, ranks) for ranks in (1, RANKS))
    return Profiles(model, alone, together)


def _measure_at_once(model: Model, ranks: int) -> Profile:
    """The profile of the first of so many processes that measure the same."""
    forking = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(ranks, forking) as pool:
        return next(iter(list(pool.map(partial(_measure, model), range(ranks)))))


def _measure(model: Model, _: int) -> Profile:
    return measure_source(
        model.source, arguments=model.arguments, microbatch_sizes=[model.microbatch]
    )


def step_s(profile: Profile) -> float:
    """Seconds of all layers."""
    return sum(each.forward_s + each.backward_s for each in profile.measurements[0].layers)


def runs(measured: Profiles, topology: Topology, quick: bool) -> Iterator[Found]:
    """A run of every plan, on the engine that it is for."""
    torch.set_num_threads(1)  # processes are forked
    model, before = measured.model, measured.together
    for schedule, options, engine in CASES[:2] if quick else CASES:
        asynchronous = schedule.startswith("pipedream")
        if asynchronous and model.name == "gpt":
            continue  # its ties: several stages update one parameter
        microbatches = {} if asynchronous else {"microbatches": MICROBATCHES}
        runs_on = {"trainer": engine, "engine": TRAINERS[engine].engine}
        given = options | microbatches | runs_on
        plan: Plan = solve(Job(before, topology, schedule=schedule, **given)).plan
        others = watch_others()
        run = run_source(plan, model.source, arguments=model.arguments, steps=STEPS, engine=engine)
        assert run is not None
        taken = others()
        after = _measure_at_once(model, RANKS)
        yield Found(
            run.document,
            (plan, _priced_by(after, plan, topology, given)),
            step_s(after) / step_s(before) - 1,
            taken,
        )
        before = after


def _priced_by(profile: Profile, plan: Plan, topology: Topology, given: dict[str, object]) -> Plan:
    """The same stages by another profile."""
    same = {key: value for key, value in given.items() if key not in STRAIGHT}
    same["cuts"] = [stage.start for stage in plan.stages[1:]]
    same["replicas"] = [stage.replicas for stage in plan.stages]
    return solve(Job(profile, topology, schedule=plan.schedule, **same)).plan


def compute_error(found: Found) -> float:
    """How far the profiles are from what the actions of all ranks took, of the latter."""
    run = found.run
    predicted = mean(
        sum(mean(_both_passes_s(plan.stages[s]) for s in rank.stages) for rank in run.ranks)
        for plan in found.priced
    )
    measured = sum(rank.measured.forward_s + rank.measured.backward_s for rank in run.ranks)
    return predicted / measured - 1


def _both_passes_s(stage: Stage) -> float:
    return stage.forward_s + stage.backward_s


def memory_errors(run: Run) -> list[float]:
    """How far predicted peak memory is from what each rank held."""
    return [
        rank.predicted.peak_memory_bytes / rank.measured.peak_memory_bytes - 1
        for rank in run.ranks
        if rank.predicted.peak_memory_bytes and rank.measured.peak_memory_bytes
    ]


def misses(found: Found) -> Iterator[str]:
    """Why a run misses the goals, in words."""
    run, others = found.run, found.others
    error = found.predicted_s / run.measured_s - 1
    own = run.own_times_s / run.measured_s - 1
    compute = compute_error(found)
    if abs(error) > WITHIN:
        longer = "longer" if compute < 0 else "shorter"
        share = abs(1 / (1 + compute) - 1)
        yield f"{error:+.1%}: its actions took {share:.1%} {longer} than they were profiled"
        if abs(found.drift) > WITHIN:
            yield f"a step took {found.drift:+.1%} when it was profiled again behind the run"
        if others is not None and others > OTHERS:
            yield f"other programs took {others:.0%} of the cores"
    if abs(own) > OWN:
        yield f"{own:+.1%} with own times: messages, exchanges or the engine"
    memory = max(memory_errors(run), key=abs, default=0.0)
    if abs(memory) > MEMORY:
        yield f"memory {memory:+.1%}: {_memory_reason(run, memory)}"


def _memory_reason(run: Run, error: float) -> str:
    """What plan and run count differently, as far as that is known."""
    if error > 0:
        return "the plan counts all gradients while activations are at their most"
    if run.plan.shape == str(RANKS):
        return "a bucket is a copy of its gradients, and AdamW takes memory while it steps"
    return "what the engine keeps of messages, and AdamW takes while it steps, is in no plan"
