"""`partopt run`: train a model by a plan, measured beside predicted."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import click

import partopt
from partopt import documents
from partopt.cli import options, stopping
from partopt.cli.terminal import say
from partopt.errors import ANSWER_IS_NO, PartoptError


@click.command()
@click.argument("plan", type=options.FILE)
@click.argument("model", metavar="MODEL[:ATTR]", type=options.FILE)
@options.set_option
@click.option("--steps", type=int, default=10, show_default=True, help="Iterations to train.")
@click.option(
    "--check", is_flag=True, help="Hold losses and gradients of a step against one process."
)
@options.option(
    "--check-device",
    "NAME",
    "Of the one process: cpu where no GPU holds the model, or auto, the GPU of rank 0.",
    default="auto",
)
@click.option("--microbatches", type=int, help="Of a step of an asynchronous plan.")
@options.option(
    "--backend",
    "NAME",
    "Of torch.distributed: gloo on processors, nccl, or auto, nccl where there are GPUs.",
    default="auto",
)
@options.option(
    "--engine",
    "NAME",
    "partopt's own (partopt), torch's pipeline runtime (torch), or auto, that of the plan.",
    default="auto",
)
@click.option("--rate", type=float, default=1e-3, show_default=True, help="Learning rate.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of weights and inputs.")
@options.option("--save", "DIR", "Write checkpoints into this folder, the last at the end.")
@options.option("--every", "N", "And after every N steps.", int)
@options.option("--resume", "DIR", "Go on from the last checkpoint in it, whatever its plan was.")
@options.output_options("the run (.json) or its timeline (.trace.json for Perfetto)")
@options.json_option
def command(
    plan: str, model: str, assignments: tuple[str, ...], output: str | None, **given: Any
) -> None:
    """Train MODEL by PLAN on torch.distributed: every rank its own stages of the model.

    Starts as many processes as the plan has ranks; under torchrun, on one machine or several, takes
    part as one of its ranks. Prints what was predicted beside what was measured. With --check a
    first step is held against one process that has the whole model: its losses and gradients, or
    under an asynchronous schedule the changes of its weights. Where they differ the command ends
    with exit code 1.

    \b
    Example:
      partopt run plan.json examples/gpt.py --steps 20
      partopt run plan.json examples/gpt.py --check
      partopt run plan.json model.py --save checkpoints --every 100
      torchrun --nproc-per-node 4 -m partopt run plan.json model.py
    """
    force, as_json = given.pop("force"), given.pop("as_json")
    if output and output != "-":
        documents.check_writable(output, force, [".json"])
    loaded, arguments = partopt.Plan.load(plan), options.parse_assignments(assignments)
    try:
        # what the model's code prints is not the page
        with stopping.stopped_by_signals(), contextlib.redirect_stdout(sys.stderr):
            finished = partopt.run_source(loaded, model, arguments=arguments, **given)
    except KeyboardInterrupt as interrupt:
        say(f"{stopping.describe(interrupt)}: every process has ended", err=True)
        raise SystemExit(stopping.exit_code(interrupt)) from None
    if finished is not None:
        _show(finished, output, force, as_json)


def _show(finished: partopt.TrainingRun, output: str | None, force: bool, as_json: bool) -> None:
    from partopt.report.run_text import render

    run = finished.document
    options.deliver(run, lambda: say(render(run)), output, force, as_json, save=finished.save)
    check = run.check
    if check is not None and not check.equal:
        raise PartoptError(
            f"the run is not equal to one process: {check.compared} of {check.worst} differ by "
            f"{check.largest_error:.1g} of the largest, losses by {check.loss_error:.1g}",
            "try a plan with one stage to see whether the model itself can be repeated",
            ANSWER_IS_NO,
            code="not-equal",
        )
