"""The functions of mpiattn.h about caches of keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..decode.cache import KVCache
from ..decode.tree import tree_decode as decode
from ..errors import ArgumentError
from ..system.choices import one_of
from . import arrays, options
from .handles import Handles
from .making import Maker, shared_errors

if TYPE_CHECKING:
    from .arrays import Described

    Given = Described | None

CALLS = (
    "cache_create",
    "cache_create_text",
    "cache_load",
    "cache_save",
    "cache_free",
    "cache_append",
    "cache_truncate",
    "cache_integer",
    "cache_lengths",
    "cache_positions",
    "tree_decode",
)
CACHES = Handles("cache")
_maker = Maker(KVCache, CACHES)


def cache_create(comm: int, number: int, handle: memoryview | None) -> None:
    """A cache with options."""
    _maker.make(comm, lambda: options.given(number), handle)


def cache_create_text(comm: int, text: str | None, handle: memoryview | None) -> None:
    """A cache with the options of a text."""
    _maker.make(comm, lambda: options.of_text(text), handle)


def cache_load(comm: int, path: str | None, number: int, handle: memoryview | None) -> None:
    """A cache with what a file has."""

    _maker.load(comm, path, lambda: options.given(number), handle)


def cache_save(number: int, path: str | None) -> None:
    """`KVCache.save`."""
    cache = CACHES[number]
    with shared_errors(cache, "save"):
        if path is None:
            raise ArgumentError("path is NULL; it must be that of a file")
    cache.save(path)


def cache_free(number: int) -> None:
    """Close a cache."""
    _maker.free(number)


def cache_append(number: int, k: Given, v: Given, of: int) -> None:
    """`KVCache.append`."""
    cache, on_gpu = CACHES[number], number in CACHES.on_gpu
    with shared_errors(cache, "append", options.check(of)):
        keys, values = arrays.needed("k", k, on_gpu), arrays.optional("v", v, on_gpu)
        if values is None and not cache.shared_kv:
            raise ArgumentError("v is NULL; it must be an array")
        named = options.of_call(of, on_gpu, ("k", "v"))
    cache.append(keys, values, **named)


def cache_truncate(number: int, lengths: memoryview | None, of: int) -> None:
    """`KVCache.truncate`."""
    cache = CACHES[number]
    with shared_errors(cache, "truncate", options.check(of)):
        kept, named = arrays.numbers("lengths", lengths).tolist(), options.of_call(of, False, ("lengths",))
    cache.truncate(kept, **named)


SIZES = "capacity", "sequences", "kv_heads", "head_dim", "value_dim", "page_size", "free_pages", "nbytes"
SENT = "sent_bytes", "sent_messages"


def cache_integer(number: int, name: str | None, value: memoryview | None) -> None:
    """Write a number of a cache."""
    cache = CACHES[number]
    one_of("name", name, (*SIZES, *SENT))
    arrays.numbers("value", value)[0] = cache.sent[SENT.index(name)] if name in SENT else getattr(cache, str(name))


def cache_lengths(number: int, local: int, memory: memoryview | None) -> None:
    """Write the number of tokens of every sequence."""
    cache = CACHES[number]
    lengths = cache.local_lengths if local else cache.lengths
    arrays.write_numbers("lengths", lengths, memory)


def cache_positions(number: int, sequence: int, memory: memoryview | None) -> None:
    """Write the positions of this rank's tokens of a sequence."""
    arrays.write_numbers("positions", CACHES[number].positions(sequence), memory)


def tree_decode(number: int, q: Given, out: Given, lse: Given, of: int) -> None:
    """`mpiattn.tree_decode`."""
    cache, on_gpu = CACHES[number], number in CACHES.on_gpu
    with shared_errors(cache, "tree_decode", options.check(of)):
        queries = arrays.needed("q", q, on_gpu)
        memory: dict[str, Any] = {
            "out": arrays.optional("out", out, on_gpu),
            "lse": arrays.optional("lse", lse, on_gpu),
        }
        named = options.of_call(of, on_gpu, ("q", "cache", *memory))
    decode(queries, cache, **memory, **named)
    if on_gpu:
        arrays.finish()
