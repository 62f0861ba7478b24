"""`partopt topology`."""

from __future__ import annotations

import click

from partopt import documents
from partopt.cli import measure_links, options
from partopt.cli.terminal import say, say_file
from partopt.documents.files import find_shipped, shipped_names
from partopt.errors import PartoptError


@click.group(short_help="list, show and measure topologies", no_args_is_help=False)
def command() -> None:
    """List, show and measure topologies.

    \b
    Example:
      partopt topology list
      partopt topology show dgx-h100 --servers 4
      partopt topology measure -o cluster.yaml
    """


command.add_command(measure_links.command)


@command.command("list")
@options.json_option
def list_(as_json: bool) -> None:
    """List the shipped topologies.

    With --json all of them are printed, as plans hold them, in one document.

    \b
    Example:
      partopt topology list
    """
    from partopt import Topology
    from partopt.report.clusters import render_topologies

    loaded = {name: Topology.load(name) for name in shipped_names("topologies")}
    if as_json:
        options.write_json(loaded)
        return
    say(render_topologies(loaded))
    say("next:    partopt topology show NAME", err=True)


@command.command()
@click.argument("topology")
@click.option("--servers", type=click.IntRange(min=1), help="Size of the outermost level.")
@click.option("--yaml", "as_yaml", is_flag=True, help="Print it as a file to edit.")
@options.json_option
def show(topology: str, servers: int | None, as_yaml: bool, as_json: bool) -> None:
    """Show TOPOLOGY: a file, - or a shipped name.

    With --json it is printed as plans hold it, in SI units.

    \b
    Example:
      partopt topology show dgx-h100 --servers 4
      partopt topology show v100-pcie --yaml > cluster.yaml
    """
    from partopt import Topology
    from partopt.report.clusters import render_topology

    loaded = Topology.load(topology, servers)
    if as_yaml and as_json:
        raise PartoptError("--yaml: goes without --json", "choose one of them", code="usage")
    if as_json:
        options.write_json(loaded)
    elif as_yaml:  # as it was written, with its comments, unless it is changed
        given = find_shipped(topology, "topologies")
        exact = loaded.dump() if servers or given == "-" else documents.read_bytes(given).decode()
        say_file(exact)
    else:
        say(render_topology(loaded))
