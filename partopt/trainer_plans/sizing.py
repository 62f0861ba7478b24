"""A transformer on clusters of several sizes: how it scales, and the least on which it fits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from msgspec import structs

from partopt.cost.problem import Progress, ignore_progress
from partopt.documents.plan import Plan
from partopt.documents.tables import Scaling, ScalingRow
from partopt.errors import PartoptError, found_until_then
from partopt.search.scaling import check_numbers, grow
from partopt.search.side_by_side import scaling_of
from partopt.search.variants import part_of
from partopt.trainer_plans.transformers import Laying, choose
from partopt.transformer.layouts import any_fits

MOST = 16_384  # devices of the clusters that are tried


def scale_layouts(
    asked: Laying,
    devices: Sequence[int],
    weak: bool = False,
    progress: Progress = ignore_progress,
) -> Scaling:
    """The best plan of the question on every number of devices, `choose`'s.

    Strong scaling keeps the global batch; `weak`: it grows with the devices, from the first number
    on. Raises PartoptError, before anything is planned, for numbers that the topology cannot be cut
    down or grown to; and where the trainer has no layout on one of them. Interrupted carries the
    rows until then.
    """
    check_numbers(devices)
    batches = [
        grow("global_batch", asked.global_batch, count, devices[0]) if weak else asked.global_batch
        for count in devices
    ]
    sized = [
        dataclasses.replace(asked, topology=asked.topology.resize(count), global_batch=batch)
        for count, batch in zip(devices, batches, strict=True)
    ]
    plans: list[Plan] = []
    with found_until_then(lambda _: _table(asked, plans) if plans else None):
        for count, question in zip(devices, sized, strict=True):
            where = f"{count} devices"
            try:
                tell = part_of(progress, where, len(devices))
                plans.append(choose(question, tell).best.plan)
            except PartoptError as error:
                raise error.at(where) from None
    return _table(asked, plans)


def _table(asked: Laying, plans: Sequence[Plan]) -> Scaling:
    """The table of plans, whose gains are over the first."""
    table = scaling_of(plans)
    first = table.rows[0]

    def row(found: ScalingRow, layout: object) -> ScalingRow:
        gain = first.devices * found.samples_per_s / first.samples_per_s
        return structs.replace(
            found,
            planner=asked.trainer,
            layout=layout,
            speedup_over_one_device=gain,
            efficiency=gain / found.devices,
        )

    rows = [row(found, plan.layout) for found, plan in zip(table.rows, plans, strict=True)]
    return structs.replace(table, rows=rows)


def find_servers(asked: Laying, least: int = 1) -> int | None:
    """The least size of the outermost level, from `least` on, on which some layout fits.

    By bytes alone, in closed form. None where no layout fits on up to `MOST` devices, or on a size
    that is `least` doubled again and again.
    """
    cluster = asked.topology.cluster
    inside = cluster.devices // cluster.levels[-1].size
    low, high, highest = least - 1, least, MOST // inside
    while high <= highest and not _fits(asked, inside * high):
        low, high = high, max(high + 1, min(2 * high, highest))
    if high > highest:
        return None
    # not bisected: a number of devices that is no multiple of much has few layouts
    return next(size for size in range(low + 1, high + 1) if _fits(asked, inside * size))


def _fits(asked: Laying, devices: int) -> bool:
    """Whether a layout on so many devices fits."""
    resized = dataclasses.replace(asked, topology=asked.topology.resize(devices))
    limit = math.inf if resized.limit_bytes is None else resized.limit_bytes
    return any_fits(resized.training, devices, resized.global_batch, limit, resized.fixed)
