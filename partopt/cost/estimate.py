"""What the formulas say of a plan: how busy its devices and ports are, and its seconds.

An estimate, which hardly exceeds what the simulator finds: that says how long a plan takes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import accumulate, pairwise

from partopt.cost.collectives import allreduce_over, exposed
from partopt.cost.memory import recomputes_apart
from partopt.cost.messages import crossing, cut_ports, hold_s, port_size
from partopt.cost.sharding import early_bytes, exchange_by, exchange_topology
from partopt.documents.plan import Estimate, Plan
from partopt.documents.stage import Load, Stage
from partopt.schedules import schedule
from partopt.schedules.placement import STRAIGHT

# C        compute seconds of a stage for one microbatch on one replica
# r        replicas of a stage
# M        microbatches of an iteration; n of them on the replica with the most
# port     of level k and a member of it: of all members where the level is a bus

Port = tuple[int, int]
Ports = dict[Port, float]  # seconds per microbatch in which a port is busy


def estimate_of(plan: Plan, one_device_s: float) -> Estimate:
    """What the formulas say of a plan; one device takes `one_device_s` for a microbatch.

    A synchronous schedule exchanges gradients once an iteration, so its all-reduces pace nothing.
    """
    M, largest = plan.microbatches, dict[str, Load]()
    for load in _loads(plan):
        if load.seconds > (largest[load.what].seconds if load.what in largest else 0.0):
            largest[load.what] = load
    pacing = [load for load in largest.values() if M is None or load.what != "all-reduce"]
    binds = max(pacing, key=lambda load: load.seconds, default=Load("compute", 0, 0.0))
    iteration_s = None if M is None else _iteration_s(plan, largest)
    in_turn = schedule(plan.schedule).one_at_a_time  # one thing is busy at a time
    return Estimate(
        period_s=binds.seconds if M is None or iteration_s is None else iteration_s / M,
        iteration_s=iteration_s,
        one_device_s=one_device_s,
        bound_by="every stage in turn" if in_turn else str(binds),
        loads=[] if in_turn else list(largest.values()),
    )


def _loads(plan: Plan) -> Iterator[Load]:
    """Seconds per microbatch in which something is busy, by stages and cuts.

    Devices compute, and handle messages or wait for them; all-reduces and tied exchanges take place
    once for r microbatches, one on every replica, or once an iteration. Ports carry what crosses
    the cuts; the busiest counts with all that goes through it, asynchronous all-reduces too.
    """
    M, stages = plan.microbatches, plan.stages
    on_device = {s: held for held in plan.devices_by_stages() for s in held}
    for s, stage in enumerate(stages):
        computing = sum(stages[t].compute_s / stages[t].replicas for t in on_device[s])
        exchanging = stage.gradients_s / stage.replicas
        handling = _handling_s(plan, s) / stage.replicas
        yield Load("compute and transfers" if handling else "compute", s, computing + handling)
        left = exchanging if M is None else _exchange_left_s(stage, plan) / M
        yield Load("all-reduce", s, left)
        if M is None and plan.engine.allreduce == "blocking":
            yield Load("compute and all-reduce", s, computing + exchanging)
    users = [_cut_s(before, after, plan) for before, after in pairwise(stages)]
    for c, ports in enumerate(users, start=1):
        yield Load("cut", c, max(ports.values(), default=0.0))
    users += [_ring_s(stage, plan) for stage in stages if M is None]
    together = _sum(use for ports in users for use in ports.items())
    busiest = max(together, key=lambda port: together[port], default=None)
    if busiest and sum(busiest in ports for ports in users) > 1:
        k, member = busiest
        size = port_size(k, plan.topology)
        behind = [any(rank // size == member for rank in stage.ranks) for stage in stages]
        yield Load("ports", behind.index(True), together[busiest])


def _cut_s(before: Stage, after: Stage, plan: Plan) -> Ports:
    """Seconds per microbatch in which the messages between two stages keep ports busy."""
    size_bytes = (after.input_bytes + after.gradient_bytes) / 2
    used = cut_ports(before.ranks, after.ranks, size_bytes, plan.topology, plan.microbatches)
    return _sum(
        ((k, member), busy_s)
        for k, members, seconds in used
        for member, busy_s in zip(members.tolist(), seconds.tolist(), strict=True)
    )


def _sum(uses: Iterable[tuple[Port, float]]) -> Ports:
    """Ports with all that keeps them busy."""
    found: Ports = {}
    for port, seconds in uses:
        found[port] = found.get(port, 0.0) + seconds
    return found


def _ring_s(stage: Stage, plan: Plan) -> Ports:
    """Seconds per microbatch in which the all-reduce of a stage keeps ports busy."""
    found: Ports = {}
    if stage.replicas == 1 or not stage.trained_bytes:
        return found
    topology = exchange_topology(plan.topology, exchange_by(plan))
    reduced = allreduce_over(stage.ranks, topology)
    for k, slope in reduced.slopes.items():
        inner, outer = topology.group_size(k - 1), topology.group_size(k)
        members = {rank // inner for rank in stage.ranks}
        inside = Counter(member * inner // outer for member in members)
        seconds = slope * stage.trained_bytes + reduced.latency_s + stage.tied_exchange_s
        for member in members:
            if inside[member * inner // outer] > 1:
                found[k, member * inner // port_size(k, topology)] = seconds / stage.replicas
    return found


def _handling_s(plan: Plan, s: int) -> float:
    """Seconds for which the messages of a microbatch keep a device of stage s from computing."""
    serial, levels = plan.waits, plan.topology.levels
    if not serial and not any(level.message_s or level.copy_byte_s for level in levels):
        return 0.0
    seconds = 0.0
    for c in (s, s + 1):
        if 0 < c < len(plan.stages):
            before, stage = plan.stages[c - 1 : c + 1]
            *_, parted = crossing(before.ranks, stage.ranks, plan.topology, plan.microbatches)
            for k, n in Counter(parted[parted > 0].tolist()).items():
                share, level = n / len(parted), levels[k - 1]
                seconds += share * hold_s(stage.input_bytes, stage.messages, level, serial)
                seconds += share * hold_s(stage.gradient_bytes, stage.back_messages, level, serial)
    return seconds


def _exchange_left_s(stage: Stage, plan: Plan) -> float:
    """Seconds of a stage's exchange of gradients that are left when its last backward has ended."""
    last = stage.backward_weight_s if schedule(plan.schedule).split else stage.backward_s
    early = plan.engine.allreduce == "overlap"
    bucket = early_bytes(plan.engine.bucket_bytes, exchange_by(plan), early)
    left = exposed(stage.allreduce_s, stage.trained_bytes, last, bucket)
    return float(left) + stage.tied_exchange_s


def _iteration_s(plan: Plan, largest: dict[str, Load]) -> float:
    """Seconds of an iteration of a synchronous schedule, of the device or port that takes longest.

    A device begins when its first microbatch has come, works through its share, and updates its
    weights, while its last gradient passes through the stages before. A port is busy in between.
    """
    entry, M, stages = schedule(plan.schedule), plan.microbatches, plan.stages
    assert M is not None
    whole = entry.shape == STRAIGHT and not entry.split
    backs = [  # what the gradient waits for
        (stage.backward_s if recomputes_apart(plan) else stage.compute_s - stage.forward_s)
        - (stage.backward_weight_s if entry.split else 0.0)
        for stage in stages
    ]
    heads = [0.0, *accumulate(stage.forward_s for stage in stages)]
    tails = [0.0, *accumulate(backs)]
    ends = []
    for held in plan.devices_by_stages():
        work, end = 0.0, math.inf
        for s in held:
            stage, n = stages[s], -(-M // stages[s].replicas)
            # the first message that comes and the last that leaves keep nothing waiting
            work += n * stage.compute_s + (n - 1) * _handling_s(plan, s)
            end = min(end, _exchange_left_s(stage, plan) + stage.optimizer_s)
            trip = heads[-1] - heads[s] + tails[-1] - tails[s]
            if entry.one_at_a_time:
                work = n * trip
            if whole:  # behind the last forward or before the first backward is a round trip
                work = max(work, trip + (n - 1) * max(stage.forward_s, backs[s]))
                end = max(end, tails[s])
        ends.append(min(heads[s] for s in held) + work + end)
    ends += [
        heads[load.place] + M * load.seconds + tails[load.place]
        for load in largest.values()
        if load.what in ("cut", "ports")
    ]
    return max(ends)


def idle_share(plan: Plan, period_s: float) -> float:
    """The share of the time of its devices that a plan leaves unused, at so many s a microbatch."""
    busy = sum(stage.compute_s for stage in plan.stages)
    return max(0.0, 1.0 - busy / (sum(plan.devices_by_stages().values()) * period_s))


def stage_variance(plan: Plan) -> float:
    """Variance of the stages' seconds per microbatch, C / r, in s^2.

    GPipe's heuristic minimises it.
    """
    costs = [stage.compute_s / stage.replicas for stage in plan.stages]
    mean = sum(costs) / len(costs)
    return sum((cost - mean) ** 2 for cost in costs) / len(costs)
