"""`partopt profile`: measure a model's layers and write them to a file."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import click

import partopt
from partopt import documents
from partopt.cli import stopping, words
from partopt.cli.next_commands import next_cluster, say_next
from partopt.cli.options import FILE, is_given, option, parse_assignments, parse_pairs, set_option
from partopt.cli.terminal import progress, say
from partopt.errors import PartoptError

if TYPE_CHECKING:
    from partopt.documents.profile import Profile

_MEASURING = ("device", "compile", "steps", "resume")  # options that do not go with --estimate
_MINUTES_FROM_S = 100.0


@click.command()
@click.argument("model", metavar="MODEL[:ATTR]", required=False, type=FILE)
@option(
    "-o --output",
    "FILE",
    "The profile to write; - is standard output; by default that of --resume.",
)
@set_option
@option("--microbatch", "LIST", "Microbatch sizes to measure.", default="1,2,4,8")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Number format of the weights [default: float32; with --estimate bfloat16, where the "
    "device computes in it and there is no --autocast].",
)
@click.option(
    "--autocast",
    type=click.Choice(["bfloat16", "float16"]),
    help="Run forward and loss under torch.autocast, over float32 weights.",
)
@click.option("--compile", is_flag=True, help="Compile each layer by torch.compile first.")
@click.option(
    "--device",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "cuda", "cpu"]),
    help="auto takes CUDA if it is there.",
)
@click.option(
    "--granularity",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "block", "leaf"]),
    help="What one layer is, see above.",
)
@option("--unit units", "GLOB", "Make each module whose name matches one layer.", multiple=True)
@option(
    "--steps",
    "N",
    "Timed steps for each size, bare and instrumented each "
    "[default: 10, or 5 where a step takes over a second].",
    int,
)
@option(
    "--resume", "FILE", "Go on with a profile that was stopped: measure the sizes that it has not."
)
@option("--name", "NAME", "What the profile calls the model [default: the file's name].")
@option(
    "--repeat repeats",
    "LIST=N",
    "The model has N blocks in the list of this name, of which two, or four or more, were built: "
    "the others have the measurements of the second.",
    multiple=True,
)
@option(
    "--estimate",
    "FILE|NAME",
    "Estimate the times on a device that is not there: a100, h100, h200, v100 or a file.",
)
@option(
    "--calibrate",
    "SECONDS",
    "With --estimate: what a step takes, forward and backward, at the first size; all times "
    "are scaled to it.",
    float,
)
@option(
    "--from-run",
    "RUN",
    "Measure nothing: take the times of this run (partopt run -o RUN.json) instead.",
)
@option("--onto", "PROFILE", "With --from-run: the profile whose times they replace.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
def command(model: str | None, output: str | None, force: bool, **given: Any) -> None:
    """Measure the time, memory and output of each layer of MODEL, or estimate the time.

    Time is that of the forward and the backward, memory what the layer keeps, output what it passes
    on.

    MODEL is a Python file or a dotted module. It offers build(**options), which returns an
    nn.Module, and example_inputs(batch_size); a loss_fn(output, inputs) if it likes. With a
    loss_fn(output, labels), example_inputs returns a pair, inputs and labels. Without :ATTR the
    model is build, create_model, model, or the only module of the file.

    A layer is a repeated block, such as a transformer block, or one of the largest modules between
    them (auto); the same without opening plain lists (block); or a module that calls no other
    (leaf). Ctrl-C, SIGTERM or an error keeps the microbatch sizes that are finished; --resume goes
    on with them.

    With --from-run there is no MODEL: what the stages of a plan took as they trained is put into
    the profile of the plan, so that planning again knows it.

    Under torchrun build makes the model parallel over the ranks (tensor, sequence or context
    parallelism), which are measured as one device; rank 0 writes.

    \b
    Example:
      partopt profile examples/gpt.py --microbatch 1,2,4 -o gpt.json
      partopt profile examples/gpt.py:build --set layers=12 --set width=768 -o big.json
      partopt profile package.model --device cuda --dtype bfloat16 -o model.json
      partopt profile examples/llama.py --set size=70b --estimate h100 -o m.json
      partopt profile examples/gpt.py --set layers=2 --repeat blocks=96 -o deep.json
      torchrun --nproc-per-node 4 -m partopt profile my_parallel.py -o tp4.json
      partopt profile --from-run run.json --onto gpt.json -o again.json
    """
    run, onto = given.pop("from_run"), given.pop("onto")
    if model is None and not (run or onto):
        raise click.UsageError("Missing argument 'MODEL[:ATTR]'.")
    resume = given["resume"]
    output = output or resume
    if output is None:
        raise click.UsageError("Missing option '-o' / '--output'.")
    force = force or output == resume  # what is gone on with may be replaced
    documents.check_writable(output, force, [".json"])
    force = force or os.environ.get("WORLD_SIZE", "1") != "1"  # a group writes after every size
    topology = "FILE"
    if model is None or run or onto:
        _save(_of_run(run, onto), output, force)
    else:
        measured = _measure_and_save(model, given, output, force)
        if output == "-" or not _writes():
            return
        from partopt.report.profile_text import render_sizes

        say(render_sizes(measured))
        topology = next_cluster(measured)
    if output != "-":
        say(f"\nWrote {output}", err=True)
        say_next("profile", output, topology=topology)


def _measure_and_save(model: str, given: dict[str, Any], output: str, force: bool) -> Profile:
    """The profile that the values of the options ask for, with blocks repeated, as it is saved."""
    repeats = given.pop("repeats")
    sizes = [size.strip() for size in given.pop("microbatch").split(",") if size.strip()]
    given["microbatch_sizes"] = [  # `measure` refuses what is not a whole number
        int(size) if re.fullmatch("-?[0-9]{1,18}", size) else size for size in sizes
    ]
    given["arguments"] = parse_assignments(given.pop("assignments"))
    if (resume := given["resume"]) is not None:  # a file: shipped ones were measured elsewhere
        from partopt.documents.profile import Profile

        given["resume"] = Profile.parse(documents.read_bytes(resume), resume)
    _check_estimate(given)
    counts = _parse_repeats(repeats, given["calibrate"])
    given["blocks"] = list(counts)
    with stopping.stopped_by_signals():
        measured = _measure(model, given, output, force)
        try:
            for blocks, count in counts.items():
                measured = partopt.repeat(measured, blocks, count)
        except PartoptError:
            _keep(measured, "nothing is repeated", output, force)
            raise
        _save(measured, output, force)
    return measured


def _of_run(run: str | None, onto: str | None) -> Profile:
    """The profile `onto` with the times of a run; refused beside what says how to measure."""
    from partopt.documents.training_run import Run

    if run is None:
        hint = "leave it out to measure MODEL"
        raise PartoptError("--onto: goes with --from-run", hint, code="unused-option")
    if onto is None:
        raise PartoptError(
            "partopt profile --from-run: a run has no bytes of parameters and activations",
            "say whose they are: --onto PROFILE, that of the plan that ran",
            code="missing-option",
            option="onto",
        )
    for parameter in click.get_current_context().command.params:
        name = str(parameter.name)
        if is_given(name) and name not in ("from_run", "onto", "output", "force"):
            said = parameter.opts[0] if isinstance(parameter, click.Option) else "MODEL"
            _refuse_unused(f"{said}: goes with measuring, and --from-run measures nothing")
    return partopt.import_run(Run.load(run), partopt.Profile.load(onto), run)


def _refuse_unused(what: str, hint: str = "leave one of the two out") -> NoReturn:
    raise PartoptError(what, hint, code="unused-option")


def _check_estimate(given: dict[str, Any]) -> None:
    """Refuse options that say how to measure beside --estimate, and its options without it."""
    if given["estimate"] is None:
        if given["calibrate"] is not None:
            what = "--calibrate: goes with --estimate"
            _refuse_unused(what, "a measured profile has the times of the device itself")
        return
    for name in _MEASURING:
        if is_given(name):
            what = f"{words.flags()[name]}: goes with measuring, and --estimate measures nothing"
            _refuse_unused(what)


def _parse_repeats(repeats: Sequence[str], calibrate: float | None) -> dict[str, int]:
    """The number of blocks of every list, from `LIST=N`."""
    if repeats and calibrate is not None:
        raise PartoptError(
            "--calibrate: the step of a whole model, and --repeat has a few of its blocks",
            "leave one of the two out",
            code="conflicting-options",
        )
    form, example = "LIST=N", "transformer.h=96"
    counts = parse_pairs("--repeat", repeats, form, example)
    for blocks, count in counts.items():
        if not count.isdecimal():
            what = f"--repeat {blocks}={count}: not of the form {form}"
            raise PartoptError(what, f"write --repeat {example}", code="invalid-option")
    return {blocks: int(count) for blocks, count in counts.items()}


def _writes() -> bool:
    """Whether this process writes the profile: of a group that torchrun started, rank 0."""
    return os.environ.get("RANK", "0") == "0"


def _save(measured: Profile, output: str, force: bool) -> None:
    if not _writes():
        return
    with stopping.not_stopped():
        measured.save(output, force)
    words.print_notes(measured.notes)


def _measure(model: str, options: dict[str, Any], output: str, force: bool) -> Profile:
    """The profile; where measuring is stopped, save what is finished before the command ends."""
    from partopt import ProfilingStopped

    def keep(finished: Profile) -> None:
        if output != "-":
            with stopping.not_stopped():
                finished.save(output, True)

    try:
        # what the model's code prints is not our data
        with (
            _show_sizes(options["microbatch_sizes"]) as shown,
            contextlib.redirect_stdout(sys.stderr),
        ):
            # a group may end at any size
            heard = {"progress": shown, "keep": keep} if _writes() else {}
            return _run(model, options | heard)
    except ProfilingStopped as stopped:
        _keep(stopped.profile, stopping.describe(stopped.__cause__), output, force)
        if stopped.error is None:
            raise SystemExit(stopping.exit_code(stopped.__cause__)) from None
        raise _with_debug(stopped.error) from stopped.error.__cause__
    except KeyboardInterrupt as interrupt:
        _keep(None, stopping.describe(interrupt), output, force)
        raise SystemExit(stopping.exit_code(interrupt)) from None
    except PartoptError as error:
        raise _with_debug(error) from error.__cause__


def _run(model: str, options: dict[str, Any]) -> Profile:
    """The profile that was asked for: estimated or measured."""
    from partopt import estimate_source, measure_source

    device = options["estimate"]
    other = ("calibrate",) if device is None else _MEASURING
    stated = {
        name: value
        for name, value in options.items()
        if value is not None and name not in ("estimate", *other)
    }
    if device is None:
        return measure_source(model, **stated)
    return estimate_source(model, device, **stated)


def _with_debug(error: Exception) -> Exception:
    """The error; where the model's code raised it, the hint says how to see its traceback."""
    if not isinstance(error, PartoptError) or error.code != "model-code-failed":
        return error
    hint = f"{error.hint}; --debug shows the traceback"
    return PartoptError(error.message, hint, error.exit_code, code=error.code, **error.fields)


def _keep(finished: Profile | None, why: str, output: str, force: bool) -> None:
    """Save what is finished, and print so."""
    if not _writes():
        return
    if finished is None:
        say(f"{why} before the first microbatch size was finished: nothing is written", err=True)
        return
    _save(finished, output, force)
    sizes = ", ".join(str(measurement.microbatch_size) for measurement in finished.measurements)
    say(f"{why}: wrote {output} with what was finished, microbatch {sizes}", err=True)


@contextlib.contextmanager
def _show_sizes(sizes: Sequence[object]) -> Iterator[Callable[[int, int, int], None]]:
    """Yield what `partopt.measure` calls with a microbatch size, steps done and steps to do.

    On a terminal every step moves the bar; elsewhere a line says that a size is done.
    """
    watch = SizeWatch(sizes, time.monotonic)
    with progress() as show:

        def tell(size: int, done: int, steps: int) -> None:
            text = watch.describe(size, done, steps)
            show(text, done, steps or 1)
            if 0 < steps == done and not sys.stderr.isatty():
                say(text, err=True)

        yield tell


class SizeWatch:
    """Says what is measured, and about how long the rest takes.

    A larger size is taken to need as much longer as it is larger, preparing it as well.
    """

    def __init__(self, sizes: Sequence[object], now: Callable[[], float]) -> None:
        self.sizes = sorted({size for size in sizes if isinstance(size, int)})
        self.now = now
        self._began = self._timed_from = 0.0

    def describe(self, size: int, done: int, steps: int) -> str:
        """`microbatch 4 (3 of 4), step 6 of 10, about 40 s left`."""
        where = f"microbatch {size} ({self.sizes.index(size) + 1} of {len(self.sizes)})"
        if not steps:
            self._began = self.now()
            return f"{where}, preparing"
        if not done:
            self._timed_from = self.now()
            return f"{where}, step 1 of {steps}"
        step_s = (self.now() - self._timed_from) / done
        whole_s = self._timed_from - self._began + step_s * steps
        later = sum(other for other in self.sizes if other > size)
        left_s = step_s * (steps - done) + whole_s * later / size
        if done < steps:
            return f"{where}, step {done + 1} of {steps}, {_about(left_s)} left"
        taken = f"{where}, {steps} steps in {whole_s:.0f} s"
        return f"{taken}, {_about(left_s)} left" if later else taken


def _about(seconds: float) -> str:
    if seconds < _MINUTES_FROM_S:
        return f"about {max(seconds, 1):.0f} s"
    return f"about {seconds / 60:.0f} min"
