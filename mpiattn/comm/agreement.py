"""Ranks agree: an error of one rank is raised on all ranks alike, so that no rank is left waiting."""

import hashlib
from numbers import Real

import numpy as np

from .. import errors
from ..errors import ArgumentError, CallError, MpiattnError
from ..system.values import AsGiven


def which_ranks(ranks):
    """Ranks in words."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _brief(text):
    return text if len(text) <= 200 else text[:197] + "..."


def _describe(error):
    """(class name, text) of an exception, to be sent; exceptions of mpiattn keep their class."""
    name = type(error).__name__
    if isinstance(error, MpiattnError):
        return name, str(error)
    if isinstance(error, OSError):
        return "FileError", str(error)
    from .mpi_errors import in_words  # only here, as it loads MPI, and commands import this before

    return "MpiattnError", in_words(error)


class agreement:
    """A context: run the body on all `Peers`; if it raises on any rank, the same error is raised on all.

    The body must not communicate, unless it fails on all ranks alike (as an h5py with MPI does).  Costs one small
    allreduce if no rank fails.
    only: the only rank on which the body does anything, for a file for example; the message then does not say on which
    ranks it failed.
    call: the collective call that this is part of, in words; raises CallError on every rank if ranks differ in it.
    hashes: as for `digest_of`.

    Its value is a dict, in which the body may put arguments that must be the same on every rank, as for `agree_on`: the
    same allreduce compares them.
    """

    # a class, since every call passes here: generators take longer
    __slots__ = ("call", "hashes", "only", "peers", "same")

    def __init__(self, peers, only=None, call="", hashes=None):
        self.peers, self.only, self.call, self.hashes, self.same = peers, only, call, hashes, {}

    def __enter__(self):
        return self.same

    def __exit__(self, kind, error, trace):
        if error is not None and not isinstance(error, Exception):
            return  # an interrupt: other ranks learn of it otherwise
        digest = digest_of(self.call, {} if error else self.same, self.hashes)
        failed, high, low = self.peers.largest([error is not None, digest, -digest]).tolist()
        if failed or high != -low:
            if self.hashes:
                self.hashes.clear()  # ranks remember different arguments now
            _raise_everywhere(self.peers, self.call, error, self.only, self.same)


def agree_on(peers, arguments):
    """Raise ArgumentError on every rank unless all gave the same `arguments`, a dict of name to value."""
    with agreement(peers) as same:
        same |= arguments


def from_rank_0(peers, make):
    """The value of make() on rank 0, on every rank; what it raises there, all ranks raise.  Costs one broadcast."""
    made, error, failure = None, None, None
    if peers.rank == 0:
        try:
            made = make()
        except Exception as caught:
            error, failure = caught, _describe(caught)
    failure, made = peers.broadcast((failure, made))
    if failure is not None:
        raise everywhere(getattr(errors, failure[0])(failure[1]), peers) from error
    return made


def digest_of(call, arguments, hashes=None):
    """A hash of the call and its arguments, an integer of 56 bits.

    hashes: {names: (arguments, their hash)} of earlier calls, to which these are added.  Most calls have the arguments
        of an earlier call, which are not hashed again.  The ranks must remember the same: arguments that compare equal
        may have different hashes (0.0 and -0.0).  No value may be changed after the call.
    """
    names, hashes = tuple(arguments), {} if hashes is None else hashes
    earlier, of_arguments = hashes.get(names, (None, 0))
    if earlier != arguments:
        of_arguments = _hashed(repr([(name, _comparable(value)) for name, value in sorted(arguments.items())]))
        hashes[names] = arguments, of_arguments
    return _hashed(call) ^ of_arguments


def _hashed(text):
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


_NO_NUMBERS = frozenset((int, str, tuple, list, range, type(None)))  # or numbers that print as they compare
_NUMBERS = frozenset((bool, float))


def _comparable(value):
    """The value; a number as Python's int or float, since 20, 20.0 and np.int64(20) are equal but print otherwise."""
    kind = type(value)
    if kind in _NO_NUMBERS or not (kind in _NUMBERS or isinstance(value, Real)):  # isinstance of Real takes long
        return value
    return int(value) if value == value // 1 else float(value)


def _raise_everywhere(peers, call, error, only, arguments):
    """Raise the first of these on all ranks: different calls, an error of some rank, different arguments."""
    calls, errors_, arguments = zip(*peers.allgather((call, error and _describe(error), {} if error else arguments)))
    different, first = _different_calls(calls), _first_error(errors_, only)
    teller = next(rank for rank, other in enumerate(errors_) if other) if first and not different else 0
    raise everywhere(different or first or _different_arguments(arguments), peers, teller) from error


def everywhere(error, peers, teller=0):
    """Mark an error as one that all `Peers` raise; returns it.  teller: the rank that tells it if nobody catches it."""
    from .endings import tell_once  # only here, as it loads MPI, and commands import this before

    error.everywhere, error.among = True, peers.comm.py2f()
    error.raised_by, error.tells = peers.size, peers.rank == teller
    tell_once()
    return error


def is_everywhere(error, comm):
    """Whether all ranks of this communicator raise this exception; it may be marked for another communicator."""
    return getattr(error, "among", None) == comm.py2f()


def _different_calls(calls):
    if len(set(calls)) == 1:
        return None
    ranks = {call: [rank for rank, other in enumerate(calls) if other == call] for call in dict.fromkeys(calls)}
    makes = [
        f"{which_ranks(where)} {'is' if len(where) == 1 else 'are'} in {call or 'another call'}"
        for call, where in ranks.items()
    ]
    return CallError(
        "ranks make different calls on one communicator: "
        + "; ".join(makes)
        + "; every rank must make the same calls in the same order"
    )


def _first_error(described, only):
    first = next((description for description in described if description is not None), None)
    if first is None:
        return None
    failing = [rank for rank, other in enumerate(described) if other == first]
    name, text = first
    if len(failing) < len(described) and only is None:
        others = "" if None in described else "; the others have errors too"
        text = f"{text} (on {which_ranks(failing)} of {len(described)}{others})"
    return getattr(errors, name)(text)


def _in_words(value):
    """A value as the caller gave it, for errors: None, and what stands for it, means that it was left out."""
    if isinstance(value, AsGiven):
        value = value.given
    if isinstance(value, str) and value == "auto":
        return "left out (auto)"
    if isinstance(value, np.ndarray):
        return " ".join(repr(value).split())
    unlimited = isinstance(value, tuple) and len(value) == 2 and all(side is None for side in value)
    return "left out" if value is None or unlimited else repr(value)


def difference(name, value, other, where, elsewhere):
    """An argument that is not the same in two places, in words; of arrays the first element that differs."""
    first, second = (each.given if isinstance(each, AsGiven) else each for each in (value, other))
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray) and first.shape == second.shape:
        differ = np.argwhere(first != second)
        if len(differ):
            place = tuple(differ[0].tolist())
            name = f"{name}[{', '.join(map(str, place))}]"
            value, other = first[place].item(), second[place].item()
    return f"{name} is {_brief(_in_words(value))} {where} but {_brief(_in_words(other))} {elsewhere}"


def _different_arguments(arguments):
    """ArgumentError about the first argument that some rank gave differently from rank 0, or not at all."""
    for name in dict.fromkeys(name for given in arguments for name in given):
        compared = [repr(_comparable(given[name])) if name in given else None for given in arguments]
        other = next((rank for rank, value in enumerate(compared) if value != compared[0]), None)
        if other is not None:
            values = arguments[0].get(name), arguments[other].get(name)
            text = difference(name, *values, "on rank 0", f"on rank {other}")
            return ArgumentError(f"{text}; it must be the same on every rank")
    return ArgumentError("an argument differs between ranks; it must be the same on every rank")
