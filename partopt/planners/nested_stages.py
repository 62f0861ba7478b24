"""The innermost pipelines of a nested plan, which are made of stages."""

from __future__ import annotations

import numpy as np

from partopt.cost.compiled import compiled
from partopt.cost.kernels import (
    between,
    exchanged_s,
    most_in_flight,
    passed_s,
    replicas_to_fit,
    replicas_to_keep_pace,
)
from partopt.planners.nested_entries import (
    AFTER,
    COLUMNS,
    COPIES,
    END,
    ENTRY,
    LAST,
    LOW,
    MEMBERS,
    MODE,
    MUST,
    OUTSIDE,
    SLACK,
    STAGES,
    USED,
    keep,
)

# [i, c)    a stage; [i, end) a pipeline inside one component
# Q         copies of the pipeline, of all levels above it
# kind      level of the cut before a pipeline; 0 where there is none


@compiled()
def fill_innermost(layers, bounds, levels, nest):  # type: ignore[no-untyped-def]
    """The entries of the innermost pipeline, which is made of stages: for each start first the end
    that the start after it has.
    """
    frame, size = nest.frames[0], levels.size[0]
    last, must, Q = frame[LAST], frame[MUST], frame[OUTSIDE]
    needs, behind = bounds.needs / Q, nest.rows[0, last, 1, 0, USED]
    entry, bearable = np.zeros(COLUMNS, np.int64), np.zeros(nest.rows.shape[2], np.bool_)
    hint, high = last, last
    for i in range(last - 1, frame[LOW] - 1, -1):
        floor = max(needs[last] - needs[i], (bounds.least_behind[i] - behind) / Q, 1.0) - SLACK
        room = float(size)
        if i > must:
            room -= max(
                0.0,
                needs[i] - needs[must] - SLACK,
                (bounds.floor[must] - bounds.least_behind[i]) / Q - SLACK,
            )
        if floor > room or not _bearable(layers, bounds, levels, nest, i, i <= must, bearable):
            continue
        while high > i + 1 and needs[high] - needs[i] > size + SLACK:
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
            least = nest.rows[0, c, 1, 0, MEMBERS] + max(1.0, needs[c] - needs[i] - SLACK)
            if bounds.stages or least < most - SLACK:
                _join(layers, bounds, levels, nest, i, c, room, bearable, entry)
                now = _most_members(nest, i, bearable, size)
                if now < most:
                    most, hint = now, c


@compiled()
def _bearable(layers, bounds, levels, nest, i, begins, bearable):  # type: ignore[no-untyped-def]
    """Set which kinds of entry cut i may have: those whose stage behind it, with most replicas,
    bears the cut. Whether there are any.
    """
    frames, x = nest.frames, layers.cuts[i]
    bearable[:] = False
    bearable[0] = i == 0
    within = _within(layers, bounds, passed_s(layers, 0, len(layers.cuts) - 1, layers.first_mode))
    for kind in range(1, len(bearable) if i > 0 else 1):
        if kind == 1 or begins:
            spread = (
                frames[kind - 1, OUTSIDE]
                if levels.bus[kind - 1]
                else _spread(nest, kind - 1, levels.size[0])
            )
            bearable[kind] = x <= within * levels.side[kind - 1] * spread
    return bearable.any()


@compiled()
def _spread(nest, k, r):  # type: ignore[no-untyped-def]
    """Level-k components that a stage with r replicas in its innermost component is on."""
    return nest.frames[k - 1, OUTSIDE] if k > 0 else nest.frames[0, OUTSIDE] * r


@compiled()
def _within(layers, bounds, passed):  # type: ignore[no-untyped-def]
    """Seconds that a stage's side of a cut may take for each microbatch."""
    return bounds.pace if layers.M == 0 else (bounds.pace + passed) / layers.M * (1 + 1e-15)


@compiled()
def _most_members(nest, i, bearable, size):  # type: ignore[no-untyped-def]
    """Of the kinds of entry that cut i may have, the members of the worst; more than there are
    where one is missing.
    """
    most = 0
    for kind in range(len(bearable)):
        if bearable[kind]:
            most = max(
                most, nest.rows[0, i, kind, 0, MEMBERS] if nest.counts[0, i, kind] else size + 1
            )
    return most


@compiled()
def _join(layers, bounds, levels, nest, i, c, room, bearable, entry):  # type: ignore[no-untyped-def]
    """Add the stages [i, c) before every entry of c; with those in front they have `room`
    members.
    """
    Q = nest.frames[0, OUTSIDE]
    nest.work[0] -= 1 + nest.counts[0, c, 1] // 4
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
                    if _carries(
                        layers, bounds, levels, nest, i, c, W, tied, C, passed, r, kind, after
                    ):
                        entry[MEMBERS], entry[USED], entry[STAGES] = (
                            row[MEMBERS] + r,
                            row[USED] + Q * r,
                            row[STAGES] + 1,
                        )
                        entry[END], entry[ENTRY], entry[COPIES], entry[MODE] = c, position, r, mode
                        if kind != 1 or entry[MEMBERS] < levels.size[0]:
                            keep(bounds, nest, 1, i, kind, entry)
                        break
                    r += 1
                r = -(-need // Q)


@compiled()
def _carries(layers, bounds, levels, nest, i, c, W, tied, C, passed, r, kind, after):  # type: ignore[no-untyped-def]
    """Whether a stage with r replicas inside its component carries its weights and both of its
    cuts.
    """
    replicas = nest.frames[0, OUTSIDE] * r
    slope, latency = nest.crossed[0, 0], nest.crossed[0, 1]
    if r > 1:
        slope = max(slope, levels.ring[0] * (r if levels.bus[0] else 1))
        latency = max(latency, levels.latency[0])
    ring = 2 * (replicas - 1) * (slope * W / replicas + latency) + tied
    if (
        (ring > bounds.pace * replicas)
        if layers.M == 0
        else (ring + layers.optimizer_rate * W > bounds.update)
    ):
        return False
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
    return turns * waiting <= (
        bounds.pace if layers.M == 0 else (bounds.pace + passed) * (1 + 1e-15)
    )
