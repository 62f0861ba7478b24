"""The script for the first minutes on a GPU knows the commands as they are: its dry run on CPUs."""

import os
import re
import subprocess
import sys

import pytest

from tests.helpers import ROOT

SCRIPT = ROOT.parent / "shared" / "prototypes" / "gpu" / "first15.sh"
PARTS = ("env", "gpt", "two", "one", "doctor")  # those that call partopt
LATE = 124  # a part that its limit ended, on a machine that is busy


@pytest.mark.slow
@pytest.mark.skipif(not SCRIPT.is_file(), reason="the script lies in ../shared, which is not here")
def test_the_first_minutes_are_rehearsed_on_processors(tmp_path):
    given = {
        "DRY": "1",
        "PY": sys.executable,
        "OUT": str(tmp_path / "out"),
        "TMPDIR": str(tmp_path),
        "NUMBA_DISABLE_JIT": "1",  # it would compile all into a cache of its own
    }
    environment = os.environ | given | {"ONLY": " ".join(PARTS), "TOTAL": "1200"}
    done = subprocess.run(
        ["bash", str(SCRIPT)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    summary = (tmp_path / "out" / "summary.txt").read_text()
    ended = {name: int(code) for name, code in re.findall(r"^== (\w+): exit (\d+)", summary, re.M)}
    assert {*ended} == {*PARTS}
    assert {*ended.values()} <= {0, LATE}, summary
    assert "FAILED" not in summary
    if ended["two"] == 0:  # a plan of two stages in two processes that share one device
        assert "equal=True" in summary
