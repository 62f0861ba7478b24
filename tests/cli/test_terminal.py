"""What a terminal is sent: nothing that it obeys or hides but newlines and the pages' colours."""

from __future__ import annotations

import ast
import json
import re
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from partopt.cli import terminal
from partopt.documents.profile import Model
from tests.helpers import ROOT, chain_profile, flat

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# steers a terminal, and no document may have it; hides or turns text, and a document may
STEERING = ["\x1b[31m", "\x1b]0;title\x07", "\x9b2J", "\x08", "\x7f", "\u202e", "\u2066", "\x00"]
HIDDEN = ["\u200b", "\u200d", "\ufeff", "\xad", "\u2028", "\u200f", "\U000e0041"]
names = st.builds(
    "".join, st.lists(st.sampled_from([*STEERING, *HIDDEN, "a", "é", "."]), min_size=1, max_size=5)
)
hidden = st.builds("".join, st.lists(st.sampled_from([*HIDDEN, "a"]), min_size=1, max_size=5))


def steering(text: str) -> list[str]:
    """The characters of a text that are neither printable nor a newline nor a colour."""
    bare = COLOUR.sub("", text)
    return [char for char in bare if not char.isprintable() and char != "\n"]


def write_named(folder: Path, name: str, file: str) -> tuple[Path, Path]:
    """A profile and a topology that bear `name` wherever they bear one, unchecked."""
    profile = chain_profile([0.01] * 4, names=[f"{name}.{index}" for index in range(4)])
    profile = msgspec.structs.replace(profile, model=Model(name=name))
    (folder / file).write_bytes(msgspec.json.encode(profile))
    cluster = flat(4, 10e9, memory_bytes=16 * 10**9).dump()
    raw = cluster.replace("name: flat-4", f"name: {json.dumps(name)}", 1)
    (folder / "cluster.yaml").write_text(raw)
    return folder / file, folder / "cluster.yaml"


def run_all(partopt, folder: Path, name: str, file: str):
    """What every verb prints of hostile files."""
    profile, cluster = write_named(folder, name, file)
    plan = folder / f"plan {file}"
    yield partopt("show", profile)
    yield partopt("topology", "show", cluster)
    job = (profile, "--topology", cluster)
    yield partopt("plan", *job, "--planner", "straight", "-o", plan, "--force")
    yield partopt("compare", *job, *(["--plan", plan] if plan.exists() else []))
    yield partopt("simulate", plan)
    yield partopt("show", folder / "cluster.yaml", profile)
    yield partopt("plan", name.replace("\x00", ""), "--topology", file)


@pytest.mark.slow
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(name=st.one_of(hidden, names), file=names.filter(lambda text: "\x00" not in text))
def test_no_name_steers_the_terminal(partopt, name, file):
    with tempfile.TemporaryDirectory() as folder:
        for outcome in run_all(partopt, Path(folder), name, f"f{file}"):
            assert outcome.code in (0, 2), outcome.err
            assert steering(outcome.out) == []
            assert steering(COLOUR.sub("\x07", outcome.err)) == []  # messages have no colours


def test_a_hidden_character_is_seen_on_the_page_and_kept_in_the_document(partopt, tmp_path):
    profile, cluster = write_named(tmp_path, "a\u200bb", "p.json")
    assert "a\\u200bb" in partopt("show", profile).out
    outcome = partopt("plan", profile, "--topology", cluster, "--json")
    assert outcome.document["profile"]["name"] == "a\u200bb"
    assert steering(outcome.out) == []


def test_colours_of_pages_stay_and_those_of_messages_do_not(capsys, monkeypatch):
    monkeypatch.setattr("click.utils.should_strip_ansi", lambda stream, color: False)
    terminal.say("\x1b[1mTIME\x1b[0m \x1b[38;5;16m\x1b[48;5;75mF\x1b[0m \x1b[8m\x1b]0;t\x07\nb")
    terminal.say("\x1b[1ma\nb", err=True)
    captured = capsys.readouterr()
    assert captured.out == (
        "\x1b[1mTIME\x1b[0m \x1b[38;5;16m\x1b[48;5;75mF\x1b[0m \\x1b[8m\\x1b]0;t\\x07\nb\n"
    )
    assert captured.err == "\\x1b[1ma\nb\n"


@pytest.mark.parametrize("path", sorted((ROOT / "partopt/cli").rglob("*.py")), ids=lambda p: p.name)
def test_everything_is_printed_in_one_place(path):
    printing = {
        node.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "click.echo")
    }
    assert not printing or path.name == "terminal.py"


@pytest.mark.parametrize(
    ("given", "width"), [("120", 120), ("20", 60), ("999", 200), ("", 80), ("wide", 80)]
)
def test_the_page_is_as_wide_as_the_environment_says_within_bounds(monkeypatch, given, width):
    monkeypatch.setenv("COLUMNS", given)
    assert terminal.columns() == width


def test_the_terms_of_a_page_are_explained_below_it(partopt, profile_file, topology_file):
    job = [profile_file(), "--topology", topology_file(), "--planner", "straight"]
    plain = partopt("plan", *job).out
    explained = partopt("plan", *job, "--explain").out
    assert explained.startswith(plain)
    below = [line for line in explained.removeprefix(plain).splitlines() if line[:1].strip()]
    terms = [line.split()[0] for line in below]
    assert {"period", "NOAM", "binds", "flight", "busy", "speed", "stage", "memory"} <= {*terms}
    assert "advice" not in terms  # which is on no page of a plan
    assert partopt("plan", *job, "--explain", "--json").document["planner"] == "straight"


@pytest.mark.parametrize("verb", ["plan", "compare", "simulate", "show"])
def test_verbs_with_pages_explain_them(partopt, verb):
    assert "--explain" in partopt(verb, "--help").out
