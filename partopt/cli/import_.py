"""`partopt import`: another program's profile, or a trainer's layout beside a better plan."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import partopt
from partopt.cli import options, planning
from partopt.cli.next_commands import Written, command_of, say_next, say_next_of_plan
from partopt.cli.terminal import progress, say
from partopt.cli.words import LARGER, as_flags, does_not_fit, hint_at_fitting, print_notes
from partopt.documents.plan import cuts_of
from partopt.errors import PartoptError, unknown

if TYPE_CHECKING:
    from partopt.documents.profile import Profile

# options that go with a profile, and those that go without one
_OF_LAYOUTS = {"profile", "pipeline_size", "rules", "cuts"}
_OF_TRANSFORMERS = {"layout", "sequence", "dtype", "assignments", "best"}
_TRACE = "torch-profile"
_PROFILES = {
    _TRACE: "traces of torch.profiler: times of the stages of a plan that ran",
    "pipedream": "a graph of the published PipeDream profiler",
}


class _Formats(click.Group):
    """Formats of profiles, one command for all of them, and of layouts, another."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The formats of profiles, then those of layouts."""
        return [_TRACE, *partopt.IMPORTERS, *_readers()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a format. PartoptError for an unknown one."""
        if cmd_name in _readers():
            return _layout
        if cmd_name == _TRACE or cmd_name in partopt.IMPORTERS:
            return _profile
        if ctx.resilient_parsing or cmd_name.startswith("-"):
            return None
        if cmd_name == "run":
            raise PartoptError(
                "partopt import run: a run is of partopt's own",
                "partopt profile --from-run RUN --onto PROFILE",
                code="unknown-format",
            )
        what, known = f'unknown format "{cmd_name}"', self.list_commands(ctx)
        raise unknown(what, cmd_name, known, code="unknown-format")

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command of the format; an option of the other kind is said to be that."""
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            raise _of_other_kind(error) or error from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """One line a format."""
        profiles = [(name, _PROFILES.get(name, "")) for name in (_TRACE, *partopt.IMPORTERS)]
        with formatter.section("Measurements, as a profile"):
            formatter.write_dl(profiles)
        layouts = [(name, trainer.reads) for name, trainer in _readers().items()]
        with formatter.section("Layouts of trainers, as a plan"):
            formatter.write_dl(layouts)


def _readers() -> Mapping[str, partopt.Trainer]:
    """The trainers whose configurations are read."""
    from partopt import TRAINERS

    return {name: trainer for name, trainer in TRAINERS.items() if trainer.read}


def _of_other_kind(error: click.NoSuchOption) -> PartoptError | None:
    """The error of an option that formats of the other kind have; None where they have it not."""
    assert error.ctx is not None
    is_layout = error.ctx.command is _layout
    other, kind = (_profile, "measurements") if is_layout else (_layout, "layouts")
    if not any(error.option_name in parameter.opts for parameter in other.params):
        return None
    return PartoptError(
        f"{error.option_name}: not of {error.ctx.command_path}",
        f"it goes with {kind}: see partopt import --help",
        code="unused-option",
    )


@click.group("import", cls=_Formats, subcommand_metavar="FORMAT ...")
def command() -> None:
    """Read what another program measured as a profile, or a trainer's layout as a plan.

    partopt import FORMAT --help says what each takes.

    \b
    Example:
      partopt import torch-profile rank*.json --onto gpt.json --plan plan.json -o again.json
      partopt import megatron 'Et*4|t*3|t*3|t*2L' --profile gpt.json --topology v100-pcie
        --global-batch 512 -o plan.json
    """


@click.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=options.FILE)
@options.option("--onto", "PROFILE", "torch-profile: the profile whose times are replaced.")
@options.option("--plan", "PLAN", "torch-profile: the plan that ran, whose stages are timed.")
@click.option("--name", help="Name of the model (default: that of the file, or of the profile).")
@options.option(
    "--microbatch-size",
    "B",
    "Samples that were measured at once; such files do not record it.",
    options.COUNT,
)
@options.option("--device", "NAME", "Device that was measured, if it is known.")
@options.output_options("the profile")
def _profile(files: tuple[str, ...], output: str | None, force: bool, **given: Any) -> None:
    """Read what another program measured and write it as a profile of partopt's.

    For pipedream, FILE is the published profiler's graph; for torch-profile they are traces of
    torch.profiler, one of each process, in which torch executed a --plan: its stages are found by
    the ranges of torch's pipelines, PP:0F0. A trace has times alone: --onto says which profile they
    are put into.

    \b
    Example:
      partopt import pipedream vgg16.txt --microbatch-size 128 -o vgg16.json
      partopt import torch-profile rank*.json --onto gpt.json --plan plan.json -o again.json
    """
    from partopt import documents

    form = str(click.get_current_context().info_name)
    if output is None:
        raise PartoptError(
            "partopt import: no output file",
            "add -o profile.json, or -o - for standard output",
            code="missing-option",
            option="output",
        )
    documents.check_writable(output, force, [".json"])
    read = _read_traces if form == _TRACE else _read_other
    imported = read(form, files, **given)
    imported.save(output, force)
    print_notes(imported.notes)
    if output != "-":
        count = len(imported.layers)
        say(f"Wrote {output}: {count} {'layer' if count == 1 else 'layers'}", err=True)
        say_next("profile", output, topology="v100-pcie")


def _read_traces(
    form: str, files: tuple[str, ...], onto: str | None, plan: str | None, **given: Any
) -> Profile:
    from msgspec.structs import replace

    if given["microbatch_size"] is not None:
        what = f"--microbatch-size: not of partopt import {form}, whose plan says it"
        raise PartoptError(what, "leave it out", code="unused-option")
    if onto is None:
        what = f"partopt import {form}: a trace has no bytes of parameters and activations"
        hint = "say whose they are: --onto PROFILE, a profile of the same model"
        raise PartoptError(what, hint, code="missing-option", option="onto")
    if plan is None:
        what = f"partopt import {form}: a trace does not say which layers its stages have"
        hint = "name the plan that ran: --plan PLAN"
        raise PartoptError(what, hint, code="missing-option", option="plan")
    known, ran, name = partopt.Profile.load(onto), partopt.Plan.load(plan), given["name"]
    imported = partopt.import_times(files, known, ran, device=given["device"])
    return replace(imported, model=replace(imported.model, name=name)) if name else imported


def _read_other(
    form: str, files: tuple[str, ...], onto: str | None, plan: str | None, **given: Any
) -> Profile:
    for flag, value in (("--onto", onto), ("--plan", plan), (files[-1], len(files) > 1)):
        if value:
            what = f"{flag}: not of partopt import {form}"
            hint = f"one FILE holds the whole profile; {flag} goes with {_TRACE}"
            raise PartoptError(what, hint, code="unused-option")
    return partopt.import_profile(form, files[0], **given)


class _Import(planning.Verb):
    """The command of every trainer, whose help says what its layout is."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """What the trainer's layout is, and how one is written."""
        trainer = partopt.TRAINERS[str(ctx.info_name)]
        with formatter.section("Layout"):
            formatter.write_dl([(trainer.example, trainer.reads)])


@click.command(cls=_Import)
@click.argument("configuration", metavar="LAYOUT", type=options.FILE)
@options.option(
    "--profile",
    "FILE|NAME",
    "The profile of the model that it cuts (default: a transformer, as LAYOUT says it).",
)
@planning.flag_of("layout", "Without a profile: replace any part, such as tp=4,pp=2.")
@planning.flag_of("sequence", "Without a profile: tokens of a sample (k = 1024).")
@planning.flag_of("dtype", "Without a profile: of the products.")
@options.option(
    "--set assignments",
    "NAME=VALUE",
    "Without a profile: a variable or a setting that the file does not have (repeat).",
    multiple=True,
)
@click.option("--best", is_flag=True, help="Without a profile: write the best plan, not yours.")
@options.option(
    "--pipeline-size",
    "P",
    "Devices of a pipeline, where it has several stages on each (default: one on each).",
    options.COUNT,
)
@options.map_option
@options.option("--cuts", "5,9", "torch-csv: the first layers of all stages but the first.")
@planning.job_options
@options.output_options("the plan")
@options.json_option
def _layout(
    configuration: str,
    profile: str | None,
    output: str | None,
    force: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Read LAYOUT, a pipeline as the trainer has it, as a plan, and put it beside a better one.

    Of a transformer the script or configuration alone will do: megatron, megatron-bridge, ms-swift,
    verl, slime, torchtitan and deepspeed say its shape and the whole layout. Of a program with
    several configurations name one: FILE:FUNCTION.

    Then -o with the ending of LAYOUT, as -o better.sh, writes LAYOUT as the best plan changes it.

    LAYOUT is the layout itself, a file that has it, or -; programs are read, not executed. It is
    laid on all devices of the topology and simulated under the schedule that the trainer runs. What
    a file says of batches, recomputation and sharding holds where no option here says it. A layout
    that does not fit the devices' memory is written, too; then it exits with 1.

    \b
    Example:
      partopt import megatron train.sh --topology dgx-h100 --servers 4
      partopt import verl run.sh --topology dgx-h100 --set tokens_per_sample=900
      partopt import megatron 'Et*4|t*3|t*3|t*2L' --profile gpt.json --topology v100-pcie
        --global-batch 512 -o plan.json
      partopt import torchtitan config.py --profile gpt.json --topology dgx-h100 --global-batch 512
      partopt import vllm 4,3,3,2 --profile gpt.json --topology v100-pcie
    """
    from partopt import documents

    trainer = str(click.get_current_context().info_name)
    suffix = "" if profile else Path(configuration.partition(".py:")[0]).suffix
    if output:
        forms = [".json", *([suffix] if re.fullmatch(r"\.\w{1,8}", suffix) else [])]
        documents.check_writable(output, force, forms)
    best, text = given.pop("best"), None
    if profile is None:
        (job, text), layout = _read_job(trainer, configuration, given), None
        stated = dict[str, Any]()
    else:
        layout, job, stated = _read_layout(trainer, configuration, profile, given)
        print_notes(job.notes)
    with progress() as tell:
        judged = partopt.judge_layout(job, layout, tell)
    for fault in judged.faults:
        say(f"warning: {trainer} does not run it so: {as_flags(fault)}", err=True)
    plan = judged.best if best and judged.best else judged.plan
    changes = text.change(judged) if text else None
    page = partial(_print_page, judged, layout, trainer, changes)
    changed = output and output.endswith(suffix) and suffix not in ("", ".json")
    save = text.writer(changes) if text and changes and changed else None
    options.deliver(plan, page, output, force, as_json, save=save)
    if not plan.fits:
        words, names = [trainer, configuration], _OF_LAYOUTS | given.keys() | {"force"}
        again = partial(command_of, "import", words, names, output=output)
        hint = hint_at_fitting(plan, job, again) if layout else _hint_at_layout(judged, job)
        raise does_not_fit(plan, job, hint)
    if layout is not None and not as_json and output != "-":
        _say_better(judged, layout, given, stated)
    elif layout is None and output and output != "-" and not save:
        say_next_of_plan(Written(plan, output), trainer)


@dataclass(frozen=True)
class _Text:
    """A configuration, and what it is read with."""

    text: str
    arguments: Mapping[str, str]
    function: str | None
    folder: Path | None  # of the file

    def change(self, judged: partopt.Judgement) -> partopt.Changes | None:
        """The text with the changes that make it the best plan; None where none was found."""
        if judged.best is None:
            return None
        read = self.arguments, self.function, self.folder
        return partopt.change_text(self.text, judged.plan, judged.best, *read)

    def writer(self, changes: partopt.Changes) -> Callable[[str, bool], None]:
        """What writes the changed text to a path, over another file if that is forced."""
        from partopt.documents.files import write_bytes

        content = changes.mark_lines(self.text).encode()
        return lambda path, force: write_bytes(path, content, force)


def _read_job(trainer: str, text: str, given: dict[str, Any]) -> tuple[partopt.Job, _Text]:
    """The job that a trainer's configuration of a transformer states; prints notes on it."""
    from partopt.options import FOR_TRANSFORMERS

    taken = {"topology", "servers", *FOR_TRANSFORMERS, *_OF_TRANSFORMERS}
    why = "the configuration of a trainer, without --profile"
    hint = "leave {} out; --layout fixes what its trainer can choose"
    options.refuse_options(given.keys() - taken, why, hint)
    name, _, function = text.rpartition(":")
    if not name.endswith(".py"):
        name, function = text, ""
    stated = planning.state_options(given)
    pairs = options.parse_pairs("--set", stated.pop("assignments", ()), "NAME=VALUE", "TP=8")
    folder = Path(name).parent if name != "-" and Path(name).is_file() else None
    read = _Text(options.layout_text(name), pairs, function or None, folder)
    topology = partopt.Topology.load(given["topology"], given["servers"])
    job, notes = partopt.read_job(
        trainer,
        read.text,
        topology,
        read.arguments,
        function=read.function,
        folder=read.folder,
        **stated,
    )
    for note in notes:
        say(f"note:    {as_flags(note)}", err=True)
    return job, read


def _read_layout(
    trainer: str, configuration: str, profile: str, given: dict[str, Any]
) -> tuple[partopt.TrainerLayout, partopt.Job, dict[str, Any]]:
    """A trainer's layout of a profile, its job, and the options of that which it states.

    Takes out of `given` what is not of the job.
    """
    why = "goes with a transformer as its configuration says it, not a profile"
    options.refuse_options(_OF_TRANSFORMERS, why)
    for name in _OF_TRANSFORMERS - {"best"}:
        del given[name]
    cuts, pipeline_size, rules = (given.pop(name) for name in ("cuts", "pipeline_size", "rules"))
    loaded = partopt.Profile.load(profile)
    topology = partopt.Topology.load(given["topology"], given["servers"])
    layout = partopt.read_layout(
        trainer,
        options.layout_text(configuration),
        loaded,
        rules=rules,
        cuts=None if cuts is None else options.integers(cuts, "--cuts"),
        pipeline_size=pipeline_size,
    )
    stated = layout.options(
        topology, given["schedule"] if options.is_given("schedule") else None, given["chunks"]
    )
    _keep_given(given, stated, layout)
    return layout, planning.state_job(loaded, topology, given | stated), stated


def _keep_given(
    given: Mapping[str, Any], stated: dict[str, Any], layout: partopt.TrainerLayout
) -> None:
    """Take what this command line says out of what is `stated`; refuse a batch beside an order."""
    batch = [name for name in ("microbatches", "global_batch") if given[name] is not None]
    M = layout.stated.stages and stated["microbatches"]
    for name in batch:
        if M and given[name] != M:
            raise PartoptError(
                f"`{name}={given[name]}`: the order is of {M} microbatches",
                "leave it out",
                code="conflicting-options",
                option=name,
            )
    for name in ("microbatch_size", "recompute", "shard"):
        if options.is_given(name):
            stated.pop(name, None)
    if batch:
        stated.pop("microbatches", None)
        stated.pop("global_batch", None)


def _print_page(
    judged: partopt.Judgement,
    layout: partopt.TrainerLayout | None,
    trainer: str,
    changes: partopt.Changes | None,
) -> None:
    """The plan, and what stands beside it."""
    from partopt.report.plans_text import render_layout, render_plan

    for line in layout.described if layout else ():
        say(f"note:    {line}", err=True)
    say(render_plan(judged.plan))
    plans = judged.plan, judged.recut, judged.best
    beside = render_layout(*plans, trainer, changes.describe() if changes else ())
    say(f"\n{beside}")


def _hint_at_layout(judged: partopt.Judgement, job: partopt.Job) -> str:
    """The option with which a transformer's layout fits."""
    if judged.best and judged.best.fits:
        return "the best layout fits: add --best to write that"
    size = job.topology.cluster.levels[-1].size
    servers = partopt.find_servers(job.with_(layout=partopt.Layout()), size + 1)
    return LARGER if servers is None else f"a layout fits with --servers {servers}"


def _say_better(
    judged: partopt.Judgement,
    layout: partopt.TrainerLayout,
    given: Mapping[str, Any],
    stated: Mapping[str, Any],
) -> None:
    """Say the command that plans the better one: the best, or the same stages at other cuts."""
    from partopt.report.plans_text import loses_to

    words = [str(click.get_current_context().params["profile"])]
    changes = {
        name: stated[name] for name in ("schedule", "chunks", *layout.conditions) if name in stated
    }
    best, recut = judged.best, judged.recut
    within = {"for": layout.trainer.name}
    if best is not None and best != recut and loses_to(judged.plan, best):
        changes |= within
    elif recut is not None and loses_to(judged.plan, recut):
        changes |= {"cuts": cuts_of(recut), "replicas": stated["replicas"]}
        changes |= within if best is not None else {}
    else:
        say_next(command_of("compare", words, given, changes))
        return
    names = set(given) | ({"rules"} if "for" in changes else set())
    say_next(command_of("plan", words, names, changes, "better.json"))
