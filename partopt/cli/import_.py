"""`partopt import`."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import click

from partopt.cli import options, words
from partopt.errors import PartoptError

if TYPE_CHECKING:
    from partopt.documents.profile import Profile

_TRACE = "torch-profile"


@click.command("import", short_help="turn another program's measurements into a profile")
@click.argument("form", metavar="FORMAT")
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@click.option(
    "--onto", metavar="PROFILE", help="torch-profile: the profile whose times are replaced."
)
@click.option(
    "--plan", metavar="PLAN", help="torch-profile: the plan that ran; its stages are timed."
)
@click.option("--name", help="Name of the model (default: that of the file, or of the profile).")
@click.option(
    "--microbatch-size",
    type=click.IntRange(min=1),
    metavar="B",
    help="Samples that were measured at once; such files do not record it.",
)
@click.option("--device", metavar="NAME", help="Device that was measured, if it is known.")
@options.output_options("the profile")
def command(
    form: str,
    files: tuple[str, ...],
    onto: str | None,
    plan: str | None,
    name: str | None,
    microbatch_size: int | None,
    device: str | None,
    output: str | None,
    force: bool,
) -> None:
    """Read what another program measured and write it as a profile of partopt's.

    FORMAT is pipedream, the published profiler's graph file, or torch-profile: traces of
    torch.profiler, one of each process. A trace has times alone: --onto says which profile they
    are put into. Layers are found by record_function ranges of their names or, recorded
    with_stack=True, as modules; with --plan the stages by the ranges of torch's pipelines, PP:0F0.

    \b
    Example:
      partopt import pipedream vgg16.txt --microbatch-size 128 -o vgg16.json
      partopt import torch-profile trace.json.gz --onto gpt.json -o measured.json
      partopt import torch-profile rank*.json --onto gpt.json --plan plan.json -o again.json
    """
    import partopt
    from partopt import documents

    if form == "run":
        raise PartoptError(
            "partopt import run: a run is of partopt's own",
            "partopt profile --from-run RUN --onto PROFILE",
            code="unknown-importer",
        )
    if form != _TRACE:
        partopt.IMPORTERS.lookup(form)
    if output is None:
        raise PartoptError(
            "partopt import: no output file",
            "add -o profile.json, or -o - for standard output",
            code="missing-option",
            option="output",
        )
    documents.check_writable(output, force)
    if form == _TRACE:
        imported = _import_traces(files, onto, plan, name, microbatch_size, device)
    else:
        _refuse_other_options(form, files, onto, plan)
        imported = partopt.import_profile(
            form, files[0], name=name, microbatch_size=microbatch_size, device=device
        )
    imported.save(output, force)
    words.print_notes(imported.notes)
    if output != "-":
        count = len(imported.layers)
        click.echo(f"Wrote {output}: {count} {'layer' if count == 1 else 'layers'}", err=True)
        click.echo(f"next:    partopt plan {shlex.quote(output)} --topology v100-pcie", err=True)


def _import_traces(
    files: tuple[str, ...],
    onto: str | None,
    plan: str | None,
    name: str | None,
    microbatch_size: int | None,
    device: str | None,
) -> Profile:
    from msgspec.structs import replace

    import partopt

    if onto is None:
        raise PartoptError(
            f"partopt import {_TRACE}: a trace has no bytes of parameters and activations",
            "say whose they are: --onto PROFILE, a profile of the same model",
            code="missing-option",
            option="onto",
        )
    imported = partopt.import_times(
        files,
        partopt.Profile.load(onto),
        plan=partopt.Plan.load(plan) if plan else None,
        microbatch_size=microbatch_size,
        device=device,
    )
    return replace(imported, model=replace(imported.model, name=name)) if name else imported


def _refuse_other_options(
    form: str, files: tuple[str, ...], onto: str | None, plan: str | None
) -> None:
    for flag, given in (("--onto", onto), ("--plan", plan), (files[-1], len(files) > 1)):
        if given:
            raise PartoptError(
                f"{flag}: not of partopt import {form}",
                f"one FILE holds the whole profile; {flag} goes with {_TRACE}",
                code="unused-option",
            )
