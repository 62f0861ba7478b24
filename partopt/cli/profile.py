"""`partopt profile`: measure a model's layers and write them to a file."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from typing import TYPE_CHECKING, Any

import click

from partopt import documents
from partopt.cli import progress, stopping, words
from partopt.cli.assignments import parse_assignments, set_option
from partopt.cli.profile_options import (
    ESTIMATING,
    MEASURING,
    check_estimate,
    check_from_run,
    choose_output,
    parse_repeats,
    parse_sizes,
)
from partopt.cli.terminal import say
from partopt.errors import PartoptError

if TYPE_CHECKING:
    from partopt.documents.profile import Profile


@click.command(short_help="measure the layers of a PyTorch model on one device")
@click.argument("model", metavar="MODEL[:ATTR]", required=False)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="The profile to write; - is standard output; by default that of --resume.",
)
@set_option
@click.option(
    "--microbatch",
    default="1,2,4,8",
    show_default=True,
    metavar="LIST",
    help="Microbatch sizes to measure.",
)
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
@click.option(
    "--unit",
    "units",
    multiple=True,
    metavar="GLOB",
    help="Make each module whose name matches one layer.",
)
@click.option(
    "--steps",
    metavar="N",
    type=int,
    help="Timed steps for each size, bare and instrumented each "
    "[default: 10, or 5 where a step takes over a second].",
)
@click.option(
    "--resume",
    metavar="FILE",
    help="Go on with a profile that was stopped: measure the sizes that it has not.",
)
@click.option(
    "--name", metavar="NAME", help="What the profile calls the model [default: the file's name]."
)
@click.option(
    "--repeat",
    "repeats",
    multiple=True,
    metavar="LIST=N",
    help="The model has N blocks in the list of this name, of which four or more were built: the "
    "others have the measurements of the second.",
)
@click.option(
    "--estimate",
    metavar="FILE|NAME",
    help="Estimate the times on a device that is not there: a100, h100, h200, v100 or a file.",
)
@click.option(
    "--calibrate",
    metavar="SECONDS",
    type=float,
    help="With --estimate: what a step takes, forward and backward, at the first size; all times "
    "are scaled to it.",
)
@click.option(
    "--group",
    metavar="N",
    type=int,
    help="With --estimate: N ranks run the model together, as its build or its class cuts it; a "
    "stage of a plan is on such groups.",
)
@click.option(
    "--topology",
    metavar="FILE|NAME",
    help="With --group: the cluster over whose innermost links the ranks exchange.",
)
@click.option(
    "--from-run",
    metavar="RUN",
    help="Measure nothing: take the times of this run (partopt run -o RUN.json) instead.",
)
@click.option(
    "--onto", metavar="PROFILE", help="With --from-run: the profile whose times they replace."
)
@click.option("--force", is_flag=True, help="Replace an existing file.")
def command(
    model: str | None,
    output: str | None,
    assignments: tuple[str, ...],
    microbatch: str,
    resume: str | None,
    from_run: str | None,
    onto: str | None,
    force: bool,
    repeats: tuple[str, ...],
    **options: Any,
) -> None:
    """Measure the time, memory and output of each layer of MODEL, or estimate the time.

    Time is that of the forward and the backward, memory what the layer keeps, output what it passes
    on.

    MODEL is a Python file or a dotted module. It offers build(**options), which returns an
    nn.Module, and example_inputs(batch_size); a loss_fn(output, inputs) if it likes. Without :ATTR
    the model is build, create_model, model, or the only module of the file.

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
      partopt profile examples/gpt.py --set layers=4 --repeat blocks=96 -o deep.json
      torchrun --nproc-per-node 4 -m partopt profile my_parallel.py -o tp4.json
      partopt profile --from-run run.json --onto gpt.json -o again.json
    """
    if model is None and not (from_run or onto):
        raise click.UsageError("Missing argument 'MODEL[:ATTR]'.")
    output, force = choose_output(output, resume, force)
    if model is None or from_run or onto:
        _save_of_run(from_run, onto, output, force)
        return
    given = {
        "microbatch_sizes": parse_sizes(microbatch),
        "arguments": parse_assignments(assignments),
        "resume": _load_resumed(resume),
        **options,
    }
    check_estimate(given)
    counts = parse_repeats(repeats, options["calibrate"])
    with stopping.stopped_by_signals():
        measured = _measure(model, given, output, force)
        try:
            measured = _repeat(measured, counts)
        except PartoptError:
            _keep(measured, "nothing is repeated", output, force)
            raise
        _save(measured, output, force)
    if output != "-" and _writes():
        from partopt.documents.device import next_cluster
        from partopt.report.profile import render_sizes

        say(render_sizes(measured))
        _tell_written(output, options["topology"] or next_cluster(measured))


def _repeat(measured: Profile, repeats: dict[str, int]) -> Profile:
    """The profile of the model with as many blocks in each list as --repeat says."""
    from partopt import repeat

    for blocks, count in repeats.items():
        measured = repeat(measured, blocks, count)
    return measured


def _save_of_run(run: str | None, onto: str | None, output: str, force: bool) -> None:
    """Write the profile `onto` with the times of a run."""
    import partopt
    from partopt.documents.run import Run

    run, onto = check_from_run(run, onto)
    _save(partopt.import_run(Run.load(run), partopt.Profile.load(onto), run), output, force)
    if output != "-":
        _tell_written(output, "FILE")


def _tell_written(output: str, topology: str) -> None:
    following = shlex.join([output, "--topology", topology])
    say(f"\nWrote {output}\nnext:    partopt plan {following}", err=True)


def _writes() -> bool:
    """Whether this process writes the profile: of a group that torchrun started, rank 0."""
    return os.environ.get("RANK", "0") == "0"


def _save(measured: Profile, output: str, force: bool) -> None:
    if not _writes():
        return
    with stopping.not_stopped():
        measured.save(output, force)
    words.print_notes(measured.notes)


def _load_resumed(resume: str | None) -> Profile | None:
    from partopt.documents.profile import Profile

    if resume is None:
        return None
    # a file: what is shipped by name was measured elsewhere
    return Profile.parse(documents.read_bytes(resume), resume)


def _measure(model: str, options: dict[str, Any], output: str, force: bool) -> Profile:
    """The profile; where measuring is stopped, save what is finished before the command ends."""
    from partopt import ProfilingStopped

    try:
        # what the model's own code prints is not our data
        with (
            progress.of_sizes(options["microbatch_sizes"]) as shown,
            contextlib.redirect_stdout(sys.stderr),
        ):
            tell = shown if _writes() else None
            return _run(model, {**options, "progress": tell})
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

    if options["estimate"] is None:
        return measure_source(model, **_without(options, "estimate", *ESTIMATING))
    return estimate_source(model, options["estimate"], **_without(options, "estimate", *MEASURING))


def _without(options: dict[str, Any], *names: str) -> dict[str, Any]:
    """The options that have a value, but these."""
    return {
        name: value for name, value in options.items() if name not in names and value is not None
    }


def _with_debug(error: Exception) -> Exception:
    """The error; where the model's own code raised it, the hint says how to see its traceback."""
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
