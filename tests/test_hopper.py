"""tests/gpu/gpu_hopper.py where there is no Hopper GPU: its kernels' machine code, and what it makes of failures."""

import importlib
import json
import os
import subprocess
import sys

import launch
import pytest
import sass

from mpiattn.backends.cuda import kernel_source, nvrtc

pytestmark = pytest.mark.workshop
SCRIPT = launch.TESTS / "gpu" / "gpu_hopper.py"
INSTRUCTIONS = {
    1: {"HGMMA", "tnspB"},
    2: {"UTMALDG", "HGMMA", "SYNCS"},
    3: {"USETMAXREG", "UBLKCP", "SYNCS"},
    4: {"HGMMA", "tnspB"},
}  # by step


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    return importlib.import_module("gpu_hopper")


def built(script, step, folder, monkeypatch, change=lambda text: text):
    """The machine code of a step, and the compiler's log."""
    monkeypatch.setattr(kernel_source, "expanded", lambda file: change(script.source()))
    kernel = kernel_source.Kernel("hopper", "hopper.cu", (), 0, 0)
    paths = folder / "hopper.cubin", folder / "hopper.log"
    nvrtc._compile(kernel, "sm_90a", script.options(step), *paths)
    return paths[0].read_bytes(), paths[1].read_text()


@pytest.mark.draw(2)
@pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))
@pytest.mark.parametrize("step", INSTRUCTIONS)
def test_kernels_compile(script, step, tmp_path, monkeypatch):
    """To the instructions that they are about, and the compiler neither spills nor ignores anything."""
    cubin, log = built(script, step, tmp_path, monkeypatch)
    assert not script.complaints(log), log
    spilled = [line for line in log.splitlines() if "bytes spill" in line]
    assert spilled and all("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in line for line in spilled)
    if sass.nvdisasm() is None:
        pytest.skip("no nvdisasm")
    text = "\n".join(line for lines in sass.disassembled(cubin).values() for line in lines)
    assert all(name in text for name in INSTRUCTIONS[step])
    assert (step == 3) == ("R200" in text), "sums of consumers are in registers that they did not have at the start"


@pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))
def test_what_the_compiler_ignores_is_seen(script, tmp_path, monkeypatch):
    """Without a known number of threads it ignores setmaxnreg, and says so as if it did not matter."""
    _, log = built(script, 3, tmp_path, monkeypatch, lambda text: text.replace("__launch_bounds__(384, 1)", ""))
    assert any("setmaxnreg" in line for line in script.complaints(log)), log


@pytest.mark.parametrize(
    "cupy, error",
    [("raise ImportError('no CuPy')", "no CuPy"), ("import time\ntime.sleep(60)", "no end in 1 s")],
    ids=["missing", "hangs"],
)
def test_every_step_is_tried(tmp_path, cupy, error):
    (tmp_path / "cupy.py").write_text(cupy)
    environment = launch.environment()
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(tmp_path), environment.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, SCRIPT, tmp_path / "result.json", "--limit", "1" if "end" in error else "30"],
        env=environment,
        text=True,
        capture_output=True,
    )
    result = json.loads((tmp_path / "result.json").read_text())
    assert done.returncode == 1 and len(done.stdout.splitlines()) == len(result) == 5, done.stdout + done.stderr
    assert all(not record["passed"] and error in record["error"] for record in result.values())
