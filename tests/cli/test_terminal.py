"""What a terminal is sent: nothing that it obeys or hides but newlines and the pages' colours;
messages as wide as it is, of which a shell takes what was meant, in words of the command line.
"""

from __future__ import annotations

import ast
import io
import json
import os
import pty
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from partopt.cli import terminal
from partopt.cli.terminal import wrap
from partopt.cli.words import as_flags
from partopt.documents.profile import Model
from tests.helpers import ROOT, chain_profile, flat, uniform_profile

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


class Wide(io.StringIO):
    """A terminal, or a file."""

    def __init__(self, is_terminal):
        super().__init__()
        self.isatty, self.fileno = (lambda: is_terminal), (lambda: 7)


@pytest.mark.parametrize(
    ("has", "width"), [(120, 120), (20, 60), (999, 200), (60, 60), (200, 200), (0, 80), (None, 80)]
)
def test_the_page_is_as_wide_as_the_terminal_within_bounds(monkeypatch, has, width):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(os, "get_terminal_size", lambda number: os.terminal_size((has, number)))
    assert terminal.columns(Wide(has is not None)) == width
    monkeypatch.setattr(sys, "stdout", Wide(has is not None))
    assert terminal.columns() == width


# --- messages are wrapped ---------------------------------------------------------------------


def test_prose_is_wrapped_below_its_lead_and_values_stay_with_their_options():
    message = (
        'hint:  write the rate of a link as "200 Gb/s" in a topology\'s file, or as it stands in '
        "--bandwidth cluster=25GB/s of another simulation"
    )
    assert wrap(message, 60).splitlines() == [
        'hint:  write the rate of a link as "200 Gb/s" in a',
        "       topology's file, or as it stands in",
        "       --bandwidth cluster=25GB/s of another simulation",
    ]
    assert wrap(message, 200) == message


def test_a_file_stays_on_its_line():
    message = "error: a folder/with blanks/in it.json: layers[3].name: a name of a layer is missing"
    assert wrap(message, 60).splitlines() == [
        "error: a folder/with blanks/in it.json: layers[3].name: a",
        "       name of a layer is missing",
    ]
    folders = "folder-of-one-word/" * 5
    assert wrap(f"error: in {folders} is nothing", 60).splitlines() == [
        "error: in",
        f"       {folders}",
        "       is nothing",
    ]


def test_other_lines_stay_as_they_are():
    for line in ("Wrote /a folder/" + "x" * 70, "  File 'a b', line 3", "measuring " + "a " * 60):
        assert wrap(line, 60) == line


@pytest.mark.slow
@given(
    st.lists(st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=30)),
    st.sampled_from(["next:    ", "hint:  this fits (3 samples/s): "]),
)
def test_a_shell_takes_a_wrapped_command_as_it_was(words, lead):
    message = lead + shlex.join(["partopt", "plan", *words])
    lines = wrap(message, 60)
    copied = lines[lines.index("partopt") :].replace("\\\n", "")  # as a shell goes on
    assert shlex.split(copied) == ["partopt", "plan", *words]
    apostrophe = shlex.quote("'")[1:-1]
    assert all(len(line) <= 60 for line in lines.splitlines() if apostrophe not in line)


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_on_a_terminal_a_command_is_copied_from_the_page(shell, tmp_path):
    """In a pseudoterminal of 60 columns: a real shell is given what was printed."""
    file = tmp_path / "a profile's name"
    uniform_profile(2).save(str(file))
    primary, terminal = pty.openpty()
    subprocess.run(
        [sys.executable, "-m", "partopt", "show", str(file)],
        stdout=subprocess.DEVNULL,
        stderr=terminal,
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "60"},
        check=True,
    )
    os.close(terminal)
    told = os.read(primary, 100_000).decode().replace("\r\n", "\n").removeprefix("next:    ")
    assert told.count("\n") > 1
    script = f"partopt() {{ printf '%s\\n' \"$@\"; }}\n{told}\n"
    heard = subprocess.run([shell, "-c", script], capture_output=True, text=True, check=True)
    assert heard.stdout.splitlines() == ["plan", str(file), "--topology", "dgx-a100"]


# --- options and functions as the command line writes them --------------------------------------


@pytest.mark.parametrize(
    ("text", "typed"),
    [
        ("`microbatches=64`", "--microbatches 64"),
        ("needs `microbatches` or `global_batch`", "needs --microbatches or --global-batch"),
        ("`microbatch_sizes=[1]`", "--microbatch 1"),
        ("`microbatch_sizes=[1, 2, 4]`: too many", "--microbatch 1,2,4: too many"),
        ("`microbatch_sizes=[1, 'x']`: no", "--microbatch 1,x: no"),
        ("`microbatch_sizes=[]`: no", "--microbatch: no"),
        ("`cuts=(5,)`", "--cuts 5"),
        ("add depth=... to `arguments`", "add depth=... to --set"),
        ("`units=h.*` or `granularity=block`", "--unit h.* or --granularity block"),
        ("`memory=40 GB`", '--memory "40 GB"'),
        ("`force=True`", "--force"),
        ("run `solve`, then `verify`", "run partopt plan, then partopt show --verify"),
        ("`measure` it again", "partopt profile it again"),
        ("`colour=blue` and `hue`", "`colour=blue` and `hue`"),
        ("`async-tp=yes`, `tp_overlap=yes`", "--with async-tp=yes, --with tp-overlap=yes"),
        ("`compile=yes` or `compile`", "--with compile=yes or --compile"),
        ("steps and `no end", "steps and `no end"),
    ],
)
def test_options_are_flags_and_functions_are_verbs(text, typed):
    assert as_flags(text) == typed
