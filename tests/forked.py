"""`python -m MODULE ARGUMENTS` as a process that has imported what takes seconds already.

A server is started once for each worker of the test run; it imports, and forks for every call. What
is tested of a process (its streams, exit code, children and files) is as ever; where its imports or
its interpreter's options are what is tested, `tests.helpers.run_process` starts one of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

LIMIT_S = 300
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["partopt.cli.run", "partopt.profiler", "partopt.runtime.run"])


class Forked:
    """A module, or a file that ends in `.py`, that runs in a process of its own."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str] = (),
        cwd: Path | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = tempfile.TemporaryDirectory()
        streams = [str(Path(self.folder.name, name)) for name in ("in", "out", "err")]
        for name in streams:
            Path(name).touch()
        self.out, self.err = map(Path, streams[1:])
        self.command = [module, *arguments]
        environment = {**os.environ, **(variables or {})}
        given = module, list(arguments), streams, environment, str(cwd or Path.cwd())
        self.process = _SERVER.Process(target=_run, args=given)
        self.process.start()

    def wait(self, limit_s: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
        """What it said, at its end; it is killed where that does not come in time."""
        self.process.join(limit_s)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        code = self.process.exitcode
        assert code is not None
        out, err = self.out.read_text(), self.err.read_text()
        self.process.close()
        self.folder.cleanup()
        return subprocess.CompletedProcess(self.command, code, out, err)


def run_forked(
    module: str, arguments: Sequence[str] = (), cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a module with the environment of this process, and wait for its end."""
    return Forked(module, arguments, cwd).wait()


def start_ranks(
    count: int, module: str, arguments: Sequence[str] = (), cwd: Path | None = None
) -> list[Forked]:
    """The ranks of a run of so many processes, with the variables that torchrun sets."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared |= {"LOCAL_WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
    return [
        Forked(module, arguments, cwd, shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(count)
    ]


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
    if module.endswith(".py"):
        sys.path.insert(0, str(Path(module).parent))
        runpy.run_path(module, run_name="__main__")
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
