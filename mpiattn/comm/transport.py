"""Transports of device memory, and their choice.

    device  MPI takes device memory
    ipc     GPUs of ranks of one node copy from each other by CUDA IPC; MPI carries messages between nodes, staged, or
            from device memory where "auto" has found that it can, but is slower within a node
    staged  through host memory

Only a back end with a device has a transport.  All ranks must choose the same, since it determines how messages are
split.
"""

from .. import backends
from ..errors import ArgumentError
from ..system import gpu_aware_mpi, gpu_probe
from ..system.choices import one_of
from ..system.logs import INFO, note
from .agreement import agreement, everywhere
from .available import agreed_backend
from .near import connect

TRANSPORTS = ("auto", "staged", "ipc", "device")
CLEARLY = 0.8  # of MPI's time: transport "auto" lets GPUs copy from each other if that takes less
_probed: dict[str, str] = {}  # the result of the probe, which runs once per process


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


class Known:
    """What the ranks of a communicator have found out about back ends, for all that are made on it.

    names: the name of the back end that all ranks can run, by the name that was asked for.
    near: the `mpiattn.comm.near.Near` of this rank for its GPU `device`, or None and why.
    before: those for other GPUs.
    """

    def __init__(self):
        self.names, self.device, self.near, self.why, self.before = {}, None, None, "", []

    def near_for(self, peers, nodes, backend):
        """(near, why) for a back end; collective: the ranks try it when one of them uses its GPU for the first time."""
        if peers.largest([self.device != backend.device])[0]:
            self.before.append(self.near)
            self.device, (self.near, self.why) = backend.device, connect(peers, nodes, backend)
        return self.near, self.why

    def failed(self):
        """A call has failed: what other ranks have not read by now they may never read."""
        for near in filter(None, (self.near, *self.before)):
            near.failed = True


def make_backend(peers, nodes, name, transport, known=None, in_order=True):
    """A new back end, on this rank's device if it has one; collective.

    nodes: node number of every rank.  name, transport: checked, the same on every rank.
    known: the `Known` of these ranks.
    in_order: whether ranks receive what another one sends in about the order in which it is sent.  Else they do not
        copy from each other's GPU: messages that nobody receives yet would hold all memory for that.
    Raises ArgumentError on every rank.
    """
    known = known or Known()
    if name not in known.names:
        known.names[name] = agreed_backend(peers, name)
    if backends.find(known.names[name]).on_gpu:
        backend = _on_gpu(peers, nodes, known.names[name], transport, known, in_order)
        sends = f", transport {in_words(backend)}"
    else:
        with agreement(peers):
            backend = local_backend(peers.rank, nodes, known.names[name], transport)
        sends = ""
    note(INFO, peers.rank, "back end %s%s; asked for: %s, transport %s", backend.name, sends, name, transport)
    return backend


def _on_gpu(peers, nodes, name, asked, known, in_order):
    """A new back end on this rank's GPU with the transport asked for; collective."""
    by_mpi, why, sure = ("device" if asked == "device" else "staged"), "as asked for", True
    if asked == "auto":
        by_mpi, why, sure = _chosen(peers)
    with agreement(peers):
        backend = local_backend(peers.rank, nodes, name, by_mpi)
    if not sure:
        from . import device_trial  # only here, as it loads MPI, and commands name transports before that

        if not device_trial.succeeds(peers, backend, why):
            backend.close()
            why = f"what the ranks sent each other did not arrive as it was ({why})"
            with agreement(peers):
                backend = local_backend(peers.rank, nodes, name, "staged")
    if asked in ("auto", "ipc") and in_order:
        near, lacking = known.near_for(peers, nodes, backend)
        if near is None and asked == "ipc":
            backend.close()
            raise everywhere(ArgumentError(f"transport is 'ipc', but {lacking}; take 'staged' or 'auto'"), peers)
        if near is None and backend.by_mpi == "staged":
            why = f"{why}, and no CUDA IPC: {lacking}"
        elif near is not None:
            faster, than = _is_faster(peers, nodes, backend, near)
            if faster:
                backend.connect(near)
            why += than if asked == "auto" else ""
    elif asked == "auto":
        why += "; ranks with pieces of the scores do not copy from each other's GPU"
    backend.transport_why = why
    return backend


def _is_faster(peers, nodes, backend, near):
    """Whether copies from GPU to GPU are faster than MPI between ranks of a node, and why in words; collective."""
    if backend.by_mpi == "staged":
        return True, "; ranks of a node copy from each other's GPU"
    from .device_trial import NBYTES, compared

    mpi, ipc = compared(peers, nodes, backend, lambda: another(backend, peers.rank, nodes, near))
    rates = (f"{NBYTES / seconds / 1e9:.3g} GB/s" for seconds in (mpi, ipc))
    return ipc < CLEARLY * mpi, "; between ranks of a node {} by MPI, {} by CUDA IPC".format(*rates)


def local_backend(rank, nodes, name, transport):
    """A new back end on the device of a rank, if it has one; transport: "staged" or "device".  Not collective."""
    return backends.get(name, transport, sum(node == nodes[rank] for node in nodes[:rank]))


def another(backend, rank, nodes, near=None):
    """A new back end like one of this rank, with its transport.  Not collective.  Raises ArgumentError.

    near: ranks to copy from GPU to GPU with; else those of that back end, if it has some.
    """
    made = local_backend(rank, nodes, backend.name, backend.by_mpi if backend.transport else "auto")
    if made.transport:
        made.transport_why = backend.transport_why
        if near or backend.near:
            made.connect(near or backend.near)
    return made


def in_words(backend):
    """The transport of a back end and why it has it; "" if it has no choice."""
    return f"{backend.transport}: {backend.transport_why}" if backend.transport else ""


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
