"""`partopt import TRAINER`: a trainer's layout as a plan, beside a better one."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from partopt.cli import options, progress
from partopt.cli.does_not_fit import does_not_fit
from partopt.cli.terminal import ascii_only, say
from partopt.cli.words import as_flags, flags_of, print_notes
from partopt.errors import PartoptError

if TYPE_CHECKING:
    from partopt import Judgement, TrainerLayout


_A_FILE = re.compile(r"[^\n|(]*(/[^\n|(]*|\.(py|sh|csv|json|ya?ml|toml|txt))")


class _Import(options.Verb):
    """The command of every trainer, whose help says what its own layout is."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """What the trainer's layout is, and how one is written."""
        import partopt

        trainer = partopt.TRAINERS[str(ctx.info_name)]
        with formatter.section("Layout"):
            formatter.write_dl([(trainer.example, trainer.reads)])


@click.command(cls=_Import)
@click.argument("layout")
@click.option(
    "--profile", required=True, metavar="FILE|NAME", help="The profile of the model that it cuts."
)
@click.option(
    "--pipeline-size",
    type=click.IntRange(min=1),
    metavar="P",
    help="Devices of a pipeline, where it has several stages on each (default: one on each).",
)
@options.map_option
@click.option(
    "--cuts", metavar="5,9", help="torch-csv: the first layers of all stages but the first."
)
@options.job_options
@options.output_options("the plan")
@options.json_option
def command(
    layout: str,
    profile: str,
    pipeline_size: int | None,
    rules: tuple[str, ...],
    cuts: str | None,
    output: str | None,
    force: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Read LAYOUT, a pipeline as the trainer has it, as a plan, and put it beside a better one.

    LAYOUT is the layout itself, a file that has it, or -; programs are read, not executed. It is
    laid on all devices of the topology and simulated under the schedule that the trainer runs. What
    a file says of batches, recomputation and sharding holds where no option here says it. A layout
    that does not fit the devices' memory is written, too; then it exits with 1.

    \b
    Example:
      partopt import megatron 'Et*4|t*3|t*3|t*2L' --profile gpt.json --topology v100-pcie
        --global-batch 512 -o plan.json
      partopt import torchtitan config.py --profile gpt.json --topology dgx-h100 --global-batch 512
      partopt import vllm 4,3,3,2 --profile gpt.json --topology v100-pcie
    """
    import partopt
    from partopt import documents

    trainer = str(click.get_current_context().info_name)
    if output:
        documents.check_writable(output, force, [".json"])
    loaded = partopt.Profile.load(profile)
    topology = partopt.Topology.load(given["topology"], given["servers"])
    own = partopt.read_layout(
        trainer,
        text_of(layout),
        loaded,
        rules=rules,
        cuts=None if cuts is None else options.integers(cuts, "--cuts"),
        pipeline_size=pipeline_size,
    )
    stated = own.options(
        topology, given["schedule"] if options.is_given("schedule") else None, given["chunks"]
    )
    _keep_given(given, stated, own)
    job = options.state_job(loaded, topology, given | stated)
    print_notes(job.notes)
    with progress.shown() as tell:
        judged = partopt.judge_layout(own, job, tell)
    for fault in judged.faults:
        say(f"warning: {trainer} does not run it so: {as_flags(fault)}", err=True)
    if as_json:
        options.write_json(judged.plan)
    elif output != "-":
        _print_page(judged, own)
    if output and not (as_json and output == "-"):
        judged.plan.save(output, force)
    if output and output != "-":
        say(f"Wrote {output}{'' if judged.plan.fits else ', which does not fit'}", err=True)
    if not judged.plan.fits:
        raise does_not_fit(judged.plan, job, partial(_again, layout, output, given))
    if not as_json and output != "-":
        say(f"next:    {_next(judged, own, given, stated)}", err=True)


def text_of(layout: str) -> str:
    """The text of a layout: of a file or standard input, or the word itself."""
    from partopt.documents import is_file, read_bytes

    if layout != "-" and not _A_FILE.fullmatch(layout) and not is_file(layout):
        return layout
    return read_bytes(layout).decode(errors="replace")


def _keep_given(given: Mapping[str, Any], stated: dict[str, Any], own: TrainerLayout) -> None:
    """Take what this command line says out of what is `stated`; refuse a batch beside an order."""
    batch = [name for name in ("microbatches", "global_batch") if given[name] is not None]
    M = own.reading.stages and stated["microbatches"]
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


def _print_page(judged: Judgement, own: TrainerLayout) -> None:
    """The plan, and what stands beside it."""
    from partopt.report import plan
    from partopt.report.plans import render_layout

    for line in own.described:
        say(f"note:    {line}", err=True)
    say(plan.render(judged.plan, ascii_only(), as_flags))
    say(f"\n{render_layout(judged.plan, judged.recut, judged.best, own.trainer.name)}")


def _again(
    layout: str, output: str | None, given: Mapping[str, Any], changes: Mapping[str, Any]
) -> str:
    """This command with some options changed."""
    names = {*given, "profile", "pipeline_size", "rules", "cuts"} - changes.keys()
    words = ["partopt", "import", str(click.get_current_context().info_name), layout]
    written = ["-o", output] if output else []
    return shlex.join([*words, *options.repeat_words(names), *flags_of(changes), *written])


def _next(
    judged: Judgement, own: TrainerLayout, given: Mapping[str, Any], stated: Mapping[str, Any]
) -> str:
    """The command that plans the better one: the best, or the same stages at other cuts."""
    from partopt.report.plans import loses_to

    profile = click.get_current_context().params["profile"]
    changed = {
        name: stated[name] for name in ("schedule", "chunks", *own.conditions) if name in stated
    }
    words = [profile, *options.repeat_words(given.keys() - changed.keys()), *flags_of(changed)]
    best, recut = judged.best, judged.recut
    within = ["--for", own.trainer.name, *options.repeat_words(["rules"])]
    if best is not None and best != recut and loses_to(judged.plan, best):
        words += within
    elif recut is not None and loses_to(judged.plan, recut):
        cuts = [stage.start for stage in recut.stages[1:]]
        words += flags_of({"cuts": cuts, "replicas": stated["replicas"]})
        words += within if best is not None else []
    else:
        return shlex.join(["partopt", "compare", *words])
    return shlex.join(["partopt", "plan", *words, "-o", "better.json"])
