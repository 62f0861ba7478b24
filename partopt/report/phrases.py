"""What pages say alike: the head, the cluster, ranks, speeds, money, limits, what times rest on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from partopt.documents.plan import Plan
from partopt.documents.simulation import SimulationDocument
from partopt.documents.stage import Figures
from partopt.documents.tables import Run
from partopt.documents.topology import Level, Topology
from partopt.printable import shorten
from partopt.report.text import DOES_NOT_FIT, label_lines, stretch
from partopt.units import format_bandwidth, format_bytes, format_count, format_flops, format_rate

Lines = list[tuple[str, str]]  # with their labels
Known = Figures | msgspec.UnsetType  # which is false


class Rated(Protocol):
    """A plan's prediction, or what says as much of it."""

    @property
    def samples_per_s(self) -> float:
        """Its speed."""

    @property
    def figures(self) -> Known:
        """What follows from the speed."""


def head(of: Plan | SimulationDocument) -> str:
    """The model, the cluster, its groups if any, and the plan in a line each."""
    model, layers, weights, count = (
        (of.profile.name, of.stages[-1].stop, of.profile.parameter_bytes, len(of.stages))
        if isinstance(of, Plan)
        else (of.model, of.layers, of.parameter_bytes, of.stages)
    )
    per_rank = "" if of.topology.group is None else " a rank"
    about = f"{layers} layers, {format_bytes(weights)} of parameters{per_rank}"
    plan = f"{count_text(count, 'stage')}, {shorten(of.shape, stretch(40))}, schedule {of.schedule}"
    return label_lines(
        [
            ("model", f"{model}: {about}, microbatch {of.microbatch_size}"),
            *cluster_lines(of.topology),
            ("plan", f"{of.planner}: {plan}"),
        ]
    )


def cluster_lines(topology: Topology) -> Lines:
    """The cluster, and the groups that its ranks are in."""

    def levels(of: Topology) -> str:
        return ", ".join(f"{level.name} ({level.size}, {link_text(level)})" for level in of.levels)

    cluster, N = topology.cluster, topology.group_ranks
    devices = f"{topology.name}, {cluster.devices} x {topology.device.name}"
    lines = [("cluster", f"{devices}: {levels(cluster)}")]
    if N > 1:
        ranks = f"ranks are groups of {N}: rank p is the real ranks {N}p to {N}p+{N - 1}"
        lines.append(("group", f"{ranks}; between groups {levels(topology)}"))
    return lines


def link_text(level: Level) -> str:
    """`ethernet 1.25 GB/s`, or `infiniband 8 x 50 GB/s` of several links."""
    rate = format_bandwidth(level.bandwidth_bytes_per_s)
    count = f"{level.links} x " if level.links > 1 else ""
    return f"{level.link} {count}{rate}".strip()


def format_ranks(ranks: Sequence[int]) -> str:
    """`0-14 (x15)`: runs of consecutive ranks, ascending, and how many there are."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{text} (x{len(ranks)})" if len(ranks) > 1 else text


def ranks_text(ranks: Sequence[int], width: int) -> str:
    """The ranks in the fullest form that fits: all of them, the first and how many, how many."""
    forms = [format_ranks(ranks), f"{min(ranks)}.. (x{len(ranks)})"]
    return next((form for form in forms if len(form) <= width), f"x{len(ranks)}")


def batch_text(microbatch_size: int, microbatches: int | None) -> str:
    """`2x16`: samples of a microbatch and, of an iteration, how many microbatches."""
    return f"{microbatch_size}x{microbatches}" if microbatches else f"{microbatch_size}"


def count_text(count: int, what: str) -> str:
    """`1 device`, `16 devices`."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def against_limit(peak_bytes: int, limit_bytes: int | None) -> str:
    """What follows a number of bytes: how it stands to the limit of a device."""
    if limit_bytes is None:
        return "; no limit is known"
    limit = format_bytes(limit_bytes)
    if peak_bytes > limit_bytes:
        over = format_bytes(peak_bytes - limit_bytes)
        return f": {DOES_NOT_FIT} {limit}, over by {over}"
    return f", {peak_bytes / limit_bytes:.0%} of {limit}"


def excess_text(peak_bytes: int, limit_bytes: int) -> str:
    """What follows a device that does not fit: what it needs, and by how much that is too much."""
    over = format_bytes(peak_bytes - limit_bytes)
    return f"needs {format_bytes(peak_bytes)}, which exceeds the limit by {over}"


def speedup_text(ratio: float, topology: Topology) -> str:
    """`14.75 times one device`, or times one group."""
    N = topology.group_ranks
    return f"{ratio:.2f} times one {'device' if N == 1 else f'group of {N}'}"


def tokens_per_sample(rated: Rated) -> float | None:
    """Tokens of a sample, where they are known."""
    if not rated.figures or rated.figures.tokens_per_s is None:
        return None
    return rated.figures.tokens_per_s / rated.samples_per_s


def speed_text(samples_per_s: float, tokens: float | None) -> str:
    """`139,892 tokens/s`, or `34.15 samples/s` where the tokens of a sample are not known."""
    if tokens is None:
        return format_rate(samples_per_s, "samples")
    return format_rate(samples_per_s * tokens, "tokens")


def speeds(rows: Sequence[Rated]) -> tuple[str, list[float]]:
    """`tokens` and how many every row does in a second, where all know them, else `samples`."""
    tokens = [tokens_per_sample(row) for row in rows]
    known = [count for count in tokens if count is not None]
    if len(known) < len(rows):
        return "samples", [row.samples_per_s for row in rows]
    return "tokens", [row.samples_per_s * count for row, count in zip(rows, known, strict=True)]


def speed_lines(rated: Rated, peak: str = "") -> Lines:
    """What follows the line of the speed, where known.

    Samples/s where the speed is in tokens/s, operations a device, and MFU, of the `peak` of a
    number format if it is named.
    """
    figures, parts = rated.figures, []
    if not figures:
        return []
    if figures.tokens_per_s is not None:
        parts.append(speed_text(rated.samples_per_s, None))
    if figures.device_flops_per_s is not None:
        share = "" if figures.mfu is None else f", MFU {figures.mfu:.1%}{peak}"
        parts.append(f"{format_flops(figures.device_flops_per_s)} a device{share}")
    return [("", "; ".join(parts))] if parts else []


def format_money(amount: float) -> str:
    """`2.50`, in whatever currency the topology has."""
    return f"{amount:,.2f}" if amount >= 0.01 else f"{amount:.3g}"


def hourly_lines(topology: Topology) -> Lines:
    """What a device and the whole cluster cost, where a price is known."""
    price, devices = topology.device.price_per_hour, topology.cluster.devices
    if not price:
        return []
    text = f"{format_money(price)} a device an hour, {format_money(price * devices)} for all"
    return [("price", text)]


def price_lines(figures: Known, devices: int) -> Lines:
    """What all devices cost an hour and what one unit of money buys, where a price is known."""
    if not figures or figures.price_per_hour is None:
        return []
    all_of_them = "the device" if devices == 1 else f"{devices} devices"
    text = f"{format_money(figures.price_per_hour)} an hour for {all_of_them}"
    return [("price", f"{text}: {bought_text(figures)}")]


def bought_text(figures: Figures) -> str:
    """`6.86 k samples (14.1 M tokens) for 1.00`: what one unit of money buys."""
    tokens = figures.tokens_per_money
    also = "" if tokens is None else f" ({format_count(tokens)} tokens)"
    return f"{bought(figures)} samples{also} for 1.00"


def bought(figures: Known) -> str:
    """Samples that one unit of money buys; a dash where no price is known."""
    known = figures.samples_per_money if figures else None
    return "-" if known is None else format_count(known)


def run_text(run: Run) -> str:
    """`22.9 days, 282 k GPU-hours, cost 592 k`: what training on many tokens takes."""
    text = f"{format_count(run.days)} days, {format_count(run.device_hours)} GPU-hours"
    return f"{text}, cost {format_count(run.cost)}" if run.cost else text


def any_price(rows: Sequence[Rated]) -> bool:
    """Whether a price is known of any of the rows."""
    return any(row.figures and row.figures.price_per_hour is not None for row in rows)


def basis_text(device: str) -> str:
    """What to say of times that were estimated for `device`."""
    return f"times estimated for {device}: nothing was measured"


def basis_lines(estimated: str | None) -> Lines:
    """The line of times estimated for a device; none where they were measured."""
    return [] if estimated is None else [("rests on", basis_text(estimated))]
