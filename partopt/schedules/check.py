"""Refuse orders that no pipeline can execute or that leave work out, with the rank and the action.

Deadlocks, devices that wait for each other, are found by executing the order.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from partopt.errors import PartoptError
from partopt.schedules.layout import Layout
from partopt.schedules.order import KINDS, A, B, F, I, Order, R, U, W

# S, s   stages, and which one
# M      microbatches
# task   a microbatch on a stage: s M + microbatch

Places = NDArray[np.int64]  # of actions in the order
NOWHERE = -1


def check(order: Order, layout: Layout) -> None:
    """Raise PartoptError unless every stage does each microbatch exactly once.

    That is a forward, then a backward, whole or an I and then a W, all on the rank that holds the
    stage's replica for that microbatch; a recomputation lies between the two. Joined actions are
    one forward and the one backward after it.
    """
    _check_numbers(order, layout)
    _check_ranks(order, layout)
    task = order.stage.astype(np.int64) * layout.microbatches + order.microbatch
    place = {kind: _places(order, layout, task, kind) for kind in (F, B, I, W, R)}
    _check_backwards(order, layout, place)
    _check_sequence(order, place)
    _check_joined(order, task)


def _check_numbers(order: Order, layout: Layout) -> None:
    stages, M = len(layout.ranks), layout.microbatches
    _refuse(
        order,
        (order.stage < 0) | (order.stage >= stages),
        "names an unknown stage",
        f"stages are numbered 0 to {stages - 1}",
    )
    acting = (order.kind != A) & (order.kind != U)
    wrong = acting & ((order.microbatch < 0) | (order.microbatch >= M))
    _refuse(order, wrong, "names an unknown microbatch", f"microbatches are numbered 0 to {M - 1}")


def _check_ranks(order: Order, layout: Layout) -> None:
    """Every action is on a rank that holds its stage.

    Every action for a microbatch is on the replica that gets it.
    """
    rank = np.repeat(np.arange(order.ranks), np.diff(order.rows))
    replicas = np.array(layout.replicas)
    held = np.zeros((len(replicas), replicas.max()), dtype=np.int64)
    for s, ranks in enumerate(layout.ranks):
        held[s, : len(ranks)] = ranks
    acting = (order.kind != A) & (order.kind != U)
    k = np.where(acting, order.microbatch % replicas[order.stage], 0)
    wrong = acting & (held[order.stage, k] != rank)
    if wrong.any():
        first = int(wrong.argmax())
        right = f"rank {held[order.stage[first], k[first]]}"
        _refuse(
            order,
            wrong,
            "is on the wrong rank",
            f"microbatch {order.microbatch[first]} of that stage belongs on {right}",
        )
    stages = len(replicas)
    holders = np.array([r * stages + s for s, ranks in enumerate(layout.ranks) for r in ranks])
    _refuse(
        order,
        ~acting & ~np.isin(rank * stages + order.stage, holders),
        "is on a rank that does not hold the stage",
        "leave it out there",
    )


def _places(order: Order, layout: Layout, task: Places, kind: int) -> Places:
    """Where the action of a kind is for each task; NOWHERE where there is none.

    Raises PartoptError where there are two.
    """
    own = np.flatnonzero(order.kind == kind)
    found = np.full(len(layout.ranks) * layout.microbatches, NOWHERE, dtype=np.int64)
    found[task[own[::-1]]] = own[::-1]
    repeated = np.zeros(len(order.kind), dtype=np.bool_)
    repeated[own] = found[task[own]] != own
    _refuse(order, repeated, "occurs twice", "each microbatch passes a stage once")
    return found


def _check_backwards(order: Order, layout: Layout, place: dict[int, Places]) -> None:
    """Every task has its F, and a B or else an I and a W."""
    there = {kind: places != NOWHERE for kind, places in place.items()}
    hint = "each microbatch needs on each stage one F, and one B or one I and one W"
    both = np.maximum(place[I], place[W])[there[B] & (there[I] | there[W])]
    twice = np.zeros(len(order.kind), dtype=np.bool_)
    twice[both] = True
    _refuse(order, twice, "occurs beside a whole backward", hint)
    split = there[I] | there[W]
    for kind, missing in (
        (F, ~there[F]),
        (B, ~there[B] & ~split),
        (I, split & ~there[I]),
        (W, split & ~there[W]),
    ):
        if missing.any():
            s, microbatch = divmod(int(missing.argmax()), layout.microbatches)
            rank = layout.ranks[s][microbatch % len(layout.ranks[s])]
            raise PartoptError(
                f"rank {rank}: {s}{KINDS[kind]}{microbatch} is missing",
                hint,
                code="invalid-order",
                rank=rank,
                action=f"{s}{KINDS[kind]}{microbatch}",
            )


def _check_sequence(order: Order, place: dict[int, Places]) -> None:
    """F comes before B or I, I before W, and R between F and B or I.

    They are on one rank, so that places in the order compare.
    """
    backward = np.maximum(place[B], place[I])
    recomputed = place[R] != NOWHERE
    pairs = (
        (place[F], backward, np.ones_like(recomputed), "comes before its forward"),
        (place[I], place[W], place[W] != NOWHERE, "comes before the inputs' backward"),
        (place[F], place[R], recomputed, "comes before its forward"),
        (place[R], backward, recomputed, "comes before its recomputation"),
    )
    for earlier, later, asked, what in pairs:
        wrong = np.zeros(len(order.kind), dtype=np.bool_)
        wrong[later[asked & (later < earlier)]] = True
        _refuse(
            order,
            wrong,
            what,
            "F comes first, then R where there is one, then B, or I and after it W",
        )


def _check_joined(order: Order, task: Places) -> None:
    first = np.flatnonzero(order.joined)
    last_of_row = np.isin(first, order.rows[1:] - 1)
    second = np.minimum(first + 1, len(order.kind) - 1)
    pair = (
        (order.kind[first] == F)
        & np.isin(order.kind[second], (B, I))
        & (task[first] != task[second])
    )
    wrong = np.zeros(len(order.kind), dtype=np.bool_)
    wrong[first[last_of_row | ~pair]] = True
    _refuse(
        order,
        wrong,
        "is not joined with the backward of another microbatch",
        "join a forward and the backward after it",
    )


def _refuse(order: Order, wrong: NDArray[np.bool_], what: str, hint: str) -> None:
    """PartoptError that names the first action that is wrong and its rank."""
    if wrong.any():
        action = int(wrong.argmax())
        rank = int(np.searchsorted(order.rows, action, side="right")) - 1
        raise PartoptError(
            f"rank {rank}: {order.name(action)} {what}",
            hint,
            code="invalid-order",
            rank=rank,
            action=order.name(action),
        )
