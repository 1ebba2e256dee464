"""tests/gpu/run_all.py where there is no GPU: a section that fails or cannot be done keeps no other from being done."""

import json
import os
import subprocess
import sys

import launch


def test_sections(tmp_path):
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda.h").touch()
    (tmp_path / "openmpi.tar").write_text("not one")
    out = tmp_path / "out"
    done = subprocess.run([sys.executable, launch.TESTS / "gpu" / "run_all.py", out, "--backend", "numpy", "--quick",
                           "--openmpi", tmp_path / "openmpi.tar", "--sections", "venv", "openmpi", "tests", "device",
                           "bench-d64-causal"], env={**launch.environment(), "CUDA_HOME": str(tmp_path)}, text=True,
                          cwd=tmp_path, capture_output=True, timeout=120)
    assert done.returncode == 1, done.stdout + done.stderr
    data = json.loads((out / "summary.json").read_text())
    found = data["sections"]
    assert {name: section["status"] for name, section in found.items()} == {
        "venv": "skipped", "openmpi": "failed", "tests": "passed", "device": "skipped", "bench-d64-causal": "passed"}
    assert "exit code" in found["openmpi"]["why"] and "tar" in (out / "openmpi.log").read_text()
    assert " passed" in found["tests"]["found"]["result"] and "numpy" in data["versions"]
    assert [table["what"] for table in found["bench-d64-causal"]["found"]["sections"]] == [
        "forward", "backward", "decode", "carry", "launch"]
    assert "carry-in" in done.stdout and not [path for path in os.listdir(out) if path.endswith(".partial")]


def test_a_section_has_its_time(tmp_path):
    """When all time is spent, what is left is told to be failed."""
    done = subprocess.run([sys.executable, launch.TESTS / "gpu" / "run_all.py", tmp_path, "--backend", "numpy",
                           "--quick", "--limit", "0.4", "--sections", "bench-d64", "tests"], env=launch.environment(),
                          text=True, capture_output=True, timeout=60)
    found = json.loads((tmp_path / "summary.json").read_text())["sections"]
    assert done.returncode == 1 and "no end after 0 s" in found["bench-d64"]["why"]
    assert "no time is left" in found["tests"]["why"]
