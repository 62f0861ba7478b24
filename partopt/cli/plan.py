"""`partopt plan`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from partopt.cli import options, planning, values
from partopt.cli.terminal import (
    Tell,
    ascii_only,
    leave_if_interrupted,
    progress,
    say,
    say_page,
    search,
)
from partopt.cli.words import as_flags, does_not_fit, flags_of, print_notes
from partopt.documents.files import find_shipped
from partopt.documents.transformer import BITS
from partopt.errors import PartoptError

if TYPE_CHECKING:
    from partopt import Job, Plan, Result
    from partopt.documents.transformer import Transformer

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
    "Of a configuration's products.",
    click.Choice(tuple(BITS)),
    default="bfloat16",
)
@options.option("--calibrate", "FILE", "A profile of its trainer's own block: measured times win.")
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
    target, rules = given["target"], given["rules"]
    _check_outputs(output, given["picture"], force, given["scaling"] is not None)
    if given["scaling"] is None and given["weak"]:
        raise PartoptError("--weak goes with --scaling", "add --scaling 8,16,32", code="usage")
    if (model := _transformer(profile)) is not None:
        from partopt.cli import transformer

        transformer.plan(model, given | {"force": force}, output, as_json)
        return
    find_shipped(profile, "profiles", "models")
    picture, scaling, weak = (given.pop(name) for name in ("picture", "scaling", "weak"))
    for name in ("sequence", "dtype", "calibrate"):
        if options.is_given(name):
            what = f"--{name}: goes with a transformer's configuration, not with a profile"
            raise PartoptError(what, f"leave --{name} out", code="unused-option")
        del given[name]
    if rules and target is None:
        raise PartoptError("--map: goes with --for", "add --for megatron", code="usage")
    if scaling is not None and target is not None:
        raise PartoptError("--for: --scaling prints a table", "drop --for", code="usage")
    planning.choose_schedule(given, [target] if target else [], several=True)
    job = planning.job(profile, given)
    if target:
        import partopt

        job = partopt.job_for(job, target, rules)
    print_notes(job.notes)
    if scaling is not None:
        _print_scaling(job, options.integers(scaling, "--scaling"), weak, as_json, output, force)
    else:
        result, interrupted = search(lambda tell: _solve(job, target, rules, tell))
        print_notes(note for note in result.notes if note not in job.notes)
        if as_json:
            options.write_json(result.document)
        elif output != "-":
            _print_page(result, job)
        if not result.fits:
            leave_if_interrupted(interrupted)
            command = partial(_command, profile, output, given)
            with progress() as tell:
                raise does_not_fit(
                    result.plan, job, command, lambda other: _solve(other, target, rules, tell).plan
                )
        if output and not (as_json and output == "-"):
            result.document.save(output, force)
        if picture:
            _draw(result, job, picture, force)
        options.say_wrote(output, picture)
        leave_if_interrupted(interrupted)
        if not as_json and output != "-" and (scale := _scale(profile, given, result.plan)):
            say(f"hint:  from how many devices on a pipeline is faster: {scale}", err=True)
    if not as_json and output != "-":
        say(f"next:    partopt {_next(profile, output, given, scaling)}", err=True)


def _transformer(profile: str) -> Transformer | None:
    import partopt

    return partopt.find_transformer(profile)


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


def _solve(job: Job, target: str | None, rules: Sequence[str], tell: Tell) -> Result:
    """The best plan of the job, or the best that a trainer can say."""
    import partopt

    if target is None:
        return partopt.solve(job, tell)
    return partopt.solve_for(job, target, rules=rules, progress=tell)


def _next(profile: str, output: str | None, given: dict[str, Any], scaling: str | None) -> str:
    """The command that follows: look at the plan, compare it, or write it."""
    if output and scaling is None and given["target"]:
        rules = options.repeat_options(["rules"])
        return f"export {shlex.quote(output)} --to {given['target']} {rules}".rstrip()
    if output and scaling is None:
        return f"simulate {shlex.quote(output)}"
    if given["schedule"] == "auto" or scaling:
        return f"plan {shlex.quote(profile)} {options.repeat_options(given)} -o plan.json"
    dropped = ("planner", "cuts", "replicas", "layout")
    kept = options.repeat_options([name for name in given if name not in dropped])
    return f"compare {shlex.quote(profile)} {kept}"


def _scale(profile: str, given: Mapping[str, Any], plan: Plan) -> str | None:
    """The command that tells where a plan of one stage is no longer the best, if one can.

    A given split and the plans of a trainer are for one number of devices.
    """
    if len(plan.stages) > 1 or plan.planner == "manual" or given["target"]:
        return None
    other = {"planner", "schedule"} if given["schedule"] == "auto" else {"planner"}
    kept = options.repeat_words(given.keys() - other)
    schedule = ["--schedule", plan.schedule] if "schedule" in other else []
    counts = ",".join(str(plan.topology.devices * times) for times in (1, 2, 4, 8))
    return shlex.join(["partopt", "plan", profile, *kept, *schedule, "--scaling", counts])


def _command(
    profile: str, output: str | None, given: dict[str, Any], changes: Mapping[str, Any]
) -> str:
    """This command with some options changed."""
    words = ["partopt", "plan", profile, *options.repeat_words(set(given) - set(changes))]
    return shlex.join([*words, *flags_of(changes), *(["-o", output] if output else [])])


def _draw(result: Result, job: Job, picture: str, force: bool) -> None:
    import partopt

    others = result.alternatives
    partopt.draw(result.plan, picture, profile=job.profile, alternatives=others, force=force)


def _print_page(result: Result, job: Job) -> None:
    from partopt.report import plan_text
    from partopt.report import plans_text as plans

    beside = ""
    if job.schedule == "auto":
        beside = plans.render_schedules([result.plan, *result.alternatives])
    elif result.alternatives:
        beside = plans.render_beside(result.plan, result.alternatives[:_BESIDE_SHOWN])
    page = plan_text.render(result.plan, ascii_only(), as_flags, result.by_size)
    say_page(f"{page}\n\n{beside}" if beside else page)


def _print_scaling(
    job: Job, devices: list[int], weak: bool, as_json: bool, output: str | None, force: bool
) -> None:
    """The best plan on every one of several numbers of devices."""
    import partopt

    found, interrupted = search(lambda tell: partopt.scale(job, devices, weak, tell))
    options.print_scaling(found, as_json, output, force)
    leave_if_interrupted(interrupted)
