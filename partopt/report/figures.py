"""Tokens, operations, utilisation and money, as people read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from partopt.documents.figures import Figures
from partopt.units import format_count, format_flops, format_rate

Known = Figures | msgspec.UnsetType


class Rated(Protocol):
    """A plan's prediction, or what says as much of it."""

    @property
    def samples_per_s(self) -> float:
        """Its speed."""

    @property
    def figures(self) -> Known:
        """What follows from the speed."""


def tokens_per_sample(rated: Rated) -> float | None:
    """Tokens of a sample, where they are known."""
    if isinstance(rated.figures, msgspec.UnsetType) or rated.figures.tokens_per_s is None:
        return None
    return rated.figures.tokens_per_s / rated.samples_per_s


def speed_text(samples_per_s: float, tokens: float | None) -> str:
    """`139,892 tokens/s`, or `34.15 samples/s` where the tokens of a sample are not known."""
    if tokens is None:
        return format_rate(samples_per_s, "samples")
    return format_rate(samples_per_s * tokens, "tokens")


def speeds(rows: Sequence[Rated]) -> tuple[str, list[float]]:
    """`tokens` and how many each row does in a second, where all know them, else `samples`."""
    tokens = [tokens_per_sample(row) for row in rows]
    known = [each for each in tokens if each is not None]
    if len(known) < len(rows):
        return "samples", [row.samples_per_s for row in rows]
    return "tokens", [row.samples_per_s * each for row, each in zip(rows, known, strict=True)]


def speed_lines(rated: Rated) -> list[tuple[str, str]]:
    """What follows the line of the speed, where known.

    Samples/s where the speed is in tokens/s, operations a device, and MFU.
    """
    figures = rated.figures
    if isinstance(figures, msgspec.UnsetType):
        return []
    parts = []
    if figures.tokens_per_s is not None:
        parts.append(format_rate(rated.samples_per_s, "samples"))
    if figures.device_flops_per_s is not None:
        share = "" if figures.mfu is None else f", MFU {figures.mfu:.1%}"
        parts.append(f"{format_flops(figures.device_flops_per_s)} a device{share}")
    return [("", "; ".join(parts))] if parts else []


def price_lines(figures: Known, devices: int) -> list[tuple[str, str]]:
    """What all devices cost an hour and what one unit of money buys, where a price is known."""
    if isinstance(figures, msgspec.UnsetType) or figures.price_per_hour is None:
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
    known = None if isinstance(figures, msgspec.UnsetType) else figures.samples_per_money
    return "-" if known is None else format_count(known)


def has_price(figures: Known) -> bool:
    """Whether a price is known."""
    return not isinstance(figures, msgspec.UnsetType) and figures.price_per_hour is not None


def format_money(amount: float) -> str:
    """`2.50`, in whatever currency the topology has."""
    return f"{amount:,.2f}" if amount >= 0.01 else f"{amount:.3g}"
