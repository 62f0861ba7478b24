"""The options with which `partopt simulate` puts a plan under other circumstances, and the plan
under them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from partopt import units
from partopt.cli import options
from partopt.errors import PartoptError, did_you_mean

if TYPE_CHECKING:
    from partopt.documents.plan import Plan
    from partopt.documents.topology import Topology

Value = TypeVar("Value")

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
    click.option(
        "--memory",
        metavar="SIZE",
        help='Limit of a device, such as "40 GB", instead of the topology\'s.',
    ),
    click.option(
        "--comm",
        type=click.Choice(["overlap", "serial"]),
        help="Whether devices compute while they send and receive.",
    ),
    click.option(
        "--allreduce",
        type=click.Choice(["overlap", "blocking"]),
        help="Whether asynchronous stages wait for their gradients.",
    ),
]


def what_if_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that change what a plan is simulated under."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def own_order(schedule: str | None) -> bool:
    """Whether --schedule names a file and not a schedule."""
    from partopt.schedules import SCHEDULES

    return (
        schedule is not None
        and schedule not in SCHEDULES
        and (schedule.endswith(".csv") or Path(schedule).is_file())
    )


def changed(plan: Plan, given: dict[str, Any], most: int) -> Plan:
    """The plan under a schedule, network, number of microbatches and warm-up that the options give;
    itself where they give none.

    Raises PartoptError where they contradict each other, the plan cannot run that way, or more than
    `most` actions would be simulated.
    """
    from partopt.schedules import schedule
    from partopt.simulator.restate import restated

    name = given["schedule"] or plan.schedule
    asynchronous = schedule(name).asynchronous
    if given["allreduce"] and not asynchronous:
        raise PartoptError(
            f"--allreduce: {name} exchanges gradients when its last backward is done",
            "drop --allreduce",
        )
    topology, M = (
        network(plan.topology, given),
        None if asynchronous else given["microbatches"] or plan.microbatches,
    )
    if M is None and not asynchronous:
        raise PartoptError(
            f"--schedule {name}: needs a number of microbatches", "add --microbatches 64"
        )
    check_layout(plan, name)
    check_size(plan, name, M or given["microbatches"], most)
    warmups = _warmups(plan, name, M, given["warmup"])
    fields = {
        "comm": given["comm"] or plan.comm,
        "allreduce": (given["allreduce"] or plan.allreduce) if asynchronous else "overlap",
    }
    if (name, M, topology, warmups) == (plan.schedule, plan.microbatches, plan.topology, None):
        from msgspec.structs import replace

        return replace(plan, **fields)
    same = (name, M) == (plan.schedule, plan.microbatches)
    if warmups is None and same and schedule(name).takes_warmup:
        # the plan's own, which may be deeper than the formula's
        warmups = [stage.warmup for stage in plan.stages]
    try:
        return restated(plan, name, M, topology, warmups, **fields)
    except PartoptError as error:
        raise error.at(name) from None


def network(topology: Topology, given: dict[str, Any]) -> Topology:
    """The topology with what the options say of its levels and of the memory of its devices.

    PartoptError for levels that it has not.
    """
    from msgspec.structs import replace

    names = [level.name for level in topology.levels]
    fields: dict[str, dict[str, Any]] = {name: {} for name in names}
    for name, rate in _by_level(
        "--bandwidth", given["bandwidth"], names, units.parse_bandwidth
    ).items():
        if rate == 0:
            raise PartoptError(
                f"--bandwidth {name}: is zero",
                "write what a link of that level achieves in one direction",
            )
        fields[name]["bandwidth_bytes_per_s"] = rate
    for name, seconds in _by_level(
        "--latency", given["latency"], names, units.parse_seconds
    ).items():
        fields[name]["latency_s"] = seconds
    for name, count in _by_level("--links", given["links"], names, _links).items():
        fields[name]["links"] = count
    device = replace(topology.device, memory_bytes=options.memory_limit(given["memory"], topology))
    return replace(
        topology,
        device=device,
        levels=[replace(level, **fields[level.name]) for level in topology.levels],
    )


def _by_level(
    flag: str, texts: Iterable[str], names: list[str], parse: Callable[[str], Value]
) -> dict[str, Value]:
    """The values of `LEVEL=VALUE` by level.

    PartoptError for other forms, other levels, and a level that comes twice.
    """
    found: dict[str, Value] = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign:
            raise PartoptError(
                f'{flag} "{text}": of which level?',
                f'write {flag} {names[-1]}="{text}"; the levels are {", ".join(names)}',
            )
        if name not in names:
            raise PartoptError(
                f"{flag} {name}: the plan's cluster has no such level", did_you_mean(name, names)
            )
        if name in found:
            raise PartoptError(f"{flag} {name}: given twice", "give each level once")
        try:
            found[name] = parse(value)
        except PartoptError as error:
            raise error.at(f"{flag} {name}") from None
    return found


def _links(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise PartoptError(f"'{text}' is no number of links", "write a whole number, 1 or more")
    return int(text)


def check_layout(plan: Plan, name: str) -> None:
    """PartoptError where the stages of the plan do not lie on the devices as the schedule `name`
    needs them.
    """
    from partopt.schedules import schedule
    from partopt.schedules.layout import LOOPED, Layout, chunks_of

    entry, held = schedule(name), len(next(iter(plan.stages_by_rank().values())))
    try:
        if entry.shape == LOOPED and name != plan.schedule and held == 1:
            raise PartoptError("several stages on each device are what it is for; the plan has one")
        chunks_of(
            Layout([stage.ranks for stage in plan.stages], plan.topology.devices, 1),
            entry.shape,
            entry.uneven,
        )
    except PartoptError as error:
        unequal = not entry.uneven and len({stage.replicas for stage in plan.stages}) > 1
        chunks = " --chunks 2" if entry.shape == LOOPED else ""
        hint = (
            error.hint
            if unequal
            else f"plan for it: partopt plan PROFILE --topology FILE --schedule {name}{chunks}"
        )
        raise PartoptError(f"--schedule {name}: {error.message}", hint) from None


def check_size(plan: Plan, name: str, microbatches: int | None, most: int) -> None:
    """PartoptError where the simulation would be of more actions than `most`; `microbatches` None:
    as many as it takes to settle.
    """
    from partopt.schedules import SCHEDULES
    from partopt.simulator.steady import microbatches_to_settle

    each = len(plan.stages) * (3 if name in SCHEDULES and SCHEDULES[name].split else 2)
    first, replicas = plan.stages[0], [stage.replicas for stage in plan.stages]
    count = microbatches or microbatches_to_settle((first.warmup + 1) * first.replicas, replicas)
    if count * each > most:
        to_settle = "" if microbatches else " that it takes to settle"
        raise PartoptError(
            (
                f"{count:,} microbatches{to_settle} in {len(plan.stages):,} stages are "
                f"{count * each:,} actions, more than {most:,}"
            ),
            f"--microbatches {max(1, most // each)} or fewer",
        )


def _warmups(plan: Plan, name: str, M: int | None, text: str | None) -> list[int] | None:
    """The warm-up that --warmup gives, a number for each stage and fewer than the microbatches that
    each of its replicas gets.
    """
    if text is None:
        return None
    from partopt.schedules import SCHEDULES

    if not SCHEDULES[name].takes_warmup:
        able = [other for other, entry in SCHEDULES.items() if entry.takes_warmup]
        raise PartoptError(
            f"--warmup: {name} has a warm-up of its own",
            f"drop --warmup, or choose --schedule {' or '.join(able)}",
        )
    more = text.startswith("+") and text[1:].isdecimal()
    found = (
        [stage.warmup + int(text) for stage in plan.stages]
        if more
        else options.integers(text, "--warmup")
    )
    if len(found) != len(plan.stages):
        raise PartoptError(
            f"--warmup {text}: {len(found)} numbers for {len(plan.stages)} stages",
            "give one for each stage",
        )
    for s, (count, stage) in enumerate(zip(found, plan.stages, strict=True)):
        most = None if M is None else -(-M // stage.replicas) - 1
        if count < 0 or (most is not None and count > most):
            allowed = (
                "0 or more"
                if most is None
                else f"0 to {most}, for a replica gets {most + 1} microbatches"
            )
            raise PartoptError(
                f"--warmup {text}: {count} forwards first on stage {s}", f"give it {allowed}"
            )
    return found
