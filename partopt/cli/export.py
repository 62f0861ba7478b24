"""`partopt export`."""

from __future__ import annotations

from pathlib import Path

import click

import partopt
from partopt.cli import options
from partopt.cli.terminal import say, say_file
from partopt.errors import PartoptError

_STEM = "partopt_plan"
_FLOWS = "flows"
_FLOWS_SUMMARY = "no trainer: every message and collective, and which are critical (.csv, .json)"


class _Export(click.Command):
    """The command, whose help lists the trainers."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """One line a trainer."""
        trainers = partopt.TRAINERS.items()
        rows = [(name, trainer.summary) for name, trainer in trainers if trainer.write]
        with formatter.section("Trainers"):
            formatter.write_dl([*rows, (_FLOWS, _FLOWS_SUMMARY)])


@click.command(cls=_Export)
@click.argument("plan", type=options.FILE)
@options.option("--to target", "TRAINER", "Which trainer.", required=True)
@options.map_option
@options.output_options("it")
def command(
    plan: str, target: str, rules: tuple[str, ...], output: str | None, force: bool
) -> None:
    """Write PLAN, a file or -, as a trainer reads it, on standard output or with -o to a file.

    A plan that the trainer cannot say is refused with every reason; nothing is rounded.

    \b
    Example:
      partopt export plan.json --to megatron
      partopt export plan.json --to torchtitan -o planned.py
      partopt export plan.json --to vllm --map "model.final*=norm"
    """
    from partopt import documents

    loaded = partopt.Plan.load(plan)
    if target == _FLOWS:
        _write_flows(loaded, output, force)
        return
    trainer = partopt.TRAINERS.lookup(target)
    path = Path(output) if output and output != "-" else Path(_STEM)
    if trainer.write is not None:
        # lines of a shell are read from any file
        forms = [] if trainer.suffix == ".sh" else [trainer.suffix]
        documents.check_writable(output or "-", force, forms)
    try:
        text = partopt.export_plan(loaded, target, rules=rules, stem=path.stem)
    except PartoptError as error:
        raise _with_hint(error, loaded, target) from None
    if text.beside and output in (None, "-"):
        endings = ", ".join(text.beside)
        raise PartoptError(
            f"partopt export --to {target}: it is several files ({trainer.suffix}, {endings})",
            f"add -o {_STEM}{trainer.suffix}",
            code="missing-option",
            option="output",
        )
    if output is None or output == "-":
        say_file(text.main)
    else:
        options.say_wrote(*text.save(output, force))
    for note in text.notes:
        say(f"note:    {note}", err=True)


def _write_flows(plan: partopt.Plan, output: str | None, force: bool) -> None:
    """Every flow of the plan, as a table or as a document (`.json`)."""
    from partopt import documents
    from partopt.report.pages import flows_csv, how_many_are_critical

    path = output or "-"
    documents.check_writable(path, force, [".csv", ".json"])
    flows = partopt.simulate(plan).flows
    text = documents.encode(flows) if path.endswith(".json") else flows_csv(flows).encode()
    documents.write_bytes(path, text, force)
    options.say_wrote(path)
    say(f"flows:   {how_many_are_critical(flows)}", err=True)


def _with_hint(error: PartoptError, plan: partopt.Plan, target: str) -> PartoptError:
    """The error, and the command that makes a plan that the trainer can say, if that helps."""
    if error.code != "target-cannot-say" or error.parts[-1].hint:
        return error
    words = [f"partopt plan PROFILE --topology {plan.topology.name} --for {target}"]
    words.append(f"--global-batch {(plan.microbatches or 0) * plan.microbatch_size or 'G'}")
    if plan.transformer:
        words.append(f"--sequence {plan.transformer.sequence}")
    hint = " ".join([*words, "-o plan.json"])
    parts = list(error.parts)
    last = parts[-1]
    parts[-1] = PartoptError(last.message, hint, code=last.code, **last.fields)
    return PartoptError.together(parts)
