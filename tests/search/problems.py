"""Small problems under synchronous schedules, drawn at random."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from partopt.cost.problem import Problem, problem_of
from partopt.documents.engine import Engine
from partopt.documents.plan import Plan
from partopt.documents.topology import Topology
from partopt.errors import PartoptError
from partopt.options import EFFORTS
from partopt.schedules import SCHEDULES
from partopt.search.effort import SearchParams
from partopt.search.ranking import order_of
from partopt.search.rows import Search
from partopt.search.variants import Variant
from tests.helpers import WAITING, chain_profile, measurement, profile_of, two_level

SIZES = [1, 2]


def best_by_schedule(stated: Sequence[Problem]) -> list[Plan]:
    """The best plan under every synchronous schedule of problems that are each other's variants."""
    plans = []
    for name, entry in SCHEDULES.items():
        variants = [Variant(problem.with_(schedule=name)) for problem in stated]
        with suppress(PartoptError):
            plans += [
                Search(variants).best_row(SearchParams.at("quick")).best
            ] * entry.tried_by_auto
    return sorted(plans, key=order_of)


def spending(*budgets: float) -> SearchParams:
    """The last of efforts that go on from each other with budgets of so many simulations."""
    params = None
    for effort, budget in zip(EFFORTS, budgets, strict=True):
        stated = SearchParams.at(effort)
        plans, grids = (replace(own, budget=budget) for own in (stated.plans, stated.grids))
        params = replace(stated, before=params, plans=plans, grids=grids)
    assert params
    return params


def at_each_size(
    problem_at: Callable[[int, str], Problem],
    batch: int,
    sizes: Sequence[int] = SIZES,
    recomputes: Sequence[str] = ("never", "always"),
) -> list[Problem]:
    """The problems of a batch of so many samples, at sizes that divide it, recomputed or not."""
    return [
        problem_at(size, recompute).with_(schedule="1f1b", microbatches=batch // size)
        for size, recompute in itertools.product(sizes, recomputes)
    ]


@st.composite
def problems(draw: st.DrawFn, layers: int = 12) -> list[Problem]:
    """Layers of any times, some of them none, on up to three servers of up to four devices whose
    links may be slow, shared or several.
    """
    count = draw(st.integers(2, layers))

    def drawn(*values: float) -> list[float]:
        return draw(st.lists(st.sampled_from(values), min_size=count, max_size=count))

    forward, backward, output = drawn(0.1, 1.0, 2.0, 3.0), drawn(0.0, 1.0, 2.0, 5.0), drawn(0, 1, 5)
    measured = [
        measurement(
            [b * seconds for seconds in forward],
            [b * seconds for seconds in backward],
            [int(b * size) for size in output],
            b,
            optimizer_s=draw(st.sampled_from([0.0, 3.0])),
            stash_groups=[((layer,), 10 * b) for layer in range(count)],
        )
        for b in SIZES
    ]
    topology = two_level(
        draw(st.integers(1, 4)),
        draw(st.integers(1, 3)),
        inner_bandwidth=draw(st.sampled_from([1.0, 10.0, 100.0])),
        outer_bandwidth=draw(st.sampled_from([1.0, 3.0, 20.0])),
        inner_latency=draw(st.sampled_from([0.0, 0.5])),
        outer_latency=draw(st.sampled_from([0.0, 1.0])),
        inner_links=draw(st.integers(1, 3)),
        outer_links=draw(st.integers(1, 2)),
        inner_bus=draw(st.booleans()),
        outer_bus=draw(st.booleans()),
    )
    weights, tied = (
        [int(size) for size in drawn(0, 1, 8)],
        draw(st.sampled_from([(), (0, count - 1), (1, count // 2, count - 1)])),
    )
    members = sorted(set(tied))
    for layer in members:
        weights[layer] += 4
    profile = profile_of(measured, weights, shared=[("tied", members, 4)])
    serial, batch = draw(st.booleans()), draw(st.sampled_from([4, 8, 12, 16, 24]))
    return at_each_size(
        lambda size, recompute: problem_of(
            profile, topology, size, recompute=recompute, engine=WAITING if serial else Engine()
        ),
        batch,
    )


def slow(layers: int, topology: Topology, seed: int = 0, **options: object) -> Problem:
    """Activations that decay and weights that grow along the chain, as in most of vision."""
    random, position = np.random.default_rng(seed), np.arange(layers) / layers
    forward = (random.lognormal(0, 0.5, layers) * 1e-3).tolist()
    outputs = 1e8 * np.exp(-3 * position) * random.lognormal(0, 0.3, layers)
    weights = 2e7 * np.exp(3 * position) * random.lognormal(0, 0.5, layers)
    profile = chain_profile(
        forward,
        [2 * seconds for seconds in forward],
        outputs.astype(int).tolist(),
        weights.astype(int).tolist(),
    )
    return problem_of(profile, topology, **options)
