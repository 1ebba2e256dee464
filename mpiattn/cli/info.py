"""Show what this installation and this launch have.

Shows versions, BLAS, MPI and devices; under mpiexec or srun also how many ranks run on which hosts:

  mpiattn info
  mpiexec -n 2 mpiattn info --json info.json

--kernels shows instead the GPU resources of every kernel, as NVIDIA's compiler reports them; it needs no GPU:

  mpiattn info --kernels sm_90
"""

import re
import socket

from .. import backends
from ..backends.cpu import choice, library
from ..backends.cuda import kernel_table
from ..backends.cuda.tile_table import PROCESSORS
from ..console import options
from ..console.json_file import report
from ..console.launch import on_all_ranks
from ..console.table import facts, table
from ..errors import ArgumentError, FileError, MpiattnError
from ..model import store
from ..system import host, installation, memory_limits
from ..system.launch_variables import launch_rank
from ..system.sources import kernel_dir
from ..system.words import number, size

HEAD_DIM = 128  # the default of `mpiattn tune`; the machine is looked up for it


def add_arguments(parser):
    """Declare the arguments of `mpiattn info`."""
    parser.add_argument(
        "--kernels",
        nargs="?",
        metavar="ARCHITECTURES",
        const=",".join(kernel_table.ARCHITECTURES),
        help="compile the GPU kernels for these architectures, for example sm_80,sm_90, and show "
        "registers, spilled bytes, shared memory and thread blocks per multiprocessor for every "
        "entry of the tile table (default: %(const)s; needs the extra cuda-compile)",
    )
    options.add(parser, "json")


def run(args):
    """`mpiattn info`."""
    if args.kernels is not None:
        return on_all_ranks(lambda job: _run_kernels(job, args), alone=True)
    return on_all_ranks(lambda job: _run(job, args), alone=True)


def _run(job, args):
    from ..comm.mesh import nodes_of

    nodes = nodes_of(job.peers)
    gathered = {"transports": _transports(job.peers, nodes), "hosts": _hosts(job.peers)}

    def make():
        if launch_rank():  # under another MPI's mpiexec every process is rank 0 of its own world
            return None
        data = _data(job.comm, nodes, **gathered)
        return data, facts(list(_lines(data)))

    report(job, args.json, make)
    return 0


def _run_kernels(job, args):
    """The table of `mpiattn info --kernels`."""
    report(job, args.json, lambda: None if launch_rank() else _made(args))
    return 0


def _made(args):
    """The table as data and text."""
    architectures = args.kernels.split(",")
    for architecture in architectures:
        if not re.fullmatch(r"sm_\d+", architecture) or int(architecture[3:]) < min(PROCESSORS):
            raise ArgumentError(
                f"kernels is {args.kernels}; it must be architectures from sm_{min(PROCESSORS)} "
                f"on, such as {','.join(kernel_table.ARCHITECTURES)}"
            )
    rows = [row for architecture in architectures for row in kernel_table.rows(architecture)]
    data = {
        "heads_per_kv": kernel_table.HEADS_PER_KV,
        "kernels": [{**row._asdict(), "tile": row.tile._asdict()} for row in rows],
    }
    cells = [
        (
            f"{row.work} {row.dtype} {row.head_dim}",
            row.architecture,
            f"{row.tile.rows}x{row.tile.columns},{','.join(map(str, row.tile[2:]))}",
            row.registers,
            row.spilled,
            f"{row.shared_bytes / 1024:.1f}",
            row.blocks,
        )
        for row in rows
    ]
    header = "kernel, dtype, head dim", "GPU", "tile", "registers", "bytes spilled", "shared KiB"
    header += ("blocks a multiprocessor",)
    text = (
        f"{kernel_table.HEADS_PER_KV} query heads for each KV head; a tile is rows x columns of scores, "
        f"warps, stages, parts of the results, warps that share rows\n\n{table(cells, header)}"
    )
    return data, text


# Gathering


def _data(comm, nodes, transports, hosts):
    """What is shown, as data for JSON."""
    return {
        "versions": installation.versions(),
        "blas": installation.blas(),
        "mpi": installation.mpi(comm),
        "hosts": hosts,
        "processor": host.processor(),
        "machine": _machine(nodes),
        "backends": backends.missing(),
        "backends_for_tests": backends.usages(tests=True),
        "auto": _auto(),
        "transports": transports,
        "kernels": _kernels(),
        "instruction_sets": _instruction_sets(),
    }


def _hosts(peers):
    """Name, ranks, cores, memory and devices of every host, in order of first ranks; collective."""
    from ..comm.mesh import by_node

    hosts = []
    for ranks in by_node(peers, (socket.gethostname(), host.cores(), memory_limits.limits(), *installation.devices())):
        names, cores, memory, devices, reasons = zip(*ranks)
        lists = []  # ranks of a host may see different devices; each distinct list is shown once
        for seen in devices:
            if seen and seen not in lists:
                lists.append(seen)
        count = len(set().union(*cores))
        entry = {"host": names[0], "ranks": len(ranks), "cores": count, "devices": lists}
        parts = [memory_limits.least(limits, len(ranks)) for limits in memory]
        limit, nbytes = min(parts, key=lambda part: (part[1] is None, part[1]))
        entry |= {"memory_bytes_per_rank": nbytes, "memory_limit": limit and limit.name}
        hosts.append({**entry, "no_devices_why": None if lists else reasons[0]})
    return hosts


def _transports(peers, nodes):
    """How plans of these ranks send, by the name of each back end on a GPU that can run on all of them."""
    from ..comm.transport import in_words, make_backend

    transports = {}
    for name in backends.usages(on_gpu=True):
        if not peers.largest([backends.find(name).missing() != ""])[0]:
            try:
                backend = make_backend(peers, nodes, name, "auto")
            except MpiattnError as error:
                if not error.everywhere:
                    raise
                transports[name] = f"{error}"
            else:
                transports[name] = in_words(backend)
                backend.close()
    return transports


def _kernels():
    try:
        return str(kernel_dir())
    except FileError as error:
        return str(error)


def _instruction_sets():
    """Whether each instruction set of the back end cpu can be taken, and why not; None without kernels."""
    if backends.find("cpu").missing():
        return None
    sets = []
    for name, state in library.instruction_sets().items():
        why = ""
        if not state.supported:
            why = "this processor does not have it"
        elif not state.compiled:
            why = "it was not compiled"
        elif fault := choice.fault(name):
            why = f"it computes a trial block wrong: {fault}"
        sets.append({"name": name, "usable": not why, "why_not": why})
    return {"sets": sets, "better": choice.better()}


def _auto():
    """What a plan's "auto" takes in this process, with its version: of compiled kernels, their instruction set."""
    backend = backends.get()
    try:
        return f"{backend.name} {backend.version}"
    finally:
        backend.close()


def _machine(nodes):
    """The machine that plans of this launch use with the default back end, and where it is from."""
    from ..model.tuned import key_of

    backend = backends.get()
    key, assumed = key_of(backend, nodes, HEAD_DIM), backend.assumed_machine
    backend.close()
    try:
        machine, where = store.resolve(key, assumed=assumed)
    except ArgumentError as error:
        return {"name": None, "from": str(error), "key": key._asdict(), "figures": None}
    return {"name": machine.name, "from": where, "key": key._asdict(), "figures": machine.as_dict()}


# Output


def _lines(data):
    """Names and values of the table."""
    mpi, blas, versions = data["mpi"], data["blas"], data["versions"]
    settings = ", ".join(f"{name}={value}" for name, value in blas["settings"].items()) or "no variable set"
    if len(blas["settings"]) == len(host.BLAS_VARIABLES) and len(set(blas["settings"].values())) == 1:
        settings = f"{host.BLAS_VARIABLES[0]} and the like: {blas['settings'][host.BLAS_VARIABLES[0]]}"
    yield from ((name, version or "not installed") for name, version in versions.items())
    yield "BLAS", f"{blas['library'] or 'unknown'}; threads: {blas['threads'] or 'unknown'} ({settings})"
    if blas["advice"]:
        yield "BLAS advice", blas["advice"]
    yield "MPI", f"{mpi['library']}; standard {mpi['standard']}"
    yield "thread level", mpi["thread_level"]
    yield "largest tag", mpi["largest_tag"]
    yield "GPU-aware MPI", f"{'yes' if mpi['gpu_aware'] else 'no'}: {mpi['gpu_aware_why']}"
    yield from ((f"transport of {name}", words) for name, words in data["transports"].items())
    yield "ranks", f"{mpi['ranks']} on {number(len(data['hosts']), 'host')}"
    if (mpi["launched_ranks"] or 1) != mpi["ranks"]:
        yield (
            "WARNING",
            f"the launcher started {mpi['launched_ranks']} ranks, this MPI sees {mpi['ranks']}: "
            "mpiexec belongs to another MPI than mpi4py",
        )
    for entry in data["hosts"]:
        devices = " | ".join(", ".join(names) for names in entry["devices"]) or f"none ({entry['no_devices_why']})"
        memory = "unknown"
        if entry["memory_limit"]:
            memory = f"{size(entry['memory_bytes_per_rank'])} a rank (left of {entry['memory_limit']})"
        yield (
            f"  {entry['host']}",
            f"ranks: {entry['ranks']}, cores: {entry['cores']}, memory: {memory}, CUDA devices: {devices}",
        )
    yield "processor", data["processor"]
    yield "machine", data["machine"]["from"]
    usable = [usage for usage, why in data["backends"].items() if not why]
    yield "back ends", ", ".join(usage for usage in usable if usage not in data["backends_for_tests"])
    yield "  auto takes", data["auto"]
    yield from _lines_of_sets(data["instruction_sets"])
    yield "  for tests", ", ".join(usage for usage in usable if usage in data["backends_for_tests"])
    for usage, why in data["backends"].items():
        if why:
            yield f"  not {usage}", why
    yield "kernel sources", data["kernels"]


def _lines_of_sets(known):
    """The lines about instruction sets, if there are kernels."""
    if known is None:
        return
    yield "  sets of cpu", ", ".join(each["name"] for each in known["sets"] if each["usable"]) or "none"
    for each in known["sets"]:
        if not each["usable"]:
            yield f"  not {each['name']}", each["why_not"]
    if known["better"]:
        yield "ADVICE", f"{known['better']} is faster on this processor: {library.ALL_SETS}"
