"""`partopt plan`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click
from msgspec import structs

import partopt
from partopt.cli import options, planning
from partopt.cli.next_commands import (
    Written,
    command_of,
    command_of_transformer,
    say_next,
    say_next_of_plan,
)
from partopt.cli.options import is_given
from partopt.cli.terminal import (
    Tell,
    leave_if_interrupted,
    progress,
    say,
    search,
)
from partopt.cli.words import does_not_fit, hint_at_fitting, print_notes
from partopt.documents.files import find_shipped
from partopt.documents.transformer import Transformer
from partopt.errors import PartoptError
from partopt.options import AUTO

if TYPE_CHECKING:
    from partopt.documents.tables import Scaling

_TAKEN = {"best": False, "best,numbers": True}  # of --with, and whether they change numbers
# options that need another, or a table
_OF_TABLES = {"weak": None, "tokens": None, "days": "tokens", "budget": "tokens"}
_BESIDE_SHOWN = 3  # plans under the one that is printed, at most


@click.command(cls=planning.Verb)
@click.argument("profile", type=options.FILE)
@planning.split_options
@planning.job_options
@options.option("--devices", "N", "Plan on so many of its devices.", options.COUNT)
@options.option("--scaling", "8,16,32", "The best plan on each of them, as a table.")
@click.option("--weak", is_flag=True, help="The batch grows with the devices.")
@options.option("--tokens", "T", "With sizes: a run of so many, such as 15T.", options.AMOUNT)
@options.option("--days", "D", "With --tokens: mark the cheapest size in time.", options.AMOUNT)
@options.option("--budget", "MONEY", "With --tokens: mark the fastest size for it.", options.AMOUNT)
@options.option("--price", "MONEY", "Of a device an hour.", options.AMOUNT)
@options.option(
    "--for target",
    "TRAINER",
    "The best that it can run, such as megatron.",
)
@planning.flag_of("layout")
@options.option("--beside", "PART=N,..", "Say where another layout's time goes, beside the best.")
@planning.flag_of("sequence")
@planning.flag_of("dtype")
@options.option(
    "--calibrate",
    "[KIND=]FILE",
    "A profile of its trainer's own block: measured times win.",
    multiple=True,
)
@options.map_option
@options.option("--picture", "FILE", "Draw the plan, too (.svg, .pdf, .png).")
@options.output_options("the plan or table")
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
    sizes = given["servers"] if isinstance(given["servers"], planning.Sizes) else None
    tabled = given["scaling"] is not None or sizes is not None
    _check_outputs(output, given["picture"], force, tabled)
    transformer = partopt.find_transformer(profile)
    _check_usage(profile, transformer, given, tabled)
    if transformer:
        _check_stated(profile, transformer, given, output)
    if transformer is None:
        planning.choose_schedule(given, [target] if target else [], several=True)
    picture, scaling, weak = (given.pop(name) for name in ("picture", "scaling", "weak"))
    beside = given.pop("beside")
    run = {name: given.pop(name) for name in ("tokens", "days", "budget")}
    model = transformer or partopt.Profile.load(profile)
    topology = partopt.Topology.load(given["topology"], sizes.most if sizes else given["servers"])
    if devices := given.pop("devices"):
        topology = topology.resize(devices)
    if price := given.pop("price"):
        device = structs.replace(topology.device, price_per_hour=price)
        topology = structs.replace(topology, device=device)
    if run["budget"] and not topology.device.price_per_hour:
        what = f"--budget: {topology.name} has no price of a device"
        raise PartoptError(what, "add --price 2.1", code="missing-option", option="price")
    best = [text for text in given["facts"] if text in _TAKEN]
    given["facts"] = [text for text in given["facts"] if text not in _TAKEN]
    job = planning.state_job(model, topology, given)
    if target:
        job = partopt.job_for(job, target, rules)
    if best:
        job = _take_best(job, best[-1])
    planning.print_job_notes(job, profile)
    servers = sizes.most if sizes else None  # of the plan that follows
    if tabled:
        asked = sizes or options.integers(scaling, "--scaling")
        found = _table(job, asked, weak, run, output, force, as_json)
        if sizes and found.chosen:
            inside = topology.cluster.devices // sizes.most
            servers = found.chosen // inside
    else:
        repeated = given.keys() | {"force", "price", "devices", "beside"}
        again = partial(command_of, "plan", [profile], repeated, output=output)
        of_page = {"picture": picture, "beside": beside}
        plan = _plan(job, again, output, force, as_json, given | of_page)
    if not as_json and output != "-":
        if not tabled and (scale := _scale(profile, given, plan)):
            say(f"hint:  from how many devices on a pipeline is faster: {scale}", err=True)
        written = None if tabled or not output else Written(plan, output, rules)
        _say_next(profile, written, given, job, servers)


def _check_usage(
    profile: str, transformer: Transformer | None, given: Mapping[str, Any], tabled: bool
) -> None:
    """Raise PartoptError for options that nothing comes of beside the others."""
    target, sizes = given["target"], isinstance(given["servers"], planning.Sizes)
    for name, needed in _OF_TABLES.items():
        if given[name] and not (tabled if needed is None else given[needed]):
            needs = "--scaling 8,16,32" if needed is None else f"--{needed} 15T"
            what = f"--{name} goes with {needs.split()[0]}"
            raise PartoptError(what, f"add {needs}", code="usage")
    if transformer is None:
        find_shipped(profile, "profiles", "models")
        if given["rules"] and target is None:
            raise PartoptError("--map: goes with --for", "add --for megatron", code="usage")
        if given["scaling"] is not None and target is not None:
            raise PartoptError("--for: --scaling prints a table", "drop --for", code="usage")
        if sizes or given["tokens"]:
            what = "--tokens" if given["tokens"] else "a range of --servers"
            raise PartoptError(f"{what} goes with a transformer", "use --scaling", code="usage")
    of_trainer = transformer is not None and target is not None
    if given["beside"] and (tabled or not of_trainer):
        what = "--beside: goes with one plan of a transformer"
        raise PartoptError(what, "add --for megatron", code="usage")
    taken = next((text for text in given["facts"] if text in _TAKEN), None)
    if taken and not of_trainer:
        what = f"--with {taken}: it takes switches of a transformer's trainer"
        raise PartoptError(what, "add --for megatron", code="usage")


def _check_stated(
    profile: str, model: Transformer, given: Mapping[str, Any], output: str | None
) -> None:
    """Raise PartoptError, with the whole command, where a transformer's options are missing."""
    needed = {"target": "--for", "global_batch": "--global-batch", "sequence": "--sequence"}
    if missing := [flag for name, flag in needed.items() if not given[name]]:
        whole = command_of_transformer(profile, model, given, output)
        what = f"{profile}: a transformer's configuration also needs {', '.join(missing)}"
        raise PartoptError(what, f"such as: {whole}", code="missing-option")


def _take_best(job: partopt.Job, what: str) -> partopt.Job:
    """The job with the switches of its trainer that help, which are said."""
    taken = partopt.take_best(job, _TAKEN[what])
    before, after = ({**one.facts, "dtype": one.dtype} for one in (job, taken))
    added = {name: value for name, value in after.items() if before.get(name) != value}
    said = ", ".join(f"{name}={value}" for name, value in sorted(added.items()))
    say(f"note:    --with {what}: {said or 'nothing helps'}", err=True)
    return taken


def _table(
    job: partopt.Job,
    sizes: planning.Sizes | Sequence[int],
    weak: bool,
    run: Mapping[str, float | None],
    output: str | None,
    force: bool,
    as_json: bool,
) -> Scaling:
    """Print and write the table of sizes, of servers or of devices, and what a `run` costs.

    Raises PartoptError where none is in time and paid for.
    """
    from partopt.report.plans_text import render_scaling

    def find(tell: Tell) -> Scaling:
        if isinstance(sizes, planning.Sizes):
            return partopt.scale_servers(job, sizes.least, sizes.most, tell)
        return partopt.scale(job, sizes, weak, tell)

    found, interrupted = search(find)
    refused = None
    if tokens := run["tokens"]:
        try:
            found = partopt.price_runs(found, tokens, run["days"], run["budget"])
        except PartoptError as error:
            refused, found = error, partopt.price_runs(found, tokens)
    options.deliver_table(found, partial(render_scaling, found), output, force, as_json)
    leave_if_interrupted(interrupted)
    if refused is not None:
        raise refused
    return found


def _plan(
    job: partopt.Job,
    again: Callable[[Mapping[str, Any]], str],
    output: str | None,
    force: bool,
    as_json: bool,
    given: Mapping[str, Any],
) -> partopt.Plan:
    """Print and write the best plan of the job.

    Raises PartoptError where none fits, with the command `again` changed so that one does.
    """
    rules, picture = given["rules"], given["picture"]
    result, interrupted = search(lambda tell: partopt.solve(job, tell, rules=rules))
    print_notes(note for note in result.notes if note not in job.notes)
    other = None
    if given["beside"]:
        fixed = job.with_(layout=partopt.Layout.parse(given["beside"]))
        with progress() as tell:
            other = partopt.solve(fixed, tell, levers=False).plan
    page = partial(_print_page, result, job, other)
    options.deliver(result.document, page, output, force, as_json, written=result.fits)
    if not result.fits:
        leave_if_interrupted(interrupted)
        raise does_not_fit(result.plan, job, hint_at_fitting(result.plan, job, again, rules))
    if picture:
        of_layout = isinstance(job.model, Transformer)
        drawn = partopt.find_profile(result.plan) if of_layout else job.profile
        others = () if of_layout else result.alternatives
        partopt.draw(result.plan, picture, profile=drawn, alternatives=others, force=force)
        options.say_wrote(picture)
    leave_if_interrupted(interrupted)
    return result.plan


def _check_outputs(output: str | None, picture: str | None, force: bool, scaling: bool) -> None:
    """Refuse, before any work is done, files that could not be written."""
    from partopt import documents

    if scaling and picture:
        raise PartoptError(
            "--picture: a table of sizes has no plan", "use -o scaling.svg", code="usage"
        )
    if picture:
        from partopt.report.pictures import check

        check(picture, force)
    if output and scaling:
        options.check_table(output, force)
    elif output:
        documents.check_writable(output, force, [".json"])


def _say_next(
    profile: str,
    written: Written | None,
    given: dict[str, Any],
    job: partopt.Job,
    servers: int | None,
) -> None:
    """Say what follows: look at the plan that is written, compare it, or write it, on `servers`."""
    of_layout, trainer = isinstance(job.model, Transformer), given["target"]
    if written and trainer:
        say_next_of_plan(written, trainer)
    elif written:
        say_next("plan", written.file)
    elif of_layout or job.schedule == AUTO or is_given("scaling"):
        changes = {"servers": servers} if servers else {}
        say_next(command_of("plan", [profile], given, changes, output="plan.json"))
    else:
        dropped = dict.fromkeys(("planner", "cuts", "replicas", "layout"))
        say_next(command_of("compare", [profile], given, dropped))


def _scale(profile: str, given: Mapping[str, Any], plan: partopt.Plan) -> str | None:
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


def _print_page(result: partopt.Result, job: partopt.Job, other: partopt.Plan | None) -> None:
    from partopt.report import plans_text as plans
    from partopt.report.transformer_text import render_parts

    page, beside = plans.render_plan(result.document, result.by_size), ""
    if job.schedule == AUTO and not result.plan.transformer:
        beside = plans.render_schedules([result.plan, *result.alternatives])
    elif result.alternatives and not result.plan.transformer:
        beside = plans.render_beside(result.plan, result.alternatives[:_BESIDE_SHOWN])
    if other is not None:
        beside = render_parts(result.plan, other, ("FIRST", "BESIDE"))
    say(f"{page}\n\n{beside}" if beside else page)
