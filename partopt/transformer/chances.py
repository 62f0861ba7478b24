"""How far what is computed of a layout is from runs like it, and what a try of it is worth."""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist, mean, median

from partopt.documents.transformer import RunErrors
from partopt.transformer.block import Training
from partopt.transformer.rates import USABLE

# what runs of a kind have in common, whose errors are in errors.csv
KINDS = {
    "sinks": "attention with sinks",
    "states": "of state spaces",
    "experts": "of experts",
    "far": "dense, on a device without 8 bits, by torch's kernels, or over 8,192 tokens",
    "short": "dense, under 1 s an iteration",
    "usual": "dense, on an H100 or later by Megatron's kernels, up to 8,192 tokens",
}
_ERRORS = Path(__file__).with_name("errors.csv")

_TOKENS = 8192  # of the longest samples of most runs

# of the time, the computed gain of a layout over another against the published one, as a standard
# deviation: of 359 pairs of runs that differ in degrees half are off by more than 0.055
APART = 0.055 / NormalDist().inv_cdf(0.75)


def kind_of(work: Training, seconds: float) -> str:
    """The kind of runs, of `KINDS`, to which an iteration of so many seconds belongs.

    Nothing where no published run is of such blocks, or has pictures.
    """
    if work.practice.images:
        return ""
    if state := work.model.recurrence:
        return state.rule if state.rule in KINDS else ""
    if work.model.indexer:
        return ""
    if work.model.experts:
        return "sinks" if work.model.sinks else "experts"
    kernels = "fp8" in work.rates.products and work.practice.attention.startswith("cudnn")
    if not kernels or work.sequence > _TOKENS:
        return "far"
    return "short" if seconds < 1.0 else "usual"


def errors_like(kind: str) -> RunErrors:
    """How far runs of a kind were off that no constant was fitted to, but one of sinks, of states.

    `twentieth` is the error that one of twenty further runs is over, if these are as likely as
    those known: the next larger one of a ranked (n + 1)-th part (Vovk et al., 2005, conformal).
    """
    known = sorted(map(abs, known_errors(kind)))
    place = min(len(known), math.ceil(0.95 * (len(known) + 1)))
    return RunErrors(
        like=KINDS[kind], runs=len(known), half=median(known), twentieth=known[place - 1]
    )


@functools.cache
def known_errors(kind: str) -> Sequence[float]:
    """Relative errors of the computed seconds of runs of a kind."""
    return [float(row["seconds"]) for row in _rows() if row["kind"] == kind and row["seconds"]]


@functools.cache
def memory_factors() -> Mapping[str, NormalDist]:
    """By source of runs: how the log of what they need to what is computed is distributed.

    It is normal around 0, its deviation the root mean square of the source's runs.
    """
    squares: dict[str, list[float]] = {}
    for row in _rows():
        if row["bytes"]:
            squares.setdefault(row["source"], []).append(math.log1p(float(row["bytes"])) ** 2)
    return {source: NormalDist(0, math.sqrt(mean(known))) for source, known in squares.items()}


def _rows() -> list[dict[str, str]]:
    """Runs that no constant was fitted to, with their errors."""
    with _ERRORS.open(newline="", encoding="utf-8") as file:
        return [*csv.DictReader(file)]


def fits_chance(needed_bytes: float, memory_bytes: float) -> float:
    """How likely a need that is computed fits a device with so many bytes in its name.

    It is off as runs of one of the sources, any of which is as likely as another.
    """
    room = math.log(USABLE * memory_bytes / needed_bytes)
    return mean(factor.cdf(room) for factor in memory_factors().values())


def expected_gain(saved: float, chance: float) -> float:
    """The share of the time that a try saves in the mean, where nothing is lost by one that fails.

    `saved` is the computed share, off by a normal error; it fits by a `chance` (the expected
    improvement of Jones et al., 1998).
    """
    known = NormalDist(saved, APART)
    return chance * (saved * (1 - known.cdf(0.0)) + APART**2 * known.pdf(0.0))
