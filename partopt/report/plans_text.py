"""A plan; plans side by side: of planners, profiles, schedules, numbers of devices, of a layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from partopt.documents.plan import Plan
from partopt.documents.tables import Comparison, Scaling, ScalingRow
from partopt.printable import shorten
from partopt.report import plan_text, transformer_text
from partopt.report.layout_words import again_text, degree_columns, grid_text
from partopt.report.phrases import (
    any_price,
    basis_lines,
    batch_text,
    bought,
    bought_text,
    cluster_lines,
    count_text,
    format_money,
    hourly_lines,
    speed_text,
    speeds,
    speedup_text,
    tokens_per_sample,
)
from partopt.report.text import Column, label_lines, paragraph, stretch, table_of
from partopt.report.transformer_text import render_change
from partopt.units import format_bytes, format_count, format_number, format_seconds

_TIMES = "x ONE, x DP: times one device, data parallelism."
_SAME = 1e-3  # of the samples/s: what is nearer loses nothing

# The rows of a table of rates are pairs: a row of the document, and its rate.
_FITS = Column("FITS", lambda pair: "yes" if pair[0].fits else "no", "whole")
_MEMORY = Column("MEMORY", lambda pair: format_bytes(pair[0].peak_memory_bytes))


def render_plan(plan: Plan, by_size: Sequence[Plan] = (), *, arithmetic: bool = False) -> str:
    """The page of a plan; of a transformer that of its layout, with the `arithmetic` of a block."""
    if plan.transformer:
        return transformer_text.render(plan, arithmetic)
    return plan_text.render(plan, by_size)


def _rate(rows: Sequence[Any]) -> tuple[Column, list[tuple[Any, float]]]:
    """The column of the speeds of `rows`, and these with their rates."""
    unit, rates = speeds([row.predicted if isinstance(row, Plan) else row for row in rows])
    column = Column(f"{unit.upper()}/S", lambda pair: format_number(pair[1]))
    return column, list(zip(rows, rates, strict=True))


def render_comparison(comparison: Comparison) -> str:
    """The model and the cluster, and the plans of several planners as a table.

    The last column shows what a trainer costs, what money buys, or the variance of the stages.
    """
    price = Column("PRICE", lambda pair: "" if pair[0].price is None else f"{pair[0].price:+.1%}")
    last, meaning = price, "PRICE: period longer than the best."
    if all(row.price is None for row in comparison.rows):
        last = Column("PER 1.00", lambda pair: bought(pair[0].figures))
        meaning = "PER 1.00: samples for 1.00."
        if not any_price(comparison.rows):
            last = Column("VAR", lambda pair: _variance(pair[0].stage_variance_s2 * 1e6))
            meaning = "VAR: variance of stages, ms^2."

    def over_data_parallel(pair: Any) -> str:
        ratio = pair[0].speedup_over_data_parallel
        return "-" if ratio is None else f"{ratio:.2f}"

    speed, rows = _rate(comparison.rows)
    table = table_of(
        rows,
        [
            Column("PLANNER", lambda pair: shorten(pair[0].planner, stretch(17, 0.5, 13)), "whole"),
            Column("SHAPE", lambda pair: shorten(pair[0].shape, stretch(8, 0.5)), "text"),
            Column("STAGES", lambda pair: str(pair[0].stages), spare=2),
            Column("PERIOD", lambda pair: format_seconds(pair[0].period_s)),
            speed,
            Column("x ONE", lambda pair: f"{pair[0].speedup_over_one_device:.2f}"),
            Column("x DP", over_data_parallel, spare=3),
            _MEMORY,
            _FITS,
            last._replace(spare=1),
        ],
        gap=1,
    )
    batch = f"microbatch {comparison.microbatch_size}, schedule {comparison.schedule}"
    head = [
        ("model", f"{comparison.model}: {comparison.layers} layers, {batch}"),
        *cluster_lines(comparison.topology),
        *hourly_lines(comparison.topology),
        *basis_lines(comparison.estimated),
    ]
    return "\n\n".join([label_lines(head), table, paragraph(f"{_TIMES} {meaning}")])


def _variance(value: float) -> str:
    """Three digits where that is enough; never more than five characters, up to 1e+99."""
    if value < 100:
        return f"{value:.3g}"
    return f"{value:.0f}" if value < 99999.5 else f"{value:.0e}"


def render_scaling(scaling: Scaling) -> str:
    """The best plan on every number of devices, and where a price is known the best of these.

    BATCH: samples of a microbatch x M, where an iteration has a number of microbatches. PER 1.00:
    samples for one unit of money, where a price is known, in place of the speed-up. Of a
    transformer the table is another.
    """

    def batch(pair: Any) -> str:
        return batch_text(pair[0].microbatch_size, pair[0].microbatches)

    if scaling.rows[0].layout:
        return _render_sizes(scaling)
    chosen = [
        Column("PLANNER", lambda pair: shorten(pair[0].planner, stretch(13, 0.4)), "text"),
        Column("SHAPE", lambda pair: shorten(pair[0].shape, stretch(9, 0.6)), "text"),
        Column("BOUND BY", lambda pair: pair[0].bound_by, "text"),
    ]
    speed, rows = _rate(scaling.rows)
    gain = Column("x ONE", lambda pair: f"{pair[0].speedup_over_one_device:.2f}")
    if any_price(scaling.rows):
        gain = Column("PER 1.00", lambda pair: bought(pair[0].figures))
    table = table_of(
        rows,
        [
            Column("DEVICES", lambda pair: str(pair[0].devices)),
            Column("BATCH", batch, "text", spare=2),
            speed,
            gain,
            Column("EFFICIENCY", lambda pair: f"{pair[0].efficiency:.0%}", spare=1),
            *chosen,
            _FITS,
        ],
        gap=1,
    )
    return "\n\n".join(filter(None, [table, _choices(scaling)]))


def _choices(scaling: Scaling) -> str:
    """The fastest and the cheapest row where a price is known, and what times rest on."""
    below, cheapest = basis_lines(scaling.estimated), scaling.cheapest
    if cheapest is not None:
        fastest = max((row for row in scaling.rows if row.fits), key=lambda row: row.samples_per_s)
        below = [("fastest", _choice(fastest)), ("cheapest", _choice(cheapest)), *below]
    return label_lines([*_idle(scaling.rows), *below])


def _idle(rows: Sequence[ScalingRow]) -> Iterator[tuple[str, str]]:
    """The rows whose batch is faster on fewer devices, and by how much."""
    for row in rows:
        other = next((one for one in rows if one.devices == row.faster_on), None)
        if other is not None:
            slower = 1 - row.samples_per_s / other.samples_per_s
            how = f"{slower:.1%} slower than" if row.fits else "no room, and it fits on"
            text = f"{how} {other.devices:,} of them, the others idle: another batch may divide"
            yield f"{row.devices:,}", text


def _render_sizes(scaling: Scaling) -> str:
    """A transformer on clusters of several sizes; with tokens days, hours of devices and money.

    BINDS: what takes most of the time beside products and attention.
    """
    unit, rates = speeds(scaling.rows)
    by_row = dict(zip(map(id, scaling.rows), rates, strict=True))
    experts = any((row.layout.ep or 1) > 1 for row in scaling.rows if row.layout)

    def mfu(row: ScalingRow) -> str:
        return f"{row.figures.mfu:.1%}" if row.figures and row.figures.mfu else ""

    def binds(row: ScalingRow) -> str:
        return f"{row.part} {row.part_share or 0.0:.0%}"

    def of_run(name: str) -> Callable[[ScalingRow], str]:
        return lambda row: format_count(getattr(row.run, name)) if row.run else ""

    runs, marked = bool(scaling.tokens), bool(scaling.chosen)
    priced = all(row.run and row.run.cost for row in scaling.rows)
    columns = [
        *([Column("", lambda row: "*" * (row.devices == scaling.chosen), "whole")] * marked),
        Column("DEVICES", lambda row: f"{row.devices:,}"),
        Column("TIME", lambda row: format_seconds(row.iteration_s)),
        Column(f"{unit.upper()}/S", lambda row: format_number(by_row[id(row)])),
        Column("MFU", mfu, spare=1),
        *([Column("DAYS", of_run("days")), Column("GPU-H", of_run("device_hours"))] * runs),
        *([Column("COST", of_run("cost"))] * priced),
        *degree_columns(experts),
        Column("BINDS", binds, "text"),
    ]
    if not all(row.fits for row in scaling.rows):
        columns.append(Column("FITS", lambda row: "yes" if row.fits else "no", "whole"))
    table = table_of(scaling.rows, columns, gap=1)
    batch = {row.microbatch_size * (row.microbatches or 1) for row in scaling.rows}
    lines = [("batch", f"{', '.join(map(str, sorted(batch)))} samples an iteration")]
    if scaling.looked_at:
        text = f"{scaling.looked_at} looked at; others are slower and cost more than one of these"
        lines.append(("sizes", text))
    if scaling.tokens:
        lines.append(("run", f"{format_count(scaling.tokens)} tokens"))
    if scaling.chosen:
        lines.append(("best", f"{scaling.chosen:,} devices (*)"))
    return "\n\n".join(filter(None, [table, label_lines(lines), _choices(scaling)]))


def _choice(row: ScalingRow) -> str:
    figures = row.figures
    assert figures
    speed = speed_text(row.samples_per_s, tokens_per_sample(row))
    price = format_money(figures.price_per_hour or 0.0)
    devices = count_text(row.devices, "device")
    return f"{devices} at {price} an hour: {speed}, {bought_text(figures)}"


def render_schedules(plans: Sequence[Plan]) -> str:
    """A line for the best plan under every schedule that was tried for one problem.

    GRID: pipelines side by side x devices of each, x stages of a device where it has several, or
    unequal replicas of the stages; BATCH: samples of a microbatch x M.
    """

    speed, rows = _rate(plans)
    return table_of(
        rows,
        [
            Column("SCHEDULE", lambda pair: pair[0].schedule, "whole"),
            Column(
                "GRID",
                lambda pair: grid_text(pair[0], shorten(pair[0].shape, stretch(10))),
                "text",
            ),
            Column(
                "BATCH", lambda pair: f"{pair[0].microbatch_size}x{pair[0].microbatches}", "text"
            ),
            Column("RECOMP.", lambda pair: again_text(pair[0]), "text", spare=1),
            Column(
                "ITERATION",
                lambda pair: format_seconds(pair[0].predicted.iteration_s or 0.0),
                spare=3,
            ),
            speed,
            Column("BUBBLE", lambda pair: f"{pair[0].predicted.bubble:.1%}", spare=2),
            _MEMORY,
            _FITS,
        ],
        gap=1,
    )


def render_beside(plan: Plan, others: Sequence[Plan]) -> str:
    """Lines for `others`, plans of the same problem.

    They say how the other plans compare with `plan`, and whether they fit.
    """

    def speedup(other: Plan) -> str:
        return speedup_text(other.predicted.speedup_over_one_device, other.topology)

    def verdict(other: Plan) -> str:
        faster = other.predicted.samples_per_s > plan.predicted.samples_per_s
        return "does not fit" if not other.fits else "faster" if faster else ""

    return table_of(
        others,
        [
            Column("BESIDE IT", lambda other: other.planner, "text"),
            Column("SHAPE", lambda other: shorten(other.shape, stretch(12)), "text"),
            Column("PERIOD", lambda other: format_seconds(other.predicted.period_s)),
            Column("SPEED", speedup, spare=1),
            Column("MEMORY", lambda other: format_bytes(other.peak_memory_bytes)),
            Column("", verdict, "whole"),
        ],
    )


def render_layout(
    plan: Plan,
    recut: Plan | None,
    best: Plan | None,
    trainer: str,
    changes: Sequence[str] = (),
) -> str:
    """A trainer's layout beside better plans, and what `plan` loses to them.

    `recut` has as many stages and replicas, `best` is the best that `trainer` runs; of a
    transformer with the `changes` of the configuration.
    """
    if plan.transformer and best is not None:
        return render_change(plan, best, changes)
    others = [replace(recut, planner="other cuts")] if recut is not None else []
    if best is not None and best != recut:
        others.append(best)
    table = f"{render_beside(plan, others)}\n\n" if others else ""
    lost = "; ".join(_losses(plan, recut, best, trainer))
    fitting = next((better for better in (best, recut) if better is not None and better.fits), None)
    if not plan.fits and fitting is not None:
        speed = speed_text(fitting.predicted.samples_per_s, fitting.profile.tokens_per_sample)
        lost = f"all: it does not fit, and {speed} do"
    nothing = f"nothing: no plan that {trainer} runs is faster"
    return table + label_lines([("loses", lost or nothing)])


def _losses(plan: Plan, recut: Plan | None, best: Plan | None, trainer: str) -> Iterator[str]:
    if recut is not None and loses_to(plan, recut):
        cuts = ",".join(str(stage.start) for stage in recut.stages[1:])
        yield f"{_loss(plan, recut):.1%} to the same stages cut at {cuts}"
    if best is not None and best != recut and loses_to(plan, best):
        yield f"{_loss(plan, best):.1%} to the best plan found that {trainer} runs"


def loses_to(plan: Plan, other: Plan) -> bool:
    """Whether the other plan is faster by more than a simulation can tell, and fits if need be."""
    return _loss(plan, other) > _SAME and (other.fits or not plan.fits)


def _loss(plan: Plan, other: Plan) -> float:
    return 1 - plan.predicted.samples_per_s / other.predicted.samples_per_s
