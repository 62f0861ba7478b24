"""The options of `partopt profile`: which go together, the sizes and the file."""

from __future__ import annotations

import re
from typing import Any

import click
from click.core import ParameterSource

from partopt import documents
from partopt.cli import words
from partopt.errors import PartoptError

ESTIMATING = ("calibrate", "group", "topology")
MEASURING = ("device", "compile", "steps", "resume")


def check_estimate(options: dict[str, Any]) -> None:
    """Refuse options that say how to measure beside --estimate, and its own without it."""
    if options["estimate"] is None:
        for name in ESTIMATING:
            if options[name] is not None:
                raise PartoptError(
                    f"--{name}: goes with --estimate",
                    "a measured profile has the times of the device itself, and torchrun starts "
                    "the ranks of a group",
                    code="unused-option",
                )
        return
    for name in MEASURING:
        if is_given(name):
            raise PartoptError(
                f"{words.FLAGS[name]}: goes with measuring, and --estimate measures nothing",
                "leave one of the two out",
                code="unused-option",
            )


def check_from_run(run: str | None, onto: str | None) -> tuple[str, str]:
    """Both; refused without each other, and beside what says how to measure."""
    if run is None:
        raise PartoptError(
            "--onto: goes with --from-run", "leave it out to measure MODEL", code="unused-option"
        )
    if onto is None:
        raise PartoptError(
            "partopt profile --from-run: a run has no bytes of parameters and activations",
            "say whose they are: --onto PROFILE, that of the plan that ran",
            code="missing-option",
            option="onto",
        )
    for parameter in click.get_current_context().command.params:
        own = parameter.name in ("from_run", "onto", "output", "force")
        if parameter.name and is_given(parameter.name) and not own:
            said = parameter.opts[0] if isinstance(parameter, click.Option) else "MODEL"
            raise PartoptError(
                f"{said}: goes with measuring, and --from-run measures nothing",
                "leave one of the two out",
                code="unused-option",
            )
    return run, onto


def is_given(name: str) -> bool:
    """Whether an option or argument is on the command line."""
    source = click.get_current_context().get_parameter_source(name)
    return source is ParameterSource.COMMANDLINE


def choose_output(output: str | None, resume: str | None, force: bool) -> tuple[str, bool]:
    """The file to write, and whether it may be replaced: the one that is gone on with may."""
    output = output or resume
    if output is None:
        raise click.UsageError("Missing option '-o' / '--output'.")
    force = force or output == resume
    documents.check_writable(output, force, [".json"])
    return output, force


def parse_sizes(text: str) -> list[int | str]:
    """The sizes of a list such as `1,2,4`; `measure` refuses what is not a whole number."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    return [int(part) if re.fullmatch("-?[0-9]{1,18}", part) else part for part in parts]


def parse_repeats(repeats: tuple[str, ...], calibrate: float | None) -> dict[str, int]:
    """The number of blocks of each list, from `LIST=N`."""
    if repeats and calibrate is not None:
        raise PartoptError(
            "--calibrate: the step of a whole model, and --repeat has a few of its blocks",
            "leave one of the two out",
            code="conflicting-options",
        )
    counts: dict[str, int] = {}
    for each in repeats:
        blocks, _, count = each.rpartition("=")
        if not (blocks and count.isdecimal()):
            raise PartoptError(
                f"--repeat {each}: not of the form LIST=N",
                "write --repeat transformer.h=96",
                code="invalid-option",
                option="repeat",
                value=each,
            )
        counts[blocks] = int(count)
    return counts
