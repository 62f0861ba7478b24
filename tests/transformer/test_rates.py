"""Rates of shipped devices on shipped clusters, and the seconds of what runs on them."""

import csv
import dataclasses
import itertools
import math
import statistics
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from benchmarks.published_older import DATA
from partopt.documents.device import shipped_file
from partopt.documents.files import shipped_names
from partopt.documents.topology import AllReduceRates, Topology
from partopt.errors import PartoptError
from partopt.importers.hugging_face import load_transformer
from partopt.transformer.as_profile import rates_of
from partopt.transformer.rates import (
    COLLECTIVE_S,
    HOP_S,
    MEMORY,
    SUSTAINED,
    TAKEN,
    Port,
    Rates,
    clock,
)
from tests.transformer.helpers import RATES

H100 = shipped_file("h100")[1]


def test_the_rates_of_a_device_in_a_cluster():
    own = Rates.of(H100, Topology.load("dgx-h100", 4))
    level = Topology.load("dgx-h100").levels[0]
    assert (own.device, own.server, own.link) == ("H100-80GB", 8, level.bandwidth_bytes_per_s)
    (port,) = own.outer
    assert port.message == port.ring == Topology.load("dgx-h100").levels[1].bandwidth_bytes_per_s
    assert own.peaks["bfloat16"] == 989.4e12
    assert own.peaks["fp8"] == 1979e12
    assert own.products["fp8"] > own.products["bfloat16"] > own.peaks["bfloat16"] / 2
    assert own.clock == 1.0
    assert own.taken == TAKEN / 132


def test_devices_of_a_server_share_its_ports():
    topology = Topology.load("dgx-h100", 4)
    server, cluster = topology.levels
    rates = AllReduceRates(bandwidth_bytes_per_s=1e10)
    one = replace(topology, levels=[server, replace(cluster, links=1, allreduce=rates)])
    own = Rates.of(H100, one)
    assert own.outer == (Port(1, cluster.bandwidth_bytes_per_s / 8, 1e10 / 8),)


def test_one_server_has_no_ports():
    topology = Topology.load("dgx-h100", 4)
    own = Rates.of(H100, replace(topology, levels=topology.levels[:1], devices=8))
    assert own.send_s(1e9, 1) == HOP_S + 1e9 / own.link


def test_a_limit_of_power_lowers_the_clock():
    assert clock(1.0) == 1.0
    assert clock(5 / 7) == pytest.approx(0.886, abs=1e-3)
    own = Rates.of(shipped_file("h100-96gb")[1], Topology.load("dgx-h100"))
    assert own.clock == clock(500 / 700)
    slow, fast = (dataclasses.replace(own, clock=each) for each in (own.clock, 1.0))
    assert slow.attention_s("flash2", 1e12, 4096)[0] > fast.attention_s("flash2", 1e12, 4096)[0]


@pytest.mark.parametrize("name", shipped_names("devices"))
def test_every_shipped_device_says_what_trainers_achieve(name):
    own = Rates.of(shipped_file(name)[1], Topology.load("dgx-h100"))
    for form, rate in own.products.items():
        assert 0.5 <= rate / own.peaks[form] < 0.9
    assert all(0 < share < 0.75 for kernel in own.attention.values() for share in kernel.share)
    assert 0.8 < own.clock <= 1


def test_a_device_of_which_nothing_is_known_is_refused():
    with pytest.raises(PartoptError, match="its file has no `training`") as refused:
        Rates.of(replace(H100, training=None), Topology.load("dgx-h100"))
    assert refused.value.code == "unknown-rates"


def test_exchanges_by_hand():
    assert RATES.passes_s(3e12) == pytest.approx(1 / MEMORY)
    assert RATES.replicas_s(8e9, 4) == pytest.approx(6e9 / 3e11)
    assert RATES.replicas_s(8e9, 1, 1) == 0.0
    assert RATES.replicas_s(8e9, 8, 1) == pytest.approx(7e9 / 3e11)
    # eight of a server use all of its ports, but no more than their links
    assert RATES.replicas_s(8e9, 16, 1) == pytest.approx(7.5e9 / (8 * 3e10))
    assert RATES.replicas_s(8e9, 16, 8) == pytest.approx(7.5e9 / 3e10)
    assert RATES.send_s(4e9, 8) == pytest.approx(HOP_S + 0.1)
    assert COLLECTIVE_S > HOP_S


@st.composite
def drawn_groups(draw):
    """Rates of three levels, and a span and a stride of groups that fill their levels or divide."""
    sizes = draw(st.lists(st.sampled_from([2, 3, 4]), min_size=3, max_size=3))
    shares = draw(st.lists(st.integers(1, 99), min_size=4, max_size=4))
    outer = (Port(1, *shares[:2]), Port(sizes[1], *shares[2:]))
    rates = dataclasses.replace(RATES, link=99, server=sizes[0], outer=outer, sizes=tuple(sizes))
    whole = math.prod(sizes)
    spans = [n for n in range(1, whole + 1) if whole % n == 0 and rates.holds(n)]
    span = draw(st.sampled_from(spans))
    return rates, whole, span, draw(st.sampled_from([n for n in spans if span % n == 0]))


def busiest(devices, pairs):
    """The most of `pairs` of ranks that leave one of the groups of so many devices."""
    leave = Counter(a // devices for a, b in pairs if a // devices != b // devices)
    return max(leave.values(), default=0)


@given(drawn_groups())
def test_exchanges_share_the_ports_that_they_go_through(drawn):
    """All groups of ranks are written down, and counted at every group of devices."""
    rates, whole, span, stride = drawn
    ranks = [
        [*range(first + at, first + span, stride)]
        for first in range(0, whole, span)
        for at in range(stride)
    ]
    rings = [pair for group in ranks for pair in zip(group, group[1:] + group[:1], strict=True)]
    sends = [(a, a + span) for a in range(whole - span)]
    every = [pair for group in ranks for pair in itertools.permutations(group, 2)]
    ring, message, scattered_s = rates.link, rates.link, 0.0
    for servers, port, of_ring in rates.outer:
        devices = servers * rates.server
        if most := busiest(devices, rings):
            ring = min(ring, of_ring * devices / most)
        if most := busiest(devices, sends):  # a device of a server has one port
            message = min(message, port * devices / max(most, rates.server))
        if stride == 1:
            scattered_s = max(scattered_s, busiest(devices, every) / span / (port * devices))
    assert rates.replicas_s(1.0, span // stride, stride) == pytest.approx(
        (1 - stride / span) / ring
    )
    if sends:
        assert rates.send_s(1.0, span) == pytest.approx(HOP_S + 1 / message)
    if stride == 1:
        assert rates.scattered_s(1.0, span) == pytest.approx(scattered_s)


def test_attention_reaches_half_of_its_share_at_half_at():
    at_half, long = (RATES.attention_s("flash", 1e15, tokens)[0] for tokens in (400, 1e9))
    assert long == pytest.approx(1 / (0.5 * SUSTAINED), rel=1e-5)
    assert at_half == pytest.approx(2 * long, rel=1e-5)


# seconds of a step of Qwen3-0.6B on one H100: NVIDIA-NeMo/RL, pull request 3628
@pytest.mark.parametrize(
    ("share", "overlaps", "published_s"),
    [(0.5, False, 1.187), (0.5, True, 1.216), (1, True, 1.678)],
)
def test_a_step_on_the_host_takes_what_was_published(share, overlaps, published_s):
    own = Rates.of(H100, Topology.load("dgx-h100", 1))
    stepped = share * load_transformer("qwen3-0.6b").parameters
    took_s = 0.752 + own.stepped_on_host_s(stepped, overlaps) - own.passes_s(34 * stepped)
    assert took_s == pytest.approx(published_s, rel=0.045)


def test_overlap_hides_as_much_of_a_step_on_the_host_as_was_published():
    """Megatron Bridge, docs/training/cpu-offloading.md: 4.2 of a step without, then 3.9."""
    own = Rates.of(H100, Topology.load("dgx-h100", 1))
    apart_s, beside_s = (own.stepped_on_host_s(1e9, overlaps) for overlaps in (False, True))
    assert beside_s / apart_s == pytest.approx((3.9 - 1) / (4.2 - 1), abs=0.01)


MEASURED = DATA / "b200-products.csv"
needs_measured = pytest.mark.skipif(not MEASURED.exists(), reason="measured products are not here")


def measured(kind):
    """Shapes of what was measured on a B200, and what it reached of its 2,250 Tflop/s."""
    with MEASURED.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["kind"] == kind]
    for row in rows:
        shape = dict(pair.split("=") for pair in row["shape"].split(", "))
        yield shape, 2.25e15 * float(row["share_of_2250_tflops"])


@needs_measured
def test_products_of_a_b200_take_as_long_as_was_measured():
    rates, errors = rates_of(Topology.load("dgx-b200", 1)), []
    for shape, achieved in measured("product"):
        b, m, n, k = (int(shape[name]) for name in "bmnk")
        adds, out = shape["accumulate"] == "True", 4 if shape["out_dtype"] == "fp32" else 2
        found_s = b * rates.product_s(m, n, k, "bfloat16", out, out * adds)
        if (operations := 2 * b * m * n * k) > 2e11:
            errors.append(found_s / (operations / achieved) - 1)
    assert len(errors) == 401
    assert abs(statistics.mean(errors)) < 0.01
    assert statistics.mean(map(abs, errors)) < 0.09


@needs_measured
@pytest.mark.parametrize(("kind", "way"), [("attention forward", 0), ("attention backward", 1)])
def test_attention_on_a_b200_takes_as_long_as_was_measured(kind, way):
    rates, errors = rates_of(Topology.load("dgx-b200", 1)), []
    for shape, achieved in measured(kind):  # which counts the whole square
        s, heads, queries, values = (
            int(shape[name]) for name in ("seq_len", "head_num", "qk_head_dim", "v_head_dim")
        )
        if heads < 32 or queries != values:
            continue
        flops = heads * s**2 * (queries + values)
        found_s = rates.attention_s("cudnn", flops, s)[way]
        errors.append(found_s / ((1, 2.5)[way] * 2 * flops / achieved) - 1)
    assert len(errors) >= 8
    assert statistics.median(map(abs, errors)) < 0.2
