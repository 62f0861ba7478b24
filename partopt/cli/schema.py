"""`partopt schema`."""

from __future__ import annotations

import json

import click

from partopt.errors import PartoptError, did_you_mean


@click.command(short_help="the JSON Schema of a file format")
@click.argument("name")
def command(name: str) -> None:
    """Print the JSON Schema of NAME: profile, plan, topology, comparison, scaling, simulation or
    verification.

    \b
    Example:
      partopt schema plan > plan.schema.json
    """
    import msgspec

    from partopt.documents.plan import Plan
    from partopt.documents.profile import Profile
    from partopt.documents.topology import TopologyFile
    from partopt.report.comparison import Comparison
    from partopt.report.scaling import Scaling
    from partopt.report.simulation import SimulationDocument
    from partopt.report.verification import Verification

    documents = {
        "profile": Profile,
        "plan": Plan,
        "topology": TopologyFile,
        "comparison": Comparison,
        "scaling": Scaling,
        "simulation": SimulationDocument,
        "verification": Verification,
    }
    if name not in documents:
        raise PartoptError(f"partopt schema {name}: no such format", did_you_mean(name, documents))
    click.echo(json.dumps(msgspec.json.schema(documents[name]), indent=1))
