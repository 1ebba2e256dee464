"""Transports of device memory: staged through host memory, or by an MPI that takes device memory; and their choice.

Only a back end with a device has a transport.  All ranks must choose the same, since it determines how messages are
split.
"""

from .. import backends
from ..errors import ArgumentError
from ..system import gpu_aware_mpi, gpu_probe
from .agreement import agreement
from .available import agreed_backend

TRANSPORTS = ("auto", "staged", "device")
_probed: dict[str, str] = {}  # the result of the probe, which runs once per process


def one_of(name, value, choices):
    """Raise ArgumentError unless a value is among the choices."""
    if value not in choices:
        raise ArgumentError(f"{name} is {value!r}; it may be {', '.join(map(str, choices))}")


def check_transport(backend, transport):
    """Raise ArgumentError unless the back end of that name can have that transport here."""
    one_of("transport", transport, TRANSPORTS)
    names = backends.candidates(backend)
    if not any(backends.find(name).on_gpu for name in names):
        if transport != "auto":
            raise ArgumentError(
                f"transport is {transport!r}, but the back end {' or '.join(map(repr, names))} has no "
                f"device; only {', '.join(backends.usages(on_gpu=True))} has"
            )
    elif transport == "device":
        aware, why = gpu_aware_mpi.gpu_aware()
        if not aware:
            raise ArgumentError(
                f"transport is 'device', but this MPI does not take device memory ({why}); take 'staged'"
            )


def make_backend(peers, nodes, name, transport, agreed=None):
    """A new back end, on this rank's device if it has one; collective.

    nodes: node number of every rank.  name, transport: checked, the same on every rank.
    agreed: what `agreed_backend` has said of names to these ranks before; the answer is added.
    Raises ArgumentError on every rank.
    """
    agreed = {} if agreed is None else agreed
    if name not in agreed:
        agreed[name] = agreed_backend(peers, name)
    name = agreed[name]
    why, sure = "", True
    if backends.find(name).on_gpu and transport == "auto":
        transport, why, sure = _chosen(peers)
    with agreement(peers):
        backend = local_backend(peers.rank, nodes, name, transport, why)
    if sure:
        return backend
    from . import device_trial  # only here, as it loads MPI, and commands name transports before that

    if device_trial.succeeds(peers, backend, why):
        return backend
    backend.close()
    why = f"what the ranks sent each other did not arrive as it was ({why})"
    with agreement(peers):
        return local_backend(peers.rank, nodes, name, "staged", why)


def local_backend(rank, nodes, name, transport, why=""):
    """A new back end on the device of a rank, if it has one; not collective.

    transport: not "auto".  why: the reason for it, in words.
    """
    backend = backends.get(name, transport, sum(node == nodes[rank] for node in nodes[:rank]))
    if why:
        backend.transport_why = why
    return backend


def _chosen(peers):
    """The transport, why in words, and whether that is sure; else the ranks have to try (`device_trial`); collective.

    "device" if the MPI of every rank claims to take device memory and the probe of rank 0 confirms it.  The claim alone
    is not enough: an MPI that does not take device memory crashes.
    """
    claims = peers.allgather(gpu_aware_mpi.gpu_aware())
    lacking = [rank for rank, (aware, _) in enumerate(claims) if not aware]
    if lacking:
        of = f" of rank {lacking[0]}" if lacking[0] else ""
        return "staged", f"this MPI{of} does not take device memory ({claims[lacking[0]][1]})", True
    with agreement(peers, only=0):
        if peers.rank == 0 and not _probed:
            _probed.update(gpu_probe.probe())
    probed, claim = peers.allgather(_probed)[0], claims[0][1]
    if probed["answer"] == "yes":
        return "device", f"{claim}; {probed['text']}", True
    if probed["answer"] == "no" or peers.size == 1:
        return "staged", probed["text"], True
    return "device", f"{claim}; {probed['text']}; tried by the ranks themselves", False
