"""Whether the layers can be placed as nested pipelines so that no stage exceeds its budget: the
probe of the nested family.

Inside a level-k component the layers [i, end) run as a pipeline of blocks; a block is a pipeline
inside one level-(k-1) component, copied on m of them. From the outermost level inwards every block
is tried with every m, from the last layer to the first: then the devices in use behind a stage, how
often it is copied and what its copies cross are known when it is chosen. Of the ways to place [i,
end) those are kept that leave most members and use fewest devices. What the layers behind a cut
take at the least, wherever their stages lie, bounds what those between two cuts take: a pipeline
that begins after the last cut from which the members that are left can take the layers in front is
of no use, and neither is a block none of whose starts would improve on what is known.
"""

from __future__ import annotations

import numpy as np

from partopt.cost.compiled import compiled
from partopt.planners.nested_entries import (
    AFTER,
    AT,
    COLUMNS,
    COPIES,
    END,
    ENTRY,
    INSIDE,
    LAST,
    LOW,
    MEMBERS,
    MUST,
    OUTSIDE,
    POSITION,
    SLACK,
    STAGES,
    TRIED,
    USED,
    keep,
    known,
)
from partopt.planners.nested_stages import fill_innermost

# k         levels with more than one member, innermost first
# Q, m      copies of a pipeline, of all levels above it; copies of a block on members of its level


@compiled()
def solve(layers, bounds, levels, nest, top):  # type: ignore[no-untyped-def]
    """Fill the entries of the pipeline of level `top`, whose frame is set and whose last entry is
    there. Whether the work sufficed.
    """
    k = top
    if k == 1:
        fill_innermost(layers, bounds, levels, nest)
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
                fill_innermost(layers, bounds, levels, nest)
                _take_over(bounds, levels, nest, k)
    return False


@compiled()
def begin(nest, k):  # type: ignore[no-untyped-def]
    """Empty the entries of the pipeline inside the block that is tried at level k, but for its last
    cut, where nothing is placed yet.
    """
    frame, inside = nest.frames[k - 1], nest.frames[k - 2]
    behind, row = (
        nest.rows[k - 1, frame[AT], k, frame[POSITION]],
        nest.rows[k - 2, inside[LAST], k - 1, 0],
    )
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
    """Go to the next end, entry and number of copies of the pipeline of level k.

    Whether there is one.
    """
    frame = nest.frames[k - 1]
    frame[TRIED] += 1
    while frame[AT] > frame[LOW]:
        while frame[POSITION] < nest.counts[k - 1, frame[AT], k]:
            members = nest.rows[k - 1, frame[AT], k, frame[POSITION], MEMBERS]
            if (
                frame[TRIED] <= levels.size[k - 1] - members
                and frame[OUTSIDE] * frame[TRIED] <= bounds.most
            ):
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
    """Set the frame of the pipeline inside the block that is tried at level k.

    Whether its members may take it far enough.
    """
    frame, inside = nest.frames[k - 1], nest.frames[k - 2]
    last, m = frame[AT], frame[TRIED]
    before = nest.rows[k - 1, last, k, frame[POSITION]]
    free, used = levels.size[k - 1] - before[MEMBERS] - m, before[USED]
    inside[LAST], inside[AFTER] = last, frame[AFTER] if last == frame[LAST] else k
    inside[OUTSIDE] = frame[OUTSIDE] * m
    inside[MUST] = _last_start(
        bounds, frame[MUST], frame[OUTSIDE] * free * levels.group[k - 1], last - 1
    )
    inside[LOW] = max(
        frame[LOW], _first_start(bounds, last, used, inside[OUTSIDE] * levels.group[k - 1])
    )
    nest.crossed[k - 2] = nest.crossed[k - 1]
    if m > 1:
        nest.crossed[k - 2, 0] = max(
            nest.crossed[k - 1, 0], levels.ring[k - 1] * (m if levels.bus[k - 1] else 1)
        )
        nest.crossed[k - 2, 1] = max(nest.crossed[k - 1, 1], levels.latency[k - 1])
    return inside[LOW] <= inside[MUST]


@compiled()
def _last_start(bounds, must, devices, most):  # type: ignore[no-untyped-def]
    """The last cut, up to `most`, from which `devices` may take the layers back to cut `must`, or
    further.
    """
    low, high = min(must, most), most
    while low < high:
        i = (low + high + 1) // 2
        if (
            max(bounds.needs[i] - bounds.needs[must], bounds.floor[must] - bounds.ceiling[i])
            > devices + SLACK
        ):
            high = i - 1
        else:
            low = i
    return low


@compiled()
def _first_start(bounds, last, used, devices):  # type: ignore[no-untyped-def]
    """The first cut from which `devices` may take the layers up to cut `last`, behind which `used`
    are in use.
    """
    low, high = 0, last
    while low < high:
        i = (low + high) // 2
        if max(bounds.needs[last] - bounds.needs[i], bounds.floor[i] - used) > devices + SLACK:
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
        used = np.int64(np.ceil(max(before[USED] + takes, bounds.least_behind[i]) - SLACK))
        for kind in range(k, nest.rows.shape[2]) if i > 0 else range(1):
            useless = i > frame[MUST] if kind > k else kind == k and members >= levels.size[k - 1]
            if not useless and not known(bounds, nest, k, i, kind, members, used):
                return True
    return False


@compiled()
def _take_over(bounds, levels, nest, k):  # type: ignore[no-untyped-def]
    """Add the pipelines inside the block that was tried at level k to the entries of level k."""
    frame, inside = nest.frames[k - 1], nest.frames[k - 2]
    entry = np.zeros(COLUMNS, np.int64)
    before = nest.rows[k - 1, frame[AT], k, frame[POSITION]]
    entry[MEMBERS], entry[END], entry[ENTRY] = (
        before[MEMBERS] + frame[TRIED],
        frame[AT],
        frame[POSITION],
    )
    entry[COPIES] = frame[TRIED]
    for i in range(inside[LOW], min(inside[MUST], inside[LAST] - 1) + 1):
        free = frame[OUTSIDE] * (levels.size[k - 1] - entry[MEMBERS]) * levels.group[k - 1]
        far = i > frame[MUST] and bounds.floor[frame[MUST]] - bounds.least_behind[i] > free + SLACK
        for kind in range(k, nest.rows.shape[2]) if i > 0 else range(1):
            if (kind > k and i > frame[MUST]) or (kind == k and (far or free == 0)):
                continue
            for position in range(nest.counts[k - 2, i, kind]):
                row = nest.rows[k - 2, i, kind, position]
                entry[USED], entry[STAGES], entry[INSIDE] = row[USED], row[STAGES], row[MEMBERS]
                keep(bounds, nest, k, i, kind, entry)
