"""Take every profile that ships in profiles/, the most valuable first, each written as soon as it
is finished.

    python benchmarks/capture_profiles.py --device cpu

On a CUDA device the models have the sizes that people train, the largest first, and the dtype is
bfloat16; on a CPU they are those that tests and documents need, small enough to wait for. A
microbatch size ships where its layers add up to the step, the hooks cost little and the layers vary
little (`benchmarks/gate.py`); one that does not is taken once more, and then left out, with the
reason. A model still running when the budget ends is interrupted and keeps the sizes that are
finished; those after it are left out. Files are named MODEL.DEVICE.DTYPE.json; one that is there
already gives way only to one with at least as many measured sizes. The table at the end is the one
in profiles/README.md.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

# a checkout in which nothing is installed
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import gate
from partopt.documents.profile import Device, Measurement, Profile
from partopt.errors import PartoptError
from partopt.units import format_seconds

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
}
SHORTEST_S = 10.0  # no model is begun with less of the budget left
PATIENCE_S = 30.0  # an interrupted model has this long to write what is finished
# in a child: the parent keeps no context on the device
HAS_CUDA = "import sys, torch; sys.exit(not torch.cuda.is_available())"


@dataclass(frozen=True)
class Capture:
    """One profile to take: its name, the example it comes from, and how."""

    name: str
    example: str
    microbatches: str
    settings: dict[str, int] = field(default_factory=dict)
    dtype: str = "float32"
    steps: int = 10

    def command(self, device: str, output: Path) -> list[str]:
        """The command that takes it, without the interpreter."""
        settings = [
            word for key, value in self.settings.items() for word in ("--set", f"{key}={value}")
        ]
        options = [
            "--microbatch",
            self.microbatches,
            "--dtype",
            self.dtype,
            "--device",
            device,
            "--steps",
            str(self.steps),
        ]
        return [
            "profile",
            f"examples/{self.example}.py",
            *settings,
            *options,
            "--name",
            self.name,
            "--force",
            "-o",
            str(output),
        ]


_MEDIUM = {"layers": 24, "width": 1024, "heads": 16}
_XL = {"layers": 48, "width": 1600, "heads": 25, "context": 1024}
_T5 = {"layers": 24, "width": 1024, "heads": 16, "ffn": 4096, "context": 512}
ON_CUDA = [
    Capture("llama-7b", "llama", "1,2,4", {"context": 2048}, "bfloat16"),
    Capture("gpt2-xl", "gpt2", "1,2,4,8", _XL, "bfloat16"),
    Capture("t5-large", "t5", "1,2,4,8,16", _T5, "bfloat16"),
    Capture("bert-large", "bert", "4,8,16,32", {**_MEDIUM, "context": 512}, "bfloat16"),
    Capture("gpt2-medium", "gpt2", "2,4,8,16", {**_MEDIUM, "context": 1024}, "bfloat16"),
    Capture("vgg16", "vgg16", "32,64,128", dtype="bfloat16"),
    Capture("resnet50", "resnet50", "64,128,256", dtype="bfloat16"),
    Capture("gpt2-small", "gpt2", "4,8,16,32", {"context": 1024}, "bfloat16"),
]
ON_CPU = [
    Capture("gpt", "gpt", "1,2,4"),
    Capture("vgg16", "vgg16", "1,2,4", steps=5),
    Capture("resnet50", "resnet50", "1,2,4", steps=5),
    Capture("gpt2-small", "gpt2", "1,2", steps=5),
    Capture("bert-base", "bert", "1,2", steps=5),
    Capture("mlp", "mlp", "64,128,256"),
]


def main() -> None:
    """Take the profiles, then print what was measured."""
    # a shell's background job ignores it, and its children would too
    signal.signal(signal.SIGINT, signal.default_int_handler)
    arguments = _arguments()
    arguments.output.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + arguments.budget
    taken = []
    for capture in ON_CUDA if arguments.device == "cuda" else ON_CPU:
        if arguments.only and capture.name not in arguments.only:
            continue
        if deadline - time.monotonic() < SHORTEST_S:
            print(
                f"left out, the budget of {arguments.budget:g} s is spent: {capture.name}",
                file=sys.stderr,
            )
            continue
        measured = take_good(capture, arguments.device, deadline)
        if measured is not None and keep(
            measured, arguments.output / file_name(capture, measured.device)
        ):
            taken.append((file_name(capture, measured.device).removesuffix(".json"), measured))
    if not taken:
        sys.exit("nothing was taken")
    print_table(taken)


def take_good(capture: Capture, device: str, deadline: float) -> Profile | None:
    """The profile of the sizes that pass the gate; those that fail it are taken once more."""
    taken = take(capture, device, deadline)
    if taken is None:
        return None
    failed = gate.failures(taken)
    if failed and deadline - time.monotonic() >= SHORTEST_S:
        report(capture, failed, "taken once more")
        sizes = ",".join(map(str, failed))
        again = take(replace(capture, microbatches=sizes), device, deadline)
        taken = gate.merge(taken, again) if again else taken
        failed = gate.failures(taken)
    report(capture, failed, "left out")
    return gate.without(taken, set(failed))


def report(capture: Capture, failed: dict[int, str], what: str) -> None:
    """Say of every size that failed why, and what comes of it."""
    for size, why in failed.items():
        print(f"{capture.name}, microbatch {size}: {why}: {what}", file=sys.stderr)


def take(capture: Capture, device: str, deadline: float) -> Profile | None:
    """Run `partopt profile`, interrupt it at the deadline; what it measured, or None where no size
    was finished.
    """
    with tempfile.TemporaryDirectory() as folder:
        # nothing that lies there already can pass for what this run took
        output = Path(folder) / "profile.json"
        command = capture.command(device, output)
        print("\n$ partopt", *command, file=sys.stderr, flush=True)
        process = subprocess.Popen(
            [sys.executable, "-m", "partopt", *command],
            cwd=ROOT,
            stdout=sys.stderr,
            env=ENVIRONMENT,
        )
        try:
            process.wait(timeout=max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            pass
        finally:
            stop(process)
        return Profile.load(str(output)) if output.exists() else None


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the process if it still runs: first so that it can write what is finished, at last by
    force.
    """
    for ask in (process.terminate, process.kill):  # SIGINT is ignored by what runs behind a shell
        if process.poll() is not None:
            return
        ask()
        try:
            process.wait(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            print("it does not end", file=sys.stderr)


def keep(measured: Profile, path: Path) -> bool:
    """Write the profile, unless the one that is there holds more measured sizes; whether it was
    written.
    """
    try:
        before = len(Profile.load(str(path)).measured()) if path.exists() else 0
    except PartoptError:
        before = 0  # not a profile that partopt can read
    if len(measured.measured()) < before:
        print(
            (
                f"{path} stays: it holds {before} sizes, and {len(measured.measured())} "
                "were finished now"
            ),
            file=sys.stderr,
        )
        return False
    measured.save(str(path), force=True)
    print(f"Wrote {path}", file=sys.stderr)
    return True


def file_name(capture: Capture, device: Device) -> str:
    """`gpt.cpu.float32.json`, `gpt2-xl.h200.bfloat16.json`, `mlp.v100-sxm2-16gb.bfloat16.json`."""
    words = ["cpu"] if device.type == "cpu" else re.findall(r"[a-z0-9]+", device.name.lower())
    label = "-".join(word for word in words if word not in ("nvidia", "tesla", "geforce"))
    return f"{capture.name}.{label}.{capture.dtype}.json"


def print_table(profiles: list[tuple[str, Profile]]) -> None:
    """Markdown: what each profile measured at its largest microbatch size."""
    print(
        "| profile | layers | microbatch | step at the largest | coverage | overhead "
        "|\n|---|---|---|---|---|---|"
    )
    for name, measured in profiles:
        sizes, last = measured.measured(), measured.measured()[-1]
        microbatches = ", ".join(str(each.microbatch_size) for each in sizes)
        coverage = _range([each.coverage for each in sizes], 100, 0, " %")
        overhead = _range([each.overhead for each in sizes], 1, 2, "")
        print(
            f"| `{name}` | {len(measured.layers)} | {microbatches} | {_step(last)} | "
            f"{coverage} | {overhead} |"
        )


def _step(measurement: Measurement) -> str:
    return "-" if measurement.step_s is None else format_seconds(measurement.step_s)


def _range(values: list[float | None], scale: float, digits: int, unit: str) -> str:
    known = sorted(f"{value * scale:.{digits}f}" for value in values if value is not None)
    lowest, highest = min(known, key=float), max(known, key=float)
    return f"{lowest}{unit}" if lowest == highest else f"{lowest} to {highest}{unit}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "profiles",
        help="folder of the profiles (default: profiles/)",
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=480.0,
        help="seconds for all of them together (default: 480)",
    )
    parser.add_argument("--only", nargs="*", metavar="NAME", help="take these alone")
    arguments = parser.parse_args()
    if arguments.device == "auto":
        found = subprocess.run([sys.executable, "-c", HAS_CUDA], check=False, env=ENVIRONMENT)
        arguments.device = "cuda" if found.returncode == 0 else "cpu"
    known = [capture.name for capture in (ON_CUDA if arguments.device == "cuda" else ON_CPU)]
    unknown = sorted(set(arguments.only or ()) - set(known))
    if unknown:
        parser.error(
            f"--only {' '.join(unknown)}: not taken on {arguments.device}; known: "
            f"{', '.join(known)}"
        )
    return arguments


if __name__ == "__main__":
    main()
