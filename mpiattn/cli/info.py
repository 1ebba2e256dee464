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
from ..backends.cuda import kernel_table
from ..backends.cuda.tile_table import PROCESSORS
from ..comm.agreement import agreement
from ..console import options
from ..console.json_file import write_json
from ..console.launch import on_all_ranks
from ..console.table import facts, table
from ..errors import ArgumentError, FileError, MpiattnError
from ..model import store
from ..system import host, installation
from ..system.launch_variables import launch_rank
from ..system.sources import kernel_dir
from ..system.words import number

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
    options.add_json(parser)


def run(args):
    """`mpiattn info`."""
    if args.kernels is not None:
        return on_all_ranks(lambda job: _run_kernels(job, args), alone=True)
    return on_all_ranks(lambda job: _run(job, args), alone=True)


def _run(job, args):
    from ..comm.mesh import nodes_of

    comm, nodes = job.comm, nodes_of(job.peers)
    transports = _transports(job.peers, nodes)
    facts_of_hosts = _hosts(job.peers, nodes)
    data = None
    with agreement(job.peers, only=0):
        # Under another MPI's mpiexec every process is rank 0 of its own world; only one of them prints.
        if comm.rank == 0 and launch_rank() == 0:
            data = {
                "versions": installation.versions(),
                "blas": installation.blas(),
                "mpi": installation.mpi(comm),
                "hosts": facts_of_hosts,
                "processor": host.processor(),
                "machine": _machine(nodes),
                "backends": backends.missing(),
                "backends_for_tests": backends.usages(tests=True),
                "auto": _auto(),
                "transports": transports,
                "kernels": _kernels(),
            }
            if args.json:
                write_json(args.json, data)
    if data and args.json != "-":
        print(facts(list(_lines(data))), flush=True)
    return 0


def _run_kernels(job, args):
    """Print the table of `mpiattn info --kernels` on rank 0."""
    with agreement(job.peers, only=0):
        if job.comm.rank or launch_rank():
            return 0
        architectures = args.kernels.split(",")
        for architecture in architectures:
            if not re.fullmatch(r"sm_\d+", architecture) or int(architecture[3:]) < min(PROCESSORS):
                raise ArgumentError(
                    f"kernels is {args.kernels}; it must be architectures from sm_{min(PROCESSORS)} "
                    f"on, such as {','.join(kernel_table.ARCHITECTURES)}"
                )
        rows = [row for architecture in architectures for row in kernel_table.rows(architecture)]
        if args.json:
            write_json(
                args.json,
                {
                    "heads_per_kv": kernel_table.HEADS_PER_KV,
                    "kernels": [{**row._asdict(), "tile": row.tile._asdict()} for row in rows],
                },
            )
        if args.json != "-":
            print(
                f"{kernel_table.HEADS_PER_KV} query heads for each KV head; a tile is rows x columns of scores, "
                "warps, stages, parts of the results, warps that share rows\n"
            )
            print(
                table(
                    [
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
                    ],
                    (
                        "kernel, dtype, head dim",
                        "GPU",
                        "tile",
                        "registers",
                        "bytes spilled",
                        "shared KiB",
                        "blocks a multiprocessor",
                    ),
                ),
                flush=True,
            )
    return 0


# Gathering


def _hosts(peers, nodes):
    """Name, ranks, cores and devices of every host, in order of first ranks.  nodes: node number of every rank."""
    ranks, hosts = peers.allgather((socket.gethostname(), host.cores(), *installation.devices())), {}
    for node, (name, cores, devices, reason) in zip(nodes, ranks):
        entry = hosts.setdefault(
            node, {"host": name, "ranks": 0, "cores": set(), "devices": [], "no_devices_why": reason}
        )
        entry["ranks"] += 1
        entry["cores"] |= cores
        # Ranks of a host may see different devices; each distinct list is shown once.
        if devices and devices not in entry["devices"]:
            entry["devices"].append(devices)
    for entry in hosts.values():
        entry["cores"] = len(entry["cores"])
        entry["no_devices_why"] = None if entry["devices"] else entry["no_devices_why"]
    return list(hosts.values())


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
            (
                f"the launcher started {mpi['launched_ranks']} ranks, this MPI sees {mpi['ranks']}: "
                "mpiexec belongs to another MPI than mpi4py"
            ),
        )
    for entry in data["hosts"]:
        devices = " | ".join(", ".join(names) for names in entry["devices"]) or f"none ({entry['no_devices_why']})"
        yield f"  {entry['host']}", (f"ranks: {entry['ranks']}, cores: {entry['cores']}, CUDA devices: {devices}")
    yield "processor", data["processor"]
    yield "machine", data["machine"]["from"]
    usable = [usage for usage, why in data["backends"].items() if not why]
    yield "back ends", ", ".join(usage for usage in usable if usage not in data["backends_for_tests"])
    yield "  auto takes", data["auto"]
    yield "  for tests", ", ".join(usage for usage in usable if usage in data["backends_for_tests"])
    for usage, why in data["backends"].items():
        if why:
            yield f"  not {usage}", why
    yield "kernel sources", data["kernels"]
