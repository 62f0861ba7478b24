"""Are estimates right? Beside what is measured on this CPU, and what was published of GPUs.

    python benchmarks/estimates.py [--steps N] [--only NAME] [--published]

The first table takes a device file made here (the speed of products, convolutions and attention,
the bandwidth, what a small operation takes) and compares estimates with profiles measured here, in
processor time of one thread: TOTAL is the error of the step, SHARE the largest error of a layer's
share of it. REGRET: cuts into 2, 4 and 8 stages that are best by the estimate, priced by the
measured profile, over the best cuts by that. Where the machine is shared, the measured side is as
noisy as the machine; AGAIN is the regret of a second measured profile: the noise.

The second table compares the files of GPUs with published tokens/s of MosaicML's LLM Foundry
(github.com/mosaicml/llm-foundry, scripts/train/benchmarking/README.md: MPT models in bfloat16 under
FSDP on 8 GPUs). ALONE is the estimate of the computation; published runs also gather weights and
reduce gradients: EXPOSED adds these as if nothing hid them, at the bandwidth of the shipped
topology, and the optimizer's step on an eighth of the weights. The truth lies between the two.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional

# a checkout in which nothing is installed
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


from benchmarks import machine
from partopt.documents.device import Roofline
from partopt.documents.profile import Measurement, Model, Profile
from partopt.documents.topology import Topology
from partopt.profiler import find_model
from partopt.profiler.device import CpuClock, hold_still
from partopt.profiler.estimating import RooflineClock
from partopt.profiler.measuring import profile_of
from partopt.profiler.settings import ProfileSettings, Subject
from partopt.profiler.weightless import build_without_weights, fake_mode

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
STAGES = (2, 4, 8)


@dataclass(frozen=True)
class Case:
    """A model of examples/, and the samples in its microbatch."""

    name: str
    microbatch: int
    arguments: dict[str, int] = field(default_factory=dict)


ON_CPU = [
    Case("mlp", 128),
    Case("gpt", 2),
    Case("gpt2", 1, {"layers": 8, "context": 128, "vocabulary": 8192}),
    Case("bert", 1, {"layers": 8, "vocabulary": 8192}),
    Case("llama", 1, {"layers": 8, "width": 512, "heads": 8, "ffn": 1408, "vocabulary": 8192}),
    Case("t5", 1, {"layers": 6, "width": 512, "heads": 8, "ffn": 2048, "vocabulary": 8192}),
    Case("vit", 2, {"layers": 8, "width": 384, "heads": 6, "ffn": 1536, "size": 112}),
    Case("vgg16", 1),
    Case("resnet50", 1),
    Case("resnet50", 4),
]


class Published(NamedTuple):
    """A run of LLM Foundry on 8 GPUs: its model, tokens, microbatch, and tokens/s of a GPU."""

    model: str
    layers: int
    width: int
    heads: int
    context: int
    microbatch: int
    accumulated: int  # microbatches of a step
    recompute: bool
    tokens_s: dict[str, int]


PUBLISHED = [
    Published("MPT-1B", 24, 2048, 16, 2048, 14, 1, False, {"h100": 45455}),
    Published("MPT-1B", 24, 2048, 16, 2048, 14, 4, False, {"a100": 20513}),
    Published("MPT-3B", 32, 2560, 20, 4096, 5, 6, False, {"h100": 20964, "a100": 9457}),
    Published("MPT-7B", 32, 4096, 32, 2048, 6, 1, False, {"h100": 10643}),
    Published("MPT-7B", 32, 4096, 32, 2048, 6, 2, False, {"a100": 4641}),
    Published("MPT-7B", 32, 4096, 32, 4096, 16, 2, True, {"h100": 8611, "a100": 3684}),
    Published("MPT-13B", 40, 5120, 40, 2048, 2, 1, False, {"h100": 4792}),
    Published("MPT-13B", 40, 5120, 40, 2048, 2, 3, False, {"a100": 2262}),
]


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", default="", help="models of this name alone")
    parser.add_argument("--published", action="store_true", help="the second table alone")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if not given.published:
        print_measured([case for case in ON_CPU if given.only in case.name], given.steps)
    if not given.only:
        print_published()


def print_measured(cases: Sequence[Case], steps: int) -> None:
    """The estimates beside measured profiles of this CPU."""
    device = this_cpu()
    numbers = (
        f"{device.peaks_flops['float32'] / 1e9:.0f} Gflop/s in products, "
        f"{device.convolution:.0%} of it in convolutions, {device.attention_forward:.0%} and "
        f"{device.attention_backward:.0%} in attention, {device.bandwidth_bytes_per_s / 1e9:.1f} "
        f"GB/s, {device.launch_s * 1e6:.1f} us an operation"
    )
    print(f"{machine.describe()}, one thread\n{numbers}\n")
    print(
        f"{'MODEL':12}{'LAYERS':>7}{'MEASURED':>11}{'ESTIMATE':>11}{'TOTAL':>8}{'SHARE':>8}", end=""
    )
    print("".join(f"{f'REGRET {count}':>10}" for count in STAGES) + f"{'AGAIN':>8}")
    regrets, again = [], []
    for case in cases:
        measured, other = (profile(case, CpuClock(), steps) for _ in range(2))
        made = profile(case, RooflineClock(device), 1)
        truth, guess = seconds(measured), seconds(made)
        own = [regret(truth, guess, count) for count in STAGES if count <= len(truth)]
        noise = [regret(truth, seconds(other), count) for count in STAGES if count <= len(truth)]
        regrets += own
        again += noise
        print(
            f"{f'{case.name} {case.microbatch}':12}{len(truth):7}{sum(truth) * 1e3:8.1f} ms"
            f"{sum(guess) * 1e3:8.1f} ms{sum(guess) / sum(truth) - 1:+8.0%}"
            f"{share_error(truth, guess):8.1%}"
            + "".join(f"{each:10.1%}" for each in own)
            + f"{statistics.mean(noise):8.1%}",
            flush=True,
        )
    print(
        f"\nregret {statistics.mean(regrets):.1%} on average, {max(regrets):.1%} at worst; of "
        f"measuring again {statistics.mean(again):.1%} and {max(again):.1%}\n"
    )


def print_published() -> None:
    """The estimates beside published runs."""
    print(f"{'MODEL':10}{'GPU':>6}{'TOKENS':>8}{'BATCH':>7}{'PUBLISHED':>11}", end="")
    print(f"{'ALONE':>9}{'':>6}{'EXPOSED':>9}{'':>6}  tokens/s of a GPU")
    for run in PUBLISHED:
        for gpu, known in run.tokens_s.items():
            alone, exposed = tokens_s(run, gpu)
            print(
                f"{run.model:10}{gpu:>6}{run.context:8}{run.microbatch:7}{known:11,}"
                f"{alone:9,.0f}{alone / known - 1:+6.0%}{exposed:9,.0f}{exposed / known - 1:+6.0%}"
                f"{'  recomputed' if run.recompute else ''}",
                flush=True,
            )


def tokens_s(run: Published, gpu: str) -> tuple[float, float]:
    """Tokens/s of a GPU: of the computation alone, and with all that FSDP sends exposed."""
    arguments = {
        "layers": run.layers,
        "width": run.width,
        "heads": run.heads,
        "context": run.context,
        "vocabulary": 50368,
    }
    device, server = Roofline.load(gpu), Topology.load(f"dgx-{gpu}", 1).levels[0]
    made = profile(Case("gpt", run.microbatch, arguments), RooflineClock(device), 1, "bfloat16")
    [measurement] = made.measurements
    computed_s = sum(seconds(made)) + (run.recompute and forward_s(measurement))
    # weights for the forward and for the backward, gradients back: a ring sends 7/8 of each
    sent_s = 3 * made.parameter_bytes() * 7 / 8 / server.bandwidth_bytes_per_s
    optimizer_s = (measurement.optimizer_s or 0) / 8 / run.accumulated
    tokens = run.microbatch * run.context
    return tokens / computed_s, tokens / (computed_s + sent_s + optimizer_s)


def this_cpu() -> Roofline:
    """What one thread of this machine does in a second, by processor time."""
    with hold_still(torch.device("cpu")):
        a, b = torch.randn(2, 1024, 1024).unbind()
        matmul = 2 * 1024**3 / median_s(lambda: a @ b)
        x, w = torch.randn(1, 128, 56, 56), torch.randn(128, 128, 3, 3)
        convolution = 2 * 56**2 * 128**2 * 9 / median_s(lambda: functional.conv2d(x, w, padding=1))
        q = torch.randn(1, 8, 512, 64, requires_grad=True)
        mixed = functional.scaled_dot_product_attention(q, q, q)
        gradient = torch.ones_like(mixed)
        product = 2 * 8 * 512**2 * 64
        forward = 2 * product / median_s(lambda: functional.scaled_dot_product_attention(q, q, q))
        backward_s = median_s(lambda: torch.autograd.grad(mixed, q, gradient, retain_graph=True))
        backward = 5 * product / backward_s
        large, other, small = torch.randn(2**23), torch.randn(2**23), torch.randn(4)
        bandwidth = 3 * large.nbytes / median_s(lambda: large + other)
        launch_s = median_s(lambda: [small + small for _ in range(100)]) / 100
    return Roofline(
        name="this CPU",
        type="cpu",
        memory_bytes=2**34,
        peaks_flops={"float32": matmul},
        bandwidth_bytes_per_s=bandwidth,
        launch_s=launch_s,
        matmul=1.0,
        convolution=convolution / matmul,
        attention_forward=forward / matmul,
        attention_backward=backward / matmul,
    )


def median_s(run: Callable[[], object], turns: int = 15) -> float:
    """Median processor seconds of a run: others slow it down as they do what is measured."""
    clock = CpuClock()
    run()
    return statistics.median(
        sum(clock.intervals_s([clock.stamp(), (run(), clock.stamp())[1]])) for _ in range(turns)
    )


def profile(case: Case, clock: Any, steps: int, dtype: str = "float32") -> Profile:
    """The profile of a case, measured by a clock or estimated by one."""
    found = find_model(f"{EXAMPLES}/{case.name}.py", case.arguments)
    settings = ProfileSettings(
        microbatch_sizes=[case.microbatch], device="cpu", dtype=dtype, steps=steps
    )
    torch.manual_seed(0)
    estimated = isinstance(clock, RooflineClock)
    with build_without_weights(fake_mode()) if estimated else contextlib.nullcontext():
        model = found.build()
    subject = Subject(model, found.example_inputs, found.loss_fn, settings, clock)
    return profile_of(subject, Model(name=case.name))


def seconds(made: Profile) -> list[float]:
    """Forward and backward of each layer."""
    return [layer.forward_s + layer.backward_s for layer in made.measurements[0].layers]


def forward_s(measurement: Measurement) -> float:
    """The forward of all layers."""
    return sum(layer.forward_s for layer in measurement.layers)


def share_error(truth: Sequence[float], guess: Sequence[float]) -> float:
    """The largest difference of a layer's share of the step, as a share of the step."""
    return max(
        abs(one / sum(truth) - other / sum(guess)) for one, other in zip(truth, guess, strict=True)
    )


def regret(truth: Sequence[float], guess: Sequence[float], stages: int) -> float:
    """How much longer the longest stage is, by `truth`, where cuts are best by `guess`."""
    return longest(truth, best_cuts(guess, stages)) / longest(truth, best_cuts(truth, stages)) - 1


def longest(layers: Sequence[float], cuts: Sequence[int]) -> float:
    """Seconds of the longest stage."""
    ends = [*cuts, len(layers)]
    return max(sum(layers[i:j]) for i, j in zip([0, *cuts], ends, strict=True))


def best_cuts(layers: Sequence[float], stages: int) -> list[int]:
    """The cuts with the shortest longest stage, by dynamic programming over the last cut."""
    best: list[tuple[float, list[int]]] = [(sum(layers[:j]), []) for j in range(len(layers) + 1)]
    for _ in range(stages - 1):
        best = [
            min(
                ((max(best[i][0], sum(layers[i:j])), [*best[i][1], i]) for i in range(1, j)),
                default=(float("inf"), []),
            )
            for j in range(len(layers) + 1)
        ]
    return best[-1][1]


if __name__ == "__main__":
    main()
