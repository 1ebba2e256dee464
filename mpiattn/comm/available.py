"""Which back end the ranks use: one that can run on all of them."""

import socket

from .. import backends
from ..errors import ArgumentError
from ..system.words import number
from .agreement import everywhere, which_ranks

HOSTS = 4  # that an error names, of those where a back end cannot run for one reason


def agreed_backend(peers, name):
    """The back end that runs on every rank: of what a name may stand for the first that can; collective.

    name: the same on every rank, checked.  Costs one small allreduce.  Raises ArgumentError on every rank: on which
    hosts it cannot run, why, and what to install.
    """
    names = backends.candidates(name)
    missing = [backends.find(candidate).missing() for candidate in names]
    lacking = peers.largest([why != "" for why in missing])
    if lacking.all():
        reasons = peers.allgather((socket.gethostname(), missing[0]))
        raise everywhere(ArgumentError(f"backend is {names[0]!r}, which cannot run {_described(reasons)}"), peers)
    return names[lacking.tolist().index(0)]


def _described(reasons):
    """On which hosts and why not, of (host, why) by rank."""
    hosts_of = {}
    for rank, (host, why) in enumerate(reasons):
        if why:
            hosts_of.setdefault(why, {}).setdefault(host, []).append(rank)
    return "; ".join(f"on {_listed(hosts)}: {why}" for why, hosts in hosts_of.items())


def _listed(hosts):
    more = len(hosts) - HOSTS
    return ", ".join(f"{host} ({which_ranks(ranks)})" for host, ranks in list(hosts.items())[:HOSTS]) + (
        f" and {number(more, 'more host')}" if more > 0 else ""
    )
