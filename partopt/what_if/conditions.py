"""A plan under other conditions: schedule, batch, warm-up, network, as a person states them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from partopt import documents, units
from partopt.cost.pricing import under
from partopt.documents.plan import Plan
from partopt.documents.stage import Reserve
from partopt.documents.topology import FASTEST, LONGEST_S, Level, Topology
from partopt.errors import PartoptError, invalid, unknown
from partopt.options import check_count, parse_bytes, with_facts
from partopt.schedules import SCHEDULES, schedule
from partopt.schedules.placement import LOOPED, Placement, chunks_of
from partopt.simulator.execution import first_microbatches

_PLANNED = {"messages", "recompute", "shard", "reserve"}  # facts that stages and limits rest on
_MOST_WARMUP = 10_000_000  # forwards: more than are simulated


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What differs from the plan; None, or a level left out, keeps what the plan says.

    `schedule` is a name, or a file with the user's order as torch's compute-only CSV;
    `microbatches` those of an iteration, or of an asynchronous schedule that pass through; `warmup`
    the forwards of every stage before its first backward, or "+1" for one more than planned.
    `bandwidth`, `latency` and `links` are by the names of levels: "25 Gb/s" or bytes/s, "50 us" or
    seconds, a number. `memory` is the limit of a device, bytes or "40 GB". `facts` are of the
    engine, as `partopt.options.with_facts` takes them.
    """

    schedule: str | None = None
    microbatches: int | None = None
    warmup: str | Sequence[int] | None = None
    bandwidth: Mapping[str, str | float] = field(default_factory=dict)
    latency: Mapping[str, str | float] = field(default_factory=dict)
    links: Mapping[str, int] = field(default_factory=dict)
    memory: str | int | None = None
    facts: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.microbatches is not None:
            check_count("microbatches", self.microbatches)
        for name in _PLANNED & self.facts.keys():
            what = "a plan rests on it" if name != "reserve" else "give the rest as `memory`"
            raise invalid(name, self.facts[name], what, "re-run `solve` with it")

    @property
    def own_order(self) -> Path | None:
        """The file with the user's order; None where the schedule is a named one."""
        given = self.schedule
        if given is None or given in SCHEDULES:
            return None
        return Path(given) if given.endswith(".csv") or documents.is_file(given) else None


def apply_conditions(plan: Plan, conditions: Conditions, most_actions: int) -> Plan:
    """The plan under a named schedule, a network, a batch and a warm-up.

    The stages stay as they are. Raises PartoptError where the conditions contradict one another,
    the plan cannot run that way, or more than `most_actions` actions would be simulated.
    """
    name = conditions.schedule or plan.schedule
    entry = schedule(name)
    M = None if entry.asynchronous else conditions.microbatches or plan.microbatches
    if M is None and not entry.asynchronous:
        raise PartoptError(
            f"`schedule={name}`: needs a number of microbatches",
            "add `microbatches=64`",
            code="microbatches-needed",
            option="schedule",
        )
    engine = with_facts(plan.engine, conditions.facts)
    if entry.asynchronous and engine.buffers == "all":
        raise PartoptError(
            f"`schedule={name}`: the plan has `buffers=all`, which is not for it",
            f"plan again with `schedule={name}`",
            code="conflicting-options",
            option="schedule",
        )
    topology = change_network(plan.topology, conditions)
    check_layout(plan, name)
    count = M or conditions.microbatches
    check_size(plan, name, count, most_actions)
    warmups = _warmups(plan, name, M, conditions.warmup)
    # a limit that is given is what the model may take
    reserve = plan.reserve if conditions.memory is None else Reserve()
    same = (name, M) == (plan.schedule, plan.microbatches)
    if warmups is None and same and (topology, engine) == (plan.topology, plan.engine):
        return replace(plan, reserve=reserve)
    if warmups is None and same and entry.takes_warmup:
        # the plan's, which may be deeper than the formula's
        warmups = [stage.warmup for stage in plan.stages]
    try:
        changed = under(plan, name, M, topology, warmups, engine=engine, reserve=reserve)
    except PartoptError as error:
        raise error.at(name) from None
    if conditions.warmup is not None:  # deeper ones take longer to settle
        check_size(changed, name, count, most_actions)
    return changed


def change_network(topology: Topology, conditions: Conditions) -> Topology:
    """The topology with the levels and the device memory that the conditions give.

    They speak of the cluster's levels, also where its devices are groups.
    """
    names = [level.name for level in topology.levels]
    fields: dict[str, dict[str, Any]] = {name: {} for name in names}
    for option, (attribute, parse) in _OF_LEVELS.items():
        for level, given in (getattr(conditions, option) or {}).items():
            if level not in names:
                raise unknown(
                    f"`{option}={level}`: the plan's cluster has no such level",
                    level,
                    names,
                    code="unknown-level",
                    option=option,
                )
            try:
                fields[level][attribute] = parse(given)
            except PartoptError as error:
                raise error.at(f"`{option}={level}`") from None
    memory = conditions.memory
    limit = topology.device.memory_bytes if memory is None else parse_bytes("memory", memory)
    cluster = topology.cluster
    levels: list[Level] = [replace(level, **fields.get(level.name, {})) for level in cluster.levels]
    device = replace(topology.device, memory_bytes=limit)
    changed = replace(cluster, device=device, levels=levels)
    return changed.in_groups(topology.group_ranks, topology.group_copies)


def _bandwidth(given: str | float) -> float:
    rate = units.parse_bandwidth(given) if isinstance(given, str) else given
    if not 0 < rate <= FASTEST:
        why = "bandwidth is too large" if rate > 0 else "bandwidth must be positive"
        hint = "write what a link of that level achieves in one direction"
        raise PartoptError(why, hint, code="invalid-option")
    return float(rate)


def _latency(given: str | float) -> float:
    seconds = units.parse_seconds(given) if isinstance(given, str) else given
    if not 0 <= seconds <= LONGEST_S:
        why = f"latency must be 0 to {LONGEST_S:,.0f} s"
        raise PartoptError(why, 'write "5 us"', code="invalid-option")
    return float(seconds)


def _links(given: object) -> int:
    text = "" if isinstance(given, bool) else str(given)
    if not re.fullmatch("[0-9]{1,4}", text) or not 1 <= int(text) <= 1024:
        hint = "write a whole number from 1 to 1024"
        raise PartoptError(f"invalid link count '{given}'", hint, code="invalid-option")
    return int(text)


# options by level: the field of a level, and what reads it
_OF_LEVELS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "bandwidth": ("bandwidth_bytes_per_s", _bandwidth),
    "latency": ("latency_s", _latency),
    "links": ("links", _links),
}


def check_layout(plan: Plan, name: str) -> None:
    """Raise PartoptError unless the stages lie on the devices as the schedule `name` needs them."""
    entry, held = schedule(name), len(next(iter(plan.stages_by_rank().values())))
    placement = Placement([stage.ranks for stage in plan.stages], plan.topology.devices, 1)
    try:
        if entry.shape == LOOPED and name != plan.schedule and held == 1:
            raise PartoptError(
                "it is for several stages on each device, and the plan has one", code="wrong-layout"
            )
        chunks_of(placement, entry.shape, entry.uneven)
    except PartoptError as error:
        unequal = not entry.uneven and len({stage.replicas for stage in plan.stages}) > 1
        chunks = " `chunks=2`" if entry.shape == LOOPED else ""
        hint = error.hint if unequal else f"plan again with `schedule={name}`{chunks}"
        raise PartoptError(
            f"`schedule={name}`: {error.message}", hint, code=error.code, option="schedule"
        ) from None


def check_size(plan: Plan, name: str, microbatches: int | None, most_actions: int) -> None:
    """Raise PartoptError where the simulation would have more than `most_actions` actions.

    `microbatches` None: as many as it takes to settle.
    """
    actions = len(plan.stages) * (3 if name in SCHEDULES and SCHEDULES[name].split else 2)
    count = microbatches or first_microbatches(plan)
    if count * actions > most_actions:
        why = "" if microbatches else " that it takes to settle"
        raise PartoptError(
            f"{count:,} microbatches{why} in {len(plan.stages):,} stages are {count * actions:,} "
            f"actions, more than {most_actions:,}",
            f"`microbatches={max(1, most_actions // actions)}` or fewer",
            code="too-many-actions",
        )


def _warmups(
    plan: Plan, name: str, M: int | None, given: str | Sequence[int] | None
) -> list[int] | None:
    """The warm-up of every stage: fewer forwards than microbatches that a replica of it gets."""
    if given is None:
        return None
    if not schedule(name).takes_warmup:
        able = " or ".join(
            f"`schedule={other}`"
            for other, entry in SCHEDULES.items()
            if entry.takes_warmup and entry.asynchronous == schedule(name).asynchronous
        )
        raise PartoptError(
            f"`warmup`: {name} has a warm-up of its own",
            f"drop `warmup`, or choose {able}",
            code="conflicting-options",
            option="warmup",
        )
    if not isinstance(given, str):
        found, text = list(given), ",".join(map(str, given))
        if not all(type(count) is int for count in found):
            raise invalid("warmup", found, "must be whole numbers", "give one for each stage")
    elif re.fullmatch(r"\+[0-9]{1,9}", given):  # more than planned
        found, text = [stage.warmup + int(given) for stage in plan.stages], given
    else:
        hint = 'give a number for each stage, or "+1"'
        raise invalid("warmup", given, "not a number for each stage", hint)
    if len(found) != len(plan.stages):
        why = f"{len(found)} numbers for {len(plan.stages)} stages"
        raise invalid("warmup", text, why, "give one for each stage")
    for s, (count, stage) in enumerate(zip(found, plan.stages, strict=True)):
        most = _MOST_WARMUP if M is None else -(-M // stage.replicas) - 1
        if not 0 <= count <= most:
            allowed = "" if M is None else f": each replica gets {most + 1} microbatches"
            why, hint = f"{count} forwards first on stage {s}", f"use 0 to {most}{allowed}"
            raise invalid("warmup", text, why, hint)
    return found
