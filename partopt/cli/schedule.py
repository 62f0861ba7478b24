"""`partopt schedule`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

import partopt
from partopt.cli import options
from partopt.cli.simulate import check_timeline
from partopt.cli.terminal import say
from partopt.errors import PartoptError

if TYPE_CHECKING:
    from partopt.documents.simulation import TrialDocument

_ALL = "all"


@click.command()
@click.argument("name")
@options.option("--stages", "P", "Devices of the pipeline.", options.COUNT, default=4)
@options.option("--microbatches", "M", "That pass through it.", options.COUNT, default=8)
@options.option(
    "--forward", "TIME", 'Of a device with one microbatch: seconds, or "5 ms".', default="1"
)
@options.option("--backward", "TIME", "Of its backward (default: twice the forward).")
@options.option(
    "--weight-gradient", "TIME", "The part of a backward that is for the weights (default: half)."
)
@options.option("--transfer", "TIME", "Of a message between two devices.", default="0")
@options.option(
    "--chunks", "V", "Stages on a device, for interleaved schedules (default: 2).", options.COUNT
)
@options.option("--activations", "SIZE", "That a device keeps of one microbatch.", default="1 GB")
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
    pipeline = partopt.Uniform(**given | {"facts": options.parse_facts(given["facts"])})
    if name == _ALL:
        if output:
            raise PartoptError(
                "-o: writes the timeline of one schedule",
                "name it: partopt schedule 1f1b -o 1f1b.svg",
                code="unused-option",
            )
        tried = partopt.try_schedules(pipeline)
        options.deliver(tried, partial(_show, tried), None, force, as_json)
        return
    check_timeline(output, force, as_json)
    trial = partopt.try_schedule(name, pipeline, save_as=output)
    page = partial(_show, trial.document)
    options.deliver(trial.document, page, output, force, as_json, save=trial.save)


def _show(document: TrialDocument) -> None:
    from partopt.report import trials_text as trials

    say(trials.render(document))
