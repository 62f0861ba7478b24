"""Schedules on equal stages: held to the exact reference and to the tables of papers."""

import json
from fractions import Fraction
from functools import cache

import pytest
from msgspec.structs import replace

import partopt
from partopt.errors import PartoptError
from partopt.schedules import SCHEDULES, schedule
from partopt.schedules.order import in_flight
from partopt.schedules.placement import MIRRORED
from tests.schedules.executed import built, makespan


@cache
def tried():
    return {own.schedule: own for own in partopt.try_schedules(partopt.Uniform()).tried}


def test_all_schedules_run_on_four_devices_with_eight_microbatches():
    assert list(tried()) == list(SCHEDULES)
    assert all(own.closed_form.agrees for own in tried().values())


@pytest.mark.parametrize("name", [name for name in SCHEDULES if not schedule(name).asynchronous])
@pytest.mark.parametrize("P, M, W", [(2, 6, 1.0), (4, 8, 0.5), (6, 12, 1.5)])
def test_it_takes_what_the_exact_reference_takes(name, P, M, W):
    """Chunks have their share of the times; the exact engine knows no profile and no plan."""
    v = tried()[name].chunks
    parts = 1 if schedule(name).shape == MIRRORED else v
    times = {"forward": parts, "backward": 2.0 * parts, "weight_gradient": W * parts}
    pipeline = partopt.Uniform(stages=P, microbatches=M, **times)
    [own] = partopt.try_schedules(pipeline, [name]).tried
    expected = makespan(name, P, v, M, seconds={"F": 1, "B": 2, "I": 2 - W, "W": W})
    assert own.iteration_s == pytest.approx(float(expected))
    assert own.bubble == pytest.approx(float(1 - Fraction(3 * M * parts) / expected))
    assert own.in_flight == in_flight(built(name, P, v, M)).tolist()


def test_activations_are_those_of_the_papers():
    """In what a device keeps of one microbatch: 1F1B P - p, interleaved 1 + (P-1)/(v P) times P
    (Korthikanti et al., MLSys 2023), ZB-V P, DualPipe P + 1 (DeepSeek-V3, table 2).
    """
    kept = {name: own.activations for name, own in tried().items()}
    assert kept["1f1b"] == [4, 3, 2, 1]
    assert kept["gpipe"] == [8] * 4
    assert kept["interleaved"][0] == 4 * (1 + 3 / 8)
    assert kept["zbv"] == kept["zb-h1"] == [4] * 4
    assert kept["dualpipe"] == [5] * 4


def test_gpipe_recomputes_before_the_gradient_comes():
    [own] = partopt.try_schedules(partopt.Uniform(recompute=True), ["gpipe"]).tried
    assert (own.iteration_s, own.activations) == (3 * 11 + 8, [1] * 4)
    assert own.closed_form.agrees


def test_messages_are_why_the_forms_differ():
    pipeline = partopt.Uniform(transfer="100 ms")
    found = {own.schedule: own for own in partopt.try_schedules(pipeline).tried}
    assert found["gpipe"].iteration_s == pytest.approx(33 + 2 * 3 * 0.1)
    assert found["gpipe"].closed_form.reason == "messages take 100.0 ms"
    assert not any(own.closed_form.agrees for own in found.values())
    waiting = partopt.Uniform(transfer="100 ms", facts={"waits": "1f1b"})
    [own] = partopt.try_schedules(waiting, ["1f1b"]).tried
    assert own.iteration_s > found["1f1b"].iteration_s
    assert own.closed_form.reason == "messages take 100.0 ms, and devices wait for them"


def test_a_form_that_does_not_hold_says_where_it_does():
    [own] = partopt.try_schedules(partopt.Uniform(microbatches=2), ["zb-h1"]).tried
    assert not own.closed_form.agrees
    assert own.closed_form.reason == "the form holds where M >= P and W <= F, I"


OUT_OF_RANGE = "is out of range; give 1e-12 to 1e6 seconds"
INVALID = [
    ("stages", 0, "expected a whole number >= 1; give 1 or more"),
    ("stages", 1025, "is too large; give 1,024 or less"),
    ("microbatches", 0, "expected a whole number >= 1; give 1 or more"),
    ("chunks", 0, "expected a whole number >= 1; give 1 or more"),
    ("forward", 0, 'must be positive; write a number, or "5 ms"'),
    ("forward", -1, 'must be positive; write a number, or "5 ms"'),
    ("forward", float("nan"), 'must be positive; write a number, or "5 ms"'),
    ("forward", 0.9e-12, OUT_OF_RANGE),
    ("backward", 0, 'must be positive; write a number, or "5 ms"'),
    ("backward", "1.1e6 s", OUT_OF_RANGE),
    ("weight_gradient", 2.1, "longer than the backward; give a part"),
    ("transfer", -0.1, 'must be 0 or more; write a number, or "5 ms"'),
    ("transfer", "2e6 s", OUT_OF_RANGE),
    ("activations", 1, 'must be positive; write "40 GB", or bytes'),  # of two stages each
]


@pytest.mark.parametrize(("option", "value", "says"), INVALID)
def test_an_invalid_option_is_named_with_what_is_right(option, value, says):
    with pytest.raises(PartoptError) as raised:
        partopt.Uniform(**{option: value})
    assert raised.value.fields["option"] == option
    assert f"{raised.value.message}; {raised.value.hint}" == f"`{option}={value}`: {says}"


@pytest.mark.parametrize(
    "options",
    [
        {"stages": 1024, "microbatches": 3255},  # 3 actions on each of two stages: 19,998,720
        {"stages": 1000, "microbatches": 2000, "chunks": 3},
        {"forward": 1e-12, "backward": 1e6, "weight_gradient": 1e6},
        {"weight_gradient": 0, "transfer": 0, "activations": 2},
    ],
)
def test_what_is_just_possible_is_taken(options):
    assert partopt.Uniform(**options).plan


@pytest.mark.parametrize(
    ("options", "actions"),
    [
        ({"stages": 1024, "microbatches": 3256}, 20_004_864),
        ({"stages": 1000, "microbatches": 2500, "chunks": 3}, 22_500_000),
        ({"stages": 1024, "microbatches": 3256, "chunks": 1}, 20_004_864),
    ],
)
def test_more_actions_than_can_be_simulated_are_refused(options, actions):
    with pytest.raises(PartoptError, match="more than 20,000,000 actions to simulate") as raised:
        partopt.Uniform(**options)
    assert raised.value.code == "too-many-actions"
    assert raised.value.fields == {"actions": actions, "limit": 20_000_000}


def test_a_timeline_larger_than_a_viewer_loads_is_refused_before_it_is_made():
    long = partopt.Uniform(stages=2, microbatches=250_001)  # a forward and a backward on each
    with pytest.raises(PartoptError, match=r"1,000,004 actions, more than 1,000,000"):
        partopt.try_schedule("1f1b", long, save_as="timeline.json")


def test_times_are_seconds_or_durations():
    pipeline = partopt.Uniform(forward="5 ms", backward="9 ms", weight_gradient="3 ms")
    [own] = partopt.try_schedules(pipeline, ["1f1b"]).tried
    assert own.iteration_s == pytest.approx(11 * 0.014)


@pytest.mark.parametrize("v", [1, 3])
def test_chunks_are_stages_of_a_device_under_looped_schedules_alone(v):
    """The bubble of interleaved 1F1B is (P - 1)(F + B) / v (Narayanan et al., SC 2021)."""
    document = partopt.try_schedule("interleaved", partopt.Uniform(chunks=v)).document
    [own] = document.tried
    assert (own.chunks, own.closed_form.agrees) == (v, True)
    assert own.iteration_s == pytest.approx(8 * 3 + 3 * 3 / v)
    assert [row.rank for row in document.timeline.ranks] == [0, 1, 2, 3]
    with pytest.raises(PartoptError, match=r"`chunks=2`: not for 1f1b") as raised:
        partopt.try_schedule("1f1b", partopt.Uniform(chunks=2))
    assert raised.value.fields == {"option": "chunks"}
    several = partopt.try_schedules(partopt.Uniform(chunks=v), ["1f1b", "zbv", "interleaved"])
    assert [row.schedule for row in several.tried] == ["1f1b", "zbv", "interleaved"]


def test_the_page_of_one_schedule(partopt):
    done = partopt("schedule", "zb-h1")
    assert done.code == 0
    assert "0  F0F1F2F3······I0W0F4I1W1F5I2W2F6I3W3F7I4W4I5W5I6W6I7W7" in done.out
    assert "bubble    11.1%; closed form (P-1)(F+I-W) = 3.00 s, 11.1%: agrees" in done.out
    assert "in flight 4\n" in done.out


def test_a_trial_with_a_timeline_that_cannot_be_read_is_refused():
    document = partopt.try_schedule("1f1b", partopt.Uniform()).document
    row = replace(document.timeline.ranks[0], actions="0F0 nonsense")
    timeline = replace(document.timeline, ranks=[row])
    faults = list(replace(document, timeline=timeline).faults())
    assert "timeline.ranks[0].actions: not actions" in [fault.message for fault in faults]


def test_schedules_that_need_another_count_say_so_in_their_row(partopt):
    done = partopt("schedule", "all", "--stages", 3)
    assert "dualpipe       3 devices do not divide into two equal halves" in done.out
    assert max(map(len, done.out.splitlines())) <= 80


def test_a_trial_is_saved_and_shown_again(partopt, tmp_path):
    for name in ("interleaved", "all"):
        printed = partopt("schedule", name, "--json")
        assert printed.document["schema"] == "partopt.trial/1"
        (tmp_path / "t.json").write_text(printed.out)
        assert partopt("show", tmp_path / "t.json").out == partopt("schedule", name).out


def test_what_it_writes_is_what_a_simulation_writes(partopt, tmp_path):
    for ending in ("json", "svg", "csv"):
        done = partopt("schedule", "1f1b", "-o", tmp_path / f"t.{ending}")
        assert done.code == 0, done.err
    assert (tmp_path / "t.csv").read_text().startswith("0F0,0F1,0F2,0F3,0B0,")
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    done = partopt("schedule", "1f1b", "-o", tmp_path / "t.csv")
    assert (done.code, done.out) == (2, "")  # refused before anything is printed


@pytest.mark.parametrize(
    "arguments, error",
    [
        (["1f2b"], 'unknown schedule "1f2b"'),
        (["dualpipe", "--stages", 3], "3 devices do not divide into two equal halves"),
        (["1f1b", "--chunks", 2], "--chunks 2: not for 1f1b"),
        (["1f1b", "--stages", 0], "partopt schedule: invalid value for '--stages'"),
        (["1f1b", "--forward", "5 parsecs"], "--forward: '5 parsecs': 'parsecs' is not a unit"),
        (["1f1b", "--microbatches", 10**8], "4 stages and 100000000 microbatches: more than"),
        (["all", "-o", "x.svg"], "-o: writes the timeline of one schedule"),
        (["1f1b", "-o", "x.txt"], "x.txt: unsupported format .txt"),
        (["1f1b", "-o", "-", "--json"], "-o - --json: both print on standard output"),
    ],
)
def test_what_cannot_be_is_refused(partopt, arguments, error):
    done = partopt("schedule", *arguments)
    assert (done.code, done.out) == (2, "")
    assert done.errors[0].startswith(error)
    assert done.hints
