"""`partopt schedule`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from partopt.cli import options, timeline
from partopt.cli.terminal import say, say_page
from partopt.errors import PartoptError

if TYPE_CHECKING:
    from partopt.documents.simulation import TrialDocument

_ALL = "all"


@click.command(short_help="schedules on equal stages, without a profile")
@click.argument("name")
@click.option(
    "--stages",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    metavar="P",
    help="Devices of the pipeline.",
)
@click.option(
    "--microbatches",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    metavar="M",
    help="That pass through it.",
)
@click.option(
    "--forward",
    default="1",
    show_default=True,
    metavar="TIME",
    help='Of a device with one microbatch: seconds, or "5 ms".',
)
@click.option("--backward", metavar="TIME", help="Of its backward (default: twice the forward).")
@click.option(
    "--weight-gradient",
    metavar="TIME",
    help="The part of a backward that is for the weights (default: half).",
)
@click.option(
    "--transfer",
    default="0",
    show_default=True,
    metavar="TIME",
    help="Of a message between two devices.",
)
@click.option(
    "--chunks",
    type=click.IntRange(min=1),
    metavar="V",
    help="Stages on a device, for interleaved schedules (default: 2).",
)
@click.option(
    "--activations",
    default="1 GB",
    show_default=True,
    metavar="SIZE",
    help="That a device keeps of one microbatch.",
)
@click.option("--recompute", is_flag=True, help="Re-materialise activations.")
@options.with_option
@options.output_options(
    "the timeline (.json for Perfetto), a figure (.svg, .pdf, .png) or the schedule (.csv)"
)
@options.json_option
def command(name: str, output: str | None, force: bool, as_json: bool, **given: Any) -> None:
    """Execute the schedule NAME on equal stages, beside what its formulas say.

    No profile and no cluster is needed: every device takes the same times. With all for NAME every
    schedule is a row of one table.

    \b
    Example:
      partopt schedule 1f1b --stages 4 --microbatches 8
      partopt schedule interleaved --chunks 2 --transfer 0.1 -o interleaved.svg
      partopt schedule all --stages 8 --microbatches 32 --forward "5 ms" --backward "9 ms"
    """
    import partopt

    pipeline = partopt.Uniform(**given | {"facts": options.parse_facts(given["facts"])})
    if name == _ALL:
        if output:
            raise PartoptError(
                "-o: writes the timeline of one schedule",
                "name it: partopt schedule 1f1b -o 1f1b.svg",
                code="unused-option",
            )
        _print(partopt.try_schedules(pipeline), as_json)
        return
    timeline.check_output(output, force, as_json)
    trial = partopt.try_schedule(name, pipeline, save_as=output)
    if output != "-":
        _print(trial.document, as_json)
    if output:
        trial.save(output, force)
        if output != "-":
            say(f"Wrote {output}", err=True)


def _print(document: TrialDocument, as_json: bool) -> None:
    if as_json:
        options.write_json(document)
    else:
        show_trial(document)


def show_trial(document: TrialDocument) -> None:
    """Print schedules on equal stages, a timeline as wide as the terminal."""
    from partopt.report import trials

    say_page(trials.render(document, *timeline.page_style()))
