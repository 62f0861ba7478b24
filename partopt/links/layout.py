"""Which ranks exchange what, so that every level of a cluster can be measured on its own."""

from __future__ import annotations

from dataclasses import dataclass

from partopt.errors import PartoptError

# N   ranks, numbered server by server
# K   ranks of a server


@dataclass(frozen=True)
class Traffic:
    """Messages of one level that are under way at once: one from each pair, or one each way."""

    label: str
    pairs: tuple[tuple[int, int], ...]
    both_ways: bool
    port_messages: int  # that leave the busiest member of the level at once

    @property
    def messages(self) -> int:
        """All messages that are under way at once."""
        return len(self.pairs) * (2 if self.both_ways else 1)


@dataclass(frozen=True)
class MeasuredLevel:
    """A level of the cluster, and what is exchanged to measure it."""

    name: str
    size: int
    traffic: tuple[Traffic, ...]  # the first is a single message
    allreduces: tuple[tuple[int, ...], ...]  # ranks of each


ONE, BOTH, SERVERS, ALL = "one message", "both directions", "two servers", "all pairs"


def levels_of(ranks: int, per_server: int) -> list[MeasuredLevel]:
    """The levels of `ranks` ranks in servers of `per_server`, innermost first.

    Raises PartoptError for a single rank, and for servers that do not divide the ranks.
    """
    if ranks < 2:
        raise PartoptError(
            f"`ranks={ranks}`: a link has two ends",
            "measure with 2 ranks or more",
            code="invalid-option",
            option="ranks",
            value=ranks,
        )
    if per_server < 1 or ranks % per_server:
        raise PartoptError(
            f"`per_server={per_server}`: {ranks} ranks are not whole servers of {per_server}",
            "choose a divisor of the number of ranks",
            code="invalid-option",
            option="per_server",
            value=per_server,
        )
    levels = []
    if per_server > 1:
        levels.append(_inside(per_server))
    if ranks > per_server:
        levels.append(_between(ranks, per_server))
    return levels


def _inside(per_server: int) -> MeasuredLevel:
    """The level inside the first server."""
    members = range(per_server)
    traffic = _of_one_pair(0, 1)
    if per_server >= 4:
        pairs = tuple(zip(members[::2], members[1::2], strict=False))
        traffic.append(Traffic(ALL, pairs, False, 1))
    return MeasuredLevel("server", per_server, tuple(traffic), _groups(members))


def _between(ranks: int, per_server: int) -> MeasuredLevel:
    """The level between servers: a rank exchanges with that of its place in another server."""
    servers = ranks // per_server
    traffic = _of_one_pair(0, per_server)
    if per_server > 1:
        pairs = tuple((rank, per_server + rank) for rank in range(per_server))
        traffic.append(Traffic(SERVERS, pairs, False, per_server))
    if servers >= 4:
        pairs = tuple(
            (server * per_server + rank, (server + 1) * per_server + rank)
            for server in range(0, servers - 1, 2)
            for rank in range(per_server)
        )
        traffic.append(Traffic(ALL, pairs, False, per_server))
    return MeasuredLevel("cluster", servers, tuple(traffic), _groups(range(0, ranks, per_server)))


def _of_one_pair(first: int, second: int) -> list[Traffic]:
    pair = ((first, second),)
    return [Traffic(ONE, pair, False, 1), Traffic(BOTH, pair, True, 1)]


def _groups(members: range) -> tuple[tuple[int, ...], ...]:
    """The first 2, 4, ... of `members`, and all of them."""
    counts = [2**power for power in range(1, len(members).bit_length()) if 2**power < len(members)]
    return tuple(tuple(members[:count]) for count in [*counts, len(members)])
