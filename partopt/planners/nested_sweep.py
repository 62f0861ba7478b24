"""Whether the layers can be placed as nested pipelines so that no stage exceeds its budget: the probe of the nested family.

Inside a level-k component the layers [i, end) run as a pipeline of blocks; a block is a pipeline inside one level-(k-1) component, copied
on m of them. From the outermost level inwards every block is tried with every m, from the last layer to the first: then the devices in
use behind a stage, how often it is copied and what its copies cross are known when it is chosen. Of the ways to place [i, end) those are
kept that leave most members and use fewest devices. What the layers behind a cut take at the least, wherever their stages lie, bounds what
those between two cuts take: a pipeline that begins after the last cut from which the members that are left can take the layers in front is
of no use, and neither is a block none of whose starts would improve on what is known.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt.cost.compiled import compiled
from partopt.cost.kernels import NAIVE, between, exchanged_s, most_in_flight, passed_s, replicas_to_fit, replicas_to_keep_pace

# L         levels with more than one member; k = 1..L, n_k members, innermost first
# N         layers; [i, c) is a stage, [i, end) a pipeline inside one component
# Q         copies of a pipeline, of all levels above it
# m         copies of a block on members of its level; at level 1 a device, so that they are a stage's replicas inside its component
# kind      level of the cut before a pipeline; 0 where there is none
# R         devices in use behind a stage, in all

# What an entry holds: members in use from its cut to the end of the pipeline, devices in use behind its cut, stages behind it; then its
# first block: where it ends, the entry there, its copies, whether it recomputes (level 1), and the entry inside it (members, devices).
MEMBERS, USED, STAGES, END, ENTRY, COPIES, MODE, INSIDE = range(8)
COLUMNS = 8

# What is known of the pipeline of a level: its last layer, the level of the cut there, the last cut at which it may begin, the first that
# its members can reach, its copies Q, and the block that is tried: its end, the entry there, its copies.
LAST, AFTER, MUST, LOW, OUTSIDE, AT, POSITION, TRIED = range(8)

_SLACK = 1e-6  # of a device: bounds are rounded with it, so that rounding errors leave nothing out


class Bounds(NamedTuple):
    """What stages may carry in one probe."""

    pace: float  # seconds: `partopt.cost.kernels.replicas_to_keep_pace`
    update: float  # seconds for a synchronous schedule's all-reduce and optimizer step
    needs: NDArray[np.float64]  # devices that the layers before each cut take by their compute, at the least, shape (N+1,)
    least: int  # replicas of a stage
    most: int
    limited: bool  # devices in use matter: memory is limited
    stages: int  # exactly so many, 0 for any number
    least_behind: NDArray[
        np.float64
    ]  # devices that the layers behind a cut take at the least, infinite where none is possible, shape (N+1,)
    floor: NDArray[np.float64]  # the least of them of all cuts up to one
    ceiling: NDArray[np.float64]  # the most of them of all cuts from one on


class Levels(NamedTuple):
    """The levels of a topology; index k-1."""

    size: NDArray[np.int64]  # n_k
    group: NDArray[np.int64]  # devices of a level-k component, shape (L+1,), of a device 1
    side: NDArray[np.float64]  # bytes/s of one member's side of a cut; on a bus, of all of its members'
    exchange: NDArray[np.float64]  # bytes/s in which a device waits for an activation and a gradient
    ring: NDArray[np.float64]  # s/byte of one member in an all-reduce
    latency: NDArray[np.float64]  # s
    bus: NDArray[np.bool_]


class Nest(NamedTuple):
    """The entries of the pipelines that are open, one of each level, and what is known of these."""

    rows: NDArray[np.int64]  # shape (L, N+1, L+1 kinds, entries, COLUMNS)
    counts: NDArray[np.int64]  # shape (L, N+1, L+1)
    frames: NDArray[np.int64]  # shape (L, 8)
    crossed: NDArray[np.float64]  # the narrowest ring (s/byte) and the largest latency (s) of the levels above, shape (L, 2)
    work: NDArray[np.int64]  # blocks and ends that may still be tried, and entries for which there was no room, shape (2,)


@compiled()
def solve(layers, bounds, levels, nest, top):  # type: ignore[no-untyped-def]
    """Fill the entries of the pipeline of level `top`, whose frame is set and whose last entry is there. Whether the work sufficed."""
    k = top
    if k == 1:
        _fill_innermost(layers, bounds, levels, nest)
        return nest.work[0] > 0
    _rewind(nest, k)
    while nest.work[0] > 0:
        if not _next_block(bounds, levels, nest, k):
            if k == top:
                return True
            k += 1
            _take_over(bounds, levels, nest, k)
        elif _enter(bounds, levels, nest, k):
            if k > 2:
                k -= 1
                _rewind(nest, k)
            else:
                _fill_innermost(layers, bounds, levels, nest)
                _take_over(bounds, levels, nest, k)
    return False


@compiled()
def begin(nest, k):  # type: ignore[no-untyped-def]
    """Empty the entries of the pipeline inside the block that is tried at level k, but for its last cut, where nothing is placed yet."""
    frame, inside = nest.frames[k - 1], nest.frames[k - 2]
    behind, row = nest.rows[k - 1, frame[AT], k, frame[POSITION]], nest.rows[k - 2, inside[LAST], k - 1, 0]
    nest.counts[k - 2, inside[LOW] : inside[LAST] + 1] = 0
    nest.counts[k - 2, inside[LAST], k - 1] = 1
    row[:] = 0
    row[USED], row[STAGES] = behind[USED], behind[STAGES]


@compiled()
def _rewind(nest, k):  # type: ignore[no-untyped-def]
    """Begin with the blocks that end where the pipeline does."""
    frame = nest.frames[k - 1]
    frame[AT], frame[POSITION], frame[TRIED] = frame[LAST], 0, 0


@compiled()
def _next_block(bounds, levels, nest, k):  # type: ignore[no-untyped-def]
    """Go to the next end, entry and number of copies of the pipeline of level k. Whether there is one."""
    frame = nest.frames[k - 1]
    frame[TRIED] += 1
    while frame[AT] > frame[LOW]:
        while frame[POSITION] < nest.counts[k - 1, frame[AT], k]:
            members = nest.rows[k - 1, frame[AT], k, frame[POSITION], MEMBERS]
            if frame[TRIED] <= levels.size[k - 1] - members and frame[OUTSIDE] * frame[TRIED] <= bounds.most:
                return True
            frame[POSITION] += 1
            frame[TRIED] = 1
        frame[AT] -= 1
        frame[POSITION], frame[TRIED] = 0, 1
    return False


@compiled()
def _enter(bounds, levels, nest, k):  # type: ignore[no-untyped-def]
    """Open the pipeline inside the block that is tried at level k, if it may be of use."""
    nest.work[0] -= 1
    if not open_inside(bounds, levels, nest, k) or not _improves(bounds, levels, nest, k):
        return False
    begin(nest, k)
    return True


@compiled()
def open_inside(bounds, levels, nest, k):  # type: ignore[no-untyped-def]
    """Set the frame of the pipeline inside the block that is tried at level k. Whether its members may take it far enough."""
    frame, inside = nest.frames[k - 1], nest.frames[k - 2]
    last, m = frame[AT], frame[TRIED]
    before = nest.rows[k - 1, last, k, frame[POSITION]]
    free, used = levels.size[k - 1] - before[MEMBERS] - m, before[USED]
    inside[LAST], inside[AFTER] = last, frame[AFTER] if last == frame[LAST] else k
    inside[OUTSIDE] = frame[OUTSIDE] * m
    inside[MUST] = _last_start(bounds, frame[MUST], frame[OUTSIDE] * free * levels.group[k - 1], last - 1)
    inside[LOW] = max(frame[LOW], _first_start(bounds, last, used, inside[OUTSIDE] * levels.group[k - 1]))
    nest.crossed[k - 2] = nest.crossed[k - 1]
    if m > 1:
        nest.crossed[k - 2, 0] = max(nest.crossed[k - 1, 0], levels.ring[k - 1] * (m if levels.bus[k - 1] else 1))
        nest.crossed[k - 2, 1] = max(nest.crossed[k - 1, 1], levels.latency[k - 1])
    return inside[LOW] <= inside[MUST]


@compiled()
def _last_start(bounds, must, devices, most):  # type: ignore[no-untyped-def]
    """The last cut, up to `most`, from which `devices` may take the layers back to cut `must`, or further."""
    low, high = min(must, most), most
    while low < high:
        i = (low + high + 1) // 2
        if max(bounds.needs[i] - bounds.needs[must], bounds.floor[must] - bounds.ceiling[i]) > devices + _SLACK:
            high = i - 1
        else:
            low = i
    return low


@compiled()
def _first_start(bounds, last, used, devices):  # type: ignore[no-untyped-def]
    """The first cut from which `devices` may take the layers up to cut `last`, behind which `used` are in use."""
    low, high = 0, last
    while low < high:
        i = (low + high) // 2
        if max(bounds.needs[last] - bounds.needs[i], bounds.floor[i] - used) > devices + _SLACK:
            low = i + 1
        else:
            high = i
    return low


@compiled()
def _improves(bounds, levels, nest, k):  # type: ignore[no-untyped-def]
    """Whether the block that is tried at level k may add to the entries of level k."""
    if bounds.stages:
        return True
    frame, inside = nest.frames[k - 1], nest.frames[k - 2]
    before = nest.rows[k - 1, frame[AT], k, frame[POSITION]]
    members, last = before[MEMBERS] + frame[TRIED], inside[LAST]
    nest.work[0] -= (inside[MUST] - inside[LOW]) // 16
    for i in range(inside[LOW], inside[MUST] + 1):
        takes = max(float(inside[OUTSIDE]), bounds.needs[last] - bounds.needs[i])
        if bounds.least_behind[i] == np.inf:
            continue
        used = np.int64(np.ceil(max(before[USED] + takes, bounds.least_behind[i]) - _SLACK))
        for kind in range(k, nest.rows.shape[2]) if i > 0 else range(1):
            useless = i > frame[MUST] if kind > k else kind == k and members >= levels.size[k - 1]
            if not useless and not _known(bounds, nest, k, i, kind, members, used):
                return True
    return False


@compiled()
def _known(bounds, nest, k, i, kind, members, used):  # type: ignore[no-untyped-def]
    """Whether an entry of this cut has no more members and devices."""
    for position in range(nest.counts[k - 1, i, kind]):
        other = nest.rows[k - 1, i, kind, position]
        if other[MEMBERS] <= members and (not bounds.limited or other[USED] <= used):
            return True
    return False


@compiled()
def _take_over(bounds, levels, nest, k):  # type: ignore[no-untyped-def]
    """Add the pipelines inside the block that was tried at level k to the entries of level k."""
    frame, inside = nest.frames[k - 1], nest.frames[k - 2]
    entry = np.zeros(COLUMNS, np.int64)
    before = nest.rows[k - 1, frame[AT], k, frame[POSITION]]
    entry[MEMBERS], entry[END], entry[ENTRY] = before[MEMBERS] + frame[TRIED], frame[AT], frame[POSITION]
    entry[COPIES] = frame[TRIED]
    for i in range(inside[LOW], min(inside[MUST], inside[LAST] - 1) + 1):
        free = frame[OUTSIDE] * (levels.size[k - 1] - entry[MEMBERS]) * levels.group[k - 1]
        far = i > frame[MUST] and bounds.floor[frame[MUST]] - bounds.least_behind[i] > free + _SLACK
        for kind in range(k, nest.rows.shape[2]) if i > 0 else range(1):
            if (kind > k and i > frame[MUST]) or (kind == k and (far or free == 0)):
                continue
            for position in range(nest.counts[k - 2, i, kind]):
                row = nest.rows[k - 2, i, kind, position]
                entry[USED], entry[STAGES], entry[INSIDE] = row[USED], row[STAGES], row[MEMBERS]
                keep(bounds, nest, k, i, kind, entry)


@compiled()
def keep(bounds, nest, k, i, kind, entry):  # type: ignore[no-untyped-def]
    """Add an entry, unless one there is as good; leave out those that it makes useless."""
    rows, kept, count = nest.rows[k - 1, i, kind], 0, nest.counts[k - 1, i, kind]
    for position in range(count):
        row = rows[position]
        if not bounds.stages or row[STAGES] == entry[STAGES]:
            better = row[MEMBERS] <= entry[MEMBERS] and (not bounds.limited or row[USED] <= entry[USED])
            worse = row[MEMBERS] >= entry[MEMBERS] and (not bounds.limited or row[USED] >= entry[USED])
            if better and not (worse and (entry[STAGES], entry[USED]) < (row[STAGES], row[USED])):
                return
            if worse:
                continue
        if kept < position:
            rows[kept] = row
        kept += 1
    if kept == len(rows):
        nest.work[1] += 1
    else:
        rows[kept] = entry
        kept += 1
    nest.counts[k - 1, i, kind] = kept


@compiled()
def _fill_innermost(layers, bounds, levels, nest):  # type: ignore[no-untyped-def]
    """The entries of the innermost pipeline, which is made of stages: for each start first the end that the start after it has."""
    frame, size = nest.frames[0], levels.size[0]
    last, must, Q = frame[LAST], frame[MUST], frame[OUTSIDE]
    needs, behind = bounds.needs / Q, nest.rows[0, last, 1, 0, USED]
    entry, bearable = np.zeros(COLUMNS, np.int64), np.zeros(nest.rows.shape[2], np.bool_)
    hint, high = last, last
    for i in range(last - 1, frame[LOW] - 1, -1):
        floor = max(needs[last] - needs[i], (bounds.least_behind[i] - behind) / Q, 1.0) - _SLACK
        room = float(size)
        if i > must:
            room -= max(0.0, needs[i] - needs[must] - _SLACK, (bounds.floor[must] - bounds.least_behind[i]) / Q - _SLACK)
        if floor > room or not _bearable(layers, bounds, levels, nest, i, i <= must, bearable):
            continue
        while high > i + 1 and needs[high] - needs[i] > size + _SLACK:
            high -= 1
        nest.work[0] -= 1 + (high - i) // 16
        if nest.work[0] <= 0:
            return
        if i < hint <= high:
            _join(layers, bounds, levels, nest, i, hint, room, bearable, entry)
        most = _most_members(nest, i, bearable, size)
        for c in range(high, i, -1):
            if most < floor + 1 and not bounds.stages:
                break
            if nest.counts[0, c, 1] == 0:
                continue
            least = nest.rows[0, c, 1, 0, MEMBERS] + max(1.0, needs[c] - needs[i] - _SLACK)
            if bounds.stages or least < most - _SLACK:
                _join(layers, bounds, levels, nest, i, c, room, bearable, entry)
                now = _most_members(nest, i, bearable, size)
                if now < most:
                    most, hint = now, c


@compiled()
def _bearable(layers, bounds, levels, nest, i, begins, bearable):  # type: ignore[no-untyped-def]
    """Set which kinds of entry cut i may have: those whose stage behind it, with most replicas, bears the cut. Whether there are any."""
    frames, x = nest.frames, layers.cuts[i]
    bearable[:] = False
    bearable[0] = i == 0
    within = _within(layers, bounds, passed_s(layers, 0, len(layers.cuts) - 1, layers.first_mode))
    for kind in range(1, len(bearable) if i > 0 else 1):
        if kind == 1 or begins:
            spread = frames[kind - 1, OUTSIDE] if levels.bus[kind - 1] else _spread(nest, kind - 1, levels.size[0])
            bearable[kind] = x <= within * levels.side[kind - 1] * spread
    return bearable.any()


@compiled()
def _spread(nest, k, r):  # type: ignore[no-untyped-def]
    """Level-k components that a stage with r replicas in its innermost component is on."""
    return nest.frames[k - 1, OUTSIDE] if k > 0 else nest.frames[0, OUTSIDE] * r


@compiled()
def _within(layers, bounds, passed):  # type: ignore[no-untyped-def]
    """Seconds that a stage's side of a cut may take for each microbatch."""
    if layers.schedule == NAIVE:
        return np.inf
    return bounds.pace if layers.M == 0 else (bounds.pace + passed) / layers.M * (1 + 1e-15)


@compiled()
def _most_members(nest, i, bearable, size):  # type: ignore[no-untyped-def]
    """Of the kinds of entry that cut i may have, the members of the worst; more than there are where one is missing."""
    most = 0
    for kind in range(len(bearable)):
        if bearable[kind]:
            most = max(most, nest.rows[0, i, kind, 0, MEMBERS] if nest.counts[0, i, kind] else size + 1)
    return most


@compiled()
def _join(layers, bounds, levels, nest, i, c, room, bearable, entry):  # type: ignore[no-untyped-def]
    """Add the stages [i, c) before every entry of c; with those in front they have `room` members."""
    Q = nest.frames[0, OUTSIDE]
    nest.work[0] -= 1
    W = between(layers.weights, i, c)
    stash = between(layers.stash, i, c) if bounds.limited else 0.0
    tied = exchanged_s(layers.tied, i, c)
    after = nest.frames[0, AFTER] if c == nest.frames[0, LAST] else 1
    for mode in range(layers.first_mode, layers.last_mode + 1):
        C, passed = layers.compute[mode, c] - layers.compute[mode, i], passed_s(layers, i, c, mode)
        pace = max(replicas_to_keep_pace(layers, C, passed, bounds.pace), bounds.least)
        F = most_in_flight(layers, W, stash, layers.cuts[i], layers.cuts[c], mode)
        for position in range(nest.counts[0, c, 1] if F > 0 else 0):
            row = nest.rows[0, c, 1, position]
            need = max(pace, replicas_to_fit(layers, F, row[USED]))
            if need > bounds.most or (bounds.stages and row[STAGES] >= bounds.stages):
                continue
            r = -(-need // Q)
            for kind in range(len(bearable)):
                while bearable[kind] and row[MEMBERS] + r <= room and Q * r <= bounds.most:
                    if _carries(layers, bounds, levels, nest, i, c, W, tied, C, passed, r, kind, after):
                        entry[MEMBERS], entry[USED], entry[STAGES] = row[MEMBERS] + r, row[USED] + Q * r, row[STAGES] + 1
                        entry[END], entry[ENTRY], entry[COPIES], entry[MODE] = c, position, r, mode
                        if kind != 1 or entry[MEMBERS] < levels.size[0]:
                            keep(bounds, nest, 1, i, kind, entry)
                        break
                    r += 1
                r = -(-need // Q)


@compiled()
def _carries(layers, bounds, levels, nest, i, c, W, tied, C, passed, r, kind, after):  # type: ignore[no-untyped-def]
    """Whether a stage with r replicas inside its component carries its weights and both of its cuts."""
    replicas = nest.frames[0, OUTSIDE] * r
    slope, latency = nest.crossed[0, 0], nest.crossed[0, 1]
    if r > 1:
        slope = max(slope, levels.ring[0] * (r if levels.bus[0] else 1))
        latency = max(latency, levels.latency[0])
    ring = 2 * (replicas - 1) * (slope * W / replicas + latency) + tied
    if (ring > bounds.pace * replicas) if layers.M == 0 else (ring + layers.optimizer_rate * W > bounds.update):
        return False
    if layers.schedule == NAIVE:
        return True
    within, waiting = _within(layers, bounds, passed), C / replicas
    for cut in range(2):
        level = after if cut else kind
        if level > 0:
            x = layers.cuts[c if cut else i]
            spread = _spread(nest, level if levels.bus[level - 1] else level - 1, r)
            if x > within * levels.side[level - 1] * spread:
                return False
            waiting += x / (levels.exchange[level - 1] * spread)
    if not layers.serial:
        return True
    turns = 1 if layers.M == 0 else -(-layers.M // replicas) * replicas
    return turns * waiting <= (bounds.pace if layers.M == 0 else (bounds.pace + passed) * (1 + 1e-15))
