"""`partopt import`."""

from __future__ import annotations

from pathlib import Path

import click

from partopt.cli import options
from partopt.errors import PartoptError
from partopt.importers import IMPORTERS


@click.command("import", short_help="turn another program's profile into one of partopt's")
@click.argument("form", metavar="FORMAT")
@click.argument("graph")
@click.option("--name", help="Name of the model (default: that of the file).")
@click.option(
    "--microbatch-size",
    type=click.IntRange(min=1),
    metavar="B",
    help="Samples that were measured; such files do not say (default: 1).",
)
@options.output_options("the profile")
def command(
    form: str,
    graph: str,
    name: str | None,
    microbatch_size: int | None,
    output: str | None,
    force: bool,
) -> None:
    """Read GRAPH, a profile in FORMAT, and write it as one of partopt's.

    FORMAT is pipedream: the published profiler's graph file.

    \b
    Example:
      partopt import pipedream vgg16.txt --microbatch-size 128 -o vgg16.json
    """
    from partopt import documents

    read = IMPORTERS.lookup(form)
    if output is None:
        raise PartoptError(
            "partopt import: no output file", "add -o profile.json, or -o - for standard output"
        )
    documents.check_writable(output, force)
    try:
        content = documents.read_bytes(graph).decode()
    except UnicodeDecodeError:
        raise PartoptError(
            f"{graph}: not text", "is this the file that the profiler wrote?"
        ) from None
    if microbatch_size is None:
        click.echo(
            (
                "warning: the file does not say its microbatch size; 1 is assumed, so "
                "samples/s means microbatches/s"
            ),
            err=True,
        )
    model = name or Path(graph).stem
    imported = read(content, graph, model, microbatch_size or 1)
    documents.refuse(imported.faults(), graph)
    imported.save(output, force)
    if output != "-":
        count = len(imported.layers)
        click.echo(f"Wrote {output}: {count} {'layer' if count == 1 else 'layers'}", err=True)
        click.echo(f"next:    partopt plan {output} --topology v100-pcie", err=True)
