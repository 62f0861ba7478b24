"""`partopt show`."""

from __future__ import annotations

from typing import Any

import click

import partopt
from partopt.cli import options
from partopt.cli.next_commands import NEXT, next_cluster, say_next
from partopt.cli.terminal import progress, say
from partopt.cli.words import print_notes
from partopt.documents.files import find_shipped
from partopt.errors import ANSWER_IS_NO, PartoptError


@click.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=options.FILE)
@click.option(
    "--verify",
    is_flag=True,
    help="Check a plan again: its numbers, what was requested, and that nothing is better.",
)
@options.option(
    "--profile",
    "FILE|NAME",
    "With --verify or -o: the plan's profile (default: the shipped one of its digest).",
)
@options.output_options("a picture (.svg, .pdf, .png)", printed=False)
@click.option("--all", "all_layers", is_flag=True, help="Every layer of a profile, none folded.")
@options.json_option
def command(
    files: tuple[str, ...],
    verify: bool,
    profile: str | None,
    output: str | None,
    force: bool,
    all_layers: bool,
    as_json: bool,
) -> None:
    """Print each FILE, or the shipped profile, topology or device of that name, for people to read.

    FILE is a profile, a plan, a topology, a simulation, a comparison, a scaling,
    a verification, a run, flows, a trial of schedules, what doctor wrote or a device.

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
    from partopt.documents.kinds import read_document
    from partopt.documents.topology import Topology

    flags = {"-o": output, "--verify": verify, "--profile": profile, "--json": as_json}
    _check_flags(len(files), [flag for flag, value in flags.items() if value])
    if output:
        from partopt.report import pictures

        pictures.check(output, force)
    for place, file in enumerate(files):
        content = documents.read_bytes(find_shipped(file, "profiles", "topologies", "devices"))
        kind, document = read_document(content, file)
        if output:
            _draw(kind, document, file, output, force, profile)
        elif verify and kind == "plan":
            _verify(document, file, profile, as_json)
        elif verify or profile:
            flag, wrong = ("--verify", f"{file} is a {kind}") if verify else _UNUSED_PROFILE
            raise PartoptError(f"{flag}: {wrong}", "partopt show --verify PLAN", code="not-a-plan")
        elif as_json:
            if isinstance(document, Topology):
                document = document.file()
            documents.write_bytes("-", documents.encode(document))
        else:
            say("\n" if place else "", nl=False)
            _show(kind, document, all_layers)
            if kind in NEXT and kind != "simulation" and len(files) == 1:
                cluster = next_cluster(document) if kind == "profile" else ""
                say_next(kind, file, topology=cluster)


def _check_flags(files: int, given: list[str]) -> None:
    """Refuse flags that take one file, and those that do not go with a picture."""
    if given and files > 1:
        what = f"{given[0]}: takes one file, not {files}"
        raise PartoptError(what, "give one FILE", code="usage")
    for flag in ("--verify", "--json"):
        if flag in given and "-o" in given:
            what, hint = f"-o: draws one document, without {flag}", f"drop {flag} or -o"
            raise PartoptError(what, hint, code="usage")


_UNUSED_PROFILE = "--profile", "goes with --verify or -o"


def _show(kind: str, document: Any, all_layers: bool) -> None:
    """Print the page of a document."""
    from partopt.cli.simulate import show_simulation
    from partopt.report.pages import text_of

    if kind == "simulation":
        show_simulation(document)
        return
    notes = getattr(document, "notes", ())
    print_notes(notes() if callable(notes) else notes)
    say(text_of(document, all_layers))


def _verify(plan: partopt.Plan, file: str, profile: str | None, as_json: bool) -> None:
    """Print every check of `plan`, which `file` holds.

    PartoptError where one fails, or without `profile` no shipped one is the plan's.
    """
    from partopt.report.pages import render_verification

    loaded = partopt.find_profile(plan, profile)
    if loaded is None:
        raise PartoptError(
            f"{file}: its profile, of {plan.profile.name}, does not come with partopt",
            "say where it is: --profile FILE",
            code="profile-needed",
        )
    with progress() as tell:
        found = partopt.verify(plan, loaded, tell)
    if as_json:
        options.write_json(found)
    else:
        say(render_verification(found))
    if not found.ok:
        hint = (
            "give the plan's own: --profile FILE"
            if "profile" in found.failed
            else "re-run partopt plan"
        )
        raise PartoptError(
            f"{file}: not verified: {', '.join(found.failed)}",
            hint,
            ANSWER_IS_NO,
            code="not-verified",
        )
    if not as_json:
        say_next("plan", file)


def _draw(
    kind: str, document: Any, file: str, output: str, force: bool, profile: str | None
) -> None:
    """Write the picture of the document in `file`, of a plan with its layers where known."""
    from partopt.report.pictures import check_kind

    check_kind(kind, file, "; a timeline: partopt simulate PLAN -o timeline.svg")
    if profile is not None and kind != "plan":
        raise PartoptError(f"--profile: {file} is a {kind}", "drop --profile", code="not-a-plan")
    of_plan = options.profile_to_draw(document, profile) if kind == "plan" else None
    partopt.draw(document, output, profile=of_plan, force=force)
    options.say_wrote(output)
