"""The innermost pipelines of a nested plan, which are made of stages."""

from __future__ import annotations

from partopt.cost.collectives import choose, share
from partopt.cost.compiled import compiled
from partopt.cost.deadline import fewest_in_time, ports_in_time, time_left_s, waits_in_time
from partopt.cost.kernels import last_exchange_s, most_in_flight, stage_cost, step_s, varies
from partopt.cost.links import hold_s, run_byte_s
from partopt.cost.tolerances import DEVICE, EPSILON
from partopt.planners.optimal.nested.entries import Entry, crossed_too, insert_undominated

# [i, c)    a stage; [i, end) a pipeline inside one component
# Q         copies of the pipeline, of all levels above it
# kind      level of the cut before a pipeline; 0 where there is none


@compiled()
def fill_innermost(layers, caps, levels, nest):  # type: ignore[no-untyped-def]
    """Fill the entries of the innermost pipeline, which is made of stages.

    For each start, the end that the start after it has is tried first.
    """
    frame, size = nest.frames[0], levels.size[0]
    last = hint = high = frame.last
    for i in range(last - 1, frame.earliest_start - 1, -1):
        begins = i <= frame.latest_start
        floor, room = _members_between(caps, nest, size, i)
        if floor > room or not _set_bearable(layers, caps, levels, nest, i, begins):
            continue
        while high > i + 1 and _needed(caps, nest, i, high) > size + DEVICE:
            high -= 1
        nest.work[0].left -= 1 + (high - i) // 16
        if nest.work[0].left <= 0:
            return
        if i < hint <= high:
            _join(layers, caps, levels, nest, i, hint, room)
        most = _most_members(nest, i, size)
        for c in range(high, i, -1):
            if most < floor + 1 and not caps.stages:
                break
            if nest.counts[0, c, 1] == 0:
                continue
            least = nest.rows[0, c, 1, 0].members + max(1.0, _needed(caps, nest, i, c) - DEVICE)
            if caps.stages or least < most - DEVICE:
                _join(layers, caps, levels, nest, i, c, room)
                now = _most_members(nest, i, size)
                if now < most:
                    most, hint = now, c


@compiled()
def _needed(caps, nest, i, j):  # type: ignore[no-untyped-def]
    """The members that the layers [i, j) take by their compute, at the least."""
    Q = nest.frames[0].outside
    return caps.needs[j] / Q - caps.needs[i] / Q


@compiled(inline="always")
def _members_between(caps, nest, size, i):  # type: ignore[no-untyped-def]
    """The fewest members from cut i to the end of the pipeline, and the most left for them.

    The layers behind i take the first at the least; the layers before i leave the second.
    """
    frame = nest.frames[0]
    last, start, Q = frame.last, frame.latest_start, frame.outside
    behind = nest.rows[0, last, 1, 0].used
    after = caps.min_devices_after[i]
    floor = max(_needed(caps, nest, i, last), (after - behind) / Q, 1.0) - DEVICE
    room = float(size)
    if i > start:
        takes = max(
            _needed(caps, nest, start, i) - DEVICE, (caps.floor[start] - after) / Q - DEVICE
        )
        room -= max(0.0, takes)
    return floor, room


@compiled()
def _set_bearable(layers, caps, levels, nest, i, begins):  # type: ignore[no-untyped-def]
    """Set which kinds of entry cut i may have.

    Those whose stage behind it, with most replicas, bears the cut. Returns whether there are any.
    """
    frames, bearable = nest.frames, nest.bearable
    bearable[:] = False
    bearable[0] = i == 0
    for kind in range(1, len(bearable) if i > 0 else 1):
        if kind == 1 or begins:
            spread = (
                frames[kind - 1].outside
                if levels.bus[kind - 1]
                else _components(nest, kind - 1, levels.size[0])
            )
            # seconds that the side of the cut takes for half of the microbatches and more
            least = layers.traffic[i] / (levels.side[kind - 1] * spread) * max(1.0, layers.M / 2)
            bearable[kind] = least <= caps.T * (1 + EPSILON)
    return bearable.any()


@compiled()
def _components(nest, k, r):  # type: ignore[no-untyped-def]
    """Level-k components that a stage with r replicas in its innermost component is on."""
    return nest.frames[k - 1].outside if k > 0 else nest.frames[0].outside * r


@compiled()
def _most_members(nest, i, size):  # type: ignore[no-untyped-def]
    """The members of the worst of the kinds of entry that cut i may have.

    More than the level has where one is missing.
    """
    most = 0
    for kind in range(len(nest.bearable)):
        if nest.bearable[kind]:
            members = nest.rows[0, i, kind, 0].members if nest.counts[0, i, kind] else size + 1
            most = max(most, members)
    return most


@compiled()
def _join(layers, caps, levels, nest, i, c, room):  # type: ignore[no-untyped-def]
    """Add the stages [i, c) before every entry of c, with at most `room` members in all."""
    Q = nest.frames[0].outside
    nest.work[0].left -= 1 + nest.counts[0, c, 1] // 4
    for mode in range(layers.first_mode, layers.last_mode + 1):
        stage = stage_cost(layers, i, c, mode)
        need, F = fewest_in_time(layers, stage, caps.T, caps.min_replicas, caps.max_replicas)
        if need > caps.max_replicas:
            continue
        r = -(-need // Q)
        for position in range(nest.counts[0, c, 1]):
            if caps.stages and nest.rows[0, c, 1, position].stages >= caps.stages:
                continue
            for kind in range(len(nest.bearable)):
                if nest.bearable[kind]:
                    _place(layers, caps, levels, nest, i, c, position, kind, r, F, room, stage)


@compiled(inline="always")
def _place(layers, caps, levels, nest, i, c, position, kind, r, F, room, stage):  # type: ignore[no-untyped-def]
    """Add the stage [i, c) before an entry of c with the fewest replicas that carry it.

    The replicas are r or more inside its component.
    """
    Q, row = nest.frames[0].outside, nest.rows[0, c, 1, position]
    last_kind = nest.frames[0].last_kind if c == nest.frames[0].last else 1
    while row.members + r <= room and Q * r <= caps.max_replicas:
        if _carries(layers, caps, levels, nest, stage, r, F, kind, last_kind):
            members, used = row.members + r, row.used + Q * r
            entry = Entry(members, used, row.stages + 1, c, position, r, stage.mode, 0)
            if kind != 1 or members < levels.size[0]:
                insert_undominated(caps, nest, 1, i, kind, entry)
            return
        r += 1


@compiled()
def _carries(layers, caps, levels, nest, stage, r, F, kind, last_kind):  # type: ignore[no-untyped-def]
    """Whether a stage with r replicas inside its component carries its weights and both cuts.

    The cut before it is of level `kind`, the cut behind it of level `last_kind`.
    """
    replicas = nest.frames[0].outside * r
    if layers.M > 0 and replicas > layers.M:
        return False
    if varies(layers):
        F = most_in_flight(layers, stage, replicas)
    waiting = 0.0
    if layers.holds:
        before, after = layers.messages[stage.start], layers.messages[stage.stop]
        held = hold_s(levels.network, stage.traffic_before, before, kind)
        waiting = 2 * (held + hold_s(levels.network, stage.traffic_after, after, last_kind))
        if not waits_in_time(layers, stage, caps.T, replicas, waiting):
            return False
    if not _updates(layers, caps, levels, nest, stage, r, F, waiting):
        return False
    before = _side_s(levels, nest, kind, stage.traffic_before, r)
    after = _side_s(levels, nest, last_kind, stage.traffic_after, r)
    both = before + after if kind > 0 and kind == last_kind else 0.0
    if layers.M == 0:
        algorithm, _, latency = _allreduce(levels, nest, r)
        pause = latency + stage.tied_s
        before += _ring_s(levels, nest, kind, stage, r, algorithm, pause) / replicas
        ring = _ring_s(levels, nest, last_kind, stage, r, algorithm, pause) / replicas
        after, both = after + ring, both + ring
    return ports_in_time(layers, stage, caps.T, replicas, before, after, both)


@compiled()
def _side_s(levels, nest, kind, cut_bytes, r):  # type: ignore[no-untyped-def]
    """Seconds per microbatch that a cut of level `kind` keeps each port of its side busy."""
    if kind == 0:
        return 0.0
    spread = _components(nest, kind if levels.bus[kind - 1] else kind - 1, r)
    return cut_bytes / (levels.side[kind - 1] * spread)


@compiled()
def _allreduce(levels, nest, r):  # type: ignore[no-untyped-def]
    """The algorithm, the seconds per byte and the latency of a stage's all-reduce.

    It has r replicas inside its component.
    """
    frame = nest.frames[0]
    crossed = crossed_too(levels, frame, 1, r)
    return choose(levels.network.algorithm, frame.outside * r, *crossed)


@compiled()
def _ring_s(levels, nest, kind, stage, r, algorithm, pause):  # type: ignore[no-untyped-def]
    """Seconds for which an all-reduce keeps the ports of level `kind` of a stage busy.

    It takes `pause` seconds longer than its bytes take.
    """
    if kind == 0 or stage.held.trained == 0.0:
        return 0.0
    m = r if kind == 1 else nest.frames[kind - 1].tried
    if m == 1:
        return 0.0
    slope = share(algorithm, nest.frames[0].outside * r, m) * run_byte_s(levels.network, m, kind)
    return slope * stage.held.trained + pause


@compiled(inline="always")
def _updates(layers, caps, levels, nest, stage, r, F, waiting):  # type: ignore[no-untyped-def]
    """Whether a stage has time to exchange its gradients, and to update.

    It has r replicas inside its component.
    """
    seconds, replicas = stage.tied_s, nest.frames[0].outside * r
    if replicas > 1:
        _, slope, latency = _allreduce(levels, nest, r)
        seconds += last_exchange_s(layers, stage, slope, latency)
    if layers.M > 0:
        seconds += step_s(layers, stage, replicas)
    return seconds <= time_left_s(layers, stage, caps.T, F, replicas, waiting)
