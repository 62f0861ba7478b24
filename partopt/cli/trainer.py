"""`partopt trainer`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import click
import msgspec

import partopt
from partopt.cli import options
from partopt.cli.next_commands import say_next
from partopt.cli.terminal import say
from partopt.units import format_bytes

_WORDS = {
    ("cuts", "anywhere"): "stages begin with any layer",
    ("cuts", "parts"): "stages begin with a block, the final norm or the head",
    ("cuts", "heads"): "stages begin with a block or the head",
    ("cuts", "blocks"): "stages begin with a block",
    ("recomputed", "all"): "all stages or none",
    ("recomputed", "first"): "all stages, or as many of their first blocks",
    ("recomputed", "each"): "each stage by itself",
}
_MANY = 12  # values of a choice that are not all shown


@click.group(no_args_is_help=False)
def command() -> None:
    """List trainers, and show what one can say of a plan and what its engine does.

    \b
    Example:
      partopt trainer list
      partopt trainer show megatron
    """


@command.command("list")
@options.json_option
def list_(as_json: bool) -> None:
    """List the trainers.

    With --json all that is known of each is printed in one document.

    \b
    Example:
      partopt trainer list
    """
    from partopt.report.text import Column, table_of

    if as_json:
        options.write_json({name: _document(trainer) for name, trainer in partopt.TRAINERS.items()})
        return
    table = table_of(
        partopt.TRAINERS.items(),
        [
            Column("NAME", lambda row: row[0], "text"),
            Column("TRIED", lambda row: row[1].tried, "text"),
            Column("EXPORT", lambda row: "yes" if row[1].write else "-"),
            Column("IMPORT", lambda row: "yes" if row[1].read else "-"),
        ],
    )
    say(table)
    say_next("list of trainers")


@command.command()
@click.argument("trainer")
@options.json_option
def show(trainer: str, as_json: bool) -> None:
    """Show what TRAINER can say of a plan, and what its engine does, each with its source.

    \b
    Example:
      partopt trainer show megatron
    """
    from partopt.report.text import label_lines

    entry = partopt.TRAINERS.lookup(trainer)
    if as_json:
        options.write_json(_document(entry))
        return
    facts = [
        ("trainer", f"{trainer}; {entry.summary}"),
        ("tried", f"{entry.tried}; in brackets are the files of it that say so"),
    ]
    for name, value in _facts(entry):
        source = entry.sources.get(name)
        facts.append((name, f"{value} ({source})" if source else value))
    say(label_lines(facts))
    say_next("trainer", trainer)


def _facts(trainer: partopt.Trainer) -> Iterator[tuple[str, str]]:
    """What a trainer can say, what its engine does, and how it runs a transformer, in words."""
    says = dataclasses.asdict(trainer.says)
    schedules = (trainer.schedules or {}).items()
    yield "schedules", ", ".join(f"{n} ({text})" if text else n for n, text in schedules) or "any"
    practice = {} if trainer.practice is None else _practice(trainer)
    engine = msgspec.structs.asdict(trainer.engine)
    for name, value in [*says.items(), *engine.items(), *practice.items()]:
        if value is msgspec.UNSET:
            continue
        if isinstance(value, dict):
            value = "; ".join(f"{degree} {what}" for degree, what in value.items())
        elif isinstance(value, list | tuple):
            value = ", ".join(value)
        elif isinstance(value, bool):
            value = "yes" if value else "no"
        elif name.endswith("_bytes") and value is not None:
            value = format_bytes(value)
        words = _WORDS.get((name, value), str(value or "none"))
        yield name, "as partopt counts it" if value is None else words


def _document(trainer: partopt.Trainer) -> dict[str, Any]:
    """All that is known of a trainer, but for the functions."""
    known = ("name", "summary", "tried", "schedules", "says", "engine", "practice")
    return {name: getattr(trainer, name) for name in known} | {"sources": {**trainer.sources}}


def _practice(trainer: partopt.Trainer) -> dict[str, Any]:
    """How a trainer runs a transformer by default: facts that have a source, and the choices."""
    facts = msgspec.structs.asdict(trainer.practice) if trainer.practice else {}
    told = {name: value for name, value in facts.items() if name in trainer.sources}
    for name, value in told.items():
        if isinstance(value, msgspec.Struct):
            parts = msgspec.structs.asdict(value).items()
            told[name] = "; ".join(f"{part} {_numbers(numbers)}" for part, numbers in parts)
        elif isinstance(value, tuple):
            told[name] = _numbers(value)
    choices = {}
    for name, known in trainer.choices.items():
        words = [*known]  # of many equal steps the first and the last
        choices[name] = ", ".join(words if len(words) < _MANY else [*words[:2], "...", words[-1]])
    choices |= {"recipe": ", ".join(trainer.recipes)} if trainer.recipes else {}
    return told | ({"choices": choices} if choices else {})


def _numbers(value: Any) -> str:
    return " and ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
