"""`partopt import`."""

from __future__ import annotations

import shlex

import click

from partopt.cli import options, words
from partopt.errors import PartoptError


@click.command("import", short_help="turn another program's profile into one of partopt's")
@click.argument("form", metavar="FORMAT")
@click.argument("graph")
@click.option("--name", help="Name of the model (default: that of the file).")
@click.option(
    "--microbatch-size",
    type=click.IntRange(min=1),
    metavar="B",
    help="Samples that were measured at once; such files do not record it (default: 1).",
)
@click.option("--device", metavar="NAME", help="Device that was measured, if it is known.")
@options.output_options("the profile")
def command(
    form: str,
    graph: str,
    name: str | None,
    microbatch_size: int | None,
    device: str | None,
    output: str | None,
    force: bool,
) -> None:
    """Read GRAPH, a profile in FORMAT, and write it as one of partopt's.

    FORMAT is pipedream: the published profiler's graph file.

    \b
    Example:
      partopt import pipedream vgg16.txt --microbatch-size 128 -o vgg16.json
    """
    import partopt
    from partopt import documents

    partopt.IMPORTERS.lookup(form)
    if output is None:
        raise PartoptError(
            "partopt import: no output file",
            "add -o profile.json, or -o - for standard output",
            code="missing-option",
            option="output",
        )
    documents.check_writable(output, force)
    imported = partopt.import_profile(
        form, graph, name=name, microbatch_size=microbatch_size, device=device
    )
    imported.save(output, force)
    words.print_notes(imported.notes)
    if output != "-":
        count = len(imported.layers)
        click.echo(f"Wrote {output}: {count} {'layer' if count == 1 else 'layers'}", err=True)
        click.echo(f"next:    partopt plan {shlex.quote(output)} --topology v100-pcie", err=True)
