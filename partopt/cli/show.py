"""`partopt show`."""

from __future__ import annotations

import re
import shlex

import click

from partopt.cli import options, verifying
from partopt.documents import shipped
from partopt.errors import PartoptError


@click.command(short_help="a profile, a plan or a topology, for people to read")
@click.argument("file")
@click.option(
    "--verify",
    is_flag=True,
    help="Check a plan again: its numbers, what was requested, and that nothing is better.",
)
@click.option(
    "--profile",
    metavar="FILE|NAME",
    help="With --verify: the plan's profile (default: the shipped one of its digest).",
)
@options.json_option
def command(file: str, verify: bool, profile: str | None, as_json: bool) -> None:
    """Print FILE, a profile, a plan, a topology, or the name of a shipped one, for people to read.

    With --verify every number of a plan is worked out again from its profile, and its bound is
    searched again. Exits with 1 where one check fails; --json prints the checks.

    \b
    Example:
      partopt show plan.json
      partopt show gpt.cpu.float32
      partopt show --verify plan.json --profile gpt.json
    """
    from partopt import documents
    from partopt.documents.plan import Plan
    from partopt.documents.profile import Profile
    from partopt.documents.topology import Topology
    from partopt.report import plan as plan_report
    from partopt.report import profile as profile_report
    from partopt.report import topology as topology_report

    content = documents.read_bytes(shipped.find(file, "profiles", "topologies"))
    kind = _kind(content, file)
    if verify and kind == "plan":
        verifying.verify(Plan.parse(content, file), file, profile, as_json)
    elif verify or profile or as_json:
        flag = "--verify" if verify else "--profile" if profile else "--json"
        raise PartoptError(
            f"{flag}: {file} is a {kind}" if verify else f"{flag}: goes with --verify",
            "partopt show --verify PLAN",
        )
    elif kind == "profile":
        click.echo(profile_report.render(Profile.parse(content, file), options.ascii_only()))
        click.echo(f"next:    partopt plan {file} --topology dgx-a100", err=True)
    elif kind == "plan":
        click.echo(plan_report.render(Plan.parse(content, file), ascii_only=options.ascii_only()))
        click.echo(f"next:    partopt simulate {shlex.quote(file)}", err=True)
    else:
        click.echo(topology_report.render(Topology.parse(content, file)))
        click.echo(f"next:    partopt plan PROFILE --topology {file}", err=True)


def _kind(content: bytes, file: str) -> str:
    """What kind of file this is, by its schema, even where it is not whole; a topology has none."""
    schema = re.search(rb'"schema"\s*:\s*"partopt\.(profile|plan)/', content)
    if schema is not None:
        return schema[1].decode()
    if content.lstrip().startswith(b"{"):
        raise PartoptError(
            f"{file}: not a profile and not a plan: no schema that partopt shows",
            'its first field should be "schema": "partopt.plan/1"',
        )
    return "topology"
