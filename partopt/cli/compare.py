"""`partopt compare`."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from partopt.cli import import_layout, options, progress, tables
from partopt.cli.terminal import say, say_page
from partopt.cli.words import print_notes
from partopt.errors import PartoptError

if TYPE_CHECKING:
    from partopt import Job, Plan
    from partopt.documents.tables import Comparison, GroupComparison


@click.command(cls=options.Verb, short_help="every planner, or groups of sizes, side by side")
@click.argument("profiles", nargs=-1, required=True, metavar="PROFILE...")
@click.option(
    "--planner",
    "chosen",
    multiple=True,
    metavar="NAME",
    help="A planner to compare (repeat; default: all).",
)
@click.option(
    "--plan",
    "files",
    multiple=True,
    metavar="FILE",
    help="A plan of yours to set beside them (repeat).",
)
@click.option(
    "--for",
    "targets",
    multiple=True,
    metavar="TRAINER",
    help="The best plan that a trainer can say, beside them (repeat; see partopt export --help).",
)
@click.option(
    "--layout",
    "layouts",
    multiple=True,
    metavar="TRAINER:LAYOUT",
    help="A pipeline as a trainer has it, which partopt import reads (repeat).",
)
@options.map_option
@options.job_options
@options.output_options("the table (.json) or a picture of it (.svg, .pdf, .png)", printed=False)
@options.explain_option
@options.json_option
def command(
    profiles: tuple[str, ...],
    chosen: tuple[str, ...],
    files: tuple[str, ...],
    targets: tuple[str, ...],
    layouts: tuple[str, ...],
    rules: tuple[str, ...],
    output: str | None,
    force: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Compare the planners on PROFILE, fastest first, all judged by one simulator.

    Several PROFILEs are of one model, measured in groups of several sizes: the best plan of each is
    shown, the fastest that fits first.

    \b
    Example:
      partopt compare gpt.cpu.float32 --topology v100-pcie -o compared.svg
      partopt compare gpt.json --topology dgx-a100 --planner pipedream --plan mine.json
      partopt compare gpt.json --topology dgx-a100 --for megatron --global-batch 512
      partopt compare gpt.json --topology v100-pcie --layout 'megatron:Et*4|t*3|t*3|t*2L'
      partopt compare tp1.json tp2.json tp4.json --topology dgx-a100 --servers 8
    """
    if output:
        tables.check(output, force)
    if len(profiles) == 1:
        options.choose_schedule(given, targets, several=False)
        within = {f"for {name}": partial(_plan_for, name, rules) for name in targets}
        own = _Own(files, layouts, rules)
        found: Comparison | GroupComparison = _compare_planners(
            profiles[0], chosen, own, within, as_json, given
        )
    else:
        several = {"--planner": chosen, "--plan": files, "--layout": layouts}
        _refuse_choice(several | {"--for": targets, "--map": rules})
        found = _compare_groups(profiles, as_json, given)
    if output:
        tables.write(found, output, force)


class _Own(NamedTuple):
    """What a person has: plans in files, and layouts of trainers with rules for their layers."""

    files: Sequence[str]
    layouts: Sequence[str]
    rules: Sequence[str]


def _compare_planners(
    profile: str,
    chosen: Sequence[str],
    own: _Own,
    within: Mapping[str, Callable[[Job, progress.Tell], Plan]],
    as_json: bool,
    given: dict[str, Any],
) -> Comparison:
    """Every planner on one profile, a person's own plans, and those `within` what trainers say."""
    import partopt
    from partopt.report.plans import render_comparison

    job = options.job(profile, given)
    print_notes(job.notes)
    named = _named(own.layouts)
    plans = {path: partopt.Plan.load(path) for path in own.files} | {
        name: _plan_of(trainer, layout, own.rules, job) for name, (trainer, layout) in named.items()
    }
    with progress.shown() as tell:
        result, notes = partopt.compare(job, chosen, plans, tell, within)
    print_notes(note for note in notes if note not in job.notes)
    if as_json:
        options.write_json(result)
        return result
    say_page(render_comparison(result))
    best = next((row.planner for row in result.rows if row.fits), result.rows[0].planner)
    if best in own.files:
        following = f"show {shlex.quote(best)}"
    elif best in named:
        kept = options.repeat_words([*given.keys() - {"schedule"}, "rules"])
        words = ["import", *named[best], "--profile", profile, *kept, "--schedule", job.schedule]
        following = shlex.join(words)
    else:
        again = f"plan {shlex.quote(profile)} {options.repeat_options(given)}"
        chosen_by = f"--for {best.split()[1]}" if best in within else f"--planner {best}"
        following = f"{again} {chosen_by} -o plan.json"
    say(f"\nnext:    partopt {following}", err=True)
    return result


def _plan_for(target: str, rules: Sequence[str], job: Job, tell: progress.Tell) -> Plan:
    """The best plan of the job that the trainer can say."""
    import partopt

    return partopt.solve_for(job, target, rules=rules, progress=tell).plan


def _named(layouts: Sequence[str]) -> dict[str, tuple[str, str]]:
    """The trainer and the layout of each of `layouts`, by the name of its row."""
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


def _plan_of(trainer: str, layout: str, rules: Sequence[str], job: Job) -> Plan:
    """The plan of a trainer's layout for the job."""
    import partopt

    read = partopt.read_layout(trainer, import_layout.text_of(layout), job.profile, rules=rules)
    own = read.options(job.topology, job.schedule, job.chunks)
    # what is compared has one batch; an order has its own
    shared = () if read.reading.stages else read.conditions
    return partopt.plan_layout(
        read, job.with_(**{name: own[name] for name in own if name not in shared})
    )


def _refuse_choice(given: Mapping[str, Sequence[str]]) -> None:
    for option, values in given.items():
        if values:
            raise PartoptError(
                f"{option}: goes with one profile",
                f"drop {option}: of several profiles the best plan of each is compared",
                code="unused-option",
            )


def _compare_groups(names: Sequence[str], as_json: bool, given: dict[str, Any]) -> GroupComparison:
    """The best plan of each of several profiles of one model."""
    import partopt
    from partopt.report.plans import render_groups

    jobs = {}
    for name in names:
        if name in jobs:
            raise PartoptError(f"{name}: given twice", "give each profile once", code="usage")
        jobs[name] = options.job(name, given)
    with progress.shown() as tell:
        result, notes = partopt.compare_groups(jobs, tell)
    print_notes(notes)
    if as_json:
        options.write_json(result)
        return result
    say_page(render_groups(result))
    best = shlex.quote(result.rows[0].profile)
    say(f"\nnext:    partopt plan {best} {options.repeat_options(given)} -o plan.json", err=True)
    return result
