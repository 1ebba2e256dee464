"""The memory that a process may use, read from files of made-up systems; and one real cgroup, where there can be."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import launch
import pytest

from mpiattn.system import memory_limits
from mpiattn.system.words import byte_option, size

MIB = 2**20
CGROUPS = Path("/sys/fs/cgroup/memory")


@pytest.fixture(autouse=True)
def no_limits(monkeypatch):
    """What `ulimit` says where the tests run is no concern of theirs."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)


def system(root, files):
    """A root folder with these files; numbers are MiB, but in memory.stat and the like they are bytes."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(content * MIB) if isinstance(content, int) else content)
    return root


def left(root, **environment):
    """{name: MiB left, with what this process uses taken away}."""
    every = memory_limits.limits(root, environment)
    return {limit.name: (limit.left - limit.used) / MIB for limit in every}


def meminfo(available, swap=0):
    return f"MemTotal: 99999 kB\nMemAvailable: {available * 1024} kB\nSwapFree: {swap * 1024} kB\nHugePages_Total: 0\n"


def version_2(path, mounted="/"):
    return {
        "proc/self/cgroup": f"0::{path}\n",
        "proc/self/mountinfo": f"33 24 0:28 {mounted} /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw\n",
    }


def test_the_node(tmp_path):
    """Free swap counts, as a job that needs it would run."""
    assert left(system(tmp_path, {"proc/meminfo": meminfo(300, 20)})) == {"the node's memory": 320}


def test_what_cannot_be_read_does_not_limit(tmp_path):
    assert memory_limits.limits(tmp_path, {"SLURM_MEM_PER_NODE": "5"}) == []  # which is no job
    files = {**version_2("/job"), "sys/fs/cgroup/job/memory.max": 100}  # what is used is unknown
    assert memory_limits.limits(system(tmp_path, files), {}) == []
    assert memory_limits.least([]) == (None, None)


def test_cgroups_of_version_2(tmp_path):
    """The job's and those around it; cached files that can be given back are not used, files in memory are."""
    step, job = "sys/fs/cgroup/slurm/job_5/step_0", "sys/fs/cgroup/slurm/job_5"
    files = {
        **version_2("/slurm/job_5/step_0"),
        f"{step}/memory.max": "max\n",
        f"{step}/memory.high": "max\n",
        f"{step}/memory.current": 90,
        f"{job}/memory.max": 400,
        f"{job}/memory.high": 350,  # from here on it is slowed down until it stands still
        f"{job}/memory.current": 200,
        f"{job}/memory.stat": f"anon 5\nshmem {50 * MIB}\ninactive_file {60 * MIB}\nactive_file {10 * MIB}\n",
        "sys/fs/cgroup/slurm/memory.max": 9000,
        "sys/fs/cgroup/slurm/memory.current": 7000,
    }
    names = {
        "Slurm's memory.high of 350 MiB of the cgroup /slurm/job_5": 350 - (200 - 70),
        "memory.max of 8.79 GiB of the cgroup /slurm": 2000,
    }
    assert left(system(tmp_path, files)) == names
    marks = [limit.shared for limit in memory_limits.limits(tmp_path, {})]
    assert len(set(marks)) == 2 and all(mark.startswith("cgroup /slurm") for mark in marks)


@pytest.mark.parametrize("most, more", [("max", 30), (str(25 * MIB), 20), ("0", 0), (None, 30)])
def test_swap_of_a_cgroup(tmp_path, most, more):
    files = {
        **version_2("/a"),
        "proc/meminfo": meminfo(9999, 30),
        "sys/fs/cgroup/a/memory.max": 100,
        "sys/fs/cgroup/a/memory.current": 10,
    }
    if most is not None:
        files |= {"sys/fs/cgroup/a/memory.swap.max": most, "sys/fs/cgroup/a/memory.swap.current": 5}
    assert left(system(tmp_path, files))["memory.max of 100 MiB of the cgroup /a"] == 90 + more


def test_in_a_container(tmp_path):
    """It sees its own cgroup as the root of all, or the path of the host's; more than one system file is mounted."""
    limit = {"sys/fs/cgroup/memory.max": 100, "sys/fs/cgroup/memory.current": 10}
    expected = {"memory.max of 100 MiB of the cgroup /": 90}
    assert left(system(tmp_path / "1", {**version_2("/"), **limit})) == expected
    assert left(system(tmp_path / "2", {**version_2("/docker/1", "/docker/1"), **limit})) == expected
    another = {"sys/fs/cgroup/c/memory.max": 50, "sys/fs/cgroup/c/memory.current": 10}
    assert left(system(tmp_path / "3", {**version_2("/a/b/c", "/docker/1"), **limit, **another})) == expected


def test_cgroups_of_version_1(tmp_path):
    mounts = (
        "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
        "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    )
    folder = "sys/fs/cgroup/memory"
    files = {
        "proc/self/cgroup": "4:memory:/a/b\n1:cpu:/c\n0::/\n",
        "proc/self/mountinfo": mounts,
        f"{folder}/memory.limit_in_bytes": str(2**63 - 4096),  # which means none
        f"{folder}/memory.usage_in_bytes": 5,
        f"{folder}/a/memory.limit_in_bytes": 50,
        f"{folder}/a/memory.usage_in_bytes": 5,
        f"{folder}/a/memory.use_hierarchy": "1\n",
        f"{folder}/a/b/memory.limit_in_bytes": 100,
        f"{folder}/a/b/memory.usage_in_bytes": 30,
        f"{folder}/a/b/memory.stat": f"cache 7\ntotal_inactive_file {8 * MIB}\ntotal_active_file {2 * MIB}\n",
    }
    inner = {"memory.limit_in_bytes of 100 MiB of the cgroup /a/b": 80}
    assert left(system(tmp_path, files)) == inner | {"memory.limit_in_bytes of 50 MiB of the cgroup /a": 45}
    (tmp_path / folder / "a/memory.use_hierarchy").write_text("0\n")  # it does not count /a/b
    assert left(tmp_path) == inner
    more = {
        "proc/meminfo": meminfo(9999, 1000),
        f"{folder}/a/b/memory.memsw.limit_in_bytes": 120,
        f"{folder}/a/b/memory.memsw.usage_in_bytes": 34,
    }
    assert left(system(tmp_path, more))["memory.limit_in_bytes of 100 MiB of the cgroup /a/b"] == 80 + 16


def test_slurm(tmp_path):
    """All that its processes use counts, wherever that is not limited by a cgroup; 0 is all memory of the node."""
    system(tmp_path, {"proc/self/status": "VmSize: 99 kB\nRssAnon: 2048 kB\n"})
    job = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"}
    assert left(tmp_path, **job, SLURM_MEM_PER_NODE="4096") == {"Slurm's --mem of 4 GiB": 4094}
    assert left(tmp_path, **job, SLURM_MEM_PER_NODE="0") == left(tmp_path, **job) == {}
    assert left(tmp_path, SLURM_MEM_PER_NODE="4096") == {}
    of_cpus = {"SLURM_MEM_PER_CPU": "100", "SLURM_JOB_CPUS_PER_NODE": "4(x2),12,8(x3)"}
    assert left(tmp_path, **job, **of_cpus) == {"Slurm's --mem-per-cpu of 100 MiB for 12 CPUs": 1198}
    assert left(tmp_path, **job, SLURM_MEM_PER_CPU="100") == {}
    of_gpus = {"SLURM_MEM_PER_GPU": "100", "SLURM_GPUS_ON_NODE": "2"}
    assert left(tmp_path, **job, **of_gpus) == {"Slurm's --mem-per-gpu of 100 MiB for 2 GPUs": 198}
    (limit,) = memory_limits.limits(tmp_path, job | of_gpus)
    assert limit.shared == "slurm 7"


def test_limits_of_the_process(tmp_path, monkeypatch):
    """Which no other process shares."""
    limits = {resource.RLIMIT_AS: 300 * MIB, resource.RLIMIT_DATA: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits[which], 0))
    system(tmp_path, {"proc/self/status": "VmSize: 10240 kB\nVmData: 1024 kB\n"})
    assert left(tmp_path) == {"the limit of 300 MiB on the address space (ulimit -v)": 290}
    limits[resource.RLIMIT_DATA] = 50 * MIB
    assert left(tmp_path)["the limit of 50 MiB on the data segment (ulimit -d)"] == 49
    assert {limit.shared for limit in memory_limits.limits(tmp_path, {})} == {""}


def test_the_least_of_all():
    node, own = memory_limits.Limit("node", 100, 0, "node"), memory_limits.Limit("own", 60, 20)
    assert memory_limits.least([node, own]) == (own, 40)
    assert memory_limits.least([node, own], 4) == (node, 25)


def test_sizes_in_words():
    assert [size(n) for n in (17, 1536, 5 * MIB, 3 * 2**40)] == ["17 B", "1.5 KiB", "5 MiB", "3 TiB"]
    options = {2**30: "1G", 2**30 + 1: "1.01G", 300 * MIB: "300M", 300 * MIB + 1: "300.01M", 2048: "2K", 17: "17"}
    assert {n: byte_option(n) for n in options} == options


@pytest.mark.draw(1)
def test_a_real_cgroup():
    folder = CGROUPS / f"mpiattn-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(200 * MIB))
    except OSError:
        pytest.skip("no cgroup can be made here")
    code = (
        f"import os; open('{folder}/cgroup.procs', 'w').write(str(os.getpid()))\n"
        "from mpiattn.system import memory_limits; held = bytearray(b'1') * (64 * 2**20)\n"
        "print([limit.left // 2**20 for limit in memory_limits.limits() if 'mpiattn-test' in limit.name])"
    )
    try:
        outcome = subprocess.run(
            [sys.executable, "-c", code], cwd=launch.ROOT, text=True, capture_output=True, timeout=60, check=True
        )
        (there,) = eval(outcome.stdout)
        assert 200 - 64 - 30 < there <= 200 - 64
    finally:
        folder.rmdir()


def test_the_peak_is_of_this_process_alone():
    """However much the process holds that has started it."""
    code = "from mpiattn.system import memory_limits; before = memory_limits.peak(); held = b'x' * 2**26\n"
    code += "print(before, memory_limits.peak())"
    start = "import subprocess as s, sys; held = b'x' * 2**28; s.run([sys.executable, '-c', sys.argv[1]], check=True)"
    command = [sys.executable, "-c", start, code]
    outcome = subprocess.run(
        command, env=launch.environment(), capture_output=True, text=True, timeout=launch.patience(60), check=True
    )
    before, after = map(int, outcome.stdout.split())
    assert before < 2**27 and after - before > 0.9 * 2**26


def test_a_system_that_does_not_tell_the_peak(tmp_path):
    assert memory_limits.peak(system(tmp_path, {"proc/self/status": "VmRSS: 99 kB\n"})) > MIB
