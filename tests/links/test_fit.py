"""Known figures are found again in measurements made from them, and curves are called poor."""

from dataclasses import replace

import numpy as np
import pytest

from partopt.links.curves import fit_factors
from partopt.links.errors import compare, worst
from partopt.links.fit import fit_level, fit_topology
from partopt.links.layout import ALL, BOTH, ONE, SERVERS, levels_of
from partopt.links.samples import AllReduceSample
from tests.links.synthetic import (
    BANDWIDTH,
    COPY,
    LATENCY_S,
    OVERHEAD_S,
    RING_BANDWIDTH,
    SIZES,
    STEP_S,
    SWITCHED,
    level_samples,
    measurement,
    server,
)

BUS = {ONE: 1, BOTH: 2, ALL: 2}


@pytest.mark.parametrize(("noise", "within"), [(0.0, 1e-3), (0.05, 0.15)])
@pytest.mark.parametrize(("in_turn", "bus"), [(SWITCHED, False), (BUS, True)])
def test_known_figures_are_recovered(in_turn, bus, noise, within):
    samples = level_samples(server(), in_turn, noise, on_a_bus=bus)
    level = fit_level(samples)
    assert (level.bus, level.links, level.size) == (bus, 1, 4)
    assert level.bandwidth_bytes_per_s == pytest.approx(BANDWIDTH, rel=within)
    assert level.latency_s == pytest.approx(LATENCY_S, rel=within)
    assert level.overhead_s == pytest.approx(OVERHEAD_S, rel=within)
    assert level.copy_bytes_per_s == pytest.approx(COPY, rel=within)
    assert level.allreduce.bandwidth_bytes_per_s == pytest.approx(RING_BANDWIDTH, rel=within)
    assert level.allreduce.latency_s == pytest.approx(STEP_S, rel=within)
    measured = measurement(samples)
    assert not worst(compare(measured, fit_topology(measured, "c"))).is_poor


@pytest.mark.parametrize(
    ("together", "links"),
    [(4, 1), (2, 2), (1, 4)],
)
def test_messages_between_two_servers_tell_the_links_of_a_server(together, links):
    between = levels_of(16, 4)[1]
    level = fit_level(level_samples(between, {**SWITCHED, SERVERS: together, ALL: together}, 0.05))
    assert (level.bus, level.links) == (False, links)


def test_one_point_far_off_moves_the_figures_little_and_is_called_poor():
    samples = level_samples(
        server(2),
        SWITCHED,
        seconds_of=lambda x: (LATENCY_S + x / BANDWIDTH) * (3 if x == 1_000_000 else 1),
    )
    measured = measurement(samples, ranks=2)
    topology = fit_topology(measured, "c")
    assert topology.levels[0].bandwidth_bytes_per_s == pytest.approx(BANDWIDTH, rel=0.05)
    found = compare(measured, topology)
    assert {each.size_bytes for each in found if each.is_poor} == {1_000_000}


def test_a_kinked_curve_is_poor():
    samples = level_samples(
        server(), SWITCHED, seconds_of=lambda x: LATENCY_S + x / (BANDWIDTH / (1 + 4 * (x > 5e6)))
    )
    measured = measurement(samples)
    assert worst(compare(measured, fit_topology(measured, "c"))).is_poor


def test_an_allreduce_over_both_levels_is_compared_with_the_formula_of_plans():
    levels = levels_of(4, 2)
    inside, between = (level_samples(level, {**SWITCHED, SERVERS: 2}) for level in levels)
    twice = tuple(  # what six steps take, and as long again
        AllReduceSample(4, size, 2 * 6 * (STEP_S + size / 4 / RING_BANDWIDTH)) for size in SIZES
    )
    slow = replace(measurement(inside, between), whole=twice)
    found = [each for each in compare(slow, fit_topology(slow, "c")) if each.level == "all"]
    assert len(found) == len(SIZES)
    assert all(each.error == pytest.approx(-0.5, abs=0.01) for each in found)


def test_under_nccl_the_calls_of_the_host_are_not_the_time_of_a_device():
    measured = measurement(level_samples(server(), SWITCHED), backend="nccl")
    level = fit_topology(measured, "c").levels[0]
    assert not level.overhead_s and not level.copy_bytes_per_s
    assert level.bandwidth_bytes_per_s == pytest.approx(BANDWIDTH, rel=1e-3)


def test_factors_are_never_negative():
    columns = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    factors, _ = fit_factors(columns, np.array([0.5, 2.0, 3.5]), np.ones(3))
    assert factors[0] == 0 and factors[1] > 0
