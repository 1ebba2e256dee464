"""Installing without a C compiler: the CPU kernels are left out, and all else is there."""

import os
import subprocess
import sys

import launch
import pytest

from mpiattn.system import host

pytestmark = pytest.mark.workshop


def test_without_a_compiler(tmp_path):
    if int((host.version("setuptools") or "0").split(".")[0]) < 77:
        pytest.skip("takes setuptools from 77")
    outcome = subprocess.run(
        [sys.executable, "setup.py", "build", "--build-base", tmp_path / "base", "--build-lib", tmp_path / "lib"],
        cwd=launch.ROOT,
        env={**os.environ, "CC": "/bin/false"},
        capture_output=True,
        text=True,
        timeout=120 * launch.time_factor(),
    )
    assert outcome.returncode == 0, outcome.stderr
    assert 'building extension "mpiattn.backends.cpu._kernels" failed' in outcome.stderr
    built = tmp_path / "lib" / "mpiattn"
    assert (built / "backends" / "cpu" / "backend.py").is_file() and not list(built.rglob("*.so"))
    code = "import os; from mpiattn import backends; print(backends.find('cpu').missing()); print(backends.get().name)"
    outcome = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "lib")},
        capture_output=True,
        text=True,
        timeout=60 * launch.time_factor(),
    )
    assert "install mpiattn where there is a C compiler" in outcome.stdout and outcome.stdout.endswith("\nnumpy\n")
