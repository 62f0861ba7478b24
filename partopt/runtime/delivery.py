"""What the actions of a rank receive and send: over the network, or from stage to stage of it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from partopt.errors import PartoptError
from partopt.runtime.context import Context
from partopt.runtime.packing import Packing
from partopt.runtime.posting import Buffer, Channel, Receives, Sends
from partopt.runtime.rank_record import RankRecord
from partopt.runtime.routes import Action, Route
from partopt.runtime.stage import Crossing, Stage, check_made
from partopt.schedules.order import B, F


class Delivery:
    """The messages of one rank in `record.steps` times its `actions`, and when they came and went.

    Between two stages of the rank tensors are handed over as they are.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        actions: Sequence[Action],
        channel: Channel,
        record: RankRecord,
        device: torch.device,
        ahead: int,
    ) -> None:
        self.record, self.device = record, device
        self.outgoing: dict[tuple[int, int], Packing] = {}  # by kind and stage
        self.incoming: dict[tuple[int, int], Packing] = {}
        for s, stage in stages.items():
            self.outgoing[F, s] = Packing(stage.sends)
            self.outgoing[B, s] = Packing(_with_gradient(stage.receives))
            self.incoming[F, s] = Packing(stage.receives)
            self.incoming[B, s] = Packing(_with_gradient(stage.sends))
        self.local: dict[Route, list[Tensor]] = {}
        routes = [a.receives for a in actions if a.receives and not a.receives.is_local]
        repeated = itertools.chain.from_iterable(itertools.repeat(routes, record.steps))
        self.sends = Sends(channel)
        self.receives = Receives(repeated, self._buffer_for, channel, ahead)

    def receive(self, step: int, action: Action) -> list[Tensor]:
        """Wait for what an action needs from another stage."""
        route = action.receives
        if route is None:
            return []
        if route.is_local:
            return self.local.pop(route)
        taken = self.receives.take(route)
        self.record.receive_posted[step, action.place] = taken.posted_ns
        self.record.received[step, action.place] = taken.done_ns
        return taken.tensors

    def post_next_receive(self, action: Action) -> None:
        """Post a receive for that of an action, which is over: no action waits for the posting."""
        if action.receives is not None and not action.receives.is_local:
            self.receives.post_next()

    def send(self, step: int, action: Action, tensors: Sequence[Tensor]) -> None:
        """Begin to send what an action made to the stage that needs it, if there is one."""
        route, place, record = action.sends, action.place, self.record
        if route is None:
            return
        if route.is_local:
            self.local[route] = [tensor.detach() for tensor in tensors]
            return

        def note_sent(when_ns: int) -> None:
            record.sent[step, place] = when_ns

        packing = self.outgoing[route.kind, action.stage]
        check_made(action.stage, tensors, packing.crossings)
        message = packing.pack(tensors, self.device)
        record.send_posted[step, place] = self.sends.post(message, route, note_sent)

    def _buffer_for(self, route: Route) -> Buffer:
        """New memory for a message, parted before it comes: no action waits for that."""
        packing = self.incoming[route.kind, route.receiver]
        message = torch.empty(packing.size, dtype=torch.uint8, device=self.device)
        return Buffer(message, packing.unpack(message))


def check_cuts(stages: Mapping[int, Stage], context: Context) -> None:
    """Raise PartoptError, on every rank, where two stages disagree on what crosses a cut."""
    own = {s: (list(stage.receives), list(stage.sends)) for s, stage in stages.items()}
    every = [entry for rank in context.gather(own) for entry in rank.items()]
    receives_of = {s: receives for s, (receives, _) in every}
    for s, (_, sends) in every:
        receives = receives_of.get(s + 1, [])
        if sends != receives:
            raise PartoptError(
                f"stage {s} sends {_words(sends)}, stage {s + 1} receives {_words(receives)}",
                "build both from one model and one batch",
                code="cut-mismatch",
            )


def _with_gradient(crossings: Sequence[Crossing]) -> list[Crossing]:
    return [crossing for crossing in crossings if crossing.gradient]


def _words(crossings: Sequence[Crossing]) -> str:
    return ", ".join(f"{list(c.shape)} {c.dtype}" for c in crossings) or "nothing"
