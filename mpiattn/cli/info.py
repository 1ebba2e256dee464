"""What this installation and this launch have.

Alone it shows versions, BLAS, MPI and devices; under mpiexec or srun also how many ranks run on which hosts, so
it is the first thing to run on a new cluster:

  mpiattn info
  mpiexec -n 2 mpiattn info --json info.json
"""

import os
import platform
import socket

from .. import __version__, backends, host
from ..agreement import agreement
from ..errors import FileError
from ..sources import kernel_dir
from . import launch_rank, options
from .jsonfile import write_json
from .launch import on_all_ranks
from .table import facts
from .threads import VARIABLES

CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x", "cupy")
THREAD_LEVELS = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")      # in MPI's order
# How launchers tell a process the number of ranks: MPICH's and Intel's, Open MPI's, HPE's.
LAUNCHED_RANKS = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PALS_SIZE")


def add_arguments(parser):
    """Declare the arguments of `mpiattn info`."""
    options.add_json(parser)


def run(args):
    """`mpiattn info`."""
    return on_all_ranks(lambda job: _run(job, args))


def _run(job, args):
    comm = job.comm
    facts_of_hosts = _hosts(comm)
    with agreement(job.peers, only=0):
        # Under another MPI's mpiexec every process is rank 0 of its own world; still only one may speak.
        if comm.rank == 0 and launch_rank() == 0:
            data = {"versions": _versions(), "blas": _blas(), "mpi": _mpi(comm), "hosts": facts_of_hosts,
                    "processor": host.processor(), "backends": list(backends.NAMES), "kernels": _kernels()}
            if args.json:
                write_json(args.json, data)
            if args.json != "-":
                print(facts(list(_lines(data))), flush=True)
    return 0


# Gathering

def _versions():
    import h5py
    parallel = "parallel" if h5py.get_config().mpi else "serial"
    return {"mpiattn": __version__, "Python": platform.python_version(), "NumPy": host.version("numpy"),
            "mpi4py": host.version("mpi4py"), "h5py": host.version("h5py"),
            "HDF5": f"{h5py.version.hdf5_version}, {parallel}", "CuPy": host.version(*CUPY),
            "torch": host.version("torch")}


def _blas():
    name, threads = host.blas()
    return {"library": name, "threads": threads,
            "settings": {variable: os.environ[variable] for variable in VARIABLES if variable in os.environ}}


def _mpi(comm):
    from mpi4py import MPI

    from ..gpuaware import gpu_aware
    aware, why = gpu_aware()
    library = MPI.Get_library_version().splitlines()[0].split(", ")[0]
    told = next((os.environ[name] for name in LAUNCHED_RANKS if os.environ.get(name, "").isdigit()), None)
    return {"library": " ".join(library.replace("\0", "").split()),
            "standard": ".".join(map(str, MPI.Get_version())), "thread_level": THREAD_LEVELS[_level(MPI)],
            "largest_tag": comm.Get_attr(MPI.TAG_UB), "gpu_aware": aware, "gpu_aware_why": why,
            "ranks": comm.size, "launched_ranks": told and int(told)}


def _level(MPI):
    order = (MPI.THREAD_SINGLE, MPI.THREAD_FUNNELED, MPI.THREAD_SERIALIZED, MPI.THREAD_MULTIPLE)
    return order.index(MPI.Query_thread())


def _hosts(comm):
    """Per host in order of its first rank: name, ranks, cores and devices; gathered on rank 0, else None."""
    from mpi4py import MPI
    local = comm.Split_type(MPI.COMM_TYPE_SHARED)
    first = local.bcast(comm.rank)
    local.Free()
    names, why = _devices()
    ranks = comm.gather((first, socket.gethostname(), host.cores(), names, why))
    if comm.rank:
        return None
    found = {}
    for leader, name, cores, devices, reason in ranks:
        entry = found.setdefault(leader, {"host": name, "ranks": 0, "cores": set(), "devices": [],
                                          "no_devices_why": reason})
        entry["ranks"] += 1
        entry["cores"] |= cores
        # Ranks that see different devices are told apart; the same list is said once.
        if devices and devices not in entry["devices"]:
            entry["devices"].append(devices)
    for entry in found.values():
        entry["cores"] = len(entry["cores"])
        entry["no_devices_why"] = None if entry["devices"] else entry["no_devices_why"]
    return list(found.values())


def _devices():
    """Names of the CUDA devices that this process sees, and why there are none: (names, why)."""
    if host.version(*CUPY) is None:
        return [], "CuPy is not installed"
    try:
        import cupy
        runtime = cupy.cuda.runtime
        names = [runtime.getDeviceProperties(i)["name"] for i in range(runtime.getDeviceCount())]
    except Exception as error:         # no driver, no device, a broken install: each has its own class in CuPy
        return [], f"CuPy finds none: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return [name.decode() if isinstance(name, bytes) else name for name in names], "CuPy counts 0 devices"


def _kernels():
    try:
        return str(kernel_dir())
    except FileError as error:
        return str(error)


# Telling

def _lines(data):
    """Names and values for people."""
    mpi, blas, versions = data["mpi"], data["blas"], data["versions"]
    settings = ", ".join(f"{name}={value}" for name, value in blas["settings"].items()) or "no variable set"
    if len(blas["settings"]) == len(VARIABLES) and len(set(blas["settings"].values())) == 1:
        settings = f"{VARIABLES[0]} and the like: {blas['settings'][VARIABLES[0]]}"
    yield from ((name, found or "not installed") for name, found in versions.items())
    yield "BLAS", f"{blas['library'] or 'unknown'}; threads: {blas['threads'] or 'unknown'} ({settings})"
    yield "MPI", f"{mpi['library']}; standard {mpi['standard']}"
    yield "thread level", mpi["thread_level"]
    yield "largest tag", mpi["largest_tag"]
    yield "GPU-aware MPI", f"{'yes' if mpi['gpu_aware'] else 'no'}: {mpi['gpu_aware_why']}"
    yield "ranks", f"{mpi['ranks']} on {len(data['hosts'])} host{'s' * (len(data['hosts']) > 1)}"
    if (mpi["launched_ranks"] or 1) != mpi["ranks"]:
        yield "WARNING", (f"the launcher started {mpi['launched_ranks']} ranks, this MPI sees {mpi['ranks']}: "
                          "mpiexec belongs to another MPI than mpi4py")
    for entry in data["hosts"]:
        devices = " | ".join(", ".join(names) for names in entry["devices"]) or f"none ({entry['no_devices_why']})"
        yield f"  {entry['host']}", (f"ranks: {entry['ranks']}, cores: {entry['cores']}, "
                                     f"CUDA devices: {devices}")
    yield "processor", data["processor"]
    yield "back ends", ", ".join(data["backends"])
    yield "kernel sources", data["kernels"]
