"""`mpiattn slurm`: the scripts, listed and copied; they are installed with the package."""

import pytest

from mpiattn.cli import main
from mpiattn.system.sources import slurm_dir

SHELL = {"env.sh", "launch.sh", "launchers.sh", "cores.sh", "check.sbatch", "run.sbatch", "bench.sbatch"}
SCRIPTS = {"README.md", "scaling.py", "reframe_check.py", *SHELL}


def test_list(capsys):
    assert main(["slurm"]) == 0
    listed, what_next = capsys.readouterr().out.split("\n\n")
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in listed.splitlines()}
    assert set(lines) >= SCRIPTS
    assert lines["env.sh"] == "The only file to change on a new cluster"
    assert lines["bench.sbatch"] == "How attention of an HDF5 file scales over nodes"
    assert lines["launchers.sh"] == "What starts the ranks"
    assert "change slurm/env.sh" in what_next


def test_copy(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["slurm", "--copy", "slurm"]) == 0
    assert "slurm/env.sh; the first job: sbatch slurm/check.sbatch" in capsys.readouterr().out
    copied = {path.name: path.read_bytes() for path in (tmp_path / "slurm").iterdir()}
    assert set(copied) >= SCRIPTS
    assert all((slurm_dir() / name).read_bytes() == content for name, content in copied.items())


def test_copy_into_a_folder_of_another_name(tmp_path, capsys):
    assert main(["slurm", "--copy", str(tmp_path / "a/jobs")]) == 0
    assert f"MPIATTN_SLURM={tmp_path}/a/jobs sbatch {tmp_path}/a/jobs/check.sbatch" in capsys.readouterr().out


def test_nothing_is_overwritten(tmp_path, capsys):
    (tmp_path / "env.sh").write_text("mine")
    assert main(["slurm", "--copy", str(tmp_path)]) == 1
    assert "it already has env.sh, nothing is written" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["env.sh"]
    assert (tmp_path / "env.sh").read_text() == "mine"


@pytest.mark.parametrize("folder", ["", "/proc/none"])
def test_no_folder(capsys, folder):
    assert main(["slurm", "--copy", folder]) == 1
    assert f"--copy is {folder!r}; it cannot be made: " in capsys.readouterr().err
