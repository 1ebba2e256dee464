"""Judges what the ranks of a node share: cores, memory, threads, devices; `ranks` as in `judge_launch`."""

from ..backends.cpu.library import ALL_SETS
from ..system.words import number, size, span
from .report_item import FAIL, PASS, WARN, Item, by_node, ranks_text

LITTLE = 2**29  # bytes; a rank that has fewer left can hardly do any work
# The variable that a BLAS reads, by the beginning of the BLAS's name.
VARIABLE = {"openblas": "OPENBLAS_NUM_THREADS", "mkl": "MKL_NUM_THREADS", "blis": "BLIS_NUM_THREADS"}


def _cores(node):
    """The cores that a node's ranks may use, together."""
    return frozenset().union(*(rank["cores"] for rank in node))


def _crowd(node):
    """The smallest set of cores that has more ranks than cores: (ranks, cores); None if there is none."""
    for cores in sorted({_cores(node), *(frozenset(rank["cores"]) for rank in node)}, key=len):
        inside = [rank["rank"] for rank in node if cores.issuperset(rank["cores"])]
        if len(inside) > len(cores):
            return inside, cores
    return None


def crowded(ranks):
    """Whether some ranks cannot have a core of their own."""
    return any(map(_crowd, by_node(ranks)))


def binding(ranks):
    """Every rank can have a core of its own."""
    nodes = by_node(ranks)
    text = (
        f"{number(span([len(rank['cores']) for rank in ranks]), 'core')} that a rank may use, "
        f"{span([len(_cores(node)) for node in nodes])} a node"
    )
    crowds = [(node, *_crowd(node)) for node in nodes if _crowd(node)]
    if not crowds:
        return Item("binding", PASS, text)
    shared = [
        f"{ranks_text(crowd)} share {number(len(cores), 'core')} of {node[0]['host']}" for node, crowd, cores in crowds
    ]
    if any(len(_cores(node)) < len(node) for node, *_ in crowds):
        advice = "ranks that share a core wait for each other: start at most as many ranks a node as it has cores"
    else:
        advice = (
            "the launcher binds several ranks to one core: let it give each its own (mpiexec -bind-to core, "
            "--bind-to core of Open MPI, srun --cpu-bind=cores)"
        )
    return Item("binding", WARN, "; ".join(shared), advice)


def memory(ranks):
    """Every rank has some memory to allocate."""
    known = [rank for rank in ranks if rank["memory"]["limit"]]
    if not known:
        return Item("memory", PASS, "this system does not say how much there is")
    worst = min(known, key=lambda rank: rank["memory"]["bytes"])
    each = span([rank["memory"]["bytes"] for rank in known], size)
    text = f"{each} for a rank; the least on {worst['host']}, by {worst['memory']['limit']}"
    if worst["memory"]["bytes"] >= LITTLE:
        return Item("memory", PASS, text)
    advice = "ask for more memory (Slurm: --mem=0 for all of a node), or start fewer ranks a node"
    return Item("memory", WARN, text, advice)


def threads(ranks):
    """The ranks of a node have no more BLAS threads than cores."""
    used = [rank["blas"]["threads"] for rank in ranks]
    library = (ranks[0]["blas"]["library"] or "").lower()
    variable = next((name for start, name in VARIABLE.items() if library.startswith(start)), "OMP_NUM_THREADS")
    share = min(max(1, len(_cores(node)) // len(node)) for node in by_node(ranks))
    advice = f"let every rank have its share of the cores: set {variable}={share} for all of them"
    if None in used:
        if all(rank["blas"]["settings"] for rank in ranks):
            return Item(
                "threads",
                PASS,
                "BLAS does not say how many it uses; they are limited by "
                + ", ".join(sorted(ranks[0]["blas"]["settings"])),
            )
        return Item("threads", WARN, "BLAS does not say how many it uses, and no variable limits them", advice)
    text = f"{span(used)} of BLAS in a rank"
    for node in by_node(ranks):
        total, cores = sum(rank["blas"]["threads"] for rank in node), len(_cores(node))
        if total > cores and any(rank["blas"]["threads"] > 1 for rank in node):
            return Item("threads", WARN, f"{text}, {total} on {number(cores, 'core')} of {node[0]['host']}", advice)
    return Item("threads", PASS, text)


def gpu_aware(ranks, probes):
    """MPI takes device buffers.  probes: the result of `mpiattn.system.gpu_probe.probe` by rank, or None."""
    claim, why = ranks[0]["mpi"]["gpu_aware"], ranks[0]["mpi"]["gpu_aware_why"]
    tried = [probe for probe in probes if probe]
    if not tried:
        return Item("GPU-aware MPI", PASS, f"not probed: no devices ({'yes' if claim else 'no'}: {why})")
    worst = min(tried, key=lambda probe: ("no", "unknown", "yes").index(probe["answer"]))
    text = f"{worst['answer']}: {worst['text']}; {why}"
    if worst["answer"] == "unknown":
        return Item(
            "GPU-aware MPI",
            WARN,
            text,
            "find out why the probe cannot run; until then "
            + ("the ranks of a job try it themselves" if claim else "device buffers go through host memory"),
        )
    if worst["answer"] == "no" and claim:
        return Item(
            "GPU-aware MPI",
            FAIL,
            text,
            "this MPI claims to take device buffers but fails with one: load a "
            "build that fits the driver, or switch its GPU support off",
        )
    if worst["answer"] == "no":
        return Item(
            "GPU-aware MPI",
            WARN,
            text,
            "device buffers go through host memory, which is slower: load an MPI built with CUDA, if the site has one",
        )
    if not claim:
        return Item(
            "GPU-aware MPI",
            WARN,
            text,
            "device buffers work, but this MPI does not claim to take them, so "
            "mpiattn does not use them: set the documented variable "
            "(MPIR_CVAR_ENABLE_GPU=1 for MPICH, MPICH_GPU_SUPPORT_ENABLED=1 for "
            "Cray MPICH)",
        )
    return Item("GPU-aware MPI", PASS, text)


def kernels(ranks):
    """No processor has a faster instruction set than the CPU kernels were compiled for."""
    sets = sorted({rank["kernels"] or "none, NumPy computes" for rank in ranks})
    slower = [rank for rank in ranks if rank["better_kernels"]]
    if not slower:
        return Item("kernels", PASS, f"instruction set of the back end cpu: {', '.join(sets)}")
    rank = slower[0]
    text = f"{rank['host']} has {rank['better_kernels']}, and takes {rank['kernels']}, as the other was not compiled"
    return Item("kernels", WARN, text, ALL_SETS)


def devices(ranks):
    """Every rank has a device, and every device has a rank."""
    if not any(rank["devices"] for rank in ranks):
        return Item("devices", PASS, f"none ({ranks[0]['no_devices_why']})")
    problems = []
    for node in by_node(ranks):
        name = node[0]["host"]
        blind = [rank["rank"] for rank in node if not rank["devices"]]
        taken, visible = {}, {device for rank in node for device in rank["devices"]}
        for rank in node:
            if rank["devices"]:
                device = rank["devices"][rank["local_rank"] % len(rank["devices"])]
                taken.setdefault(device, []).append(rank["rank"])
        if blind:
            problems.append(f"no device is seen by {ranks_text(blind)} of {name}")
        problems += [
            f"{ranks_text(some)} share device {device} of {name}" for device, some in taken.items() if len(some) > 1
        ]
        if visible - set(taken):
            problems.append(f"{number(len(visible - set(taken)), 'device')} of {name} not used")
    if problems:
        return Item(
            "devices",
            WARN,
            "; ".join(problems),
            "start as many ranks per node as it has devices, and let every rank see all of them: a rank uses "
            "the device whose number is its rank on the node",
        )
    names = sorted({name for rank in ranks for name in rank["device_names"]})
    return Item("devices", PASS, f"one for each rank: {', '.join(names)}")
