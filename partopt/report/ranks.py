"""Ranks as people read them."""

from __future__ import annotations

from collections.abc import Sequence


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
