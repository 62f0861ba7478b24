"""Tokens, operations, MFU and money: what they are, and when nothing is said."""

import msgspec
import pytest
from msgspec.structs import replace

from partopt import planners, solve
from partopt.cost.figures import figures_of, flops_of, sample_flops
from partopt.cost.problem import problem_of
from partopt.documents.plan import Plan
from partopt.documents.profile import Device, Estimated, Group, Profile
from partopt.documents.stage import Figures
from partopt.documents.topology import Topology
from partopt.errors import PartoptError
from partopt.job import Job
from partopt.report.phrases import speeds
from partopt.report.plan_text import render as render_plan
from partopt.report.plans_text import render_comparison, render_scaling
from partopt.search.compare import comparison_of
from partopt.search.scaling import scaling_of
from partopt.simulator.execution import simulate_plan
from tests.helpers import chain_profile, flat

GPU = Device(name="GPU", type="cuda")


def counted(flops=(1000, 3000), tokens=None, **fields):
    """A profile of a GPU whose layers say how many operations the forward has."""
    profile = chain_profile([1.0] * len(flops), [2.0] * len(flops), microbatch_size=2)
    [measured] = profile.measurements
    layers = [
        replace(each, forward_flops=count)
        for each, count in zip(measured.layers, flops, strict=True)
    ]
    model = replace(profile.model, tokens_per_sample=tokens)
    return replace(
        profile,
        **{
            "model": model,
            "device": GPU,
            "measurements": [replace(measured, layers=layers)],
            **fields,
        },
    )


def priced(topology, price):
    return replace(topology, device=replace(topology.device, price_per_hour=price))


def plan_of(profile, topology, **options):
    found = planners.plan("straight", problem_of(profile, topology, **options))
    return simulate_plan(found)


def test_a_sample_takes_three_forwards():
    assert sample_flops(counted()) == 3 * 4000 / 2


def test_the_ranks_of_a_group_count():
    assert sample_flops(counted(group=Group(ranks=4))) == 4 * 3 * 4000 / 2


@pytest.mark.parametrize(
    "profile",
    [
        counted(flops=(1000, None)),
        counted(flops=(0, 0)),
        counted(device=Device(name="GPU", type="cpu")),
        counted(layers=[replace(each, frozen_bytes=1) for each in counted().layers]),
    ],
)
def test_nothing_is_said_where_the_operations_are_not_known(profile):
    assert sample_flops(profile) is None


def test_the_operations_of_a_transformer_are_those_that_palm_counts():
    """6 N + 12 L d T a token (appendix B), N without the table of the positions."""
    profile = Profile.load("gpt3-6.7b.h100-estimated.bfloat16")
    T, L, d, V = 2048, 32, 4096, 50257
    weights = 12 * L * d**2 + V * d  # of the products; biases and norms have none
    assert profile.model.tokens_per_sample == T
    assert sample_flops(profile) == pytest.approx(T * (6 * weights + 12 * L * d * T), rel=1e-3)


def test_the_peak_is_the_shipped_one_of_the_device_that_the_times_are_of():
    cluster = Topology.load("dgx-h100")
    profile = Profile.load("gpt3-6.7b.h100-estimated.bfloat16")
    assert flops_of(profile, cluster)[1] == 989.4e12
    measured = counted(device=Device(name="NVIDIA H100 80GB HBM3", type="cuda"))
    assert flops_of(measured, cluster)[1] == 67e12  # float32
    assert flops_of(replace(measured, autocast="bfloat16"), cluster)[1] == 989.4e12
    assert flops_of(measured, Topology.load("dgx-a100")) == (6000, None)
    mine = Estimated(device="mine", sha256="0")
    assert flops_of(counted(estimated=mine), flat(2)) == (6000, None)
    others = replace(profile, estimated=replace(profile.estimated, sha256="0"))
    assert flops_of(others, cluster)[1] is None


def at_rate(flops_per_s, device="H100-80GB", **fields):
    """A profile of two layers whose steps take 3 s a microbatch."""
    return counted(
        (0, round(flops_per_s * 6 / 3)), device=Device(name=device, type="cuda"), **fields
    )


def test_float32_is_faster_than_its_peak_only_as_tf32():
    cluster = Topology.load("dgx-h100")
    assert flops_of(at_rate(66e12), cluster)[1] == 67e12
    assert flops_of(at_rate(68e12), cluster)[1] == 494.7e12


@pytest.mark.parametrize(("times", "peak"), [(2.0, 67e12), (0.9, 494.7e12)])
def test_the_fastest_microbatch_size_says_which_peak_it_is(times, peak):
    """A sample takes so many `times` as long in microbatches of one as in those of two."""
    profile = at_rate(66e12)
    [two] = profile.measurements
    layers = [
        replace(own, forward_s=own.forward_s * times / 2, backward_s=own.backward_s * times / 2)
        for own in two.layers
    ]
    one = replace(two, microbatch_size=1, layers=layers)
    both = replace(profile, measurements=[one, two])
    assert flops_of(both, Topology.load("dgx-h100"))[1] == peak


def test_no_plan_does_more_operations_than_its_devices_can():
    """Up to three times the peak the count may be too high: nothing is said. Above it, an error."""
    cluster = Topology.load("dgx-h100")
    assert flops_of(at_rate(495e12), cluster) == (None, None)
    impossible = at_rate(1490e12)
    assert flops_of(impossible, Topology.load("dgx-a100")) == (None, None)  # another device's
    with pytest.raises(PartoptError, match=r"chain: 497 Tflop/s a device, above 495 Tflop/s"):
        solve(Job(impossible, cluster, planner="straight"))


def test_a_plan_whose_speed_is_above_the_peak_of_its_devices_is_refused():
    plan = plan_of(at_rate(60e12), Topology.load("dgx-h100"))
    faster = replace(plan.profile, sample_flops=plan.profile.sample_flops * 40)
    with pytest.raises(PartoptError, match="above 67 Tflop/s, the peak of H100-80GB"):
        figures_of(plan.predicted.samples_per_s, faster, plan.topology)


def test_without_any_of_it_a_plan_is_what_it_was():
    plan = plan_of(chain_profile([1.0, 1.0]), flat(2))
    assert plan.predicted.figures is msgspec.UNSET
    assert b"figures" not in msgspec.json.encode(plan)
    assert b"price_per_hour" not in msgspec.json.encode(plan)


def test_each_figure_follows_from_the_speed():
    plan = plan_of(counted(tokens=10), priced(flat(2), 2.5))
    assert plan.predicted.samples_per_s == 2 / 3
    found = plan.predicted.figures
    assert found == Figures(
        tokens_per_s=pytest.approx(20 / 3),
        device_flops_per_s=pytest.approx(6000 * 2 / 3 / 2),
        price_per_hour=5.0,
        samples_per_money=pytest.approx(2 / 3 * 3600 / 5),
        tokens_per_money=pytest.approx(20 / 3 * 3600 / 5),
    )


def test_the_utilisation_is_over_the_peak():
    reference = plan_of(counted(), flat(2)).profile
    found = figures_of(1.0, replace(reference, peak_flops=30_000.0), flat(2))
    assert found.mfu == pytest.approx(0.1)
    uncounted = replace(reference, peak_flops=30_000.0, sample_flops=None)
    assert figures_of(1.0, uncounted, flat(2)) is msgspec.UNSET


def test_groups_are_paid_and_counted_by_their_real_devices():
    whole = priced(flat(8), 1.5)
    groups = whole.in_groups(4)
    reference = plan_of(counted(), flat(2)).profile
    assert figures_of(1.0, reference, groups) == figures_of(1.0, reference, whole)
    assert figures_of(1.0, reference, groups).price_per_hour == 12.0


def test_idle_devices_are_paid_too():
    plan = plan_of(counted(), priced(flat(4), 1.0), stages=2)
    assert len(plan.idle_ranks) == 2
    assert plan.predicted.figures.price_per_hour == 4.0


def test_pages_say_what_is_known():
    page = " ".join(render_plan(plan_of(counted(tokens=10), priced(flat(2), 2.5))).split())
    assert (
        "speed 6.67 tokens/s, 2.00 times one device; devices idle 0.0% 0.6667 samples/s; 2 k"
        in page
    )
    assert "MFU" not in page
    assert "price 5.00 an hour for 2 devices: 480 samples (4.8 k tokens) for 1.00" in page
    plain = render_plan(plan_of(chain_profile([1.0, 1.0]), flat(2)))
    assert "price" not in plain
    assert "samples/s, 2.00 times one device; devices idle" in plain
    assert "tokens" not in plain


def test_tables_are_in_tokens_where_every_row_knows_them():
    """6.67 tokens a second are the 0.667 samples of 10 each."""
    tokens, samples = plan_of(counted(tokens=10), flat(2)), plan_of(counted(), flat(2))
    told = render_scaling(scaling_of([tokens])).split()
    assert (told[2], told[13]) == ("TOKENS/S", "6.67")
    told = render_scaling(scaling_of([tokens, samples])).split()
    assert (told[2], told[13]) == ("SAMPLES/S", "0.6667")
    assert speeds([tokens.predicted, tokens.predicted]) == ("tokens", [pytest.approx(20 / 3)] * 2)


def test_a_comparison_with_a_price_says_what_it_buys():
    plans = {"straight": plan_of(counted(), priced(flat(2), 2.5))}
    text = render_comparison(comparison_of(plans, None))
    assert "price    2.50 a device an hour, 5.00 for all" in text
    assert "PER 1.00" in text
    assert "VAR" not in text
    assert "VAR" in render_comparison(
        comparison_of({"straight": plan_of(counted(), flat(2))}, None)
    )


def test_a_scaling_names_the_fastest_and_the_cheapest_that_fit():
    plans = [plan_of(counted((1, 1, 1, 3)), priced(flat(n), 2.0)) for n in (1, 2, 3)]
    found = scaling_of(plans)
    assert found.cheapest == found.rows[0]
    text = " ".join(render_scaling(found).split())
    assert "fastest 2 devices at 4.00 an hour" in text
    assert "cheapest 1 device at 2.00 an hour" in text
    unpriced = scaling_of([plan_of(counted(), flat(2))])
    assert unpriced.cheapest is None
    assert "cheapest" not in render_scaling(unpriced)
    nothing = msgspec.structs.replace(
        found, rows=[msgspec.structs.replace(row, fits=False) for row in found.rows]
    )
    assert nothing.cheapest is None


def test_a_plan_with_figures_is_read_as_it_was_written(tmp_path):
    plan = plan_of(counted(tokens=10), priced(flat(2), 2.5))
    plan.save(str(tmp_path / "plan.json"))
    assert Plan.load(str(tmp_path / "plan.json")) == plan
