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
                f"device; only these have: {', '.join(backends.usages(on_gpu=True))}"
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
    if backends.find(name).on_gpu and transport == "auto":
        transport = _chosen(peers)
    with agreement(peers):
        return local_backend(peers.rank, nodes, name, transport)


def local_backend(rank, nodes, name, transport):
    """A new back end on the device of a rank, if it has one; transport: not "auto".  Not collective."""
    return backends.get(name, transport, sum(node == nodes[rank] for node in nodes[:rank]))


def _chosen(peers):
    """ "device" if the MPI of every rank claims to take device memory and the probe of rank 0 confirms it.

    The claim alone is not enough: an MPI that does not take device memory crashes.
    """
    aware, _ = gpu_aware_mpi.gpu_aware()
    if peers.largest([not aware])[0]:
        return "staged"
    with agreement(peers, only=0):
        if peers.rank == 0 and not _probed:
            _probed.update(gpu_probe.probe())
    return "device" if peers.allgather(_probed.get("answer"))[0] == "yes" else "staged"
