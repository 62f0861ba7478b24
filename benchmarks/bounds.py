"""How much is proved of plans: 40 questions, and by how much another plan may yet be faster.

    python benchmarks/bounds.py [QUESTION ...]

Shipped profiles on shipped topologies, and random chains on fast, middling and slow links, under
schedules of one stage a device. The whole command plans, `bound` is how much faster at most another
plan of its scope is, `seconds` of the processor are those of the command and of the bound alone.
QUESTIONs are numbers, from 0.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from command import LIMIT_S, Row, command_of, run
from large import FAST, MIDDLE, SLOW, children_s
from machine import describe

from partopt import Plan, Profile
from partopt.cost.problem import problem_from_plan
from partopt.search.bound import lower_bound_s

_GPIPE, _1F1B = "--schedule gpipe --global-batch", "--schedule 1f1b --global-batch"
_EAGER, _SPLIT = "--schedule 1f1b-eager --global-batch", "--schedule zb-h1 --global-batch"
_2BW, _DREAM = "--schedule pipedream-2bw", "--schedule pipedream"
_M = "--schedule 1f1b --microbatches"
SHIPPED = [
    f"gnmt.v100-published.float32 --topology v100-pcie {_GPIPE} 2048",
    f"gnmt.v100-published.float32 --topology v100-pcie {_DREAM}",
    f"gnmt.v100-published.float32 --topology v100-nvlink {_1F1B} 2048",
    f"gnmt.v100-published.float32 --topology v100-pcie {_2BW} --memory 4GB",
    f"vgg16.v100-published.float32 --topology v100-pcie {_1F1B} 2048",
    f"vgg16.v100-published.float32 --topology v100-pcie {_DREAM}",
    f"vgg16.v100-published.float32 --topology v100-nvlink {_2BW}",
    f"resnet50.v100-published.float32 --topology v100-pcie {_GPIPE} 4096",
    f"resnet50.v100-published.float32 --topology v100-pcie {_2BW}",
    f"bert-base.cpu.float32 --topology v100-pcie {_1F1B} 64",
    f"gpt2-small.cpu.float32 --topology v100-pcie {_DREAM}",
    f"vgg16.cpu.float32 --topology v100-nvlink {_EAGER} 128",
    f"gpt3-6.7b.h100-estimated.bfloat16 --topology dgx-h100 --servers 4 {_1F1B} 512",
    f"llama-7b.a100-estimated.bfloat16 --topology dgx-a100 --servers 2 {_1F1B} 256",
    f"llama-70b.h100-estimated.bfloat16 --topology dgx-h100 --servers 8 {_1F1B} 512",
    f"llama-70b.a100-estimated.bfloat16 --topology dgx-a100 --servers 8 {_2BW}",
    f"mixtral-8x7b.h100-estimated.bfloat16 --topology dgx-h100 --servers 4 {_GPIPE} 512",
    f"t5-11b.a100-estimated.bfloat16 --topology dgx-a100 --servers 4 {_1F1B} 512",
    f"t5-11b.h100-estimated.bfloat16 --topology dgx-h100 --servers 2 {_SPLIT} 256",
    f"vit-g.a100-estimated.bfloat16 --topology dgx-a100 --servers 4 {_2BW}",
]
DRAWN = [
    Row("", "layers 40 1", (4, 4), SLOW, _DREAM),
    Row("", "layers 60 2", (8, 4), SLOW, _2BW),
    Row("", "noise 50 3", (8, 4), SLOW, f"{_M} 128"),
    Row("", "peaks 60 4", (8, 8), SLOW, f"{_M} 256 --memory 3GB"),
    Row("", "layers 100 5", (8, 8), SLOW, _DREAM),
    Row("", "layers 100 6", (8, 8), SLOW, f"{_DREAM} --memory 3GB"),
    Row("", "noise 30 7", (4, 4), SLOW, "--schedule gpipe --microbatches 64"),
    Row("", "peaks 100 8", (8, 16), SLOW, f"{_2BW} --memory 6GB"),
    Row("", "layers 48 9", (8, 2), MIDDLE, _2BW),
    Row("", "layers 80 10", (8, 4), MIDDLE, f"{_M} 256"),
    Row("", "noise 64 11", (8, 8), MIDDLE, "--schedule gpipe --microbatches 256"),
    Row("", "peaks 90 12", (8, 8), MIDDLE, _DREAM),
    Row("", "noise 100 13", (8, 32), MIDDLE, _DREAM),
    Row("", "layers 80 14", (8, 16), MIDDLE, f"{_M} 512 --memory 4GB"),
    Row("", "layers 60 15", (8, 8), FAST, f"{_M} 256"),
    Row("", "noise 90 16", (8, 16), FAST, f"{_2BW} --memory 2GB"),
    Row("", "peaks 120 17", (8, 8), FAST, f"{_M} 128 --memory 4GB --recompute auto"),
    Row("", "layers 60 18", (8, 4), FAST, "--schedule zb-h1 --microbatches 64"),
    Row("", "layers 300 19", (8, 8), FAST, f"{_M} 256 --memory 6GB"),
    Row("", "layers 1000 20", (8, 32), FAST, "--memory 40GB"),
]


def main(chosen: Sequence[str]) -> None:
    """Print the table, and the median and the worst of what may be faster."""
    print(describe())
    print(f"\n{'partopt plan':80}{'stages':>8}{'bound':>8}{'seconds':>9}{'bound':>8}")
    gaps = list[float]()
    for number in map(int, chosen) if chosen else range(len(SHIPPED) + len(DRAWN)):
        with tempfile.TemporaryDirectory() as folder:
            gaps += _print_row(number, Path(folder))
    if gaps:
        print(f"median {statistics.median(gaps):.1%}, worst {max(gaps):.1%} of {len(gaps)}")


def _print_row(number: int, folder: Path) -> list[float]:
    """Print a row; how much faster another plan may be, nothing where no plan fits."""
    if number < len(SHIPPED):
        name = SHIPPED[number]
        profile, *options = name.split()
        command = [sys.executable, "-m", "partopt", "plan", profile, *options]
    else:
        row = DRAWN[number - len(SHIPPED)]
        sizes = " x ".join(map(str, row.sizes))
        name, command = (
            f"{row.profile}, {sizes}, {row.rates[1]}, {row.options}",
            command_of(row, folder),
        )
        profile = command[4]
    path = folder / "plan.json"
    before_s, _ = children_s(), run([*command, "-o", str(path)], LIMIT_S)
    seconds = children_s() - before_s
    if not path.exists() or not (plan := Plan.load(path)).fits or plan.certificate is None:
        print(f"{number:2} {name[:76]:77}{'-':>8}", flush=True)
        return []
    began = time.process_time()
    lower_bound_s(problem_from_plan(plan, Profile.load(profile)))
    bound_s = time.process_time() - began
    gap = plan.certificate.gap
    print(
        f"{number:2} {name[:76]:77}{plan.shape:>8.8}{gap:8.1%}{seconds:7.1f} s{bound_s:6.2f} s",
        flush=True,
    )
    return [gap]


if __name__ == "__main__":
    main(sys.argv[1:])
