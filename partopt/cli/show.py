"""`partopt show`."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import click

from partopt.cli import drawing, options, verifying
from partopt.cli.terminal import ascii_only, say, say_page
from partopt.documents import shipped
from partopt.errors import PartoptError

if TYPE_CHECKING:
    import msgspec


@click.command(short_help="a document of any kind, for people to read")
@click.argument("file")
@click.argument("other", required=False)
@click.option(
    "--verify",
    is_flag=True,
    help="Check a plan again: its numbers, what was requested, and that nothing is better.",
)
@click.option(
    "--profile",
    metavar="FILE|NAME",
    help="With --verify or -o: the plan's profile (default: the shipped one of its digest).",
)
@click.option(
    "--microbatch-size",
    type=click.IntRange(min=1),
    metavar="B",
    help="With two profiles: the size to compare at (default: the largest common one).",
)
@options.output_options("a picture (.svg, .pdf, .png)", printed=False)
@click.option("--all", "all_layers", is_flag=True, help="Every layer of a profile, none folded.")
@options.explain_option
@options.json_option
def command(
    file: str,
    other: str | None,
    verify: bool,
    profile: str | None,
    microbatch_size: int | None,
    output: str | None,
    force: bool,
    all_layers: bool,
    as_json: bool,
) -> None:
    """Print FILE, or the shipped profile, topology or device of that name, for people to read.

    FILE is a profile, a plan, a topology, a simulation, a comparison (of planners or of groups), a
    scaling, a verification, a difference, a run, flows, a trial of schedules or a device. With
    OTHER both are profiles of one model, shown layer by layer side by side.

    Layers and blocks of a profile that repeat are shown once, and of many rows the first and the
    last, without --all. With --json the document is printed again. With --verify every number of a
    plan is computed again from its profile, and its bound is searched again. Exits with 1 where one
    check fails; --json then prints the checks.

    With -o a profile, a plan, a comparison, a scaling or a run is drawn, a plan with the layers of
    its profile where that is known.

    \b
    Example:
      partopt show plan.json
      partopt show gpt.cpu.float32
      partopt show eager.json compiled.json
      partopt show --verify plan.json --profile gpt.json
      partopt show plan.json --profile gpt.json -o plan.svg
    """
    from partopt import documents
    from partopt.documents.estimates import next_cluster
    from partopt.documents.kinds import kind_of
    from partopt.documents.plan import Plan
    from partopt.documents.profile import Profile

    if output:
        drawing.check(output, force, {"OTHER": other, "--verify": verify, "--json": as_json})
    content = documents.read_bytes(shipped.find(file, "profiles", "topologies", "devices"))
    kind = kind_of(content, file)
    if output:
        drawing.draw(kind, _load(kind, content, file), file, output, force, profile)
        return
    if other is not None:
        _refuse_verifying(verify, profile)
        _show_difference(kind, content, file, other, microbatch_size, all_layers, as_json)
        return
    if microbatch_size:
        raise PartoptError(
            "--microbatch-size: goes with two profiles",
            "partopt show FIRST SECOND --microbatch-size B",
            code="unused-option",
        )
    if verify and kind == "plan":
        verifying.verify(Plan.parse(content, file), file, profile, as_json)
        return
    if verify or profile:
        flag, wrong = ("--verify", f"{file} is a {kind}") if verify else _UNUSED_PROFILE
        raise PartoptError(
            f"{flag}: {wrong}", "partopt show --verify PLAN", code="not-a-plan", kind=kind
        )
    if as_json:
        documents.write_bytes("-", documents.encode(_load(kind, content, file)))
        return
    _show(kind, content, file, all_layers)
    if kind in _NEXT:
        cluster = next_cluster(Profile.parse(content, file)) if kind == "profile" else ""
        say(f"next:    {_NEXT[kind].format(shlex.quote(file), cluster)}", err=True)


def _refuse_verifying(verify: bool, profile: str | None) -> None:
    if verify or profile:
        raise PartoptError(
            "--verify: one plan is verified at a time",
            "partopt show --verify PLAN",
            code="unused-option",
        )


def _show_difference(
    kind: str,
    content: bytes,
    file: str,
    other: str,
    microbatch_size: int | None,
    all_layers: bool,
    as_json: bool,
) -> None:
    """Print two profiles side by side."""
    from partopt import documents
    from partopt.cli.words import as_flags
    from partopt.documents.difference import Difference
    from partopt.documents.estimates import next_cluster
    from partopt.documents.kinds import kind_of
    from partopt.documents.profile import Profile
    from partopt.report import difference

    beside = documents.read_bytes(shipped.find(other, "profiles", "topologies"))
    kinds = (kind, kind_of(beside, other))
    if kinds != ("profile", "profile"):
        raise PartoptError(
            f"{file} is a {kinds[0]}, {other} a {kinds[1]}: two profiles are shown side by side",
            "plans: partopt compare PROFILE --topology T --plan FILE --plan FILE",
            code="not-a-profile",
        )
    second = Profile.parse(beside, other)
    found = Difference.between(Profile.parse(content, file), second, (file, other), microbatch_size)
    if as_json:
        documents.write_bytes("-", documents.encode(found))
        return
    say_page(difference.render(found, all_layers, as_flags))
    say(f"next:    partopt plan {shlex.quote(other)} --topology {next_cluster(second)}", err=True)


_UNUSED_PROFILE = "--profile", "goes with --verify or -o"
_NEXT = {
    "profile": "partopt plan {} --topology {}",
    "plan": "partopt simulate {}",
    "topology": "partopt plan PROFILE --topology {}",
    "device": "partopt profile MODEL --estimate {} -o profile.json",
}


def _load(kind: str, content: bytes, file: str) -> msgspec.Struct:
    """The document in `content`; a topology and a device as files that people write."""
    from partopt.documents.device import DeviceFile, read_device
    from partopt.documents.kinds import DOCUMENTS
    from partopt.documents.structs import Document
    from partopt.documents.topology import Topology

    document = DOCUMENTS[kind]
    if issubclass(document, Document):
        return document.parse(content, file)
    if document is DeviceFile:
        return read_device(content, file)
    import msgspec
    import yaml

    return msgspec.convert(yaml.safe_load(Topology.parse(content, file).dump()), document)


def _show(kind: str, content: bytes, file: str, all_layers: bool) -> None:
    """Print the page of the document in `content`."""
    from partopt.cli.schedule import show_trial
    from partopt.cli.simulate import show_simulation
    from partopt.cli.words import as_flags, print_notes
    from partopt.documents.simulation import SimulationDocument
    from partopt.documents.topology import Topology
    from partopt.documents.trial import TrialDocument
    from partopt.report import topology
    from partopt.report.pages import text_of

    if kind == "topology":
        loaded = Topology.parse(content, file)
        print_notes(loaded.notes())
        say_page(topology.render(loaded))
    elif kind == "simulation":
        show_simulation(SimulationDocument.parse(content, file))
    elif kind == "trial":
        show_trial(TrialDocument.parse(content, file))
    else:
        document = _load(kind, content, file)
        print_notes(getattr(document, "notes", ()))
        say_page(text_of(document, as_flags, ascii_only(), all_layers))
