"""The memory that a cache will need, before it is allocated, and which capacity would fit."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ..comm.room import check_room, spread
from ..problem.problem import ITEMSIZE
from .storage import cache_pages

if TYPE_CHECKING:
    from ..backends.base import Backend
    from ..comm.mesh import Home
    from ..comm.peers import Peers
    from ..comm.room import Room
    from .options import CacheOptions

MOST = 2**62  # bytes of all ranks that are added up


def check_capacity(home: Home, peers: Peers, backend: Backend, asked: CacheOptions) -> None:
    """Raise MemoryShortage on every rank if nodes, cgroups or GPUs have no room for the pools of pages; collective.

    asked: checked.
    """
    numbers = math.prod([asked.page_size, asked.kv_heads, asked.head_dim + (0 if asked.shared_kv else asked.value_dim)])
    page_bytes = numbers * ITEMSIZE[asked.dtype]
    nbytes = cache_pages(asked.capacity, peers.size, asked.sequences, asked.page_size) * page_bytes
    needs = np.full(peers.size, min(nbytes, MOST // peers.size))

    def advise(room: Room) -> str:
        pages = room.least() // page_bytes - (asked.sequences - 1)  # each sequence may fill one only in part
        fits = f"capacity={pages * peers.size * asked.page_size} fits; " if pages > 0 else ""
        return fits + spread(room, needs)

    check_room(peers, home, backend, needs, f"a cache of capacity={asked.capacity}", advise)
