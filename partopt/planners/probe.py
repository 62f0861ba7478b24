"""Whether the layers can be placed so that no stage exceeds its budget: the feasibility probe of a
parametric search.

From the last layer to the first, for each cut i the entries (`partopt.planners.entries`) of the
ways to place layers [i, N): over every end j of the first stage and every entry of j, the fewest
replicas that keep the pace, fit the memory and carry the weights and the cuts, as late as possible.
Ends j are passed over in blocks: each of the layers between takes a share of a device, at the
least, so a block whose latest start, less these, is no later than one that is known has nothing to
add.
"""

from __future__ import annotations

import numpy as np

from partopt.cost.capacity import first_at_least
from partopt.cost.compiled import compiled
from partopt.cost.kernels import (
    NEVER,
    between,
    exchanged_s,
    most_in_flight,
    passed_s,
    replicas_to_fit,
    replicas_to_keep_pace,
)
from partopt.planners.entries import (
    COLUMNS,
    CUT,
    ENTRY,
    EXTRA,
    GAP,
    LIMIT,
    LOW,
    MODE,
    REPLICAS,
    STAGES,
    START,
    USED,
    all_covered,
    covered,
    keep,
    settle,
)
from partopt.schedules.entry import ALL_IN_FLIGHT

# N        layers; [i, j) is a stage
# R        devices in use behind a stage
# floor    the earliest start that leaves the layers before i enough devices

BLOCK = 32  # ends in a block
_COARSE = 1024  # and in a coarse block
_SLACK = 1e-6  # of a device: bounds are rounded with it, so that rounding errors leave nothing out


@compiled()
def reaches(layers):  # type: ignore[no-untyped-def]
    """For each i the last j at which a stage [i, j) may end by its weights and its stash alone, N
    apart; shape (N+1,).
    """
    N = len(layers.cuts) - 1
    reach = np.full(N + 1, N)
    j = N
    for i in range(N - 1, -1, -1):
        j = max(j, i + 1)
        while j > i + 1 and not _may_fit(layers, i, j, 2 if layers.M == 0 else 1):
            j -= 1
        reach[i] = j
    return reach


@compiled()
def widest(layers, reach):  # type: ignore[no-untyped-def]
    """Seconds in which the largest stage with each layer passes a microbatch on; shape (N,)."""
    N = len(reach) - 1
    largest = np.zeros(N)
    for i in range(N):
        passed = passed_s(layers, i, reach[i], layers.first_mode)
        for layer in range(i, reach[i]):
            largest[layer] = max(largest[layer], passed)
    return largest


@compiled()
def _may_fit(layers, i, j, F):  # type: ignore[no-untyped-def]
    """Whether [i, j) fits with F in flight, its cuts not counted."""
    if layers.memory == np.inf:
        return True
    versions = F if layers.versions == ALL_IN_FLIGHT else layers.versions
    kept = 1 if layers.last_mode else F
    return (versions + 1 + layers.optimizer) * between(layers.weights, i, j) + kept * between(
        layers.stash, i, j
    ) <= layers.memory + 8


@compiled()
def begin(table, devices):  # type: ignore[no-untyped-def]
    """Empty the table but for cut N, behind which all `devices` are left; wholly where there are
    none.
    """
    N = len(table.counts) - 1
    table.counts[:], table.dropped[0] = 0, 0
    table.top[:], table.used[:], table.extra[:] = -np.inf, np.inf, np.inf
    for column in range(5):
        table.blocks[:, :, column] = np.inf if column % 2 else -np.inf
    table.blocks[:, :, 4] = np.inf
    table.rows[N, 0] = 0
    table.rows[N, 0, LIMIT] = devices
    table.counts[N] = 1 if devices > 0 else 0
    _summarise(table, N, 0.0)


@compiled()
def sweep(layers, caps, reach, source, table):  # type: ignore[no-untyped-def]
    """Fill the table from the ends in `source`: itself, or that of a stage less."""
    N = len(layers.cuts) - 1
    for i in range(N - 1, -1, -1):
        if caps.behind[i] == np.inf:
            continue
        floor = max(np.int64(np.ceil(caps.ahead[i] - _SLACK)), 1 if i else 0)
        _fill_cut(layers, caps, reach, source, table, i, floor)
        _summarise(table, i, caps.needs[N] - caps.needs[i])


@compiled()
def _summarise(table, i, behind):  # type: ignore[no-untyped-def]
    """The bounds of cut i, from its entries; `behind` devices are what the layers from i on take at
    least.
    """
    for position in range(table.counts[i]):
        table.top[i] = max(table.top[i], table.rows[i, position, LIMIT])
        table.used[i] = min(table.used[i], table.rows[i, position, USED])
        table.extra[i] = min(table.extra[i], table.rows[i, position, EXTRA])
    for coarse in range(2):
        block = table.blocks[coarse, i // (_COARSE if coarse else BLOCK)]
        block[0], block[1] = (
            max(block[0], table.top[i] + behind),
            min(block[1], table.used[i] - behind),
        )
        block[2], block[3] = max(block[2], table.top[i]), min(block[3], table.used[i])
        block[4] = min(block[4], table.extra[i])


@compiled()
def _fill_cut(layers, caps, reach, source, table, i, floor):  # type: ignore[no-untyped-def]
    """The entries of cut i: first with the end that the first entry of the next cut has, then with
    every block of ends.
    """
    N = len(layers.cuts) - 1
    behind = caps.needs[N] - caps.needs[i]
    entry = np.zeros(COLUMNS, np.int64)
    hint = table.rows[i + 1, 0, CUT] if table.counts[i + 1] else 0
    if hint and source.counts[hint]:
        _fill_from_block(layers, caps, source, table, i, hint, hint, floor, behind, entry)
    if reach[i] < N:
        _fill_from_block(layers, caps, source, table, i, N, N, floor, behind, entry)
    high = reach[i]
    while high > i:
        block = source.blocks[1, high // _COARSE]
        whole = high % _COARSE == _COARSE - 1 and high - _COARSE >= i
        if whole and _useless(
            caps, table, i, floor, block[0] - behind, block[1] + behind, block[4]
        ):
            high -= _COARSE
            continue
        low = max(high - high % BLOCK, i + 1)
        block = source.blocks[0, high // BLOCK]
        if not _useless(caps, table, i, floor, block[0] - behind, block[1] + behind, block[4]):
            _fill_from_block(layers, caps, source, table, i, low, high, floor, behind, entry)
        high = low - 1


@compiled()
def _fill_from_block(layers, caps, source, table, i, low, high, floor, behind, entry):  # type: ignore[no-untyped-def]
    """The entries of cut i whose first stage ends from `low` to `high`, in one block; late ends
    first, which have less behind them.
    """
    block = source.blocks[0, low // BLOCK]
    if _useless(caps, table, i, floor, block[0] - behind, block[1] + behind, block[4]):
        return
    r = _replicas_at_least(layers, caps, i, low, block[3])
    if r > caps.most or _useless(caps, table, i, floor, block[2] - r, block[3] + r, block[4]):
        return
    for j in range(high, low - 1, -1):
        if source.counts[j] == 0:
            continue
        takes = max(
            caps.needs[j] - caps.needs[i], caps.behind[i] - caps.behind[j], float(caps.least)
        )
        if not _useless(
            caps, table, i, floor, source.top[j] - takes, source.used[j] + takes, source.extra[j]
        ):
            _join(layers, caps, source, table, i, j, floor, entry)


@compiled()
def _replicas_at_least(layers, caps, i, j, R):  # type: ignore[no-untyped-def]
    """A lower bound on the replicas of every stage from i to j or further, R devices or more behind
    it: what is counted rises with the end.

    The exchange of tied gradients does not, which ends where a stage holds all of the layers: it is
    left out.
    """
    W, C = (
        between(layers.weights, i, j),
        layers.compute[layers.first_mode, j] - layers.compute[layers.first_mode, i],
    )
    r = max(
        replicas_to_keep_pace(layers, C, passed_s(layers, i, j, layers.first_mode), caps.pace),
        caps.least,
    )
    if caps.limited:
        stash, F = between(layers.stash, i, j), 0
        for mode in range(layers.first_mode, layers.last_mode + 1):
            F = max(F, most_in_flight(layers, W, stash, layers.cuts[i], 0.0, mode))
        r = max(r, replicas_to_fit(layers, F, np.int64(R)))
    return first_at_least(caps.any_weights, r, W)


@compiled()
def _useless(caps, table, i, floor, top, used, extra):  # type: ignore[no-untyped-def]
    """Whether a start by `top` with `used` devices, neither rounded yet, and `extra` recomputed, or
    more, adds nothing to cut i.
    """
    top, used = min(top, caps.group[-1] - caps.behind[i]), max(used, caps.behind[i])
    if top < floor - 1 or extra > caps.extra:
        return True
    least = np.int64(np.ceil(used - _SLACK)) if caps.limited else NEVER
    return all_covered(
        table.rows[i, : table.counts[i]],
        caps.group,
        caps.free[i],
        np.int64(np.floor(top + _SLACK)),
        least,
        extra,
        floor,
    )


@compiled()
def _join(layers, caps, source, table, i, j, floor, entry):  # type: ignore[no-untyped-def]
    """The entries of cut i whose first stage is [i, j)."""
    before, after = layers.cuts[i], layers.cuts[j]
    W, tied = between(layers.weights, i, j), exchanged_s(layers.tied, i, j)
    stash = between(layers.stash, i, j) if caps.limited else 0.0
    for mode in range(layers.first_mode, layers.last_mode + 1):
        C = layers.compute[mode, j] - layers.compute[mode, i]
        passed = passed_s(layers, i, j, mode)
        pace = max(replicas_to_keep_pace(layers, C, passed, caps.pace), caps.least)
        F = most_in_flight(layers, W, stash, before, after, mode)
        for position in range(source.counts[j] if F > 0 else 0):
            row = source.rows[j, position]
            r = max(pace, replicas_to_fit(layers, F, row[USED]), caps.bearing[row[GAP], j])
            entry[EXTRA] = row[EXTRA] + (layers.extra[j] - layers.extra[i] if mode else 0)
            if r <= caps.most and not _useless(
                caps, table, i, floor, row[LIMIT] - r, row[USED] + r, float(entry[EXTRA])
            ):
                entry[STAGES], entry[CUT], entry[ENTRY], entry[MODE] = (
                    row[STAGES] + 1,
                    j,
                    position,
                    mode,
                )
                _place(
                    layers, caps, table, i, row, floor, entry, r, W, tied, C, passed, before, after
                )


@compiled()
def _place(layers, caps, table, i, row, floor, entry, r, W, tied, C, passed, before, after):  # type: ignore[no-untyped-def]
    """Every useful place of a stage that begins at cut i before the entry `row`, with r replicas or
    more.
    """
    L, G = len(caps.group) - 1, caps.group[-2]
    first, last = (0, 0) if caps.free[i] else (1, L)
    if first == last and row[LIMIT] - r >= floor:
        start, replicas = settle(
            layers,
            caps,
            row,
            floor,
            (row[LIMIT] - r) % G,
            r,
            W,
            tied,
            C,
            passed,
            before,
            after,
            first,
        )
        if start == row[LIMIT] - r:
            _keep_place(caps, table, i, row, floor, entry, first, start, replicas)
            return
    for gap in range(first, last + 1):
        least = max(r, caps.bearing[gap, i])
        if least > caps.most or row[LIMIT] - least < floor:
            continue
        used = row[USED] + least if caps.limited else NEVER
        for latest in range(row[LIMIT] - least, max(floor - 1, row[LIMIT] - least - G), -1):
            if covered(
                table.rows[i, : table.counts[i]],
                caps.group,
                gap,
                latest,
                used,
                float(entry[EXTRA]),
                floor,
            ):
                continue
            start, replicas = settle(
                layers, caps, row, floor, latest % G, least, W, tied, C, passed, before, after, gap
            )
            if start >= 0:
                _keep_place(caps, table, i, row, floor, entry, gap, start, replicas)


@compiled()
def _keep_place(caps, table, i, row, floor, entry, gap, start, replicas):  # type: ignore[no-untyped-def]
    """Keep the entry of a stage at `start`, if the stage before it, at this gap, has room."""
    limit = start if gap == 0 else start // caps.group[gap - 1] * caps.group[gap - 1]
    low = 0 if gap == 0 else start // caps.group[gap] * caps.group[gap]
    if limit < floor or (i > 0 and limit <= low):
        return
    entry[LIMIT], entry[LOW], entry[USED], entry[GAP] = limit, low, row[USED] + replicas, gap
    entry[START], entry[REPLICAS] = start, replicas
    keep(table, caps, i, entry)
