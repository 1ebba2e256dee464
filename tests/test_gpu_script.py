"""tests/gpu/run_all.py where there is no GPU: what it installs, finds and keeps, and what it makes of failures."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
import zipfile

import launch
import pytest

from mpiattn.backends.testing import emulated

pytestmark = pytest.mark.workshop
SCRIPT = launch.TESTS / "gpu" / "run_all.py"
HANDED_OVER = ["results.tar.gz", "summary.json", "summary.txt"]


def start(folder, *options, path="", **more):
    """The script, on the CPU at tiny sizes, with a work folder of its own; without PyTorch, which loads slowly."""
    (folder / "hidden").mkdir(exist_ok=True)
    (folder / "hidden" / "torch.py").write_text("raise ImportError('hidden')")
    environment = launch.environment()
    for name, first in (("PATH", path), ("PYTHONPATH", folder / "hidden")):
        environment[name] = os.pathsep.join(filter(None, [str(first), environment.get(name)]))
    return subprocess.Popen(
        [
            sys.executable,
            SCRIPT,
            folder / "out",
            "--work",
            folder / "work",
            "--backend",
            "numpy",
            "--quick",
            *map(str, options),
        ],
        env=environment | more,
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def run_all(folder, *options, code=0, **more):
    """Its sections and its output."""
    process = start(folder, *options, **more)
    try:
        text, _ = process.communicate(timeout=launch.patience(400))
    finally:
        process.terminate()  # and it ends what it has started
    assert process.returncode == code, text
    return json.loads((folder / "out" / "summary.json").read_text())["sections"], text


def program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def statuses(sections):
    return {name: section["status"] for name, section in sections.items()}


@pytest.mark.slow
def test_sections(tmp_path):
    """One that fails keeps no other from being done; what is measured is told, and all is in three files."""
    (tmp_path / "openmpi.tar").write_text("not one")
    done, text = run_all(
        tmp_path,
        "--openmpi",
        tmp_path / "openmpi.tar",
        *"--sections smoke mpi openmpi probe ranks-decode bench-kernel".split(),
        code=1,
    )
    assert statuses(done) == {
        "install": "passed",
        "device": "skipped",
        "smoke": "passed",
        "mpi": "passed",
        "ranks-decode": "passed",
        "openmpi": "failed",
        "probe": "skipped",
        "bench-kernel": "passed",
    }
    assert "ReadError" in done["openmpi"]["why"] and "section openmpi" in done["probe"]["why"]
    assert list(done["smoke"]["record"]["steps"]) == [
        "back end",
        "forward",
        "backward",
        "a head alone",
        "speed",
        "decode",
    ]
    assert " passed" in done["ranks-decode"]["record"]["result"] and "add up to 6" in done["mpi"]["record"]["result"]
    assert [table["what"] for table in done["bench-kernel"]["record"]["tables"]] == [
        "forward",
        "backward",
        "decode",
        "decode",
        "carry",
        "launch",
    ]
    assert "forward bfloat16 d128, 2 heads over 2, 40 causal: TFLOP/s: mpiattn" in text
    assert "no PyTorch here" in done["bench-kernel"]["record"]["result"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == HANDED_OVER
    with tarfile.open(tmp_path / "out" / "results.tar.gz") as packed:
        names = packed.getnames()
        assert {f"results/{name}.log" for name in done} <= set(names) and "results/summary.txt" in names
        assert b"test_" in packed.extractfile("results/ranks-decode.log").read()


@pytest.mark.slow
@pytest.mark.skipif(emulated.compiler() is None, reason="the emulation needs a C++ compiler")
def test_other_tiles_than_the_tables(tmp_path):
    done, _ = run_all(tmp_path, "--backend", "emulated", "--sections", "tiles", code=0)
    tiles = done["tiles"]["record"]["tiles"]
    assert len(tiles) == 8 and all(len(each) > 1 for each in tiles.values())
    assert all(next(iter(each.values()))["of_table"] == 1 for each in tiles.values())


def test_figures(monkeypatch):
    """What the tables of decoding, carry-in and a pass come to in a line."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    figure = importlib.import_module("gpu_results").figure
    problem = {"heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "causal": True}

    def rows(rate, *speeds):
        return [{"name": name, rate: speed, "median": 1 / speed} for name, speed in speeds]

    assert figure(
        {
            "what": "backward",
            "seqlen": 8192,
            "missing": {"torch cuDNN": "it is not there"},
            "results": rows("flops_per_second", ("mpiattn", 150e12), ("torch flash, deterministic", 300e12)),
        },
        problem,
    ) == (
        "backward bfloat16 d128, 32 heads over 8, 8192 causal: TFLOP/s: mpiattn 150; torch flash, deterministic 300 "
        "(mpiattn is 0.50 of it); torch cuDNN is missing (it is not there)"
    )
    assert figure(
        {
            "what": "decode",
            "keys": 65536,
            "heads": 64,
            "kv_heads": 8,
            "results": rows("bytes_per_second", ("mpiattn", 2e12), ("a copy", 2.5e12)),
        },
        problem,
    ) == ("decode bfloat16 d128, 65536 keys, 64 heads over 8: mpiattn 2000 GB/s, 80% of a copy; a copy 2500 GB/s")
    assert figure({"what": "carry", "seqlen": 8192, "keys": 4096, "results": [{}], "overhead": 0.125}, problem) == (
        "carry bfloat16 d128, 32 heads over 8, 8192 queries by 4096 keys: adding to a partial costs +12.5%"
    )


def test_commands_in_turn(tmp_path):
    """The second tells what the first has found too, whatever became of its OUT; and nothing if the time is spent."""
    run_all(tmp_path, "--sections", "mpi")
    for path in (tmp_path / "out").iterdir():
        path.unlink()
    done, _ = run_all(tmp_path, "--limit", "0.4", "--sections", "bench-kernel", code=1)
    assert statuses(done) == {"mpi": "passed", "install": "passed", "device": "skipped", "bench-kernel": "failed"}
    assert "no time is left" in done["bench-kernel"]["why"]


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is here, and perhaps a GPU")
def test_without_a_gpu(tmp_path):
    """It is told once, and what needs none is done."""
    done, _ = run_all(tmp_path, "--backend", "cuda", "--sections", "smoke", "mpi", "blocks", code=1)
    assert statuses(done) == {
        "install": "passed",
        "device": "failed",
        "smoke": "skipped",
        "mpi": "passed",
        "blocks": "skipped",
    }
    assert done["smoke"]["why"] == done["device"]["why"] and "no GPU that CuPy can use" in done["smoke"]["why"]


def wheel(folder, name, files=(), tag="py3-none-any"):
    """A wheel of nothing but data."""
    information = f"{name}-1.0.dist-info"
    texts = {
        f"{name}.py": "",
        **{f"{name}-1.0.data/data/{path}": text for path, text in dict(files).items()},
        f"{information}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{information}/WHEEL": f"Wheel-Version: 1.0\nGenerator: none\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    texts[f"{information}/RECORD"] = "".join(f"{path},,\n" for path in texts)
    with zipfile.ZipFile(folder / f"{name}-1.0-{tag}.whl", "w") as packed:
        for path, text in texts.items():
            packed.writestr(path, text)


@pytest.mark.slow
def test_wheels(tmp_path):
    """Those of what is here are left alone, but MPI's, whose library is the one with a number."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel(wheels, "numpy")
    wheel(wheels, "mpich", {"lib/libmpi.so": "INPUT(libmpi.so.12)", "lib/libmpi.so.12": "not one"})
    wheel(wheels, "made_up_other", tag="cp27-none-any")
    done, _ = run_all(tmp_path, "--wheels", wheels, "--sections", "mpi", code=1)
    assert done["install"]["status"] == "failed" and "not installed: made-up-other" in done["install"]["why"]
    assert done["install"]["record"]["installed"] == ["mpich"]
    assert done["install"]["record"]["own"] == ["numpy"]
    assert "libmpi.so.12" in done["mpi"]["why"], "mpi4py was given another library"
    (wheels / "made_up_other-1.0-cp27-none-any.whl").unlink()
    for name in ("cupy_cuda13x", "cupy_cuda12x"):
        wheel(wheels, name)
    done, _ = run_all(tmp_path, "--wheels", wheels, "--sections", "device", code=1)
    assert "cupy-cuda12x and cupy-cuda13x" in done["install"]["why"]


def test_sanitizer(tmp_path):
    """How it is called, and that its silence is not taken for praise."""
    program(
        tmp_path / "bin" / "compute-sanitizer",
        f"""
        echo "$MPIATTN_CUPY $*" >>{tmp_path}/called
        echo "===== 3 passed in 1.00s ====="
        test $2 = racecheck || echo "========= ERROR SUMMARY: 0 errors"
        """,
    )
    done, _ = run_all(tmp_path, "--sections", "memcheck-pages", "racecheck-pages", path=tmp_path / "bin", code=1)
    called = (tmp_path / "called").read_text().splitlines()
    assert called[0].startswith("unpooled --tool memcheck --report-api-errors no --error-exitcode 9")
    assert done["memcheck-pages"]["record"]["result"] == "3 passed in 1.00s; ERROR SUMMARY: 0 errors"
    assert done["racecheck-pages"]["status"] == "failed" and "no summary" in done["racecheck-pages"]["why"]


MPS = """
read word
echo "$CUDA_MPS_PIPE_DIRECTORY $* $word" >>{0}/called
test "$word" != get_server_list || echo {1}
"""


@pytest.mark.parametrize("says", ["4711", "", "Cannot find MPS control daemon process"])
def test_mps(tmp_path, says):
    """Ranks use it if a program has; else it is stopped, and they do without.  It ends with the command."""
    server = says.isdecimal()
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "cupy.py").write_text("import numpy\narange = numpy.arange\n")
    program(tmp_path / "bin" / "nvidia-cuda-mps-control", MPS.format(tmp_path, says))
    program(
        tmp_path / "work" / "site" / "bin" / "mpiexec",
        f"echo rank $CUDA_MPS_PIPE_DIRECTORY >>{tmp_path}/called; echo === 1 passed ===",
    )
    done, _ = run_all(tmp_path, "--sections", "mps", "ranks-decode", path=tmp_path / "bin", code=int(not server))
    folder = tmp_path / "work" / "mps"
    expected = [f"{folder}  quit", f"{folder} -d ", f"{folder}  get_server_list"]
    expected += [f"rank {folder}", f"{folder}  quit"] if server else [f"{folder}  quit", "rank", f"{folder}  quit"]
    assert (tmp_path / "called").read_text().splitlines() == expected
    if server:
        assert done["mps"]["record"]["result"].startswith("server 4711")
    else:
        assert done["mps"]["status"] == "failed" and "not through MPS" in done["mps"]["why"]
    assert done["ranks-decode"]["status"] == "passed"


def test_a_run_that_is_ended(tmp_path):
    """It ends what it has started, and what was known is there, with the log of what was running."""
    program(tmp_path / "bin" / "compute-sanitizer", f"echo begun; echo $$ >{tmp_path}/pid; exec sleep 300")
    process = start(tmp_path, "--sections", "mpi", "memcheck-pages", path=tmp_path / "bin")
    try:
        deadline = time.monotonic() + 120
        while not ((tmp_path / "pid").is_file() and (tmp_path / "pid").read_text().endswith("\n")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    finally:
        process.kill()
        process.communicate()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    out = tmp_path / "out"
    assert statuses(json.loads((out / "summary.json").read_text())["sections"])["mpi"] == "passed"
    assert "begun" in (out / "running.log").read_text()


def test_list():
    """Every group fits into one command by its estimates."""
    text = subprocess.run([sys.executable, SCRIPT, "--list"], text=True, capture_output=True, check=True).stdout
    groups = [line.split() for line in text.splitlines() if not line.startswith(" ")]
    assert [words[0] for words in groups] == ["smoke:", "blocks:", "bench:", "sanitizer:", "ranks:"]
    assert all(int(words[1]) < int(words[3]) < 540 for words in groups)
