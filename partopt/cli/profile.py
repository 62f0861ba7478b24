"""`partopt profile`: measure a model's layers and write them to a file."""

from __future__ import annotations

import ast
import contextlib
import shlex
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from partopt import documents, profile
from partopt.errors import PartoptError
from partopt.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from partopt.profile import Measurement, Profile


@click.command(short_help="measure the layers of a PyTorch model on one device")
@click.argument("model", metavar="MODEL[:ATTR]")
@click.option("-o", "--output", required=True, metavar="FILE", help="The profile to write; - is standard output.")
@click.option("--set", "assignments", multiple=True, metavar="K=V", help="An argument for the function that builds the model.")
@click.option("--microbatch", default="1,2,4,8", show_default=True, metavar="LIST", help="Microbatch sizes to measure.")
@click.option("--dtype", default="float32", show_default=True, type=click.Choice(["float32", "bfloat16", "float16"]), help="Number format.")
@click.option(
    "--device", default="auto", show_default=True, type=click.Choice(["auto", "cuda", "cpu"]), help="auto takes CUDA if it is there."
)
@click.option(
    "--granularity", default="auto", show_default=True, type=click.Choice(["auto", "block", "leaf"]), help="What one layer is, see above."
)
@click.option("--unit", "units", multiple=True, metavar="GLOB", help="Make each module whose name matches one layer.")
@click.option("--steps", default=10, show_default=True, metavar="N", help="Timed steps for each size, bare and instrumented each.")
@click.option("--name", metavar="NAME", help="What the profile calls the model [default: the file's name].")
@click.option("--force", is_flag=True, help="Replace an existing file.")
def command(model: str, output: str, assignments: tuple[str, ...], microbatch: str, name: str | None, force: bool, **options: Any) -> None:
    """Measure how long each layer of MODEL takes, forward and backward, what it keeps in memory and what it passes on.

    MODEL is a Python file or a dotted module. It offers build(**options), which returns an nn.Module, and example_inputs(batch_size); a
    loss_fn(output, inputs) if it likes. Without :ATTR the model is build, create_model, model, or the only module of the file.

    A layer is a repeated block, such as a transformer block, or one of the largest modules between them (auto); the same without opening
    plain lists (block); or a module that calls no other (leaf). Ctrl-C keeps the microbatch sizes that are finished.

    \b
    Example:
      partopt profile examples/gpt.py --microbatch 1,2,4 -o gpt.json
      partopt profile examples/gpt.py:build --set layers=12 --set width=768 -o big.json
      partopt profile package.model --device cuda --dtype bfloat16 -o model.json
    """
    documents.check_writable(output, force)
    sizes, arguments = _parse_sizes(microbatch), _parse_assignments(assignments)
    measured = _measure(model, arguments, name, {**options, "microbatch_sizes": sizes}, output, force)
    profile.save(measured, output, force)
    if output != "-":
        _print_summary(measured)
        click.echo(f"\nWrote {output}\nnext:    partopt plan {shlex.quote(output)} --topology dgx-a100", err=True)


def _measure(model: str, arguments: dict[str, Any], name: str | None, options: dict[str, Any], output: str, force: bool) -> Profile:
    """The profile; where it is interrupted, what is finished is written and the command ends with 130."""
    from partopt.profiler import ProfilingInterrupted, find_model, profile_source

    try:
        with _progress_shown() as progress, contextlib.redirect_stdout(sys.stderr):  # what the model's own code prints is not our data
            return profile_source(find_model(model, arguments), name, progress=progress, **options)
    except ProfilingInterrupted as interrupted:
        if interrupted.profile is None:
            click.echo("interrupted before the first microbatch size was finished: nothing is written", err=True)
            raise SystemExit(130) from None
        profile.save(interrupted.profile, output, force)
        sizes = ", ".join(str(measurement.microbatch_size) for measurement in interrupted.profile.measurements)
        click.echo(f"interrupted: wrote {output} with what was finished, microbatch {sizes}", err=True)
        raise SystemExit(130) from None


def _parse_sizes(text: str) -> list[int]:
    """Microbatch sizes of a list such as `1,2,4`, each once, the smallest first."""
    hint = "list whole numbers from 1, such as 1,2,4,8"
    parts = [part.strip() for part in text.split(",") if part.strip()]
    for part in parts:
        if not (part.isascii() and part.isdigit() and int(part) > 0):
            raise PartoptError(f"--microbatch {text}: '{part}' is not a microbatch size", hint)
    if not parts:
        raise PartoptError("--microbatch: no size given", hint)
    return sorted({int(part) for part in parts})


def _parse_assignments(assignments: tuple[str, ...]) -> dict[str, Any]:
    """Arguments from `K=V`: V is a Python literal where it reads as one, else text."""
    arguments: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals or not key.isidentifier():
            raise PartoptError(f"--set {assignment}: not of the form K=V", "write --set layers=12")
        arguments[key] = _literal(value)
    return arguments


def _literal(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, int | float | str | list | dict | None) else text


@contextlib.contextmanager
def _progress_shown() -> Iterator[Callable[[int, int, int], None]]:
    """A progress bar on a terminal, nothing elsewhere; it is told the microbatch size, the steps done and the steps to do."""
    if not sys.stderr.isatty():
        yield lambda size, done, steps: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("building the model", total=None)
        yield lambda size, done, steps: bar.update(task, description=f"microbatch {size}", completed=done, total=steps)


def _print_summary(measured: Profile) -> None:
    """What was measured, on standard output: a line for each microbatch size."""
    parameters = sum(_distinct_parameter_bytes(measured))
    click.echo(f"{measured.model.name}: {len(measured.layers)} layers, {format_bytes(parameters)} of parameters, {measured.dtype}")
    click.echo(f"{measured.device.name} ({measured.device.type}), torch {measured.environment.torch}\n")
    click.echo(f"{'MICROBATCH':>10}  {'STEP':>9}  {'SAMPLES/S':>16}  {'COVERAGE':>8}  {'OVERHEAD':>8}  {'OPTIMIZER':>9}")
    for measurement in measured.measurements:
        click.echo(_summary_line(measurement))


def _distinct_parameter_bytes(measured: Profile) -> Iterator[int]:
    shared = {parameter.name: parameter.bytes for layer in measured.layers for parameter in layer.shared_parameters}
    yield from shared.values()
    for layer in measured.layers:
        yield layer.parameter_bytes - sum(parameter.bytes for parameter in layer.shared_parameters)


def _summary_line(measurement: Measurement) -> str:
    if measurement.out_of_memory or measurement.step_s is None:
        return f"{measurement.microbatch_size:>10}  out of memory"
    optimizer = "-" if measurement.optimizer_s is None else format_seconds(measurement.optimizer_s)
    rate = format_rate(measurement.microbatch_size / measurement.step_s, "samples")
    coverage, overhead = f"{measurement.coverage:.1%}", f"{measurement.overhead:.2f}"
    step = format_seconds(measurement.step_s)
    return f"{measurement.microbatch_size:>10}  {step:>9}  {rate:>16}  {coverage:>8}  {overhead:>8}  {optimizer:>9}"
