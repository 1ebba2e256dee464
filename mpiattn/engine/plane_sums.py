"""Sums over the planes of a mesh, of an array that planes share: the gradient of a bias without heads of its own."""

from itertools import pairwise

from ..schedule.kinds import TAG

TAGS = max(TAG.values()) + 128, max(TAG.values()) + 129  # beyond those of passes and of regrouping


def sum_over(planes, array, mesh, backend, exchange):
    """Replace an array by its sum over some planes, of the ranks with this rank's chunk; collective among these.

    planes: their numbers, this rank's among them, in increasing order.  The terms are added in this order.
    array: (sequences, heads, tokens, keys) with any strides.
    Each plane adds up a part and gives it to the others: a rank sends twice the array, less two parts.
    """
    plane, chunk = divmod(mesh.rank, mesh.tile.chunks)
    own = planes.index(plane)
    peers = [other * mesh.tile.chunks + chunk for other in planes]
    whole = backend.empty((1, 1, 1, array.size), array.dtype)
    backend.copy(whole.reshape(array.shape), array)
    bounds = [array.size * n // len(planes) for n in range(len(planes) + 1)]
    parts = [whole[..., start:stop] for start, stop in pairwise(bounds)]
    terms = [part if n == own else backend.empty(parts[own].shape, array.dtype) for n, part in enumerate(parts)]
    total = backend.empty(parts[own].shape, array.dtype)
    backend.zero([total])
    others = [n for n in range(len(planes)) if n != own]
    _exchange(others, peers, parts, terms, TAGS[0], mesh, backend, exchange)
    for term in terms:
        backend.accumulate(total, term)
    backend.copy(parts[own], total)
    _exchange(others, peers, [total] * len(planes), parts, TAGS[1], mesh, backend, exchange)
    backend.copy(array, whole.reshape(array.shape))


def _exchange(others, peers, sent, received, tag, mesh, backend, exchange):
    """Send each peer an array and receive another; wait until all are here."""
    backend.begin()  # messages have what launches so far have written
    requests = []
    for n in others:
        requests += exchange.receive(mesh.comm, backend.incoming(received[n]), peers[n], tag)
    for n in others:
        requests += exchange.send(mesh.comm, backend.outgoing(sent[n]), peers[n], tag)
    exchange.wait(requests, "adding up the gradient of the bias over the planes")
    for n in others:
        backend.sent(sent[n])
    for n in others:
        backend.wait(backend.arrived(received[n]))
