"""`partopt plan`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from partopt.cli import options, planning, values
from partopt.cli.next_commands import command_of, say_next
from partopt.cli.options import is_given
from partopt.cli.terminal import (
    Tell,
    ascii_only,
    leave_if_interrupted,
    progress,
    say,
    say_page,
    search,
)
from partopt.cli.words import as_flags, does_not_fit, hint_at_fitting, print_notes
from partopt.documents.files import find_shipped
from partopt.documents.transformer import BITS, Transformer
from partopt.errors import PartoptError
from partopt.options import AUTO

if TYPE_CHECKING:
    from partopt import Job, Plan, Result

_BESIDE_SHOWN = 3  # plans under the one that is printed, at most


@click.command(cls=planning.Verb)
@click.argument("profile", shell_complete=values.PLANNED)
@planning.split_options
@planning.job_options
@options.option("--scaling", "8,16,32", "The best plan on each of them, as a table.")
@click.option("--weak", is_flag=True, help="The batch grows with the devices.")
@options.option(
    "--for target",
    "TRAINER",
    "The best that it can run, such as megatron.",
    shell_complete=values.TRAINER,
)
@options.option("--layout", "PART=N,..", "Fix any part of it, such as pp=4,chunks=2,dp=1.")
@options.option(
    "--sequence",
    "S",
    "Tokens of a sample (k = 1024, M = 1024^2).",
    options.TOKENS,
)
@options.option(
    "--dtype",
    "FORMAT",
    "Of a configuration's products (default: bfloat16).",
    click.Choice(tuple(BITS)),
)
@options.option(
    "--calibrate",
    "[KIND=]FILE",
    "A profile of its trainer's own block: measured times win.",
    multiple=True,
)
@options.map_option
@options.option("--picture", "FILE", "Draw the plan, too (.svg, .pdf, .png).")
@options.output_options("the plan or table")
@options.explain_option
@options.json_option
def command(profile: str, output: str | None, force: bool, as_json: bool, **given: Any) -> None:
    """Cut PROFILE, a file, - or a shipped name, into stages for a cluster.

    Every candidate is simulated. Prints the stages and what to expect, after
    Ctrl-C of the best so far. Exits with 1 and writes no plan where none fits.

    \b
    Example:
      partopt plan gpt.cpu.float32 --topology v100-pcie -o plan.json
      partopt plan gpt.json --topology dgx-h100 --for megatron --global-batch 512
      partopt plan gpt.json --topology cluster.yaml --cuts 5,9 --replicas 2,1,1
    """
    import partopt

    target, rules = given["target"], given["rules"]
    _check_outputs(output, given["picture"], force, given["scaling"] is not None)
    if given["scaling"] is None and given["weak"]:
        raise PartoptError("--weak goes with --scaling", "add --scaling 8,16,32", code="usage")
    transformer = partopt.find_transformer(profile)
    if transformer is None:
        find_shipped(profile, "profiles", "models")
        if rules and target is None:
            raise PartoptError("--map: goes with --for", "add --for megatron", code="usage")
        if given["scaling"] is not None and target is not None:
            raise PartoptError("--for: --scaling prints a table", "drop --for", code="usage")
        planning.choose_schedule(given, [target] if target else [], several=True)
    picture, scaling, weak = (given.pop(name) for name in ("picture", "scaling", "weak"))
    model = transformer or partopt.Profile.load(profile)
    topology = partopt.Topology.load(given["topology"], given["servers"])
    job = planning.state_job(model, topology, given)
    if target:
        job = partopt.job_for(job, target, rules)
    print_notes(job.notes)
    plan, written = None, output if scaling is None else None
    if scaling is not None:
        from partopt.report.plans_text import render_scaling

        devices = options.integers(scaling, "--scaling")
        found, interrupted = search(lambda tell: partopt.scale(job, devices, weak, tell))
        page = partial(render_scaling, found)
        options.deliver_table(found, page, output, force, as_json)
        leave_if_interrupted(interrupted)
    else:
        repeated = given.keys() | {"force"}
        again = partial(command_of, "plan", [profile], repeated, output=output)
        plan = _plan(job, again, output, force, as_json, given | {"picture": picture})
    if not as_json and output != "-":
        if plan and (scale := _scale(profile, given, plan)):
            say(f"hint:  from how many devices on a pipeline is faster: {scale}", err=True)
        _say_next(profile, written, given, job)


def _plan(
    job: Job,
    again: Callable[[Mapping[str, Any]], str],
    output: str | None,
    force: bool,
    as_json: bool,
    given: Mapping[str, Any],
) -> Plan:
    """Print and write the best plan of the job, or the best that a trainer can say.

    Raises PartoptError where none fits, with the command `again` changed so that one does.
    """
    import partopt

    target, rules, picture = given["target"], given["rules"], given["picture"]

    def find(asked: Job, tell: Tell) -> Result:
        if target is None:
            return partopt.solve(asked, tell)
        return partopt.solve_for(asked, target, rules=rules, progress=tell)

    result, interrupted = search(lambda tell: find(job, tell))
    print_notes(note for note in result.notes if note not in job.notes)
    page = partial(_print_page, result, job)
    options.deliver(result.document, page, output, force, as_json, written=result.fits)
    if not result.fits:
        leave_if_interrupted(interrupted)
        with progress() as tell:
            hint = hint_at_fitting(result.plan, job, again, lambda other: find(other, tell).plan)
        raise does_not_fit(result.plan, job, hint)
    if picture:
        of_layout = isinstance(job.model, Transformer)
        drawn = partopt.find_profile(result.plan) if of_layout else job.profile
        others = result.alternatives
        partopt.draw(result.plan, picture, profile=drawn, alternatives=others, force=force)
        options.say_wrote(picture)
    leave_if_interrupted(interrupted)
    return result.plan


def _check_outputs(output: str | None, picture: str | None, force: bool, scaling: bool) -> None:
    """Refuse, before any work is done, files that could not be written."""
    from partopt import documents

    if scaling and picture:
        raise PartoptError("--picture: --scaling has no plan", "use -o scaling.svg", code="usage")
    if picture:
        from partopt.report.pictures import check

        check(picture, force)
    if output and scaling:
        options.check_table(output, force)
    elif output:
        documents.check_writable(output, force, [".json"])


def _say_next(profile: str, written: str | None, given: dict[str, Any], job: Job) -> None:
    """Say what follows: look at the plan that is written, compare it, or write it."""
    of_layout, trainer = isinstance(job.model, Transformer), given["target"]
    if written and of_layout:
        say_next("plan of a transformer", written, trainer=trainer)
    elif written and trainer:
        rules = options.repeat_options(["rules"])
        say_next("plan for a trainer", written, trainer=f"{trainer} {rules}".rstrip())
    elif written:
        say_next("plan", written)
    elif of_layout or job.schedule == AUTO or is_given("scaling"):
        say_next(command_of("plan", [profile], given, output="plan.json"))
    else:
        dropped = dict.fromkeys(("planner", "cuts", "replicas", "layout"))
        say_next(command_of("compare", [profile], given, dropped))


def _scale(profile: str, given: Mapping[str, Any], plan: Plan) -> str | None:
    """The command that tells where a plan of one stage is no longer the best, if one can.

    A given split and the plans of a trainer are for one number of devices.
    """
    if len(plan.stages) > 1 or plan.planner == "manual" or given["target"]:
        return None
    changes: dict[str, Any] = {"planner": None}
    if given["schedule"] == AUTO:
        changes["schedule"] = plan.schedule
    changes["scaling"] = [plan.topology.devices * times for times in (1, 2, 4, 8)]
    return command_of("plan", [profile], given, changes)


def _print_page(result: Result, job: Job) -> None:
    from partopt.report import plans_text as plans

    page, beside = plans.render_plan(result.plan, ascii_only(), as_flags, result.by_size), ""
    if job.schedule == AUTO and not result.plan.transformer:
        beside = plans.render_schedules([result.plan, *result.alternatives])
    elif result.alternatives:
        beside = plans.render_beside(result.plan, result.alternatives[:_BESIDE_SHOWN])
    say_page(f"{page}\n\n{beside}" if beside else page)
