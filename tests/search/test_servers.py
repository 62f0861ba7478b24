"""A transformer on several numbers of devices, and the least on which it fits."""

import functools
import itertools
import re
from contextlib import suppress

import pytest
from msgspec import UNSET, structs

from partopt import Layout, Topology, find_transformer
from partopt.errors import Interrupted, PartoptError
from partopt.job import Job
from partopt.report.plans_text import render_scaling
from partopt.search import sizes
from partopt.search.fitting import find_fitting
from partopt.search.layout_plans import search_layouts
from partopt.search.layout_questions import estimate_layouts, question_of, training_for
from partopt.search.levers import Switches
from partopt.search.runs import price_runs
from partopt.search.scaling import scale, scale_servers
from partopt.search.sizes import Sizes, find_frontier, find_servers
from partopt.transformer.layouts import find_layouts

pytestmark = pytest.mark.slow


def asked(model="llama3-8b", servers=1, topology="dgx-h100", **options):
    return Job(
        model=find_transformer(model),
        topology=Topology.load(topology, servers),
        **{"trainer": "megatron", "global_batch": 48, "sequence": 4096, "facts": {}} | options,
    )


@pytest.mark.parametrize("weak", [False, True])
def test_a_row_is_the_best_plan_on_that_many_devices(weak):
    found = scale(asked(), [8, 16], weak)
    for row, servers in zip(found.rows, (1, 2), strict=True):
        batch = 48 * (servers if weak else 1)
        plan = search_layouts(asked(servers=servers, global_batch=batch))[0]
        assert (row.devices, row.planner, row.layout) == (8 * servers, "megatron", plan.layout)
        assert row.samples_per_s == plan.predicted.samples_per_s
        assert row.figures.mfu == plan.predicted.figures.mfu
        assert row.microbatches * row.microbatch_size == batch
    first, second = found.rows
    assert (first.efficiency, first.speedup_over_one_device) == (1.0, 8.0)
    gain = second.samples_per_s / first.samples_per_s
    assert second.efficiency == pytest.approx(gain / 2)
    assert second.speedup_over_one_device == pytest.approx(8 * gain)


@pytest.mark.parametrize(
    ("devices", "options", "message"),
    [
        ([16, 8], {}, "must be ascending numbers of devices"),
        ([8, 20], {}, "20 devices do not fill dgx-h100"),
        ([8, 32], {"layout": Layout(dp=3)}, "8 devices: `layout="),
    ],
)
def test_what_does_not_scale_is_told(devices, options, message):
    with pytest.raises(PartoptError) as error:
        scale(asked(global_batch=64, **options), devices)
    assert message in error.value.message


def fits(question, servers):
    """Whether the best layout on so many servers fits, simulated."""
    topology = question.topology.resize(8 * servers)
    return search_layouts(question.with_(topology=topology))[0].fits


@pytest.mark.parametrize(
    ("options", "servers"),
    [({"model": "llama3-70b", "sequence": 8192}, 3), ({"memory": "14 GB"}, 2)],
)
def test_the_least_servers_are_those_on_which_a_plan_fits_and_none_with_fewer(options, servers):
    question = asked(**options)
    assert find_servers(question) == servers
    assert [fits(question, own) for own in range(1, servers + 1)] == [False] * (servers - 1) + [
        True
    ]


def test_the_least_is_looked_for_from_a_number_on():
    assert find_servers(asked()) == 1
    assert find_servers(asked(), 3) == 3
    alone = asked("llama3-405b", layout=Layout(tp=1, cp=1, pp=1))
    assert find_servers(alone) is None  # replicas hold all of it, on however many


def test_no_number_below_the_least_is_passed_over():
    """Of GPT-3 175B on V100, every number of servers by itself."""
    question = asked(
        "gpt3-175b", topology="v100-nvlink", trainer="deepspeed", dtype="float16", memory="30 GB"
    )
    servers = find_servers(question)
    assert servers == 48
    for own in range(33, servers):
        few = question_of(question)._replace(devices=8 * own, batch=48)
        assert not find_layouts(training_for(question), few).fitting


def test_what_does_not_fit_is_told_servers_or_an_open_layout():
    assert find_fitting(asked(memory="14 GB")).options == {"servers": 2}
    assert find_fitting(asked(memory="3 GB")) is None
    held = asked(memory="30 GB", layout=Layout(tp=1, pp=1, dp=8))
    found = find_fitting(held).options
    assert found.pop("layout") == Layout() and set(found.values()) == {None}
    assert search_layouts(held.with_(layout=Layout()))[0].fits


def test_of_more_servers_and_a_switch_the_faster_is_named(monkeypatch):
    tight = asked(memory="14 GB")
    found = estimate_layouts(tight)
    switch = min(Switches(tight, found).alone(), key=lambda worth: worth.iteration_s)
    larger = tight.with_(topology=tight.topology.resize(16))
    assert not found.fitting
    assert estimate_layouts(larger).fitting[0].seconds < switch.iteration_s
    assert find_fitting(tight).options == {"servers": 2}
    monkeypatch.setattr(sizes, "MOST", 8)  # devices: there are no more servers
    facts = find_fitting(tight).options["facts"]
    assert facts == switch.facts and facts.keys() == {"optimizer-offload", "offload-overlap"}
    assert estimate_layouts(tight.with_(facts=facts)).fitting


def test_sizes_begin_where_it_fits_and_are_powers_of_two_and_the_most():
    found = scale_servers(asked("llama3-70b", global_batch=96), 1, 6)
    assert [row.devices for row in found.rows] == [24, 32, 48]
    assert all(row.fits and 0 < row.part_share < 1 for row in found.rows)
    assert found.rows[0].iteration_s == pytest.approx(96 / found.rows[0].samples_per_s)


def test_an_interrupted_range_has_the_rows_that_are_finished():
    def stop(what, done, total):
        if what == "estimating sizes" and done:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as stopped:
        scale_servers(asked(global_batch=96), 2, 3, stop)
    assert [row.devices for row in stopped.value.found.rows] == [16, 24]


def test_sizes_on_which_nothing_fits_are_told():
    with pytest.raises(PartoptError, match="no layout of megatron fits on 1 to 2") as error:
        scale_servers(asked("llama3-70b", global_batch=96), 1, 2)
    assert error.value.hint == "one does on 3"


@functools.cache
def priced():
    question = asked(global_batch=64)
    device = structs.replace(question.topology.device, price_per_hour=2.0)
    topology = structs.replace(question.topology, device=device)
    return scale_servers(question.with_(topology=topology), 1, 4)


def test_runs_take_their_tokens_and_the_best_size_is_in_time_and_paid_for():
    table = priced()
    found = price_runs(table, 1e12)
    assert found.chosen is UNSET
    for row in found.rows:
        seconds = 1e12 / row.figures.tokens_per_s
        assert row.run.days == pytest.approx(seconds / 86400)
        assert row.run.device_hours == pytest.approx(row.devices * seconds / 3600)
        assert row.run.cost == pytest.approx(2 * row.run.device_hours)
    runs = {row.devices: row.run for row in found.rows}
    for days in sorted(run.days for run in runs.values()):
        able = {n: run for n, run in runs.items() if run.days <= days}
        cheapest = min(able, key=lambda n: able[n].device_hours)
        assert price_runs(table, 1e12, days=days).chosen == cheapest
    for budget in sorted(run.cost for run in runs.values()):
        able = {n: run for n, run in runs.items() if run.cost <= budget}
        fastest = min(able, key=lambda n: able[n].days)
        assert price_runs(table, 1e12, budget=budget).chosen == fastest


def test_what_is_nearest_is_told_where_no_size_is_in_time_or_paid_for():
    table = priced()
    runs = {row.devices: row.run for row in price_runs(table, 1e12).rows}
    fast = min(runs, key=lambda devices: runs[devices].days)
    cheap = min(runs, key=lambda devices: runs[devices].cost)
    days, cost = runs[fast].days, runs[cheap].cost
    for asked_for, told in (
        ({"days": days / 2}, f"no size is in time; the fastest, {fast} devices, takes {days:.4g} "),
        ({"budget": cost / 2}, f"no size is paid for; the cheapest, {cheap} devices, takes "),
        ({"days": days, "budget": cost}, f"the cheapest in time, {fast} devices, takes "),
    ):
        with pytest.raises(PartoptError) as error:
            price_runs(table, 1e12, **asked_for)
        assert told in error.value.message and error.value.exit_code == 1
        allowed = re.findall(r"`(days|budget)=([0-9.]+)([kMB]?)`", error.value.hint)
        assert len(allowed) == len(asked_for)  # each of them alone is enough
        for name, number, prefix in allowed:
            value = float(number) * 1e3 ** ("kMB".find(prefix) + 1 if prefix else 0)
            assert price_runs(table, 1e12, **asked_for | {name: value}).chosen


def test_a_budget_needs_a_price():
    table = scale_servers(asked(global_batch=64), 1, 1)
    with pytest.raises(PartoptError, match="no price"):
        price_runs(table, 1e12, budget=1e6)


QUESTIONS = [
    ("llama3-70b", "dgx-h100", "megatron", 512, 24),
    ("llama3-8b", "dgx-h100", "torchtitan", 192, 20),
    ("mixtral-8x7b", "dgx-h100", "megatron", 256, 12),
]


@functools.cache
def every_size(model, topology, trainer, batch, most):
    """A job, and seconds of the best layout on every number of servers by itself."""
    job = asked(model, most, topology, trainer=trainer, global_batch=batch)
    found = {}
    for servers in range(1, most + 1):
        resized = job.with_(topology=job.topology.resize(8 * servers))
        with suppress(PartoptError):  # no layout has as many devices
            if not (fitting := estimate_layouts(resized).fitting) and resized.model.experts:
                fitting = estimate_layouts(resized.with_(facts={"graphs": "none"})).fitting
            if fitting:
                found[servers] = fitting[0].seconds
    return job, found


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question[0])
def test_no_size_that_is_not_shown_is_better_for_a_deadline_or_a_budget(question):
    job, seconds = every_size(*question)
    shown = find_frontier(Sizes(job), range(1, question[-1] + 1))
    costs = {servers: servers * seconds[servers] for servers in seconds}
    for limit in seconds.values():
        in_time = [servers for servers in seconds if seconds[servers] <= limit]
        best = min(costs[servers] for servers in in_time)
        assert min(costs[servers] for servers in shown if servers in in_time) == best
    for limit in costs.values():
        paid = [servers for servers in seconds if costs[servers] <= limit]
        best = min(seconds[servers] for servers in paid)
        assert min(seconds[servers] for servers in shown if servers in paid) == best
    for servers, other in itertools.permutations(shown, 2):  # and none is shown for nothing
        assert seconds[servers] < seconds[other] or costs[servers] < costs[other]


def test_sizes_that_nothing_beats_are_rows_beside_powers_of_two():
    found = scale_servers(asked("llama3-8b", 13, global_batch=96), 5, 13)
    times = {row.devices: row.iteration_s for row in found.rows}
    assert found.looked_at == 9
    assert {40, 64, 104, 96} <= times.keys()  # the first, 8, the most; and 12, which is faster
    assert times[96] < times[104]
    assert "9 looked at" in render_scaling(found)
