"""The memory that this process may use: of its node, its cgroups, its Slurm job, and by its own limits; and what it has
used.  Linux only.

What cannot be read does not limit.  Whatever the system can take back counts as free: files in its cache, and memory
that it can move to free swap.  So what is refused by these limits could not have run.
"""

import os
import re
import resource
from pathlib import Path
from typing import NamedTuple

from .words import size

UNLIMITED = 2**60  # bytes; cgroups of version 1 without a limit have the largest number of whole pages
MEGABYTE = 2**20  # the unit of Slurm's variables
# Files of a cgroup: its limits, what is used, and the cached files in memory.stat, which are given back when needed.
VERSIONS = {
    2: (("memory.max", "memory.high"), "memory.current", ("active_file", "inactive_file", "slab_reclaimable")),
    1: (("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
}


class Limit(NamedTuple):
    """A limit on memory.

    name: in words.
    left: bytes that the processes under it may have, beside what others and they themselves already use.
    used: bytes that this process uses already, where `left` does not know of them.
    shared: text that is the same in all processes of a node that are under it together; "" if each has its own.
    """

    name: str
    left: int
    used: int = 0
    shared: str = ""


def limits(root="/", environment=os.environ):
    """All limits of this process that can be read, as a list of `Limit`.

    root: the folder that holds proc and sys.  environment: that has Slurm's variables.
    """
    root = Path(root)
    memory, own = _fields(root / "proc/meminfo"), _fields(root / "proc/self/status")
    swap = memory.get("SwapFree", 0)
    every = []
    if "MemAvailable" in memory:
        every.append(Limit("the node's memory", memory["MemAvailable"] + swap, shared="node"))
    of_cgroups = list(_of_cgroups(root, swap))
    every += of_cgroups
    if not any("/job_" in limit.name for limit in of_cgroups):  # else Slurm limits the job by its cgroup
        every += _of_slurm(environment, own.get("RssAnon", 0))
    every += _of_process(own)
    return every


def peak(root="/"):
    """The most memory, resident, that this process has used, in bytes.  root: as for `limits`.

    That of getrusage is at least what the process held that started this one: it is taken only where there is no other.
    """
    own = _fields(Path(root) / "proc/self/status")
    return own.get("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def least(every, sharing=1):
    """The `Limit` that leaves a process the fewest bytes, and these; (None, None) if there is none.

    sharing: the number of processes of the node, which have equal parts of what they share.
    """
    parts = [((limit.left // (sharing if limit.shared else 1)) - limit.used, limit) for limit in every]
    return min(parts, key=lambda part: part[0])[::-1] if parts else (None, None)


def _read(path):
    """The text of a file; "" if it cannot be read."""
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""


def _fields(path):
    """{name: bytes} of a file of lines such as "SwapFree:  12 kB"."""
    return {name: int(kilobytes) * 1024 for name, kilobytes in re.findall(r"(\w+):\s*(\d+) kB", _read(path))}


def _of_process(own):
    """Limits of this process alone.  own: the fields of /proc/self/status."""
    for which, name, field in (
        (resource.RLIMIT_AS, "the address space (ulimit -v)", "VmSize"),
        (resource.RLIMIT_DATA, "the data segment (ulimit -d)", "VmData"),
    ):
        limit = resource.getrlimit(which)[0]
        if limit != resource.RLIM_INFINITY and field in own:
            yield Limit(f"the limit of {size(limit)} on {name}", limit, own[field])


# Slurm: where it does not limit memory by cgroups, it may add up what the processes of a job use, and end it


def _of_slurm(environment, used):
    """The memory that a Slurm job has asked for on a node."""
    job = environment.get("SLURM_JOB_ID")
    if not (job and environment.get("SLURMD_NODENAME")):  # a shell of salloc has the variables, too
        return
    for variable, option, counts in (
        ("SLURM_MEM_PER_NODE", "--mem", None),
        ("SLURM_MEM_PER_CPU", "--mem-per-cpu", ("SLURM_JOB_CPUS_PER_NODE", "CPUs")),
        ("SLURM_MEM_PER_GPU", "--mem-per-gpu", ("SLURM_GPUS_ON_NODE", "GPUs")),
    ):
        asked = environment.get(variable, "")
        if not asked.isdigit() or not int(asked):  # 0: all memory of the node
            continue
        each, count, words = int(asked) * MEGABYTE, 1, ""
        if counts is not None:
            # as "4(x2),2": of the node that has the most, since the launcher may hand on the variables of another node
            numbers = re.findall(r"(\d+)(?:\(x\d+\))?(?:,|$)", environment.get(counts[0], ""))
            if not numbers:
                continue
            count = max(map(int, numbers))
            words = f" for {count} {counts[1]}"
        yield Limit(f"Slurm's {option} of {size(each)}{words}", each * count, used, f"slurm {job}")


# Cgroups


def _of_cgroups(root, swap):
    """The limits of this process's cgroups and of those around them.  swap: bytes that are free."""
    paths = re.findall(r"^\d+:([^:]*):(.*)$", _read(root / "proc/self/cgroup"), re.MULTILINE)
    for version, base, folder in _mounts(root):
        for controllers, path in paths:
            if "memory" in controllers.split(",") if version == 1 else not controllers:
                yield from _around(root / folder.lstrip("/"), _inside(path, base), version, swap)


def _mounts(root):
    """(version, the cgroup that is mounted, the folder) of every file system that has cgroups with memory."""
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2":
            yield 2, fields[3], fields[4]
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            yield 1, fields[3], fields[4]


def _inside(path, base):
    """A cgroup's path under the one that is mounted; that one itself where the path is not under it."""
    parts, above = Path(path).parts, Path(base).parts
    return Path(*parts[len(above) :]) if parts[: len(above)] == above else Path()


def _around(mount, path, version, swap):
    """The limits of a cgroup and of those that hold it."""
    for inner in (path, *path.parents):
        folder = mount / inner
        if version == 1 and inner != path and _read(folder / "memory.use_hierarchy").strip() == "0":
            continue  # it does not count those inside
        yield from _of_cgroup(folder, f"/{inner}" if inner.parts else "/", version, swap)


def _of_cgroup(folder, name, version, swap):
    names, usage, cached = VERSIONS[version]
    values = {of: _number(folder / of) for of in names}
    limit, of = min(((number, of) for of, number in values.items() if number is not None), default=(None, ""))
    used = _number(folder / usage)
    if limit is None or limit >= UNLIMITED or used is None:
        return
    statistics = dict(re.findall(r"^(\w+) (\d+)$", _read(folder / "memory.stat"), re.MULTILINE))
    reclaimable = sum(int(statistics.get(field, 0)) for field in cached)
    left = limit - max(used - reclaimable, 0) + _swap_of(folder, version, swap, limit)
    slurm = "Slurm's " if re.search(r"/job_\d+", name) else ""
    try:
        number = folder.stat().st_ino  # containers of a node have cgroups of the same name
    except OSError:
        number = 0
    yield Limit(f"{slurm}{of} of {size(limit)} of the cgroup {name}", left, shared=f"cgroup {name} {number}")


def _swap_of(folder, version, swap, limit):
    """Bytes of free swap that a cgroup may use."""
    if version == 2:
        most, used = _number(folder / "memory.swap.max"), _number(folder / "memory.swap.current")
        return swap if most is None or used is None else max(min(swap, most - used), 0)
    both, used = _number(folder / "memory.memsw.limit_in_bytes"), _number(folder / "memory.memsw.usage_in_bytes")
    if both is None or used is None:
        return swap
    resident = _number(folder / "memory.usage_in_bytes") or 0
    return max(min(swap, both - limit - (used - resident)), 0)


def _number(path):
    """The number in a file; None where it cannot be read or is "max"."""
    text = _read(path).strip()
    return int(text) if text.isdigit() else None
