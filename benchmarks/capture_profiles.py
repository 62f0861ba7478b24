"""Take every profile that ships in profiles/, the most valuable first, each written as soon as it is finished.

    python benchmarks/capture_profiles.py --device cpu

On a CUDA device the models have the sizes that people train and the dtype is bfloat16; on a CPU they are small enough to wait for. A model
still running when the budget ends is interrupted and keeps the microbatch sizes that are finished; those after it are left out.
Files are named MODEL.DEVICE.DTYPE.json. The table at the end is the one in profiles/README.md.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from partopt import profile
from partopt.profile import Measurement, Profile
from partopt.units import format_seconds

ROOT = Path(__file__).parent.parent
SHORTEST_S = 10.0  # no model is begun with less of the budget left


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
        settings = [word for key, value in self.settings.items() for word in ("--set", f"{key}={value}")]
        options = ["--microbatch", self.microbatches, "--dtype", self.dtype, "--device", device, "--steps", str(self.steps)]
        return ["profile", f"examples/{self.example}.py", *settings, *options, "--name", self.name, "--force", "-o", str(output)]


_MEDIUM = {"layers": 24, "width": 1024, "heads": 16}
ON_CUDA = [
    Capture("gpt2-small", "gpt2", "1,2,4,8,16,32", {"context": 1024}, "bfloat16"),
    Capture("gpt2-medium", "gpt2", "1,2,4,8,16", {**_MEDIUM, "context": 1024}, "bfloat16"),
    Capture("bert-large", "bert", "1,2,4,8,16,32", {**_MEDIUM, "context": 512}, "bfloat16"),
    Capture("resnet50", "resnet50", "8,16,32,64,128", dtype="bfloat16"),
    Capture("vgg16", "vgg16", "8,16,32,64,128", dtype="bfloat16"),
    Capture("gpt2-xl", "gpt2", "1,2,4", {"layers": 48, "width": 1600, "heads": 25, "context": 1024}, "bfloat16"),
    Capture("gpt", "gpt", "8,16,32,64", dtype="bfloat16"),
    Capture("mlp", "mlp", "1024,4096,16384", {"width": 4096}, "bfloat16"),
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
    arguments = _arguments()
    device = arguments.device if arguments.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    arguments.output.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + arguments.budget
    taken = []
    for capture in ON_CUDA if device == "cuda" else ON_CPU:
        output = arguments.output.resolve() / f"{capture.name}.{device_label(device)}.{capture.dtype}.json"
        if arguments.only and capture.name not in arguments.only:
            continue
        if deadline - time.monotonic() < SHORTEST_S:
            print(f"left out, the budget of {arguments.budget:g} s is spent: {capture.name}", file=sys.stderr)
        elif take(capture.command(device, output), deadline):
            taken.append(output)
    print_table([(path.name.removesuffix(".json"), profile.load(str(path))) for path in taken])


def take(command: list[str], deadline: float) -> bool:
    """Run `partopt COMMAND`, interrupt it at the deadline; whether it left a profile."""
    print("\n$ partopt", *command, file=sys.stderr, flush=True)
    process = subprocess.Popen([sys.executable, "-m", "partopt", *command], cwd=ROOT, stdout=sys.stderr)
    try:
        process.wait(timeout=max(deadline - time.monotonic(), 0))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        process.wait()
    return process.returncode == 0 or (process.returncode == 130 and Path(command[-1]).exists())


def device_label(device: str) -> str:
    """The device as file names have it: `cpu`, `h200`, `v100-sxm2-16gb`."""
    if device == "cpu":
        return "cpu"
    words = re.findall(r"[a-z0-9]+", torch.cuda.get_device_name().lower())
    return "-".join(word for word in words if word not in ("nvidia", "tesla", "geforce"))


def print_table(profiles: list[tuple[str, Profile]]) -> None:
    """Markdown: what each profile measured at its largest microbatch size."""
    print("| profile | layers | microbatch | step at the largest | coverage | overhead |\n|---|---|---|---|---|---|")
    for name, measured in profiles:
        sizes, last = measured.measured(), measured.measured()[-1]
        microbatches = ", ".join(str(each.microbatch_size) for each in sizes)
        coverage = _range([each.coverage for each in sizes], 100, 0, " %")
        overhead = _range([each.overhead for each in sizes], 1, 2, "")
        print(f"| `{name}` | {len(measured.layers)} | {microbatches} | {_step(last)} | {coverage} | {overhead} |")


def _step(measurement: Measurement) -> str:
    return "-" if measurement.step_s is None else format_seconds(measurement.step_s)


def _range(values: list[float | None], scale: float, digits: int, unit: str) -> str:
    known = sorted(f"{value * scale:.{digits}f}" for value in values if value is not None)
    lowest, highest = min(known, key=float), max(known, key=float)
    return f"{lowest}{unit}" if lowest == highest else f"{lowest} to {highest}{unit}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("--output", type=Path, default=ROOT / "profiles", help="folder of the profiles (default: profiles/)")
    parser.add_argument("--budget", type=float, default=480.0, help="seconds for all of them together (default: 480)")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="take these alone")
    return parser.parse_args()


if __name__ == "__main__":
    main()
