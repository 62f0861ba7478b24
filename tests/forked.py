"""`python -m MODULE ARGUMENTS` as a process that has imported what takes seconds already.

A server is started once for each worker of the test run; it imports, and forks for every call. What
is tested of a process (its streams, exit code, children and files) is as ever; where its imports or
its interpreter's options are what is tested, `tests.helpers.run_process` starts one of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

LIMIT_S = 300
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["partopt.cli.run", "partopt.profiler", "partopt.runtime.run"])


def run_forked(
    module: str, arguments: Sequence[str] = (), cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a module with the environment of this process, and wait for its end."""
    with tempfile.TemporaryDirectory() as folder:
        streams = [str(Path(folder, name)) for name in ("in", "out", "err")]
        for name in streams:
            Path(name).touch()
        given = module, list(arguments), streams, dict(os.environ), str(cwd or Path.cwd())
        process = _SERVER.Process(target=_run, args=given)
        process.start()
        process.join(LIMIT_S)
        if process.is_alive():
            process.kill()
            process.join()
        code = process.exitcode
        process.close()
        out, err = (Path(name).read_text() for name in streams[1:])
    assert code is not None
    return subprocess.CompletedProcess([module, *arguments], code, out, err)


def _run(
    module: str, arguments: list[str], streams: list[str], environment: dict[str, str], cwd: str
) -> None:
    for number, name in enumerate(streams):
        os.dup2(os.open(name, os.O_RDWR | os.O_APPEND), number)
    # no context closes them: they are the process's own
    sys.stdin = open(0)  # noqa: SIM115
    sys.stdout, sys.stderr = open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
