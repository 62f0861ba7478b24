"""`partopt schema`."""

from __future__ import annotations

import json

import click

from partopt.cli.terminal import say
from partopt.errors import unknown


@click.command()
@click.argument("name")
def command(name: str) -> None:
    """Print the JSON Schema of NAME.

    NAME is profile, plan, topology, comparison, scaling, simulation, verification, run,
    flows, trial, doctor or device.

    \b
    Example:
      partopt schema plan > plan.schema.json
    """
    import msgspec

    from partopt.documents.kinds import DOCUMENTS

    if name not in DOCUMENTS:
        what = f"{name}: no such format"
        raise unknown(what, name, DOCUMENTS, code="unknown-document")
    say(json.dumps(msgspec.json.schema(DOCUMENTS[name]), indent=1))
