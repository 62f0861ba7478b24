"""The store by which the processes of a local run find each other; the parent holds it."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

JOIN_S = 120.0  # until all processes have joined
_HOST = "127.0.0.1"
_TAKES_SOCKETS = torch.__version__ >= "2.7"  # the store's faster server; that of 2.6 opens its own


def open_store(ranks: int) -> tuple[Store, int]:
    """A store on a port of this host alone that the system chooses, and the port."""
    listening = socket.create_server((_HOST, 0))
    port = listening.getsockname()[1]
    store = TCPStore(
        _HOST,
        port,
        world_size=ranks + 1,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=JOIN_S),
        master_listen_fd=listening.detach(),
        use_libuv=_TAKES_SOCKETS,
    )
    return store, port


def join_store(port: int) -> Store:
    """The store that the parent holds on `port`."""
    timeout = timedelta(seconds=JOIN_S)
    return TCPStore(_HOST, port, is_master=False, timeout=timeout, use_libuv=_TAKES_SOCKETS)
