"""Profiles of models larger than memory: how far they are from ordinary ones, what they take.

    python benchmarks/larger_than_memory.py [--steps N] [--only NAME]

Models that fit are profiled both ways: error of the step, and the largest error of a layer's share
of it, in processor seconds, so that what else the machine does counts little. The last columns
compare the ordinary profile with a second one: the noise. Then the structure of LLaMA 70B, and the
whole command for LLaMA 7B. Every row runs in a process of its own, on one thread.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[1] / "examples"
FITTING = {
    "gpt2": ("gpt2", {}),
    "bert": ("bert", {}),
    "llama": ("llama", {"layers": 12, "width": 1024, "heads": 16, "kv_heads": 4, "ffn": 2816}),
    "vit-b-16": ("vit", {}),
}
LLAMA_70B = {"layers": 80, "width": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672}
GIB = 2**30


def main() -> None:
    """Print the tables."""
    from machine import describe

    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", default="")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        print(json.dumps(globals()[f"run_{given.run}"](given.only, given.steps)))
        return
    print(f"{describe()}; {given.steps} steps\n")
    print(f"{'model':12}{'ordinary':>12}{'larger':>12}{'step':>8}{'share':>8}", end="")
    print(f"{'again':>8}{'share':>8}{'not run':>10}")
    for name in FITTING:
        if given.only in name:
            row = measure_in_process("both", name, given.steps)
            print(
                f"{name:12}{row['ordinary_s']:10.3f} s{row['larger_s']:10.3f} s"
                f"{row['larger_s'] / row['ordinary_s'] - 1:+8.1%}{row['share']:8.1%}"
                f"{row['again_s'] / row['ordinary_s'] - 1:+8.1%}{row['again_share']:8.1%}"
                f"{row['not_run']:>6}/{row['layers']}",
                flush=True,
            )
    for title, what in (("structure of LLaMA 70B", "structure"), ("command, LLaMA 7B", "command")):
        if given.only in title:
            row = measure_in_process(what, "", given.steps)
            print(f"{title}: {row['seconds']:.0f} s, {row['peak_gib']:.2f} GiB, {row['what']}")


def measure_in_process(what: str, name: str, steps: int) -> dict[str, Any]:
    """What `run_...` returns in a process of its own."""
    words = ["--run", what, "--only", name, "--steps", str(steps)]
    done = subprocess.run(
        [sys.executable, __file__, *words], check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def run_both(name: str, steps: int) -> dict[str, Any]:
    """The ordinary profile of a model, the other one, and the ordinary one again."""
    ordinary, larger, again = (profile(name, steps, larger=way) for way in (False, True, False))
    step_s = [sum(seconds(each)) for each in (ordinary, larger, again)]
    return {
        "ordinary_s": step_s[0],
        "larger_s": step_s[1],
        "again_s": step_s[2],
        "share": share_error(ordinary, larger),
        "again_share": share_error(ordinary, again),
        "not_run": sum(layer.measured_as is not None for layer in larger.layers),
        "layers": len(larger.layers),
    }


def profile(name: str, steps: int, larger: bool) -> Any:
    """The profile of a model that fits, at microbatch size 1."""
    from partopt import measure_source

    warnings.simplefilter("ignore")
    example, arguments = FITTING[name]
    with tempfile.TemporaryDirectory() as folder:
        source = EXAMPLES / f"{example}.py"
        if example == "vit":
            source = Path(folder) / "vit.py"
            source.write_text(VIT.replace("FOLDER", repr(str(EXAMPLES))))
        return measure_source(
            source,
            arguments=arguments,
            microbatch_sizes=[1],
            device="cpu",
            steps=steps,
            larger_than_memory=larger,
        )


VIT = """
import sys
sys.path.insert(0, FOLDER)
from vision import classification_loss as loss_fn, pictures as example_inputs, torchvision_models

def build():
    return torchvision_models(224).vit_b_16(weights=None)
"""


def seconds(measured: Any) -> list[float]:
    """Forward and backward of each layer."""
    return [layer.forward_s + layer.backward_s for layer in measured.measurements[0].layers]


def share_error(one: Any, other: Any) -> float:
    """The largest difference of a layer's share of the step, as a share of the step."""
    whole, others = sum(seconds(one)), sum(seconds(other))
    return max(
        abs(mine / whole - its / others)
        for mine, its in zip(seconds(one), seconds(other), strict=True)
    )


def run_structure(_name: str, _steps: int) -> dict[str, Any]:
    """Building LLaMA 70B and observing its structure, at 2,048 tokens."""
    import torch

    from partopt.profiler import find_model
    from partopt.profiler.building import build_within
    from partopt.profiler.clock import CpuClock
    from partopt.profiler.free_memory import Memory
    from partopt.profiler.larger import LargeMeasurer
    from partopt.profiler.settings import check_settings
    from partopt.profiler.subject import Subject

    began = time.perf_counter()
    source = find_model(EXAMPLES / "llama.py", {**LLAMA_70B, "context": 2048})
    settings = check_settings([1], "cpu", "float32", "auto", (), 1, None)
    memory = Memory(float("inf"), float("inf"), copies=4)
    model, _ = build_within(source.build, memory, torch.float32, True)
    subject = Subject(model, source.example_inputs, source.loss_fn, settings, CpuClock(), memory)
    measurer = LargeMeasurer(subject, memory)
    with measurer.placed():
        _, structure = measurer.observe_structure(source.example_inputs(1))
    weights = sum(each.nbytes for each in model.parameters())
    kept = sum(group.bytes for group in structure.stash_groups)
    return {
        "seconds": time.perf_counter() - began,
        "peak_gib": peak_bytes(resource.RUSAGE_SELF) / GIB,
        "what": f"{weights / 1e9:.0f} GB of weights, {kept / 1e9:.0f} GB kept, "
        f"{len(structure.layers)} layers",
    }


def run_command(_name: str, _steps: int) -> dict[str, Any]:
    """The whole command for LLaMA 7B at 128 tokens, two steps."""
    from partopt.documents.profile import Profile

    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        output = str(Path(folder) / "llama.json")
        words = ["--microbatch", "1", "--steps", "2", "--device", "cpu", "--larger-than-memory"]
        model = str(EXAMPLES / "llama.py")
        subprocess.run(
            [sys.executable, "-m", "partopt", "profile", model, *words, "-o", output],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        [measured] = Profile.load(output).measurements
    return {
        "seconds": time.perf_counter() - began,
        "peak_gib": peak_bytes(resource.RUSAGE_CHILDREN) / GIB,
        "what": f"a step {measured.step_s:.1f} s, the optimizer {measured.optimizer_s:.1f} s",
    }


def peak_bytes(who: int) -> int:
    """The largest memory that a process has held."""
    return resource.getrusage(who).ru_maxrss * 1024


if __name__ == "__main__":
    main()
