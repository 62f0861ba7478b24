"""A profile as people read it: what was measured, and where the time and the bytes are."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

from partopt.documents.profile import Measurement, Profile
from partopt.printable import shorten, without_numbers
from partopt.report.folds import Fold, fold
from partopt.report.phrases import basis_lines
from partopt.report.text import Column, bar, label_lines, paragraph, stretch, style, table_of
from partopt.units import format_bytes, format_number, format_seconds

Number = TypeVar("Number", int, float)
# a row of the table of layers: the layer and how often it repeats, None where rows are left out
Row = tuple[int, int] | None

_MOST_ROWS, _FIRST = 100, 75  # of layers, and how many of these are the first ones
_LEAST_SAVED = 2  # rows, by a fold


def render(profile: Profile, all_layers: bool = False) -> str:
    """The measured microbatch sizes, then the layers at the largest of them.

    A bar shows a layer's share of the time, a star a layer measured by another one. Layers and
    blocks that repeat are shown once, and of very many rows the first and the last; every layer has
    a row with `all_layers`.
    """
    measurement = profile.measured()[-1]
    rows: list[Row] = [(place, 1) for place in range(len(profile.layers))]
    left_out = 0
    if not all_layers:
        rows, left_out = choose_rows(_alike(profile, measurement))
    table = _layer_table(profile, measurement, rows)
    parts = [render_sizes(profile), f"microbatch {measurement.microbatch_size}:\n{table}"]
    ran = sorted({layer.measured_as for layer in profile.layers if layer.measured_as is not None})
    if ran:
        which = f"layer {ran[0]}" if len(ran) == 1 else "a layer like it"
        parts.append(paragraph(f"* did not run: has the measurements of {which}"))
    every = style().spell("`all_layers=True` shows each layer")
    if any(row and row[1] > 1 for row in rows):
        parts.append(paragraph(f"xN: N times, rows with the same mark in turn; {every}"))
    if left_out:
        parts.append(paragraph(f"{left_out} rows are left out; {every}"))
    return "\n\n".join(parts)


def _head(profile: Profile) -> str:
    """What was measured, on what."""
    known, tokens = profile.environment, profile.model.tokens_per_sample
    versions = [
        ("torch", known.torch),
        ("CUDA", known.cuda),
        ("driver", known.driver),
        ("cuDNN", known.cudnn),
        ("NCCL", known.nccl),
    ]
    environment = ", ".join(f"{name} {version}" for name, version in versions if version)
    about = [
        f"{len(profile.layers)} layers",
        f"{format_bytes(profile.parameter_bytes())} of parameters",
        profile.dtype,
        profile.autocast and f"{profile.autocast} autocast",
        profile.compiled and "compiled",
        tokens and f"{tokens:,} tokens a sample",
    ]
    lines = [
        ("model", f"{profile.model.name}: {', '.join(part for part in about if part)}"),
        ("device", profile.device.name + (f" ({environment})" if environment else "")),
        *_condition_lines(profile),
        *([("group", f"{profile.group_ranks} ranks; numbers of one")] if profile.group else []),
        *basis_lines(profile.estimated_for),
    ]
    return label_lines(lines)


def render_sizes(profile: Profile) -> str:
    """What was measured on what, and a row for every microbatch size."""

    def layers_s(measurement: Measurement) -> float:
        return sum(layer.forward_s + layer.backward_s for layer in measurement.layers)

    def known_or_dash(
        value: Callable[[Measurement], Number | None], form: Callable[[Number], str]
    ) -> Callable[[Measurement], str]:
        def cell(measurement: Measurement) -> str:
            found = None if measurement.out_of_memory else value(measurement)
            return "-" if found is None else form(found)

        return cell

    def step(measurement: Measurement) -> str:
        if measurement.out_of_memory:
            return "out of memory"
        return "-" if measurement.step_s is None else format_seconds(measurement.step_s)

    def rate(measurement: Measurement) -> float:
        return measurement.microbatch_size / layers_s(measurement)

    sizes = table_of(
        profile.measurements,
        [
            Column("MICROBATCH", lambda row: str(row.microbatch_size)),
            Column("STEP", step),
            Column("LAYERS", known_or_dash(layers_s, format_seconds)),
            Column("COVERAGE", known_or_dash(lambda row: row.coverage, "{:.1%}".format)),
            Column("OVERHEAD", known_or_dash(lambda row: row.overhead, "{:.2f}".format), spare=2),
            Column("SAMPLES/S", known_or_dash(rate, format_number)),
            Column(
                "OPTIMIZER", known_or_dash(lambda row: row.optimizer_s, format_seconds), spare=1
            ),
            Column("PEAK", known_or_dash(lambda row: row.peak_memory_bytes, format_bytes)),
        ],
        gap=1,
    )
    return f"{_head(profile)}\n\n{sizes}"


def _condition_lines(profile: Profile) -> Iterator[tuple[str, str]]:
    """The settings of torch that decide a device's speed, and its clock rate, where known."""
    known = profile.environment
    tf32 = {"products": known.matmul_tf32, "convolutions": known.cudnn_tf32}
    precision = known.float32_matmul_precision
    settings = [
        precision and precision != "highest" and f"float32 products {precision}",
        *(value and f"TF32 in {name}" for name, value in tf32.items()),
        known.cudnn_benchmark and "cuDNN's benchmark",
        profile.device.type == "cuda"
        and known.attention
        and f"attention {' and '.join(known.attention)}",
    ]
    if any(settings):
        yield "settings", ", ".join(setting for setting in settings if setting)
    lowered = f"lowered by {' and '.join(known.throttled_by)}" if known.throttled_by else ""
    rate = f"{known.sm_clock_hz / 1e6:.0f} MHz" if known.sm_clock_hz else ""
    if rate or lowered:
        yield "clock", ", ".join(part for part in (rate, lowered) if part)


def _alike(profile: Profile, measurement: Measurement) -> list[Hashable]:
    """A key for every layer, equal for those that differ in nothing but numbers in their names."""
    return [
        (
            without_numbers(layer.name),
            layer.type,
            layer.parameter_bytes,
            layer.measured_as is None,
            measured.forward_s,
            measured.backward_s,
            measured.output_bytes,
        )
        for layer, measured in zip(profile.layers, measurement.layers, strict=True)
    ]


def choose_rows(keys: Sequence[Hashable]) -> tuple[list[Row], int]:
    """Rows of layers that are alike where their `keys` are equal, and how many are left out."""

    def written(folds: Sequence[Fold], step: int = 1) -> Iterator[Row]:
        return ((place, run.times) for run in folds[::step] for place in run.block[::step])

    folds = fold(keys, _LEAST_SAVED)
    count = sum(run.length for run in folds)
    if count <= _MOST_ROWS:
        return list(written(folds)), 0
    last = list(islice(written(folds, -1), _MOST_ROWS - _FIRST))[::-1]
    return [*islice(written(folds), _FIRST), None, *last], count - _MOST_ROWS


def _layer_table(profile: Profile, measurement: Measurement, rows: list[Row]) -> str:
    slowest = max(layer.forward_s + layer.backward_s for layer in measurement.layers)

    def of_layer(cell: Callable[[int], str]) -> Callable[[Row], str]:
        return lambda row: "" if row is None else cell(row[0])

    def name(place: int) -> str:
        layer = profile.layers[place]
        star = "" if layer.measured_as is None else "*"
        call = f" #{layer.call}" if layer.call else ""
        return shorten(f"{layer.name}{call}", stretch(18 - len(star))) + star

    def share(place: int) -> float:
        measured = measurement.layers[place]
        return (measured.forward_s + measured.backward_s) / slowest

    layers, measured = profile.layers, measurement.layers
    times = Column("", lambda row: f"x{row[1]}" if row and row[1] > 1 else "", "whole")
    return table_of(
        rows,
        [
            Column("#", lambda row: ".." if row is None else str(row[0])),
            Column("LAYER", of_layer(name), "text"),
            *([times] if any(row and row[1] > 1 for row in rows) else []),
            Column(
                "TYPE", of_layer(lambda n: shorten(layers[n].type, stretch(12, 0.2))), "text", 2
            ),
            Column("FORWARD", of_layer(lambda n: format_seconds(measured[n].forward_s))),
            Column("BACKWARD", of_layer(lambda n: format_seconds(measured[n].backward_s))),
            Column("OUTPUT", of_layer(lambda n: format_bytes(measured[n].output_bytes))),
            Column("WEIGHTS", of_layer(lambda n: format_bytes(layers[n].parameter_bytes))),
            Column("TIME", of_layer(lambda n: bar(share(n), 6)), "text", 1),
        ],
    )
