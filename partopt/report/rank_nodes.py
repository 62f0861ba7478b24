"""The nodes of one rank in an execution graph, made action by action."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from partopt.documents.stage import Flow
from partopt.schedules.order import KINDS, A, B, F, I, R, U, W

if TYPE_CHECKING:
    from partopt.report.execution_graph import ExecutionGraph

# What a node does.
COMPUTE, SEND, RECEIVE, COLLECTIVE = "compute", "send", "receive", "collective"


@dataclass(frozen=True)
class Node:
    """Something that a rank does when the nodes `after`, by number, are over.

    A computation has a start and `seconds`; a message `size_bytes`, its `peer` and a `tag` of its
    own; a collective its `kind` as in the plan's communication, its group, by number, and the bytes
    that every rank puts in.
    """

    number: int
    name: str
    does: str
    after: Sequence[int]
    start_s: float = 0.0
    seconds: float = 0.0
    size_bytes: int = 0
    peer: int = 0
    tag: int = 0
    kind: str = ""
    group: int = 0


class Action(NamedTuple):
    """An action of a rank, as the order has it, with its simulated start and its time."""

    kind: int
    stage: int
    microbatch: int
    joined: bool
    start_s: float
    seconds: float

    def __str__(self) -> str:
        """`2F0`, and of an optimizer step `2U`."""
        number = "" if self.kind == U else self.microbatch
        return f"{self.stage}{KINDS[self.kind]}{number}"


_GATHERED, _SCATTERED = (F, B, I, R), (B, W)  # actions beside which stages in shares exchange


@dataclass
class RankNodes:
    """The nodes of one rank, made action by action."""

    graph: ExecutionGraph
    rank: int
    actions: Sequence[Action]
    nodes: list[Node] = field(default_factory=list)
    last: list[int] = field(default_factory=list)  # what the next computation waits for
    unsent: list[Action] = field(default_factory=list)  # those whose results are not sent yet
    exchanged: dict[int, list[int]] = field(default_factory=dict)  # by stage, its last exchange
    # by stage, what has made all buckets of its gradients but for the last
    buckets: dict[int, int] = field(default_factory=dict)
    come: dict[tuple[str, ...], int] = field(default_factory=dict)  # stages come to an exchange

    def run(self) -> list[Node]:
        """All nodes of the rank."""
        for place, action in enumerate(self.actions):
            if action.kind == A:
                self._exchange(action)
            else:
                self._compute(place, action)
        return self.nodes

    def _add(self, name: str, does: str, after: Sequence[int], **fields: Any) -> int:
        number = len(self.nodes) + 1
        self.nodes.append(Node(number, name, does, list(dict.fromkeys(after)), **fields))
        return number

    def _compute(self, place: int, action: Action) -> None:
        """A computation, behind what comes for it, and the message with its result."""
        received = []
        if not (place and self.actions[place - 1].joined):  # else it came with the other one's
            for each in self.actions[place : place + 1 + action.joined]:
                received += self._receive(each)
        beside = self._beside(action)
        exchanged = self.exchanged.get(action.stage, []) if action.kind == U else []
        following = self.actions[place + 1] if place + 1 < len(self.actions) else action
        exchange = following if following.kind == A else None
        own = self._run(action, exchange, [*self.last, *received, *exchanged])
        self.last = [own, *beside]
        self.unsent.append(action)
        if not action.joined and not (self.graph.work.blocking and exchange):
            self._send_all(self.last)
        if action.kind == U:
            self._gather(action.stage)

    def _run(self, action: Action, exchange: Action | None, after: Sequence[int]) -> int:
        """The node of an action, or two where the exchange behind it begins while it runs."""
        head_s, name = 0.0, str(action)
        if exchange is not None:
            early = self.graph.work.exchanges_early[exchange.stage]
            head_s = min(action.seconds, early.head_start_s)
        seconds = action.seconds - head_s
        own = self._add(name, COMPUTE, after, start_s=action.start_s, seconds=seconds)
        if exchange is None or not head_s:
            return own
        self.buckets[exchange.stage] = own
        start_s = action.start_s + seconds
        return self._add(f"{name} rest", COMPUTE, [own], start_s=start_s, seconds=head_s)

    def _peer(self, action: Action, side: int) -> int | None:
        """The rank of the stage before or behind that has the microbatch; None of this rank."""
        ranks, other = self.graph.work.ranks, action.stage + side
        if not 0 <= other < len(ranks):
            return None
        peer = ranks[other][action.microbatch % len(ranks[other])]
        return None if peer == self.rank else peer

    def _tag(self, stage: int, microbatch: int, back: bool) -> int:
        """A number for the message that a stage makes of a microbatch."""
        return 2 * (microbatch * len(self.graph.work.ranks) + stage) + back

    def _receive(self, action: Action) -> list[int]:
        """The message that an action needs, if any."""
        s, back = action.stage, action.kind != F
        peer = self._peer(action, 1 if back else -1) if action.kind in (F, B, I) else None
        if peer is None:
            return []
        maker = s + 1 if back else s - 1
        size = round(self.graph.crossing[back][max(s, maker)])
        tag = self._tag(maker, action.microbatch, back)
        name = f"{action} from {peer}"
        return [self._add(name, RECEIVE, self.last, size_bytes=size, peer=peer, tag=tag)]

    def _send_all(self, after: Sequence[int]) -> None:
        """The messages that are not sent yet."""
        for action in self.unsent:
            self._send(action, after)
        self.unsent = []

    def _send(self, action: Action, after: Sequence[int]) -> None:
        """The message with the result of an action, if any."""
        s, back = action.stage, action.kind != F
        peer = self._peer(action, -1 if back else 1) if action.kind in (F, B, I) else None
        if peer is None:
            return
        size = round(self.graph.crossing[back][s if back else s + 1])
        tag = self._tag(s, action.microbatch, back)
        sent = self._add(f"{action} to {peer}", SEND, after, size_bytes=size, peer=peer, tag=tag)
        if self.graph.work.serial:
            self.last.append(sent)

    def _collect(self, flow: Flow, name: str, share: float, after: Sequence[int]) -> list[int]:
        """A collective of a `share` of the bytes of a flow; none of one rank alone."""
        members = self.graph.members(flow)
        if len(members) < 2:
            return []
        size = flow.bytes * share / (len(members) if flow.kind == "allgather" else 1)
        group = self.graph.groups[members]
        kind = "allreduce" if flow.kind == "tied" else flow.kind
        return [self._add(name, COLLECTIVE, after, size_bytes=round(size), kind=kind, group=group)]

    def _beside(self, action: Action) -> list[int]:
        """What stages in shares gather and scatter while they compute."""
        found: list[int] = []
        for flow in self.graph.flows[action.stage]:
            gathers = flow.kind == "allgather"
            if flow.per == "microbatch" and action.kind in (_GATHERED if gathers else _SCATTERED):
                share = 0.5 if gathers else 1.0  # for the forward, and for the backward
                after, name = [*self.last, *found], f"{action} {flow.kind}"
                found += self._collect(flow, name, share, after)
        return found

    def _gather(self, s: int) -> None:
        """The parameters that the optimizer's shares have made, behind a synchronous step."""
        for flow in self.graph.flows[s]:
            if flow.kind == "allgather" and flow.per != "microbatch":
                self._collect(flow, f"{s} {flow.kind}", 1.0, self.last)

    def _exchange(self, action: Action) -> None:
        """The exchange of a stage's gradients."""
        graph, s = self.graph, action.stage
        earlier = self.exchanged.get(s, [])
        ended = self._exchange_parts(s, action.microbatch, earlier)
        self.exchanged[s] = ended
        if graph.work.blocking:
            self.last = [*self.last, *ended]
            self._send_all(self.last)
        elif graph.asynchronous:
            self.last = [*self.last, *earlier]

    def _exchange_parts(self, s: int, number: int, earlier: Sequence[int]) -> list[int]:
        """The collectives of an exchange, in turn; the last of them.

        In buckets, all that the last backward makes but for the last one is exchanged beside it.
        """
        graph, bucket = self.graph, self.buckets.get(s)
        tail = 1.0 if bucket is None else graph.work.exchanges_early[s].tail
        ended = [*self.last, *earlier]
        for flow in graph.flows[s]:
            name = f"{s} {flow.kind} {number}"
            if flow.kind == "tied":
                ended = self._tie(flow, name, ended)
            elif flow.per != "microbatch" and (flow.kind != "allgather" or graph.asynchronous):
                first = [] if bucket is None else self._collect(flow, name, 1 - tail, [bucket])
                ended = self._collect(flow, name, tail, [*ended, *first]) or ended
        return ended

    def _tie(self, flow: Flow, name: str, ended: list[int]) -> list[int]:
        """The exchange of tied parameters, once the rank has come to it with all that it holds."""
        names = tuple(flow.parameters)
        held = [
            s for s in self.graph.holders[names] if self.rank in self.graph.plan.stages[s].ranks
        ]
        self.come[names] = self.come.get(names, 0) + 1
        if self.come[names] % len(held):
            return ended
        tied = self._collect(flow, name, 1.0, ended) or ended
        self.exchanged |= dict.fromkeys(held, tied)
        return tied
