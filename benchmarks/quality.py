"""How good plans are: random problems, planned, and attacked by an independent hill climb.

    python benchmarks/quality.py [--problems N] [--seconds S] [--seed N] [--effort E]

The climb knows nothing of planners: it moves cuts and replicas at random, from the chosen plan and
from random splits in turn, and prices and simulates each. It has S seconds a problem. `improved` is
how many plans it makes faster by more than 1 and 5 %, `gap` how far chosen plans are above the
bound of their certificates.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from machine import describe

import partopt as po
from partopt.cost.pricing import price
from partopt.cost.problem import CONTIGUOUS, Partition, Problem, consecutive
from partopt.documents.plan import Plan
from partopt.documents.profile import (
    Device,
    Layer,
    LayerMeasurement,
    Measurement,
    Model,
    Profile,
    SharedParameter,
    Tensor,
)
from partopt.documents.topology import Device as ClusterDevice
from partopt.documents.topology import Level, Topology
from partopt.errors import PartoptError
from partopt.schedules import schedule
from partopt.search.warmup import simulate_with_best_warmup
from partopt.simulator import simulate_plan

SCHEDULES = ("pipedream", "pipedream-2bw", "1f1b", "1f1b-eager", "gpipe", "zb-h1")
LINKS = {"fast": 100e9, "slow": 2e9, "bus": 10e9}  # bytes/s
NEAR = 1.2  # times the chosen period: a split this good is tried at its best warm-up

Split = tuple[tuple[int, ...], tuple[int, ...]]  # where stages but the first begin; replicas


@dataclass(frozen=True)
class Outcome:
    """A problem, and what came of it; `improved` is the share that the climb gained."""

    kinds: tuple[str, ...]
    improved: float
    gap: float
    seconds: float


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--problems", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--effort", default="normal")
    parser.add_argument("--verbose", action="store_true", help="a line for each problem too")
    given = parser.parse_args()
    print(describe())
    outcomes = []
    for number in range(given.problems):
        random = np.random.default_rng((given.seed, number))
        job, kinds = draw(random, SCHEDULES[number % len(SCHEDULES)], given.effort)
        outcome = attack(job, kinds, random, given.seconds, given.verbose and number)
        outcomes += [outcome] if outcome is not None else []
    _print(outcomes, given.problems)


def draw(random: np.random.Generator, name: str, effort: str) -> tuple[po.Job, tuple[str, ...]]:
    """A problem under a schedule, and the words for its kind."""
    layers, devices = int(random.integers(6, 41)), int(random.integers(4, 17))
    link = str(random.choice(list(LINKS)))
    servers = 2 if devices % 2 == 0 and random.random() < 0.5 else 1
    latency = float(random.choice([0.0, 5e-6, 50e-6]))
    levels = [
        Level(
            name="server",
            size=devices // servers,
            bandwidth_bytes_per_s=LINKS[link],
            latency_s=latency,
            bus=link == "bus",
        ),
        Level(
            name="cluster", size=servers, bandwidth_bytes_per_s=LINKS[link] / 8, latency_s=latency
        ),
    ]
    topology = Topology(name="drawn", device=ClusterDevice(name="device"), levels=levels)
    if servers == 1:
        topology = Topology(name="drawn", device=topology.device, levels=levels[:1])
    equal = bool(random.random() < 0.4)
    profile = _profile(random, layers, equal)
    synchronous = not schedule(name).asynchronous
    limited = bool(random.random() < 0.4)
    job = po.Job(
        profile,
        topology,
        schedule=name,
        microbatches=int(random.choice([8, 16, 32])) if synchronous else None,
        memory=_memory(random, profile) if limited else None,
        effort=effort,  # type: ignore[arg-type]
    )
    kinds = (
        name,
        f"{link} links",
        f"{servers} level{'s' * (servers > 1)}",
        "equal blocks" if equal else "lognormal",
        "memory limit" if limited else "no memory limit",
    )
    return job, kinds


def _profile(random: np.random.Generator, layers: int, equal: bool) -> Profile:
    """Layers that are blocks, equal but the first and the last, or of any times."""
    spread = np.ones(layers) if equal else random.lognormal(0, 0.7, layers)
    if equal:
        spread[[0, -1]] = random.lognormal(0, 1.0, 2)
    forward = spread * 1e-3
    outputs = (np.ones(layers) if equal else random.lognormal(0, 1.0, layers)) * float(
        random.choice([2e5, 2e6, 1e7])
    )
    weights = (np.ones(layers) if equal else random.lognormal(0, 1.0, layers)) * float(
        random.choice([1e5, 1e6, 1e7])
    )
    shared = int(weights.min()) if random.random() < 0.25 else 0
    tensors = [
        Tensor(producer=layer, consumers=[layer + 1], bytes=int(outputs[layer]))
        for layer in range(layers - 1)
    ]
    if random.random() < 0.25:
        start = int(random.integers(0, layers - 3))
        stop = int(random.integers(start + 2, layers))
        tensors.append(Tensor(producer=start, consumers=[stop], bytes=int(outputs[start])))
    tied = [SharedParameter(name="tied", bytes=shared)]
    return Profile(
        model=Model(name="drawn"),
        device=Device(name="none"),
        dtype="float32",
        layers=[
            Layer(
                name=f"layer{layer}",
                type="Layer",
                parameter_bytes=int(weights[layer]),
                shared_parameters=tied if shared and layer in (0, layers - 1) else [],
            )
            for layer in range(layers)
        ],
        measurements=[
            Measurement(
                microbatch_size=1,
                layers=[
                    LayerMeasurement(
                        forward_s=float(f), backward_s=float(2 * f), output_bytes=int(a)
                    )
                    for f, a in zip(forward, outputs, strict=True)
                ],
                tensors=tensors,
            )
        ],
    )


def _memory(random: np.random.Generator, profile: Profile) -> int:
    """A limit: a share of what the whole model takes with one microbatch in flight."""
    weights = sum(layer.parameter_bytes for layer in profile.layers)
    (measured,) = profile.measured()
    stash = sum(tensor.bytes for tensor in measured.tensors)
    return int((4 * weights + stash) * random.uniform(0.3, 1.2))


def attack(
    job: po.Job,
    kinds: tuple[str, ...],
    random: np.random.Generator,
    seconds: float,
    number: int | bool,
) -> Outcome | None:
    """What the climb makes of the plan for a job; None where no plan fits."""
    began = time.perf_counter()
    try:
        result = po.solve(job)
    except PartoptError:
        return None
    took_s = time.perf_counter() - began
    plan = result.plan
    if not plan.fits:
        return None
    climb = Climb(job.problem, plan.predicted.period_s, random)
    split, best_s = climb.run(_split_of(plan), time.perf_counter() + seconds)
    improved = 1 - best_s / plan.predicted.period_s
    lower_s = (
        result.certificate.lower_bound_s / (plan.microbatches or 1) if result.certificate else 0
    )
    gap = plan.predicted.period_s / lower_s - 1 if lower_s else math.nan
    if number is not False:
        print(
            f"{number:4} {', '.join(kinds)}: {len(job.profile.layers)} layers, "
            f"{job.topology.devices} devices, {plan.shape}: {100 * improved:.2f} % by {split}, "
            f"gap {100 * gap:.1f} %, {took_s:.2f} s, {climb.judged} judged",
            flush=True,
        )
    return Outcome(kinds, max(0.0, improved), gap, took_s)


def _split_of(plan: Plan) -> Split:
    return tuple(stage.start for stage in plan.stages[1:]), tuple(
        stage.replicas for stage in plan.stages
    )


class Climb:
    """A hill climb over splits of a problem, from the chosen plan and from random ones."""

    def __init__(self, problem: Problem, chosen_s: float, random: np.random.Generator) -> None:
        self.problem, self.chosen_s, self.random = problem, chosen_s, random
        self.alike = not schedule(problem.schedule).uneven
        self.best: tuple[Split, float] | None = None
        self.judged = 0

    def run(self, chosen: Split, until: float) -> tuple[Split, float]:
        """The best split that is found by then, and its period."""
        self.best = chosen, self.chosen_s
        turn = 0
        while time.perf_counter() < until:
            split = chosen if turn % 2 == 0 else self._any()
            turn += 1
            value, in_vain = self._period_s(split), 0
            while in_vain < 150 and time.perf_counter() < until:
                other = self._near(split)
                found = self._period_s(other)
                in_vain += 1
                if found < value:
                    split, value, in_vain = other, found, 0
        return self.best

    def _period_s(self, split: Split) -> float:
        """Simulated seconds per microbatch, infinite where the split cannot be or does not fit."""
        cuts, replicas = split
        bounds = [0, *cuts, self.problem.chain.layers]
        if sorted(set(bounds)) != bounds or min(replicas) < 1:
            return math.inf
        if sum(replicas) > self.problem.topology.devices:
            return math.inf
        self.judged += 1
        plan = price(Partition(CONTIGUOUS, consecutive(bounds, replicas)), self.problem, "manual")
        try:
            found = simulate_plan(plan)
            if not found.fits:
                return math.inf
            if found.predicted.period_s < NEAR * self.chosen_s:
                found = simulate_with_best_warmup(plan)
        except PartoptError:
            return math.inf
        period_s = found.predicted.period_s
        if self.best is not None and found.fits and period_s < self.best[1]:
            self.best = split, period_s
        return period_s

    def _any(self) -> Split:
        """A random split."""
        devices, layers = self.problem.topology.devices, self.problem.chain.layers
        stages = int(self.random.integers(1, min(devices, layers) + 1))
        cuts = np.sort(self.random.choice(np.arange(1, layers), stages - 1, replace=False))
        if self.alike:
            replicas = [int(self.random.integers(1, devices // stages + 1))] * stages
        else:
            ends = np.sort(self.random.choice(np.arange(1, devices), stages - 1, replace=False))
            replicas = np.diff([0, *ends, devices]).tolist()
        return tuple(cuts.tolist()), tuple(replicas)

    def _near(self, split: Split) -> Split:
        """The split with one or two random changes."""
        for _ in range(1 + int(self.random.random() < 0.3)):
            moves: Sequence[Callable[[list[int], list[int]], None]] = (
                self._move_cut,
                self._move_cut,
                self._move_replica,
                self._add,
                self._drop,
            )
            cuts, replicas = list(split[0]), list(split[1])
            moves[int(self.random.integers(len(moves)))](cuts, replicas)
            split = tuple(sorted(cuts)), tuple(replicas)
        return split

    def _move_cut(self, cuts: list[int], replicas: list[int]) -> None:
        if cuts:
            cuts[int(self.random.integers(len(cuts)))] += int(
                self.random.choice([-3, -2, -1, 1, 2, 3])
            )

    def _move_replica(self, cuts: list[int], replicas: list[int]) -> None:
        if self.alike:
            more = int(self.random.choice([-1, 1]))
            replicas[:] = [count + more for count in replicas]
            return
        source, to = self.random.integers(len(replicas), size=2)
        replicas[source] -= int(self.random.random() < 0.8)
        replicas[to] += int(self.random.random() < 0.8)

    def _add(self, cuts: list[int], replicas: list[int]) -> None:
        """A stage more: one of two parts of another, or with a replica of its own."""
        cuts.append(int(self.random.integers(1, self.problem.chain.layers)))
        s = int(self.random.integers(len(replicas)))
        if self.alike:
            replicas.append(replicas[0])
        elif replicas[s] > 1:
            part = int(self.random.integers(1, replicas[s]))
            replicas[s] -= part
            replicas.insert(s, part)
        else:
            replicas.insert(s, 1)

    def _drop(self, cuts: list[int], replicas: list[int]) -> None:
        """A stage less, whose replicas its neighbour gets."""
        if cuts:
            s = int(self.random.integers(len(cuts)))
            del cuts[s]
            freed = replicas.pop(s)
            replicas[s] += 0 if self.alike else freed


def _print(outcomes: Sequence[Outcome], problems: int) -> None:
    print(f"\n{len(outcomes)} of {problems} problems have a plan that fits\n")
    print(
        f"{'kind':18}{'problems':>9}{'> 1 %':>8}{'> 5 %':>8}{'worst':>8}"
        f"{'gap':>9}{'p90':>8}{'planned in':>12}"
    )
    for kind, own in _by_kind(outcomes):
        gaps = [outcome.gap for outcome in own]
        improved = [outcome.improved for outcome in own]
        print(
            f"{kind:18}{len(own):9}{_share(improved, 0.01):>8}{_share(improved, 0.05):>8}"
            f"{100 * max(improved):6.1f} %{100 * statistics.median(gaps):7.1f} %"
            f"{100 * float(np.quantile(gaps, 0.9)):6.1f} %"
            f"{statistics.median(outcome.seconds for outcome in own):10.2f} s"
        )


def _share(improved: Sequence[float], more: float) -> str:
    return f"{100 * sum(each > more for each in improved) / len(improved):.1f} %"


def _by_kind(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, list[Outcome]]]:
    if outcomes:
        yield "all", list(outcomes)
    for kind in dict.fromkeys(kind for at in range(5) for kind in _kinds(outcomes, at)):
        yield kind, [outcome for outcome in outcomes if kind in outcome.kinds]


def _kinds(outcomes: Sequence[Outcome], at: int) -> list[str]:
    return sorted({outcome.kinds[at] for outcome in outcomes})


if __name__ == "__main__":
    main()
