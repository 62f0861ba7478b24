"""Scripts that tests run in bash: few processes, which end together when time is up."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

# what a drawn script may start; a function that calls itself ends after so many calls
_LIMITS = "ulimit -Su 4000 2>/dev/null || true; ulimit -St 60; FUNCNEST=100\n"


def run_bash(
    script: str, *, strict: bool = False, cwd: Path | None = None, timeout: float = 20
) -> subprocess.CompletedProcess[str]:
    """What a script prints in a bash that has a home alone; `strict` stops at the first failure.

    Raises TimeoutExpired where it is not done in `timeout` seconds: no process of it is left then.
    """
    command = ["bash", "--norc", *["-eu"] * strict, "-c", _LIMITS + script]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, cwd=cwd,
        env={"PATH": os.defpath, "HOME": "/home/somebody"}, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, out, err)
