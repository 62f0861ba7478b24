"""The options with which `partopt simulate` puts a plan under other conditions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import click

from partopt.cli import options
from partopt.errors import PartoptError

_OPTIONS = [
    click.option(
        "--schedule",
        metavar="NAME|FILE.csv",
        help="Another schedule, or your own order as torch's compute-only CSV.",
    ),
    click.option(
        "--microbatches",
        type=click.IntRange(min=1),
        metavar="M",
        help="In an iteration; asynchronous: that pass through.",
    ),
    click.option(
        "--warmup",
        metavar="3,2,1,0|+N",
        help="Forwards of each stage before its first backward, or N more than planned.",
    ),
    click.option(
        "--bandwidth",
        multiple=True,
        metavar="LEVEL=RATE",
        help='Of a level, such as cluster="25 Gb/s" (repeat).',
    ),
    click.option(
        "--latency",
        multiple=True,
        metavar="LEVEL=TIME",
        help='Of a level, such as cluster="50 us" (repeat).',
    ),
    click.option(
        "--links",
        multiple=True,
        metavar="LEVEL=N",
        help="Parallel links of each member of a level (repeat).",
    ),
    options.memory_option,
    options.with_option,
    click.option(
        "--jitter",
        metavar="5%",
        help="Let every action's time vary by chance: what the plan then loses.",
    ),
    click.option(
        "--slow",
        multiple=True,
        metavar="RANK=FACTOR",
        help="A rank that takes longer, such as 3=1.2 (repeat).",
    ),
    click.option(
        "--seed", type=click.IntRange(min=0), metavar="N", help="With --jitter (default: 0)."
    ),
    click.option(
        "--draws", type=click.IntRange(min=1), metavar="N", help="With --jitter (default: 50)."
    ),
]


def what_if_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that change what a plan is simulated under."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def parse_conditions(given: dict[str, Any], levels: list[str]) -> dict[str, Any]:
    """What `partopt.simulate` takes, from the values of `what_if_options`.

    `levels` are those of the plan's cluster, for hints.
    """
    conditions = dict(given)
    for option in ("bandwidth", "latency", "links"):
        conditions[option] = _by_level(f"--{option}", given[option], levels)
    conditions["facts"] = options.parse_facts(given["facts"])
    conditions["slow"] = _by_rank(given["slow"])
    warmup = given["warmup"]
    if warmup is not None and not (warmup.startswith("+") and warmup[1:].isdecimal()):
        conditions["warmup"] = options.integers(warmup, "--warmup")
    return conditions


def _by_rank(texts: Iterable[str]) -> dict[int, float]:
    """The factors of `RANK=FACTOR` by rank."""
    found: dict[int, float] = {}
    for text in texts:
        rank, _, factor = text.partition("=")
        try:
            number, value = int(rank), float(factor)
        except ValueError:
            raise PartoptError(
                f'--slow "{text}": not a rank and a factor', "write --slow 3=1.2", code="usage"
            ) from None
        if number in found:
            raise PartoptError(f"--slow {number}: given twice", "give each rank once", code="usage")
        found[number] = value
    return found


def _by_level(flag: str, texts: Iterable[str], levels: list[str]) -> dict[str, str]:
    """The values of `LEVEL=VALUE` by level."""
    found: dict[str, str] = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign:
            raise PartoptError(
                f'{flag} "{text}": of which level?',
                f'write {flag} {levels[-1]}="{text}"; the levels are {", ".join(levels)}',
                code="usage",
            )
        if name in found:
            raise PartoptError(f"{flag} {name}: given twice", "give each level once", code="usage")
        found[name] = value
    return found
