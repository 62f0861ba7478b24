"""Ctrl-C while `partopt plan` or `compare` searches: the best until then is shown and written."""

from __future__ import annotations

import contextlib
import json

import pytest

import partopt as po
from tests.forked import Forked
from tests.helpers import ROOT, uniform_profile

GNMT = ("gnmt.v100-published.float32", "--topology", "v100-pcie", "--global-batch", "512")
LAYOUTS = (
    *("llama3-8b", "--topology", "dgx-h100", "--servers", "1", "--for", "megatron"),
    *("--global-batch", "32", "--sequence", "2048"),
)


@pytest.fixture
def interrupted_at(monkeypatch):
    """Ctrl-C at the k-th report of progress, or of what is being done; all that was reported."""

    def interrupt(k: int, of: str = "") -> list[str]:
        reports: list[str] = []

        def tell(what: str, done: int, total: int) -> None:
            reports.append(what)
            if sum(of in report for report in reports) == k and of in what:
                raise KeyboardInterrupt

        @contextlib.contextmanager
        def progress():
            yield tell

        monkeypatch.setattr("partopt.cli.terminal.progress", progress)
        return reports

    return interrupt


@pytest.mark.slow
def test_the_best_until_then_is_shown_and_written(partopt, interrupted_at, tmp_path):
    interrupted_at(400)
    written = tmp_path / "plan.json"
    outcome = partopt("plan", *GNMT, "--schedule", "1f1b", "-o", written)
    assert outcome.code == 130
    assert "plan     optimal: " in outcome.out
    said = outcome.err.splitlines()
    assert said[-2] == f"Wrote {written}"
    assert said[-1].startswith("interrupted at ")
    assert said[-1].endswith(": this is the best until then")
    assert "next:" not in outcome.err
    assert po.verify(po.Plan.load(written), po.Profile.load(GNMT[0])).verified


@pytest.mark.slow
def test_json_of_an_interrupted_search_is_a_document(partopt, interrupted_at):
    interrupted_at(400)
    outcome = partopt("plan", *GNMT, "--schedule", "1f1b", "--json")
    assert outcome.code == 130
    assert json.loads(outcome.out)["planner"] == "optimal"
    assert outcome.err.splitlines()[-1].startswith("interrupted at ")


@pytest.mark.parametrize("rest", [("plan",), ("plan", "--scaling", "8,16"), ("compare",)])
def test_nothing_is_written_where_nothing_was_found(partopt, interrupted_at, tmp_path, rest):
    interrupted_at(3)
    verb, *options = rest
    written = tmp_path / "written.json"
    outcome = partopt(verb, *GNMT, "--schedule", "1f1b", *options, "-o", written)
    assert (outcome.code, outcome.out) == (130, "")
    assert outcome.err.splitlines()[-1].endswith(": nothing is written")
    assert not written.exists()


def test_it_says_how_far_it_was(partopt, interrupted_at):
    interrupted_at(2)
    outcome = partopt("plan", *GNMT, "--schedule", "1f1b")
    expected = "interrupted at 12% of estimating grids, before a plan was found: nothing is written"
    assert (outcome.code, outcome.err.splitlines()[-1]) == (130, expected)


@pytest.mark.slow
def test_rows_of_a_comparison(partopt, interrupted_at, tmp_path):
    interrupted_at(400)
    written = tmp_path / "table.json"
    outcome = partopt("compare", *GNMT, "--schedule", "1f1b", "-o", written)
    assert outcome.code == 130
    assert outcome.out.count("\n") > 1
    rows = json.loads(written.read_text())["rows"]
    assert rows[0]["planner"] == "optimal"


@pytest.mark.slow
def test_rows_of_a_table_of_devices(partopt, interrupted_at):
    interrupted_at(1, "8 devices")
    outcome = partopt("plan", *LAYOUTS, "--scaling", "2,4,8", "--json")
    assert outcome.code == 130
    assert [row["devices"] for row in json.loads(outcome.out)["rows"]] == [2, 4]


@pytest.mark.slow
@pytest.mark.levers
@pytest.mark.parametrize(
    ("report", "of"),
    [
        (9, "estimating layouts"),
        (1, "simulating layouts"),
        (3, "simulating layouts"),
        (4, "estimating what else helps"),
    ],
)
def test_a_layout(partopt, interrupted_at, tmp_path, report, of):
    """Before the first is simulated, too."""
    interrupted_at(report, of)
    written = tmp_path / "plan.json"
    outcome = partopt("plan", *LAYOUTS, "-o", written)
    assert outcome.code == 130
    assert f"{of}: this is the best until then" in outcome.err
    plan = po.Plan.load(written)
    assert plan.transformer.asked == plan.transformer.layout


@pytest.mark.slow
def test_one_that_does_not_fit_is_shown_and_not_written(
    partopt, interrupted_at, profile_file, topology_file, tmp_path
):
    written = tmp_path / "plan.json"
    question = ("plan", profile_file(uniform_profile(8)), "--topology", topology_file())
    options = ("--schedule", "1f1b", "--microbatches", "16", "--memory", "1B", "-o", written)
    reports = interrupted_at(0)
    assert partopt(*question, *options).code == 1
    interrupted_at(len(reports))
    outcome = partopt(*question, *options)
    assert outcome.code == 130
    assert "does not fit" in outcome.out
    assert outcome.err.splitlines()[-1].endswith(": this is the best until then")
    assert not written.exists()


# gets Ctrl-C when its search has had so many seconds of the processor
SCRIPT = """
import contextlib, os, signal, sys
from partopt.cli import main, terminal

@contextlib.contextmanager
def progress():
    signal.signal(signal.SIGVTALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    signal.setitimer(signal.ITIMER_VIRTUAL, float(os.environ["AFTER_S"]))
    yield lambda what, done, total: None

terminal.progress = progress
main(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.usefixtures("heeded_signals")
@pytest.mark.parametrize("after_s", [0.2, 0.6, 1.4])
def test_a_process_that_is_interrupted_anywhere(tmp_path, after_s):
    """In compiled code, too, after which Python looks for signals."""
    script, written = tmp_path / "search.py", tmp_path / "plan.json"
    script.write_text(SCRIPT)
    options = ["--schedule", "auto", "--effort", "thorough", "-o", str(written)]
    variables = {"AFTER_S": str(after_s)}
    started = Forked(str(script), ["plan", *GNMT, *options], ROOT, variables)
    done = started.wait()
    assert done.returncode == 130, done.stderr
    last = done.stderr.splitlines()[-1]
    if written.exists():
        assert done.stdout
        assert last.endswith(": this is the best until then")
        assert po.verify(po.Plan.load(written), po.Profile.load(GNMT[0])).verified
    else:
        assert not done.stdout
        assert last.endswith("before a plan was found: nothing is written")
