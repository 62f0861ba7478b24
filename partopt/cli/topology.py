"""`partopt topology`: those that are shipped, and those that are measured."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

import partopt
from partopt import documents
from partopt.cli import options, stopping
from partopt.cli.next_commands import say_next
from partopt.cli.terminal import say, say_file
from partopt.cli.words import print_notes
from partopt.documents.files import find_shipped, shipped_names
from partopt.errors import ANSWER_IS_NO, PartoptError


@click.group(no_args_is_help=False)
def command() -> None:
    """List, show and measure topologies.

    \b
    Example:
      partopt topology list
      partopt topology show dgx-h100 --servers 4
      partopt topology measure -o cluster.yaml
    """


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
    say_next("list of topologies")


@command.command()
@click.argument("topology", type=options.FILE)
@click.option("--servers", type=options.COUNT, help="Size of the outermost level.")
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


@command.command("measure", short_help="measure the links between ranks")
@options.option("-o --output", "FILE", "The file to write; - is standard output.", required=True)
@options.option(
    "--ranks", "N", "Processes to start here [default: every GPU; else 4, at most the cores].", int
)
@options.option(
    "--per-server", "K", "Ranks of a server [default: all; under torchrun those of a host].", int
)
@options.option(
    "--sizes", "LIST", "Of messages and all-reduces [default: 4kB to 16MB, on GPUs to 256MB]."
)
@click.option(
    "--backend",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "gloo", "nccl"]),
    help="auto takes NCCL where torch sees GPUs.",
)
@options.option(
    "--repetitions",
    "N",
    "Of large messages, in each of three rounds; small ones have up to ten times as many.",
    options.WholeNumber(min=5),
    default=10,
)
@options.option("--name", "NAME", "Of the cluster [default: the file's name].")
@click.option("--json", "as_json", is_flag=True, help="Print all figures as JSON.")
@click.option("--accept-poor", is_flag=True, help="Write the file even where the fit is poor.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
def measure(
    output: str,
    sizes: str | None,
    name: str | None,
    as_json: bool,
    accept_poor: bool,
    force: bool,
    **given: Any,
) -> None:
    """Measure the links between ranks and write a topology of them.

    Messages of a pair of ranks and all-reduces over 2, 4, ... and all ranks are timed at each size,
    on GPUs by events. Bandwidth, latency and what messages take of their senders are fitted to
    that, for each level. Then messages go in both directions, and between all pairs, at once. Where
    the file is more than 15 % off anywhere the fit is poor: it is written only with --accept-poor.

    Without torchrun N processes are started here. Under torchrun all its ranks take part, hosts are
    servers, and rank 0 writes.

    \b
    Example:
      partopt topology measure -o cluster.yaml
      torchrun --nnodes 2 --nproc-per-node 8 ... -m partopt topology measure -o cluster.yaml
    """
    writes = os.environ.get("RANK", "0") == "0"  # of ranks on several hosts, one
    if writes:
        documents.check_writable(output, force, [".yaml", ".yml"])
    if as_json and output == "-":
        raise PartoptError(
            "--json: standard output already has the file",
            "name a file with --output",
            code="unused-option",
        )
    from partopt import prepare_links

    run = prepare_links(None if sizes is None else _parse_sizes(sizes), **given)
    name = name or (Path(output).stem if output != "-" else "cluster")
    with stopping.stopped_by_signals():
        try:
            links = run.fit(name, _tell)
        except KeyboardInterrupt as interrupt:
            say(f"{stopping.describe(interrupt)}: nothing is written", err=True)
            raise SystemExit(stopping.exit_code(interrupt)) from None
    if writes:
        _finish(links, output, force, as_json, accept_poor)


def _finish(
    links: partopt.FittedLinks, output: str, force: bool, as_json: bool, accept_poor: bool
) -> None:
    """Print and, where the fit is good or accepted, write."""
    from partopt import Topology
    from partopt.report.clusters import render_links

    print_notes(links.notes)
    if as_json:
        options.write_json(links.document)
    else:
        say(render_links(links), err=output == "-")
    far = links.worst
    if far.is_poor and not accept_poor:
        raise PartoptError(
            f"{output}: not written: the fit is poor, {far.off:.0%} off at {far.level}, {far.what}",
            "measure on an idle machine, with a core for each rank, or fewer `sizes`; "
            "`accept_poor=True` writes it all the same",
            ANSWER_IS_NO,
            code="poor-fit",
        )
    assert Topology.parse(links.text.encode(), output) == links.topology
    with stopping.not_stopped():
        documents.write_bytes(output, links.text.encode(), force)
    if output != "-":
        assert not Path(output).is_file() or Topology.load(output) == links.topology
        say(f"\nWrote {output}", err=True)
        say_next("topology", output)


def _parse_sizes(text: str) -> list[int]:
    from partopt import units

    try:
        return [units.parse_bytes(part) for part in text.split(",") if part.strip()]
    except PartoptError as error:
        raise error.at("--sizes") from None


def _tell(what: str) -> None:
    """Say what is measured next; called in the process of rank 0."""
    say(f"measuring {what}", err=True)
