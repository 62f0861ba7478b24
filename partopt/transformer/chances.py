"""How far what is computed of a layout is from runs like it, and what a try of it is worth."""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist, median

from partopt.documents.transformer import RunErrors
from partopt.transformer.block import Training
from partopt.transformer.rates import USABLE

# what runs of a kind have in common, whose errors are in errors.csv
KINDS = {
    "sinks": "attention with sinks",
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
    """The kind of runs, of `KINDS`, to which an iteration of so many seconds belongs."""
    if work.model.experts:
        return "sinks" if work.model.sinks else "experts"
    kernels = "fp8" in work.rates.products and work.practice.attention.startswith("cudnn")
    if not kernels or work.sequence > _TOKENS:
        return "far"
    return "short" if seconds < 1.0 else "usual"


def errors_like(kind: str) -> RunErrors:
    """How far runs of a kind were off that no constant was fitted to, but for one of sinks.

    `twentieth` is the error that one of twenty further runs is over, if these are as likely as
    those known: the next larger one of a ranked (n + 1)-th part (Vovk et al., 2005, conformal).
    """
    known = sorted(map(abs, known_errors("seconds", kind)))
    place = min(len(known), math.ceil(0.95 * (len(known) + 1)))
    return RunErrors(
        like=KINDS[kind], runs=len(known), half=median(known), twentieth=known[place - 1]
    )


@functools.cache
def known_errors(of: str, kind: str = "") -> Sequence[float]:
    """Relative errors of computed `seconds` or `bytes`, of runs of a kind, by default of all."""
    with _ERRORS.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["kind"] == kind or not kind]
    return [float(row[of]) for row in rows if row[of]]


def fits_chance(needed_bytes: float, memory_bytes: float) -> float:
    """How likely a need that is computed fits a device with so many bytes in its name.

    That is how many of the runs whose bytes are published it would fit, if it is off as theirs.
    """
    errors, usable = known_errors("bytes"), USABLE * memory_bytes
    return sum(needed_bytes <= usable * (1 + error) for error in errors) / len(errors)


def expected_gain(saved: float, chance: float) -> float:
    """The share of the time that a try saves in the mean, where nothing is lost by one that fails.

    `saved` is the computed share, off by a normal error; it fits by a `chance` (the expected
    improvement of Jones et al., 1998).
    """
    known = NormalDist(saved, APART)
    return chance * (saved * (1 - known.cdf(0.0)) + APART**2 * known.pdf(0.0))
