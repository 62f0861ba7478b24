"""Schedules on equal stages: held to the exact reference and to the tables of papers."""

import json
from fractions import Fraction
from functools import cache

import pytest
from msgspec.structs import replace

import partopt
from partopt.errors import PartoptError
from partopt.schedules import SCHEDULES, schedule
from partopt.schedules.layout import MIRRORED
from partopt.schedules.order import in_flight
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
    assert found["1f1b"].closed_form.reason == "messages take 100.0 ms, and devices wait for them"
    assert not any(own.closed_form.agrees for own in found.values())


def test_a_form_that_does_not_hold_says_where_it_does():
    [own] = partopt.try_schedules(partopt.Uniform(microbatches=2), ["zb-h1"]).tried
    assert not own.closed_form.agrees
    assert own.closed_form.reason == "the form holds where M >= P and W <= F, I"


def test_invalid_options_are_named():
    for option, *values in (
        ("stages", 0, 10**6),
        ("microbatches", 0),
        ("forward", 0, -1, float("nan")),
        ("backward", "1e9"),
        ("transfer", -0.1),
        ("weight_gradient", 3),
        ("chunks", 0),
    ):
        for value in values:
            with pytest.raises(PartoptError) as raised:
                partopt.Uniform(**{option: value})
            assert raised.value.fields["option"] == option
    pipeline = partopt.Uniform(forward="5 ms", backward="9 ms", weight_gradient="3 ms")
    [own] = partopt.try_schedules(pipeline, ["1f1b"]).tried
    assert own.iteration_s == pytest.approx(11 * 0.014)


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
