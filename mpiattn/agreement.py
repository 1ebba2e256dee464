"""Ranks agree: one rank's error becomes the same error on all of them, and none is left waiting."""

import hashlib
from contextlib import contextmanager

from . import errors
from .errors import ArgumentError, MpiattnError


def _which(ranks):
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _describe(error):
    """(class name, text) of an exception, to be sent; classes of mpiattn survive the journey."""
    name = type(error).__name__
    if isinstance(error, MpiattnError):
        return name, str(error)
    if isinstance(error, OSError):
        return "FileError", str(error)
    return "MpiattnError", f"{name}: {error}"


def _raise_everywhere(peers, error, only):
    told = peers.allgather(None if error is None else _describe(error))
    name, text = next(t for t in told if t is not None)
    failing = [rank for rank, t in enumerate(told) if t == (name, text)]
    if len(failing) < peers.size and only is None:
        text = f"{text} (on {_which(failing)} of {peers.size})"
    common = getattr(errors, name)(text)
    common.everywhere = True
    raise common from error


@contextmanager
def agreement(peers, only=None):
    """Run the body on every one of the `Peers`; if it raises on any, the same error is raised on all.

    The body must not communicate, or only so that it fails on all ranks alike (an h5py that has MPI).  Costs one
    small allreduce when all is well.
    only: the one rank on which the body does anything, for what concerns all (a file, say); the message then
    does not say on which ranks it failed.

    Yields a dict, in which the body may put arguments that must be the same on every rank, as for `agree_on`: they are
    compared by the same allreduce.
    """
    error, same = None, {}
    try:
        yield same
    except Exception as caught:
        error = caught
    digest = _digest(same) if same and error is None else 0
    failed, high, low = peers.largest([error is not None, digest, -digest])
    if failed:
        _raise_everywhere(peers, error, only)
    if high != -low:
        _raise_different(peers, same)


def _brief(value):
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."


def agree_on(peers, arguments):
    """Raise ArgumentError on every rank unless all gave the same `arguments`, a dict of name to value."""
    with agreement(peers) as same:
        same |= arguments


def _digest(arguments):
    return int.from_bytes(hashlib.sha256(repr(sorted(arguments.items())).encode()).digest()[:7], "big")


def _raise_different(peers, arguments):
    told = peers.allgather(arguments)
    for name in arguments:
        values = [t[name] for t in told]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            error = ArgumentError(f"{name} is {_brief(values[0])} on rank 0 but {_brief(values[other])} on rank "
                                  f"{other}; it must be the same on every rank")
            error.everywhere = True
            raise error
