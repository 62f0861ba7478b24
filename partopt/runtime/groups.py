"""The process groups through which messages between stages go."""

from __future__ import annotations

import torch.distributed as dist

from partopt.runtime.context import Context
from partopt.runtime.posting import Channel, group_key
from partopt.runtime.routes import Route, actions_of
from partopt.schedules.order import Order


def open_channel(context: Context, order: Order) -> Channel:
    """The channel for the messages of `order`.

    Under gloo the run's own group is enough, for each message has a tag. NCCL has no tags: there
    each direction of each pair of ranks over a cut has a group, in which messages keep their order.
    This has not been run on NCCL.
    """
    microbatches = int(order.microbatch.max()) + 1
    if dist.get_backend() != "nccl":
        return Channel(microbatches, None)
    routes = [
        action.sends
        for rank in range(order.ranks)
        for action in actions_of(order, rank)
        if action.sends and not action.sends.is_local
    ]
    keys: dict[tuple[int, int, int, int], Route] = {group_key(route): route for route in routes}
    groups = {
        key: context.group([route.source, route.destination], str(key))
        for key, route in sorted(keys.items())
    }
    return Channel(microbatches, groups)
