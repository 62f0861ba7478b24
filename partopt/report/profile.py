"""A profile as people read it: what was measured, and where the time and the bytes are."""

from __future__ import annotations

from rich.console import Console

from partopt.profile import Measurement, Profile
from partopt.report.table import bar, encodes_bars, shorten, table
from partopt.units import format_bytes, format_seconds


def show(profile: Profile, out: Console) -> None:
    """Print the measured microbatch sizes, then every layer at the largest of them with its share of the time drawn."""
    environment = ", ".join(f"{name} {version}" for name, version in _versions(profile))
    out.print(f"{'model':9}{profile.model.name}: {len(profile.layers)} layers, {profile.dtype}")
    out.print(f"{'device':9}{profile.device.name}{f' ({environment})' if environment else ''}\n")
    headings = ["MICROBATCH", "STEP", "LAYERS", "COVERAGE", "OVERHEAD", "SAMPLES/S", "OPTIMIZER", "PEAK"]
    out.print(table(headings, [_size_row(measurement) for measurement in profile.measurements], left=()))
    measurement = profile.measured()[-1]
    out.print(f"\nmicrobatch {measurement.microbatch_size}:")
    out.print(
        table(
            ["", "LAYER", "TYPE", "FORWARD", "BACKWARD", "OUTPUT", "WEIGHTS", "TIME"],
            _layer_rows(profile, measurement, out),
            left=(1, 2, 7),
        )
    )


def _versions(profile: Profile) -> list[tuple[str, str]]:
    known = profile.environment
    return [(name, version) for name, version in (("torch", known.torch), ("CUDA", known.cuda)) if version]


def _size_row(measurement: Measurement) -> list[str]:
    size = str(measurement.microbatch_size)
    if measurement.out_of_memory:
        return [size, "out of memory", *["-"] * 6]
    layers_s = sum(layer.forward_s + layer.backward_s for layer in measurement.layers)
    return [
        size,
        _or_dash(measurement.step_s, format_seconds),
        format_seconds(layers_s),
        _or_dash(measurement.coverage, lambda share: f"{share:.1%}"),
        _or_dash(measurement.overhead, lambda ratio: f"{ratio:.2f}"),
        f"{measurement.microbatch_size / layers_s:,.1f}",
        _or_dash(measurement.optimizer_s, format_seconds),
        _or_dash(measurement.peak_memory_bytes, format_bytes),
    ]


def _or_dash(value: float | None, form: object) -> str:
    return "-" if value is None else form(value)  # type: ignore[operator,no-any-return]


def _layer_rows(profile: Profile, measurement: Measurement, out: Console) -> list[list[str]]:
    slowest = max(layer.forward_s + layer.backward_s for layer in measurement.layers)
    return [
        [
            str(index),
            shorten(layer.name + (f" #{layer.call}" if layer.call else ""), 18),
            shorten(layer.type, 12),
            format_seconds(measured.forward_s),
            format_seconds(measured.backward_s),
            format_bytes(measured.output_bytes),
            format_bytes(layer.parameter_bytes),
            bar((measured.forward_s + measured.backward_s) / slowest, 6, ascii_only=not encodes_bars(out.file)),
        ]
        for index, (layer, measured) in enumerate(zip(profile.layers, measurement.layers, strict=True))
    ]
