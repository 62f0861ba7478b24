"""A profile as people read it: what was measured, and where the time and the bytes are."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import TypeVar

from partopt.documents.profile import Layer, Measurement, Profile
from partopt.printable import shorten, without_numbers
from partopt.report.basis import basis_lines
from partopt.report.layer_rows import LayerRows, choose_rows, every_row, layer_table, legend
from partopt.report.table import bar, label_lines, paragraph, table
from partopt.report.width import stretch
from partopt.units import format_bytes, format_seconds

Number = TypeVar("Number", int, float)

_SIZE_HEADINGS = [
    "MICROBATCH",
    "STEP",
    "LAYERS",
    "COVERAGE",
    "OVERHEAD",
    "SAMPLES/S",
    "OPTIMIZER",
    "PEAK",
]
_LAYER_HEADINGS = ["#", "LAYER", "TYPE", "FORWARD", "BACKWARD", "OUTPUT", "WEIGHTS", "TIME"]


def render(
    profile: Profile,
    ascii_only: bool = False,
    all_layers: bool = False,
    spell: Callable[[str], str] = str,
) -> str:
    """The measured microbatch sizes, then the layers at the largest of them.

    A bar shows each layer's share of the time, a star a layer measured by another one. Layers and
    blocks that repeat are shown once, and of very many rows the first and the last; each layer has
    a row with `all_layers`, an option that is written as `spell` does.
    """
    measurement = profile.measured()[-1]
    rows = every_row(len(profile.layers))
    if not all_layers:
        rows = choose_rows(_alike(profile, measurement))
    notes = [f"microbatch {measurement.microbatch_size}:\n"]
    notes[0] += _layer_table(profile, measurement, rows, ascii_only)
    notes += map(paragraph, [*_not_run(profile), *legend(rows, spell)])
    return "\n\n".join([render_sizes(profile), *notes])


def render_sizes(profile: Profile) -> str:
    """What was measured on what, and a row for each microbatch size."""
    environment = ", ".join(f"{name} {version}" for name, version in _versions(profile))
    head = [
        (
            "model",
            (
                f"{profile.model.name}: {len(profile.layers)} layers, "
                f"{format_bytes(profile.parameter_bytes())} of parameters, {_format(profile)}"
                f"{_tokens(profile)}"
            ),
        ),
        ("device", profile.device.name + (f" ({environment})" if environment else "")),
        *([("group", f"{profile.group_ranks} ranks; numbers of one")] if profile.group else []),
        *basis_lines(profile.estimated_for),
    ]
    sizes = table(
        _SIZE_HEADINGS, map(_size_row, profile.measurements), left=(), gap=1, spare=(6, 4)
    )
    return f"{label_lines(head)}\n\n{sizes}"


def _tokens(profile: Profile) -> str:
    tokens = profile.model.tokens_per_sample
    return "" if tokens is None else f", {tokens:,} tokens a sample"


def _format(profile: Profile) -> str:
    """The number format, and how the model was run."""
    marks = [profile.dtype, profile.autocast and f"{profile.autocast} autocast"]
    return ", ".join(filter(None, [*marks, "compiled" if profile.compiled else None]))


def _versions(profile: Profile) -> list[tuple[str, str]]:
    known = profile.environment
    return [
        (name, version)
        for name, version in (("torch", known.torch), ("CUDA", known.cuda))
        if version
    ]


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


def _or_dash(value: Number | None, form: Callable[[Number], str]) -> str:
    return "-" if value is None else form(value)


def _not_run(profile: Profile) -> Iterator[str]:
    """Which layers did not run themselves."""
    ran = sorted({layer.measured_as for layer in profile.layers if layer.measured_as is not None})
    if ran:
        which = f"layer {ran[0]}" if len(ran) == 1 else "a layer like it"
        yield f"* did not run: has the measurements of {which}"


def _alike(profile: Profile, measurement: Measurement) -> list[Hashable]:
    """A key for each layer, equal for those that differ in nothing but numbers in their names."""
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


def _layer_table(
    profile: Profile, measurement: Measurement, rows: LayerRows, ascii_only: bool
) -> str:
    slowest = max(layer.forward_s + layer.backward_s for layer in measurement.layers)

    def cells(place: int) -> list[str]:
        layer, measured = profile.layers[place], measurement.layers[place]
        seconds = measured.forward_s + measured.backward_s
        return [
            _layer_name(layer),
            shorten(layer.type, stretch(12, 0.2)),
            format_seconds(measured.forward_s),
            format_seconds(measured.backward_s),
            format_bytes(measured.output_bytes),
            format_bytes(layer.parameter_bytes),
            bar(seconds / slowest, 6, ascii_only),
        ]

    return layer_table(rows, _LAYER_HEADINGS, cells, left=(1, 2, 7), spare=(7, 2))


def _layer_name(layer: Layer) -> str:
    name = layer.name + (f" #{layer.call}" if layer.call else "")
    return (
        shorten(name, stretch(18))
        if layer.measured_as is None
        else f"{shorten(name, stretch(17))}*"
    )
