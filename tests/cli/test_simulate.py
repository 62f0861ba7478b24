"""`partopt simulate`."""

import io
import json
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from partopt import documents
from partopt.documents.plan import Plan
from partopt.what_if import simulation
from tests.helpers import changed, flat, run_process


def test_the_report_is_on_standard_output_and_what_to_do_next_beside_it(partopt, plan_file):
    path = plan_file()
    outcome = partopt("simulate", path)
    assert outcome.code == 0
    for part in (
        "plan     straight: 4 stages",
        "RANK  |0 s",
        "F0",
        "WORK",
        "LEVEL",
        "period",
        "speed",
        "memory",
        "advice",
    ):
        assert part in outcome.out or part.upper() in outcome.out
    assert outcome.err == f"next:    partopt simulate {path} -o trace.json\n"


def test_the_simulation_confirms_what_the_plan_predicts(partopt, plan_file):
    for given in (
        ("--planner", "straight"),
        ("--planner", "pipedream"),
        ("--planner", "gpipe", "--schedule", "gpipe", "--microbatches", 8),
    ):
        path = plan_file(*given)
        found = partopt("simulate", path, "--json").document
        predicted = Plan.load(path).predicted
        assert found["period_s"] == pytest.approx(predicted.period_s, rel=1e-9)
        assert found["bubble"] == pytest.approx(predicted.bubble, abs=1e-9)
        assert found["peak_memory_bytes"] == Plan.load(path).peak_memory_bytes
        assert found["changed"] == []


def test_one_json_document_and_nothing_else(partopt, plan_file):
    outcome = partopt("simulate", plan_file(), "--json")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.document["schema"] == "partopt.simulation/1"


def test_a_plan_from_standard_input(partopt, plan_file):
    path = plan_file()
    assert (
        partopt("simulate", "-", "--json", stdin=documents.read_bytes(path)).out
        == partopt("simulate", path, "--json").out
    )


def test_the_same_document_every_time(partopt, synchronous):
    assert (
        partopt("simulate", synchronous, "--json").out
        == partopt("simulate", synchronous, "--json").out
    )


@pytest.mark.parametrize(
    "given", [[], ["--schedule", "zb-h1"], ["--bandwidth", "all=1 MB/s"], ["--microbatches", "4"]]
)
def test_piped_text_is_80_columns_wide_and_plain(partopt, synchronous, given, monkeypatch):
    monkeypatch.chdir(Path(synchronous).parent)
    outcome = partopt("simulate", Path(synchronous).name, *given)
    assert max(map(len, outcome.out.splitlines())) <= 80
    assert "\x1b" not in outcome.out


@pytest.mark.slow
def test_ascii_where_the_terminal_has_no_more(synchronous):
    done = run_process(
        ["simulate", synchronous], environment={"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    )
    assert done.returncode == 0
    assert done.stdout.isascii()
    assert b"?" not in done.stdout


class TestOutput:
    def test_a_trace(self, partopt, synchronous, tmp_path):
        outcome = partopt("simulate", synchronous, "-o", tmp_path / "trace.json")
        assert outcome.err.splitlines() == [
            f"Wrote {tmp_path / 'trace.json'}",
            f"next:    open {tmp_path / 'trace.json'} in https://ui.perfetto.dev",
        ]
        assert json.loads((tmp_path / "trace.json").read_bytes())["otherData"]["schedule"] == "1f1b"

    def test_a_trace_on_standard_output_and_nothing_else(self, partopt, synchronous):
        outcome = partopt("simulate", synchronous, "-o", "-")
        assert (outcome.code, outcome.err) == (0, "")
        assert outcome.document["traceEvents"]

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "form, begin", [("svg", b"<?xml"), ("pdf", b"%PDF"), ("png", b"\x89PNG")]
    )
    def test_a_figure(self, partopt, synchronous, tmp_path, form, begin):
        assert partopt("simulate", synchronous, "-o", tmp_path / f"figure.{form.upper()}").code == 0
        assert (tmp_path / f"figure.{form.upper()}").read_bytes().startswith(begin)

    def test_a_schedule_is_written_and_executed_again(self, partopt, synchronous, tmp_path):
        path = tmp_path / "own.csv"
        usual = partopt("simulate", synchronous, "-o", path, "--json").document
        again = partopt("simulate", synchronous, "--schedule", path, "--json").document
        assert (again["schedule"], again["microbatches"], again["period_s"]) == (
            "own.csv",
            16,
            usual["period_s"],
        )
        assert [rank["peak_memory_bytes"] for rank in again["ranks"]] == [
            rank["peak_memory_bytes"] for rank in usual["ranks"]
        ]

    def test_json_and_a_file_at_once(self, partopt, synchronous, tmp_path):
        outcome = partopt("simulate", synchronous, "--json", "-o", tmp_path / "t.json")
        assert outcome.document["schema"] == "partopt.simulation/1"
        assert (tmp_path / "t.json").exists()

    def test_an_existing_file(self, partopt, synchronous, tmp_path):
        (tmp_path / "t.json").write_text("mine")
        outcome = partopt("simulate", synchronous, "-o", tmp_path / "t.json")
        assert (outcome.code, outcome.out, outcome.hints) == (2, "", ["add --force to replace it"])
        assert (tmp_path / "t.json").read_text() == "mine"
        assert partopt("simulate", synchronous, "-o", tmp_path / "t.json", "--force").code == 0

    @pytest.mark.parametrize("name", ["trace", "trace.yaml", "trace.json.gz"])
    def test_an_unknown_extension(self, partopt, synchronous, tmp_path, name):
        outcome = partopt("simulate", synchronous, "-o", tmp_path / name)
        assert (outcome.code, outcome.out) == (2, "")
        assert outcome.hints == [
            "choose .json (trace for Perfetto), .svg, .pdf, .png (figure) or .csv (schedule)"
        ]

    def test_two_things_on_standard_output(self, partopt, synchronous):
        assert partopt("simulate", synchronous, "-o", "-", "--json").errors == [
            "-o - --json: both print on standard output"
        ]

    def test_more_actions_than_a_trace_holds(self, partopt, synchronous, tmp_path):
        outcome = partopt(
            "simulate", synchronous, "-o", tmp_path / "t.json", "--microbatches", 200_000
        )
        assert (outcome.code, outcome.out, outcome.hints) == (
            2,
            "",
            ["--microbatches 125000 or fewer"],
        )


class TestMemory:
    def test_a_plan_that_does_not_fit_is_still_told_and_exits_with_one(
        self, partopt, plan_file, tmp_path
    ):
        alone = changed(documents.read_bytes(plan_file()), "runners_up", to=[])
        small = changed(alone, "topology", "device", "memory_bytes", to=10**7)
        (tmp_path / "small.json").write_bytes(small)
        outcome = partopt("simulate", tmp_path / "small.json")
        assert outcome.code == 1
        assert "DOES NOT FIT 10 MB" in outcome.out
        assert re.match(
            r"the plan does not fit: rank 0 needs [\d.]+ MB, which exceeds the limit by [\d.]+ MB",
            outcome.errors[0],
        )
        assert outcome.hints == [
            'with --memory "10000000 B" partopt plan keeps within that where any plan does'
        ]
        assert partopt("simulate", tmp_path / "small.json", "--json").document["fits"] is False

    def test_another_limit(self, partopt, plan_file):
        outcome = partopt("simulate", plan_file(), "--memory", "10 MB")
        assert outcome.code == 1
        assert "changed  memory of a device 16 GB -> 10 MB" in outcome.out
        assert partopt("simulate", plan_file(), "--memory", "10").errors == [
            "--memory: '10' has no unit"
        ]

    def test_more_microbatches_in_flight_than_there_is_room_for(self, partopt, plan_file):
        path = plan_file(cluster=flat(4, 10e9, memory_bytes=40 * 10**6))
        assert partopt("simulate", path).code == 0
        assert partopt("simulate", path, "--warmup", "+20").code == 1


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", "the file is empty"),
        (b"{}", 'has no "schema": not a partopt plan'),
        (b'{"schema": "partopt.profile/1"}', 'schema: "partopt.profile/1" is not a partopt plan'),
    ],
)
def test_a_file_that_is_no_plan(partopt, tmp_path, content, error):
    (tmp_path / "x.json").write_bytes(content)
    outcome = partopt("simulate", tmp_path / "x.json")
    assert (outcome.code, outcome.out, outcome.errors) == (
        2,
        "",
        [f"{tmp_path / 'x.json'}: {error}"],
    )


def test_a_truncated_plan(partopt, plan_file, tmp_path):
    content = documents.read_bytes(plan_file())
    (tmp_path / "x.json").write_bytes(content[: len(content) // 2])
    outcome = partopt("simulate", tmp_path / "x.json")
    assert (outcome.code, outcome.out) == (2, "")
    assert "not JSON" in outcome.errors[0]


def test_a_plan_that_takes_no_time(partopt, plan_file, tmp_path):
    document = json.loads(documents.read_bytes(plan_file()))
    for stage in document["stages"]:
        stage |= {name: 0 for name in stage if name.endswith("_s")} | {
            "input_bytes": 0,
            "output_bytes": 0,
            "parameter_bytes": 0,
        }
    (tmp_path / "x.json").write_text(json.dumps(document))
    outcome = partopt("simulate", tmp_path / "x.json")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.errors == [
        f"{tmp_path / 'x.json'}: all that the plan does takes 0 s: there is nothing to see"
    ]


def test_a_plan_of_an_unknown_schedule(partopt, plan_file, tmp_path):
    (tmp_path / "x.json").write_bytes(
        changed(documents.read_bytes(plan_file()), "layout", "schedule", to="1f2b")
    )
    outcome = partopt("simulate", tmp_path / "x.json")
    assert (outcome.code, outcome.errors) == (
        2,
        [f'{tmp_path / "x.json"}: schedule: unknown schedule "1f2b"'],
    )
    assert (
        partopt("simulate", tmp_path / "x.json", "--schedule", "1f1b", "--microbatches", 8).code
        == 0
    )


def test_a_terminal_gets_colour_and_its_width(partopt, synchronous, monkeypatch, capsys):
    class Terminal(io.TextIOWrapper):
        def isatty(self):
            return True

    def on_a_terminal(**environment):
        with monkeypatch.context() as patched:
            patched.setenv("COLUMNS", "132")
            for name, value in environment.items():
                patched.setenv(name, value)
            content = io.BytesIO()
            patched.setattr(sys, "stdout", Terminal(content, encoding="utf-8", write_through=True))
            partopt("simulate", synchronous)
            return content.getvalue().decode()

    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured, plain = on_a_terminal(), on_a_terminal(NO_COLOR="1")
    assert "\x1b[38;5;16m" in coloured
    assert "\x1b" not in plain
    assert 80 < max(map(len, plain.splitlines())) <= 132


@pytest.mark.usefixtures("heeded_signals")
def test_an_interrupt_does_not_wait_for_the_simulation(partopt, synchronous, tmp_path, monkeypatch):
    released = threading.Event()

    def endless(*_):
        signal.raise_signal(signal.SIGINT)
        released.wait(60)

    monkeypatch.setattr(simulation, "execute", endless)
    began = time.monotonic()
    outcome = partopt("simulate", synchronous, "-o", tmp_path / "x.csv")
    assert (outcome.code, outcome.out, outcome.err) == (130, "", "interrupted\n")
    assert time.monotonic() - began < 30
    assert not (tmp_path / "x.csv").exists()
    released.set()
