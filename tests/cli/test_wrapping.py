"""Messages are as wide as the terminal, and what a shell takes of them is what was meant."""

from __future__ import annotations

import os
import pty
import shlex
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partopt.cli.terminal import wrap
from tests.helpers import ROOT, uniform_profile

WORDS = st.lists(st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=30))


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
@given(WORDS, st.sampled_from(["next:    ", "hint:  this fits (3 samples/s): "]))
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
