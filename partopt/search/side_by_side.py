"""Plans side by side, as documents."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from msgspec import UNSET
from msgspec.structs import replace

from partopt.cost.estimate import stage_variance
from partopt.documents.plan import Plan
from partopt.documents.tables import Comparison, ComparisonRow, Scaling, ScalingRow


def comparison_of(
    plans: Mapping[str, Plan], data_parallel: Plan | None, restricted: Sequence[str] = ()
) -> Comparison:
    """The comparison of `plans` of one problem by name, at least one; ties keep their order.

    `data_parallel` is None where the schedule cannot have it. The `restricted` ones say how much
    longer they take than the fastest of all that fits.
    """
    base_s = data_parallel.predicted.period_s if data_parallel else None
    rows = [_comparison_row(name, plan, base_s) for name, plan in plans.items()]
    best_s = min((row.period_s for row in rows if row.fits), default=math.inf)
    rows = [
        replace(row, price=row.period_s / best_s - 1)
        if row.planner in restricted and row.fits
        else row
        for row in rows
    ]
    first = next(iter(plans.values()))
    return Comparison(
        model=first.profile.name,
        layers=first.stages[-1].stop,
        microbatch_size=first.microbatch_size,
        schedule=first.schedule,
        estimated=first.profile.estimated,
        topology=first.topology,
        rows=sorted(rows, key=lambda row: row.period_s),
    )


def _comparison_row(name: str, plan: Plan, base_s: float | None) -> ComparisonRow:
    predicted = plan.predicted
    return ComparisonRow(
        planner=name,
        shape=plan.shape,
        stages=len(plan.stages),
        period_s=predicted.period_s,
        samples_per_s=predicted.samples_per_s,
        figures=predicted.figures,
        speedup_over_one_device=predicted.speedup_over_one_device,
        speedup_over_data_parallel=None if base_s is None else base_s / predicted.period_s,
        peak_memory_bytes=plan.peak_memory_bytes,
        fits=plan.fits,
        stage_variance_s2=stage_variance(plan),
    )


def scaling_of(plans: Sequence[Plan]) -> Scaling:
    """The table of `plans` of one model on several numbers of devices, in their order.

    Of a transformer, which one device may not hold, gains are over the first.
    """
    rows = [_scaling_row(plan, plans[0]) for plan in plans]
    return Scaling(estimated=plans[0].profile.estimated, rows=rows)


def _scaling_row(plan: Plan, first: Plan) -> ScalingRow:
    devices, predicted, of_layout = plan.topology.devices, plan.predicted, plan.transformer
    gain = predicted.speedup_over_one_device
    if of_layout:
        devices = plan.topology.cluster.devices
        gain = first.topology.cluster.devices * predicted.samples_per_s
        gain /= first.predicted.samples_per_s
    return ScalingRow(
        devices=plan.topology.cluster.devices,
        planner=plan.trainer if of_layout else plan.planner,
        shape=plan.shape,
        layout=plan.layout if of_layout else UNSET,
        microbatch_size=plan.microbatch_size,
        microbatches=plan.microbatches,
        period_s=predicted.period_s,
        samples_per_s=predicted.samples_per_s,
        figures=predicted.figures,
        speedup_over_one_device=gain,
        efficiency=gain / devices,
        bound_by=predicted.bound_by,
        fits=plan.fits,
    )
