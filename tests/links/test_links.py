"""Known figures are found again in measurements made from them, and curves are called poor."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from partopt.documents.links import AllReduceSample, FitComparison
from partopt.documents.topology import Topology
from partopt.errors import PartoptError
from partopt.report.clusters import render_links as render
from partopt.runtime.link_fit import (
    compare,
    fit_factors,
    fit_links,
    fit_topology,
    levels_of,
    notes_of,
    protocol_step,
)
from tests.links.synthetic import (
    BANDWIDTH,
    COPY,
    LATENCY_S,
    OVERHEAD_S,
    RING_BANDWIDTH,
    SIZES,
    STEP_S,
    level_samples,
    measurement,
    server,
)

LEVELS = [level_samples(level) for level in levels_of(4, 2)]
MEASURED = measurement(*LEVELS)


def test_the_levels_of_servers():
    inside, between = levels_of(8, 2)
    assert (inside.name, inside.size, inside.pair) == ("server", 2, (0, 1))
    assert (between.name, between.size, between.pair) == ("cluster", 4, (0, 2))
    assert between.allreduces == ((0, 2), (0, 2, 4, 6))


def test_one_server_and_a_rank_a_server():
    (level,) = levels_of(5, 5)
    assert (level.name, level.allreduces) == ("server", ((0, 1), (0, 1, 2, 3), (0, 1, 2, 3, 4)))
    (level,) = levels_of(3, 1)
    assert (level.name, level.size, level.allreduces) == ("cluster", 3, ((0, 1), (0, 1, 2)))


@pytest.mark.parametrize(("ranks", "per_server"), [(1, 1), (0, 1), (4, 3), (4, 0), (4, 8)])
def test_no_levels(ranks, per_server):
    with pytest.raises(PartoptError):
        levels_of(ranks, per_server)


@pytest.mark.parametrize(("noise", "within"), [(0.0, 1e-3), (0.05, 0.15)])
def test_known_figures_are_recovered(noise, within):
    links = fit_links(measurement(level_samples(server(), noise)), "c", 4)
    (level,) = links.topology.levels
    assert (level.bus, level.links, level.size) == (False, 1, 4)
    assert level.bandwidth_bytes_per_s == pytest.approx(BANDWIDTH, rel=within)
    assert level.latency_s == pytest.approx(LATENCY_S, rel=within)
    assert level.overhead_s == pytest.approx(OVERHEAD_S, rel=within)
    assert level.copy_bytes_per_s == pytest.approx(COPY, rel=within)
    assert level.allreduce.bandwidth_bytes_per_s == pytest.approx(RING_BANDWIDTH, rel=within)
    assert level.allreduce.latency_s == pytest.approx(STEP_S, rel=within)
    assert not links.worst.is_poor


def test_one_point_far_off_moves_the_figures_little_and_is_called_poor():
    samples = level_samples(
        server(2), seconds_of=lambda x: (LATENCY_S + x / BANDWIDTH) * (3 if x == 1_000_000 else 1)
    )
    links = fit_links(measurement(samples, ranks=2), "c", 2)
    assert links.topology.levels[0].bandwidth_bytes_per_s == pytest.approx(BANDWIDTH, rel=0.05)
    assert {each.size_bytes for each in links.comparisons if each.is_poor} == {1_000_000}


def test_a_kinked_curve_is_poor():
    samples = level_samples(
        server(), seconds_of=lambda x: LATENCY_S + x / (BANDWIDTH / (1 + 4 * (x > 5e6)))
    )
    assert fit_links(measurement(samples), "c", 4).worst.is_poor


def test_an_allreduce_over_both_levels_is_compared_with_the_formula_of_plans():
    twice = tuple(  # what six steps take, and as long again
        AllReduceSample(4, size, 2 * 6 * (STEP_S + size / 4 / RING_BANDWIDTH)) for size in SIZES
    )
    slow = replace(MEASURED, whole=twice)
    found = [each for each in compare(slow, fit_topology(slow, "c")) if each.level == "all"]
    assert len(found) == len(SIZES)
    assert all(each.error == pytest.approx(-0.5, abs=0.01) for each in found)


def test_under_nccl_the_calls_of_the_host_are_not_the_time_of_a_device():
    measured = measurement(level_samples(server()), backend="nccl")
    level = fit_topology(measured, "c").levels[0]
    assert not level.overhead_s and not level.copy_bytes_per_s
    assert level.bandwidth_bytes_per_s == pytest.approx(BANDWIDTH, rel=1e-3)


@pytest.mark.parametrize("overhead_s, byte_s", [(0.0, 1 / COPY), (OVERHEAD_S, 0.0)])
def test_a_sender_is_held_for_each_message_or_each_byte_alone(overhead_s, byte_s):
    plain = level_samples(server(2))
    sends = [replace(one, send_s=overhead_s + byte_s * one.size_bytes) for one in plain.messages]
    links = fit_links(measurement(replace(plain, messages=tuple(sends)), ranks=2), "c", 2)
    (level,) = links.topology.levels
    assert (bool(level.overhead_s), bool(level.copy_bytes_per_s)) == (overhead_s > 0, byte_s > 0)
    found = [each for each in links.comparisons if each.what == "its sender"]
    assert [each.size_bytes for each in found] == list(SIZES)
    assert all(each.fitted_s == pytest.approx(each.measured_s, rel=1e-3) for each in found)


def test_factors_are_those_of_huber():
    """Weighted errors are at right angles to every column (Huber, 1964): those of up to 1.5 times
    the median count in full, larger ones linearly.
    """
    columns = np.stack([np.ones(9), np.arange(9.0)], 1)
    target = 3 + 2 * np.arange(9.0) + [0.3, -0.2, 0.1, 4, -0.1, 0.2, -0.3, -5, 0.1]
    factors = fit_factors(columns, target, np.full(9, 2.0))
    errors = (columns @ factors - target) / 2
    bound = 1.5 * np.median(np.abs(errors))
    assert np.clip(errors, -bound, bound) @ columns == pytest.approx([0, 0], abs=1e-6)
    assert factors == pytest.approx([3, 2], rel=0.1)


def test_factors_are_never_negative():
    columns = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    factors = fit_factors(columns, np.array([0.5, 2.0, 3.5]), np.ones(3))
    assert factors[0] == 0 and factors[1] > 0


def test_the_file_is_the_topology_behind_what_is_said_of_the_fit():
    links = fit_links(replace(MEASURED, load=0.6), "two-by-two", 2)
    assert Topology.parse(links.text.encode()) == links.topology
    lines = links.text.splitlines()
    assert lines[0].startswith("# the machine is busy: a load of 4.8 on 8 cores")
    assert lines[2].startswith("# good fit: largest error 0% (")


def test_a_poor_fit_says_where_it_fails():
    kinked = level_samples(
        levels_of(2, 2)[0], seconds_of=lambda x: 1e-3 if x == 64_000 else 5e-5 + x / 3e9
    )
    links = fit_links(measurement(kinked, ranks=2), "kinked", 2)
    assert links.quality.startswith("POOR FIT: largest error ")
    assert "; over 15% off at server, message: 64 kB" in links.quality
    assert links.text.startswith("# POOR FIT: ")
    assert " poor\n" in render(links)


def test_the_report_has_a_row_for_every_figure():
    links = fit_links(MEASURED, "two-by-two", 2)
    text = render(links)
    rows = [line for line in text.splitlines() if line.startswith(("server ", "cluster "))]
    assert len(rows) == len(links.comparisons) + 2  # the levels themselves
    assert max(map(len, text.splitlines())) <= 100
    assert "ranks    4 on 1 host, gloo" in text


def test_a_busy_host_and_a_poor_fit_begin_where_they_are_said_to():
    for load, noted in ((0.25, False), (0.26, True)):
        codes = [note.code for note in notes_of(measurement(*LEVELS, load=load, cores=8), 4)]
        assert ("busy-host" in codes) is noted
    for ranks, noted in ((8, False), (9, True)):  # on eight cores
        codes = [note.code for note in notes_of(measurement(*LEVELS, ranks=ranks), ranks)]
        assert ("shared-cores" in codes) is noted
    for factor, poor in ((0.86, False), (0.84, True), (1.14, False), (1.16, True)):
        fitted = fit_topology(measurement(level_samples(server(2)), ranks=2), "c")
        slower = partial(lambda factor, x: (LATENCY_S + x / BANDWIDTH) / factor, factor)
        other = measurement(level_samples(server(2), seconds_of=slower), ranks=2)
        found = compare(other, fitted)
        messages = [each for each in found if each.what == "message"]
        assert [each.is_poor for each in messages] == [poor] * len(SIZES)
        assert messages[0].error == pytest.approx(factor - 1, abs=1e-3)


def test_the_topology_names_what_was_measured():
    topology = fit_topology(replace(MEASURED, device="A CPU", memory_bytes=7), "c")
    assert (topology.name, topology.device.name, topology.device.memory_bytes) == ("c", "A CPU", 7)
    assert {level.name: level.size for level in topology.levels} == {"server": 2, "cluster": 2}
    assert topology.allreduce == "ring"


def test_what_makes_figures_doubtful():
    busy = measurement(*LEVELS, load=0.6, cores=2)
    assert [note.code for note in notes_of(busy, 2)] == ["busy-host", "shared-cores", "one-host"]
    assert next(notes_of(busy, 2)).text == (
        "the machine is busy: a load of 1.2 on 2 cores before the measurement"
    )
    assert not list(notes_of(measurement(*LEVELS, hosts=("a", "a", "b", "b")), 2))
    split = measurement(*LEVELS, hosts=("a", "b", "b", "b"))
    assert "split-server" in [note.code for note in notes_of(split, 2)]


def test_the_error_of_a_sender_is_relative_to_its_own_time():
    """A sender that waits for longer than the message takes is 91 % off, not 181 %."""
    sender = FitComparison("server", "its sender", 4_000, 20e-6, 1.8e-6, whole_s=10e-6)
    assert sender.error == pytest.approx(-0.91)
    assert sender.off == pytest.approx(0.91) and sender.is_poor
    short = FitComparison("server", "its sender", 4_000, 1e-6, 0.1e-6, whole_s=100e-6)
    assert (short.error, short.off) == (pytest.approx(-0.9), pytest.approx(0.009))
    assert not short.is_poor  # of the message it is nothing
    document = fit_links(MEASURED, "c", 2).document
    assert {"error", "whole_s"} < document["comparisons"][0].keys()


def test_the_ports_of_servers_are_used_at_once():
    inside, between = levels_of(8, 4)
    assert inside.ports == ((0, 1), (2, 3))
    assert between.ports == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert levels_of(2, 2)[0].ports == levels_of(2, 1)[0].ports == ()


def stepped(size, step_s=200e-6):
    return LATENCY_S + size / BANDWIDTH + (step_s if size >= 1_000_000 else 0)


def test_a_protocols_step_is_told_from_the_latency():
    samples = level_samples(server(), seconds_of=stepped)
    step = protocol_step(samples.messages)
    assert step.from_bytes == 1_000_000
    assert step.latency_s == pytest.approx(LATENCY_S, rel=0.01)
    assert step.step_s == pytest.approx(200e-6, rel=0.01)
    notes = [note.text for note in notes_of(measurement(samples), 4)]
    assert notes == [
        "server: of a message 50.00 us are latency; 200.0 us more, from 1 MB on, are another "
        "protocol's"
    ]
    assert protocol_step(level_samples(server()).messages) is None
    assert protocol_step(level_samples(server(), noise=0.02).messages) is None


def test_messages_at_once_that_share_a_link_are_told_of():
    alone = level_samples(server())
    twice = tuple(replace(each, seconds=2 * each.seconds) for each in alone.messages)
    shared = measurement(replace(alone, both=twice, ports=alone.messages))
    assert [note.text for note in notes_of(shared, 4)] == [
        "server: both directions of a pair at once take 2.0 times as long as one message"
    ]
    busy = measurement(replace(alone, both=alone.messages, ports=twice))
    assert [note.code for note in notes_of(busy, 4)] == ["shared-ports"]
