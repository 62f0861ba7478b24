"""Is a profile right? Ranges of layers, executed alone, against the sum that the profile has.

    python benchmarks/profiler_accuracy.py --device cpu

A profile measures layers inside whole steps. Here a range of layers, as a stage of a pipeline would
hold it, runs by itself: its modules in a row on inputs recorded once, without hooks, timed as a
whole. The two agree where the times of layers add up to those of stages. Profiling and running
alone take turns, and a range's error is the median of the turns. What runs between two modules of a
range is not executed. Both are in the time of the profiler's own clock, on a CPU processor time, so
that what else the machine does counts less.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# a checkout in which nothing is installed
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import machine
from benchmarks.gate import spread
from partopt.documents.profile import Model, Profile
from partopt.profiler import find_model
from partopt.profiler.device import Clock, clock_of, hold_still
from partopt.profiler.measuring import profile_of
from partopt.profiler.settings import ProfileSettings, Subject
from partopt.profiler.step import run_loss
from partopt.profiler.tensors import place, tensors_in
from partopt.units import format_seconds

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
RANGES = 4  # of about equal time in each model
_LEGEND = """\
MEAN, LARGEST: error of the profile's sum of a range, of the range alone. BIAS: with its sign.
SPREAD: largest standard deviation of a layer of over 1 % of the step."""
_ROW = "{:12} {:>6} {:>6} {:>9} {:>8} {:>8} {:>7} {:>6} {:>11} {:>8}"


@dataclass(frozen=True)
class Case:
    """A model of examples/, its size on a device, and the samples in its microbatch."""

    name: str
    microbatch: int
    settings: dict[str, int] = field(default_factory=dict)


ON_CPU = [
    Case("mlp", 128, {"width": 512}),
    Case("gpt", 2, {"layers": 4}),
    Case("vgg16", 1),
    Case("gpt2", 1, {"layers": 4, "context": 64, "vocabulary": 8192}),
    Case("bert", 1, {"layers": 4, "vocabulary": 8192}),
]
ON_CUDA = [
    Case("mlp", 16384, {"width": 4096}),
    Case("gpt", 64),
    Case("vgg16", 64),
    Case("gpt2", 8, {"context": 1024}),
    Case("bert", 16, {"layers": 24, "width": 1024, "heads": 16, "context": 512}),
]


def main() -> None:
    """A row for each model."""
    arguments = _arguments()
    settings = ProfileSettings(microbatch_sizes=[1], device=arguments.device, steps=arguments.steps)
    print(_describe(arguments.device))
    heading = ("MODEL", "LAYERS", "RANGES", "STEP", "MEAN", "LARGEST", "BIAS", "SPREAD")
    print(_ROW.format(*heading, "COVERAGE", "OVERHEAD"))
    for case in ON_CPU if arguments.device == "cpu" else ON_CUDA:
        if not arguments.only or case.name in arguments.only:
            print(row(case, settings, arguments.rounds), flush=True)
    print(_LEGEND)


def row(case: Case, settings: ProfileSettings, rounds: int) -> str:
    """The line of a model, which is profiled and executed in ranges `rounds` times."""
    found = find_model(f"{EXAMPLES}/{case.name}.py", case.settings)
    torch.manual_seed(0)
    settings = replace(settings, microbatch_sizes=[case.microbatch])
    clock = clock_of(settings.torch_device)

    def inputs_of(size: int) -> Any:
        return _without_labels(found.example_inputs(size))

    subject = Subject(found.build(), inputs_of, _sum, settings, clock)
    profiles = [profile_of(subject, Model(name=case.name))]
    inputs = place(inputs_of(case.microbatch), settings.torch_device, settings.torch_dtype)
    calls, cuts = record_calls(subject.model, profiles[0], inputs), ranges(profiles[0])
    ratios: list[list[float]] = [[] for _ in cuts]
    for turn in range(rounds):
        if turn:
            profiles.append(profile_of(subject, Model(name=case.name)))
        layers = profiles[-1].measurements[0].layers
        for (begin, end), own in zip(cuts, ratios, strict=True):
            alone = time_range(calls, slice(begin, end), clock, settings)
            own.append(sum(x.forward_s + x.backward_s for x in layers[begin:end]) / alone)
    errors = [statistics.median(own) - 1 for own in ratios]
    measured = [each.measurements[0] for each in profiles]
    return _ROW.format(
        case.name,
        len(calls),
        len(errors),
        format_seconds(statistics.median(each.step_s or 0 for each in measured)),
        f"{statistics.mean(map(abs, errors)):.1%}",
        f"{max(errors, key=abs):+.1%}",
        f"{statistics.mean(errors):+.1%}",
        f"{statistics.median(map(spread, measured)):.1%}",
        f"{statistics.median(each.coverage or 0 for each in measured):.1%}",
        f"{statistics.median(each.overhead or 0 for each in measured):.2f}",
    )


@dataclass(frozen=True)
class Call:
    """A call of a layer's module, with the arguments that it had in a whole step."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def record_calls(model: nn.Module, profile: Profile, inputs: Any) -> list[list[Call]]:
    """The calls of every layer in one forward of the model, their tensors cut from the graph.

    A layer is the call of one module, and a piece of a split unit goes on with what is called
    before the next one begins: of modules outside all layers those that call no other.
    """
    layers = {(layer.name, layer.call): index for index, layer in enumerate(profile.layers)}
    units = {layer.name for layer in profile.layers}
    counts: Counter[str] = Counter()
    calls: list[list[Call]] = [[] for _ in layers]
    running = [-1]

    def recorder(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = tuple(map(_cut, args)), {key: _cut(value) for key, value in kwargs.items()}
            running[0] = layers.get((name, counts[name]), running[0])
            counts[name] += 1
            if running[0] >= 0:
                calls[running[0]].append(Call(module, *given))

        return hook

    handles = [
        module.register_forward_pre_hook(recorder(name), with_kwargs=True)
        for name, module in model.named_modules()
        if name in units or not (any(module.children()) or _is_inside(name, units))
    ]
    run_loss(model, inputs, _sum)
    for handle in handles:
        handle.remove()
    return calls


def _is_inside(name: str, units: set[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:end]) in units for end in range(1, len(parts)))


def ranges(profile: Profile) -> list[tuple[int, int]]:
    """Consecutive ranges that tile the layers, of about a quarter of the time each."""
    seconds = [x.forward_s + x.backward_s for x in profile.measurements[0].layers]
    total, so_far, cuts = sum(seconds), 0.0, [0]
    for index, own in enumerate(seconds):
        so_far += own
        if so_far >= total * len(cuts) / RANGES and index + 1 < len(seconds):
            cuts.append(index + 1)
    return list(zip(cuts, [*cuts[1:], len(seconds)], strict=True))


def time_range(
    calls: list[list[Call]], part: slice, clock: Clock, settings: ProfileSettings
) -> float:
    """Median seconds of the forward and the backward of a range by itself, after two to warm up.

    The gradient of its output is given; the last range has that of the model's sum.
    """
    own = [call for layer in calls[part] for call in layer]
    is_first, is_last = part.start == 0, part.stop == len(calls)
    gradient = None if is_last else torch.randn_like(_run(own, is_first))
    taken = []
    with hold_still(settings.torch_device):
        for _ in range(settings.steps + 2):
            begin = clock.stamp()
            made = _run(own, is_first)
            (made.sum() if is_last else made).backward(gradient)  # type: ignore[no-untyped-call]
            taken += clock.intervals_s([begin, clock.stamp()])
    return statistics.median(taken[2:])


def _run(calls: list[Call], is_first: bool) -> Tensor:
    """What the range makes: each module takes the output of the one before it.

    A module that takes no floating tensor, an embedding, has its output added to what there is. The
    input of the first range needs no gradient, as in the model.
    """
    current: Tensor | None = None
    for call in calls:
        places = [("args", i, v) for i, v in enumerate(call.args)]
        places += [("kwargs", key, value) for key, value in call.kwargs.items()]
        at = next((p for p in places if _is_floating(p[2])), None)
        args, kwargs = list(call.args), dict(call.kwargs)
        if at is not None:
            shape = at[2].shape
            given = _leaf(call, at[2], is_first) if current is None else current.reshape(shape)
            (args if at[0] == "args" else kwargs)[at[1]] = given
        made = next(filter(_is_floating, tensors_in(call.module(*args, **kwargs))))
        current = made if at is not None or current is None else current + made
    assert current is not None
    return current


def _leaf(call: Call, given: Tensor, is_first: bool) -> Tensor:
    leaf = given.detach().requires_grad_(not is_first)
    # autograd refuses a leaf that is changed in place
    return leaf.clone() if getattr(call.module, "inplace", False) else leaf


def _sum(output: Any, inputs: Any) -> Tensor:
    made: Tensor = next(filter(_is_floating, tensors_in(output)))
    return made.sum()


def _cut(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 1


def _without_labels(inputs: Any) -> Any:
    """The inputs without labels: a loss inside the model is none of its modules'."""
    named = isinstance(inputs, dict)
    return {key: inputs[key] for key in inputs if key != "labels"} if named else inputs


def _describe(device: str) -> str:
    what = f"; {torch.cuda.get_device_name()}" if device == "cuda" else ", one thread"
    return f"{machine.describe()}, torch {torch.__version__}{what}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cuda", "cpu"], default=default)
    parser.add_argument("--steps", type=int, default=10, help="timed steps each (default: 10)")
    parser.add_argument("--rounds", type=int, default=3, help="profiles, each with its ranges")
    parser.add_argument("--only", nargs="*", metavar="MODEL", help="these alone")
    return parser.parse_args()


if __name__ == "__main__":
    main()
