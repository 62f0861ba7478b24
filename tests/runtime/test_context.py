"""When the ranks of a host take turns: by its memory, and by how many of them it has."""

import torch

from partopt.profiler.device import HEADROOM
from partopt.runtime.context import Context, Progress

FREE = 1000.0


class Placed(Context):
    """A rank of hosts with so much memory each, that counts how often all wait for each other."""

    def __init__(self, rank, hosts):
        super().__init__(rank, len(hosts), torch.device("cpu"), Progress(), host=hosts[rank])
        self.hosts, self.waits = hosts, 0

    def gather(self, value):
        return [(host, FREE) for host in self.hosts]

    def barrier(self):
        self.waits += 1


def turns(hosts, size_bytes):
    """At which turn each rank makes it, and how many turns there are."""
    ranks = [Placed(rank, hosts) for rank in range(len(hosts))]
    return [(each.in_turns(size_bytes, lambda own=each: own.waits), each.waits) for each in ranks]


def test_ranks_take_turns_where_a_host_has_no_room_for_all_of_its_own():
    two, three = FREE / HEADROOM / 2, FREE / HEADROOM / 3
    together = [(0, 0)] * 3
    assert turns(["a", "b", "a"], two - 1) == together
    assert turns(["a", "b", "a"], two + 1) == [(0, 2), (0, 2), (1, 2)]
    assert turns(["a", "a", "a"], three - 1) == together
    assert turns(["a", "a", "a"], three + 1) == [(0, 3), (1, 3), (2, 3)]
    assert turns(["a", "b", "c"], 2 * two - 1) == together
