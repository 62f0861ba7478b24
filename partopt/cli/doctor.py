"""`partopt doctor`: what this machine is and can do, tried out and written into one file.

What is tried runs as separate commands: one that hangs is ended, and one that breaks its device
breaks no other.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from partopt import documents
from partopt.cli import options
from partopt.cli.terminal import say
from partopt.errors import ANSWER_IS_NO, PartoptError

if TYPE_CHECKING:
    from partopt.documents.doctor import Check, Diagnosis, Exchange

LIMIT_S = 300.0  # of one command
_LINES = 20  # of its output that are kept where it fails
MODEL = "partopt.profiler.small"
ONE = """name: one
device: {name: GPU}
levels:
  - {name: host, link: pcie, size: 1, bandwidth: 10 GB/s}
"""


@click.command()
@options.option("-o --output", "FILE", "The file to write.", default="doctor.json")
@click.option("--force", is_flag=True, help="Replace the file.")
@options.json_option
def command(output: str, force: bool, as_json: bool) -> None:
    """Say what this machine is, and try on it all that partopt does with a device.

    Versions and devices; an exchange of each kind between two ranks; links, a profile, a plan and a
    run of a small model: with one GPU one rank on it too, with several on both engines, of four
    where there are four. What is missing is said so. All of it goes into one file, which has no
    names of hosts or people: send it along with a question.

    Exits with 1 where something failed.

    \b
    Example:
      partopt doctor
      partopt doctor -o ours.json
    """
    from partopt.report.doctor_text import render

    documents.check_writable(output, force, [".json"])
    with tempfile.TemporaryDirectory() as folder:
        found = _diagnose(Path(folder))
    found.save(output, force)
    if as_json:
        options.write_json(found)
    else:
        say(render(found))
    options.say_wrote(output)
    if found.failed:
        raise PartoptError(
            f"failed: {', '.join(found.failed)}",
            f"{output} has the last lines of each: send it along",
            ANSWER_IS_NO,
            code="doctor-failed",
        )


@dataclass
class _Trial:
    """What is tried in a folder, and what came of it."""

    folder: Path
    checks: list[Check] = field(default_factory=list)

    def run(self, name: str, arguments: list[str], needs: str = "") -> bytes | None:
        """What a command prints; None where it fails, or the file that it needs is not there."""
        from partopt.documents.doctor import Check

        if needs and not (self.folder / needs).is_file():
            text = f"not tried: there is no {needs}"
            self.checks.append(Check(name=name, status="missing", text=text))
            return None
        say(f"trying   {name}", err=True)
        began = time.monotonic()
        try:
            done = subprocess.run(
                [sys.executable, "-m", *arguments],
                cwd=self.folder,
                capture_output=True,
                timeout=LIMIT_S,
                check=False,
            )
            why, printed, told = f"exit code {done.returncode}", done.stdout, done.stderr
            failed = done.returncode != 0
        except subprocess.TimeoutExpired as late:
            why, failed = f"did not end within {LIMIT_S:.0f} s", True
            printed, told = late.stdout or b"", late.stderr or b""
        lines = told.decode(errors="replace").splitlines()[-_LINES:]
        self.checks.append(
            Check(
                name=name,
                status="failed" if failed else "ok",
                text=why if failed else "",
                seconds=time.monotonic() - began,
                output=lines if failed else [],
            )
        )
        return None if failed else printed

    def load(self, kind: type[Any], name: str) -> Any:
        """The document in a file of the folder; None where none was written."""
        path = self.folder / name
        return kind.load(str(path)) if path.is_file() else None


def _diagnose(folder: Path) -> Diagnosis:
    import msgspec

    from partopt import describe_host
    from partopt.documents.doctor import Diagnosis, Exchange
    from partopt.documents.plan import Plan
    from partopt.documents.profile import Profile
    from partopt.documents.training_run import Run

    host = describe_host()
    trial = _Trial(folder, list(host.checks))
    partopt = "partopt"
    exchanges = trial.run("exchanges", ["partopt.runtime.exchanges", host.backend])
    gpus = len(host.devices)
    ranks = 4 if host.backend == "nccl" and gpus >= 4 else 2
    ends = ["--ranks", f"{ranks}", "--sizes", "4kB,64kB,1MB", "--repetitions", "5"]
    ends += ["--accept-poor", "--backend", host.backend, "--json", "-o", "links.yaml"]
    links = trial.run("links", [partopt, "topology", "measure", *ends])
    trial.run("profile", [partopt, "profile", MODEL, "--microbatch", "4,8", "-o", "profile.json"])

    def plan(name: str, cluster: str, file: str) -> None:
        shape = ["--planner", "straight", "--schedule", "1f1b", "--microbatches", "4", "-o", file]
        known = ["profile.json", "--topology", cluster]
        trial.run(name, [partopt, "plan", *known, *shape], "profile.json")

    def run(name: str, file: str, *options: str) -> None:
        steps = ["--steps", "3", "--check", *options]
        trial.run(name, [partopt, "run", file, MODEL, *steps], file)

    plan("plan", "links.yaml" if links is not None else "v100-pcie", "plan.json")
    run("run", "plan.json", "--backend", host.backend, "-o", "run.json")
    if host.backend == "nccl":  # partopt's engine ran; and the other
        run("run, torch's engine", "plan.json", "--engine", "torch")
    elif gpus:
        (folder / "one.yaml").write_text(ONE)
        plan("plan for one GPU", "one.yaml", "one.json")
        run("run on one GPU", "one.json", "--backend", "nccl")
    found: list[Exchange] = (
        [] if exchanges is None else msgspec.json.decode(exchanges, type=list[Exchange])
    )
    return Diagnosis(
        environment=host.environment,
        machine=host.machine,
        devices=host.devices,
        backend=host.backend,
        checks=[_with_errors(check, found) for check in trial.checks],
        exchanges=found,
        links=None if links is None else msgspec.json.decode(links),
        profile=trial.load(Profile, "profile.json"),
        plan=trial.load(Plan, "plan.json"),
        run=trial.load(Run, "run.json"),
    )


def _with_errors(check: Check, exchanges: list[Exchange]) -> Check:
    """The check, failed where it is that of the exchanges and one of them failed."""
    from msgspec.structs import replace

    failed = [exchange for exchange in exchanges if exchange.error]
    if check.name != "exchanges" or not failed:
        return check
    text = "; ".join(f"{exchange.kind}: {exchange.error}" for exchange in failed)
    return replace(check, status="failed", text=text)
