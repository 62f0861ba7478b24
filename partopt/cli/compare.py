"""`partopt compare`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

import partopt
from partopt.cli import options, planning
from partopt.cli.next_commands import command_of, command_of_transformer, say_next
from partopt.cli.terminal import Tell, leave_if_interrupted, say, search
from partopt.cli.words import print_notes
from partopt.errors import PartoptError

if TYPE_CHECKING:
    from partopt.documents.tables import Comparison


@click.command(cls=planning.Verb)
@click.argument("profile", type=options.FILE)
@options.option(
    "--planner chosen",
    "NAME",
    "A planner to compare (repeat; default: all).",
    multiple=True,
)
@options.option(
    "--plan files", "FILE", "A plan of yours to set beside them (repeat).", multiple=True
)
@options.option(
    "--for targets",
    "TRAINER",
    "The best plan that a trainer can say, beside them (repeat; see partopt export --help).",
    multiple=True,
)
@options.option(
    "--layout layouts",
    "TRAINER:LAYOUT",
    "A pipeline as a trainer has it, which partopt import reads (repeat).",
    multiple=True,
)
@options.map_option
@planning.job_options
@options.output_options("the table (.json) or a picture of it (.svg, .pdf, .png)", printed=False)
@options.json_option
def command(profile: str, output: str | None, force: bool, as_json: bool, **given: Any) -> None:
    """Compare the planners on PROFILE, fastest first, all judged by one simulator.

    \b
    Example:
      partopt compare gpt.cpu.float32 --topology v100-pcie -o compared.svg
      partopt compare gpt.json --topology dgx-a100 --planner pipedream --plan mine.json
      partopt compare gpt.json --topology dgx-a100 --for megatron --global-batch 512
      partopt compare gpt.json --topology v100-pcie --layout 'megatron:Et*4|t*3|t*3|t*2L'
    """
    from partopt.report.plans_text import render_comparison

    if output:
        options.check_table(output, force)
    asked = {name: given.pop(name) for name in ("chosen", "files", "layouts", "targets", "rules")}
    planning.choose_schedule(given, asked["targets"], several=False)
    if transformer := partopt.find_transformer(profile):
        named = next(iter(asked["targets"]), None)
        whole = command_of_transformer(profile, transformer, given, trainer=named)
        what = f"{profile}: a transformer's configuration, and planners cut profiles"
        hint = f"--beside of this sets a layout beside its trainer's best: {whole}"
        raise PartoptError(what, f"{hint} --beside tp=8", code="not-a-profile")
    loaded = partopt.Profile.load(profile)
    topology = partopt.Topology.load(given["topology"], given["servers"])
    job = planning.state_job(loaded, topology, given)
    planning.print_job_notes(job, profile)
    found, interrupted = _compare_planners(job, asked)
    page = partial(render_comparison, found)
    options.deliver_table(found, page, output, force, as_json)
    leave_if_interrupted(interrupted)
    if not as_json:
        say("", err=True)
        _say_next(profile, job, asked, found, given)


def _compare_planners(job: partopt.Job, asked: Mapping[str, Any]) -> tuple[Comparison, str]:
    """Every planner on one profile, a person's plans, and those within what trainers say.

    The second value says where Ctrl-C interrupted it.
    """
    plans = {path: partopt.Plan.load(path) for path in asked["files"]} | {
        name: _plan_of(trainer, layout, asked["rules"], job)
        for name, (trainer, layout) in _name_layouts(asked["layouts"]).items()
    }

    def plan_for(target: str, job: partopt.Job, tell: Tell) -> partopt.Plan:
        return partopt.solve(job.with_(trainer=target), tell, rules=asked["rules"]).plan

    within = {f"for {name}": partial(plan_for, name) for name in asked["targets"]}
    (result, notes), interrupted = search(
        lambda tell: partopt.compare(job, asked["chosen"], plans, tell, within)
    )
    print_notes(note for note in notes if note not in job.notes)
    return result, interrupted


def _say_next(
    profile: str,
    job: partopt.Job,
    asked: Mapping[str, Any],
    result: Comparison,
    given: Mapping[str, Any],
) -> None:
    """Say the command that shows the best, or plans it again."""
    best = next((row.planner for row in result.rows if row.fits), result.rows[0].planner)
    if best in asked["files"]:
        say_next(shlex.join(["partopt", "show", best]))
    elif best in (named := _name_layouts(asked["layouts"])):
        words, changes = [*named[best], "--profile", profile], {"schedule": job.schedule}
        say_next(command_of("import", words, [*given, "rules"], changes))
    else:
        by = {"for": best.split()[1]} if best.startswith("for ") else {"planner": best}
        say_next(command_of("plan", [profile], given, by, "plan.json"))


def _name_layouts(layouts: Sequence[str]) -> dict[str, tuple[str, str]]:
    """The trainer and the layout of `layouts`, by the names of their rows."""
    named: dict[str, tuple[str, str]] = {}
    for given in layouts:
        trainer, colon, layout = given.partition(":")
        if not colon:
            raise PartoptError(
                f"--layout {given}: no trainer",
                "write --layout 'megatron:Et*4|t*3|t*3|t*2L'",
                code="invalid-option",
            )
        count = sum(other == trainer for other, _ in named.values())
        named[f"{trainer} layout{f' {count + 1}' if count else ''}"] = trainer, layout
    return named


def _plan_of(trainer: str, layout: str, rules: Sequence[str], job: partopt.Job) -> partopt.Plan:
    """The plan of a trainer's layout for the job."""
    read = partopt.read_layout(trainer, options.layout_text(layout), job.profile, rules=rules)
    stated = read.options(job.topology, job.schedule, job.chunks)
    # what is compared has one batch; an order has one already
    shared = () if read.stated.stages else read.conditions
    options_ = {name: stated[name] for name in stated if name not in shared}
    return partopt.plan_layout(job.with_(**options_), read)
