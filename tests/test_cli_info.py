"""`mpiattn info` alone, under mpiexec and with devices that are not there, and the verdict on GPU-aware MPI."""

import json
import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import launch
import pytest
import warm

from mpiattn import backends
from mpiattn.console.blas_environment import name_core_type
from mpiattn.system import host
from mpiattn.system.gpu_aware_mpi import verdict

INFO = [sys.executable, "-m", "mpiattn", "info"]


def info(n, *arguments, **options):
    return (
        launch.mpirun(n, [*INFO, *arguments], **options)
        if "env" in options
        else warm.command(n, ["info", *arguments], **options)
    )


def test_one_table_for_all_ranks():
    text = info(3).stdout
    lines = {line[:16].strip(): line[16:].strip() for line in text.splitlines()}
    assert len(lines) == len(text.splitlines())  # nothing is said twice
    assert lines["Python"] == platform.python_version()
    assert lines["NumPy"] == host.version("numpy")
    assert lines["ranks"] == "3 on 1 host"
    assert lines["GPU-aware MPI"].startswith("no: ") or lines["GPU-aware MPI"].startswith("yes: ")
    usable = [name for name, why in backends.missing().items() if not why]
    tests = backends.usages(tests=True)
    assert lines["back ends"] == ", ".join(name for name in usable if name not in tests) and "numpy" in usable
    assert lines["for tests"] == ", ".join(name for name in usable if name in tests) and "deferred" in tests
    best = backends.get("auto")
    assert lines["auto takes"] == f"{best.name} {best.version}"
    assert lines["not cuda"].startswith("it needs")
    assert os.path.isfile(os.path.join(lines["kernel sources"], "README.md"))
    assert "WARNING" not in lines


def test_kernels(tmp_path):
    """A table of what the compiler says, by one rank; the compiler itself is tested in test_kernels_compile.py."""
    code = (
        "import sys; from mpiattn.backends.cuda import kernel_table as t; from mpiattn.cli import main; "
        "t.rows = lambda of: [t.Row('forward', 'bfloat16', 128, of, t.ScoreTile(128, 64, 4, 1), 255, 16, 66560, 2)]; "
        "sys.exit(main(sys.argv[1:]))"
    )
    outcome = launch.mpirun(
        2, [sys.executable, "-c", code, "info", "--kernels", "sm_80,sm_90", "--json", tmp_path / "kernels.json"]
    )
    rows = [line.split() for line in outcome.stdout.splitlines() if line.startswith("forward")]
    assert rows == [
        ["forward", "bfloat16", "128", of, "128x64,4,1,1,1", "255", "16", "65.0", "2"] for of in ("sm_80", "sm_90")
    ]
    kernels = json.loads((tmp_path / "kernels.json").read_text())["kernels"]
    assert [of["architecture"] for of in kernels] == ["sm_80", "sm_90"] and kernels[0]["tile"]["rows"] == 128


def test_kernels_that_cannot_be_compiled():
    for architectures in ("sm_70", "90", "sm_90,"):
        outcome = info(2, "--kernels", architectures, check=False)
        assert outcome.returncode
        assert f"kernels is {architectures}; it must be architectures from sm_80 on" in outcome.stderr
    code = "import sys; sys.modules['cuda'] = None; from mpiattn.cli import main; sys.exit(main(sys.argv[1:]))"
    outcome = launch.mpirun(1, [sys.executable, "-c", code, "info", "--kernels", "sm_90"], check=False)
    assert outcome.returncode and "pip install 'mpiattn[cuda-compile]'" in outcome.stderr


def test_json(tmp_path):
    text = info(2, "--json", tmp_path / "info.json").stdout
    data = json.loads((tmp_path / "info.json").read_text())
    assert data["mpi"]["ranks"] == 2 and data["mpi"]["library"] in text
    assert data["mpi"]["thread_level"] in ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
    assert data["blas"]["threads"] in (1, None)  # as the launch sets it
    assert [entry["ranks"] for entry in data["hosts"]] == [2]
    assert json.loads(info(2, "--json", "-").stdout)["versions"] == data["versions"]


def test_json_that_cannot_be_written_is_said_once():
    outcome = info(2, "--json", "/no/such/folder/info.json", check=False)
    assert outcome.returncode
    assert outcome.stderr.count("--json is '/no/such/folder/info.json'") == 1
    assert "Traceback" not in outcome.stderr


def test_counts_ranks_host_by_host():
    if launch.vendor() != "mpich":
        pytest.skip("only MPICH can pretend to have two hosts")
    data = json.loads(info(3, "--json", "-", env={"MPIR_CVAR_NUM_CLIQUES": "2"}).stdout)
    assert [entry["ranks"] for entry in data["hosts"]] == [2, 1]


def test_alone_and_under_the_mpiexec_of_another_mpi():
    """What that looks like to a process: a launcher says two ranks, MPI knows of one, or cannot start (MPICH)."""
    launch.require_launch()
    other = "PMI_SIZE" if launch.vendor() == "openmpi" else "OMPI_COMM_WORLD_SIZE"
    own, foreign = (
        subprocess.run(INFO, env=launch.environment(extra), text=True, capture_output=True, timeout=launch.patience(60))
        for extra in ({}, {other: "2"})
    )
    assert own.returncode == 0 and "1 on 1 host" in own.stdout and "WARNING" not in own.stdout
    if launch.vendor() == "mpich":
        assert foreign.returncode == 1 and not foreign.stdout
        assert foreign.stderr.startswith("mpiattn: the launcher started 2 ranks of Open MPI, mpi4py has MPICH")
    else:
        assert foreign.returncode == 0 and "the launcher started 2 ranks, this MPI sees 1" in foreign.stdout


@pytest.mark.draw(1)
@pytest.mark.parametrize(
    "runtime, seen",
    [
        (
            "def getDeviceCount(): return 2\n    def getDeviceProperties(i): return {'name': b'Fast %d' % i}",
            "CUDA devices: Fast 0, Fast 1",
        ),
        ("def getDeviceCount(): return 0", "none (CuPy counts 0 devices)"),
        (
            "def getDeviceCount(): raise RuntimeError('cudaErrorInsufficientDriver: too old')",
            "none (CuPy finds none: RuntimeError: cudaErrorInsufficientDriver: too old)",
        ),
        ("raise ImportError('libcuda.so.1: cannot open')", "none (CuPy finds none: ImportError: libcuda.so.1"),
    ],
)
def test_devices(tmp_path, runtime, seen):
    (tmp_path / "cupy.py").write_text(
        f"class cuda:\n  class runtime:\n    {runtime}\n".replace("def getDevice", "@staticmethod\n    def getDevice")
    )
    meta = tmp_path / "cupy_cuda13x-13.6.0.dist-info"
    meta.mkdir()
    (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: cupy-cuda13x\nVersion: 13.6.0\n")
    text = info(2, env={"PYTHONPATH": os.pathsep.join([str(tmp_path), str(launch.ROOT)])}).stdout
    assert seen in text
    assert "13.6.0" in text


CRAY, PLAIN = "MPI VERSION    : CRAY MPICH version 8.1.29", "MPICH Version: 4.3\nMPICH configure: --with-device=ch4"
CUDA = PLAIN + " --with-cuda=/usr/local/cuda"
YES, NO = ("/lib/libmpi.so", 1), ("/lib/libmpi.so", 0)


@pytest.mark.parametrize(
    "version, environ, answer, transport, aware, why",
    [
        ("Open MPI v5.0.11", {}, YES, False, True, "/lib/libmpi.so says yes"),
        ("Open MPI v5.0.11", {}, NO, False, False, "/lib/libmpi.so says no"),
        ("Open MPI v5.0.11", {}, None, False, False, "unknown, so no"),
        (PLAIN, {}, NO, False, False, "configured without --with-cuda"),
        (PLAIN + " --with-cuda=no", {"MPIR_CVAR_ENABLE_GPU": "1"}, None, False, False, "unknown, so no"),
        (CUDA, {}, YES, False, True, "says yes"),
        (CUDA, {"MPIR_CVAR_ENABLE_GPU": "0"}, YES, False, False, "MPIR_CVAR_ENABLE_GPU=0"),
        (CUDA, {"MPIR_CVAR_ENABLE_GPU": "1"}, None, False, True, "--with-cuda=/usr/local/cuda"),
        (CUDA, {}, None, False, False, "unknown, so no"),
        (CRAY, {}, YES, True, False, "without MPICH_GPU_SUPPORT_ENABLED=1"),
        (CRAY, {"MPICH_GPU_SUPPORT_ENABLED": "1"}, None, False, False, "libmpi_gtl_cuda is not loaded"),
        (CRAY, {"MPICH_GPU_SUPPORT_ENABLED": "1"}, None, True, True, "libmpi_gtl_cuda"),
        ("MVAPICH2 Version: 2.3.7", {}, YES, False, False, "MV2_USE_CUDA"),
    ],
)
def test_verdict(version, environ, answer, transport, aware, why):
    said, reason = verdict(version, environ, answer, transport)
    assert said is aware
    assert why in reason


def test_host():
    assert host.version("no-such-package", "numpy") == host.version("numpy")
    assert host.version("no-such-package") is None
    assert host.cores() and host.processor()
    assert host.ask("/no/such/library.so", "anything") is None


@pytest.mark.parametrize(
    "libraries, expected",
    [
        ([], (None, None)),
        (
            [("openmp", "openmp", "libgomp.so.1", None, 8), ("blas", "mkl", "libmkl_rt.so", "2024.0", 4)],
            ("mkl 2024.0", 4),
        ),
        (
            [
                ("blas", "openblas", "/site/scipy.libs/libscipy_openblas-1.so", "0.3.27", 2),
                ("blas", "openblas", "/site/numpy.libs/libscipy_openblas64_-2.so", "0.3.31", 1),
            ],
            ("openblas 0.3.31", 1),
        ),
    ],
)
def test_the_blas_is_that_of_numpy(monkeypatch, libraries, expected):
    fields = ("user_api", "internal_api", "filepath", "version", "num_threads")
    infos = [dict(zip(fields, library)) for library in libraries]
    monkeypatch.setattr(host, "_libraries", lambda: [SimpleNamespace(info=info.copy) for info in infos])
    assert host.blas() == expected


AVX2, ALL = "fpu avx avx2", "fpu avx avx2 avx512f avx512cd avx512bw avx512dq avx512vl"


@pytest.mark.parametrize(
    "core, flags, setting, advised",
    [
        ("Haswell", ALL, None, True),
        ("Zen", ALL, None, True),
        ("Haswell", AVX2, None, False),
        ("Haswell", ALL.replace(" avx512vl", ""), None, False),
        ("SkylakeX", ALL, None, False),
        ("Haswell", ALL, "Haswell", True),
        ("SkylakeX", ALL, "SKYLAKEX", False),
        (None, ALL, None, False),
    ],
)
def test_blas_advice(monkeypatch, core, flags, setting, advised):
    """Only where AVX-512 is left aside, also if the environment asks for that."""
    info = {"user_api": "blas", "internal_api": "openblas", "filepath": "", "architecture": core}
    monkeypatch.setattr(host, "_libraries", lambda: [SimpleNamespace(info=info.copy)])
    monkeypatch.setattr(host, "_cpuinfo", {"flags": flags}.get)
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    if setting:
        monkeypatch.setenv("OPENBLAS_CORETYPE", setting)
    advice = host.blas_advice()
    assert (advice is not None) == advised
    if advised:
        assert core in advice and "OPENBLAS_CORETYPE=SKYLAKEX" in advice


@pytest.mark.parametrize(
    "vendor, flags, setting, then",
    [
        ("AuthenticAMD", ALL, None, "SKYLAKEX"),
        ("AuthenticAMD", ALL, "Zen", "Zen"),
        ("AuthenticAMD", AVX2, None, None),
        ("GenuineIntel", ALL, None, None),
    ],
)
def test_commands_name_the_type_of_core(monkeypatch, vendor, flags, setting, then):
    monkeypatch.setattr(host, "_cpuinfo", {"flags": flags, "vendor_id": vendor}.get)
    monkeypatch.setattr(os, "environ", {"OPENBLAS_CORETYPE": setting} if setting else {})
    name_core_type()
    assert os.environ.get("OPENBLAS_CORETYPE") == then
    assert ("your own program" in (host.blas_advice() or "")) == (then == "SKYLAKEX")


@pytest.mark.workshop  # a cluster's OpenBLAS may have been built for one type of core
def test_the_type_of_core():
    blas = json.loads(info(2, "--json", "-", env={"OPENBLAS_CORETYPE": "Haswell"}).stdout)["blas"]
    if not (blas["library"] or "").startswith("openblas") or platform.machine() != "x86_64":
        pytest.skip(f"NumPy's BLAS is {blas['library']}, on {platform.machine()}")
    assert blas["library"].endswith(" Haswell") and blas["threads"] == 1
    assert "OPENBLAS_CORETYPE is Haswell" in (blas["advice"] or "OPENBLAS_CORETYPE is Haswell")
