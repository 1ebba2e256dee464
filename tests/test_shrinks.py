"""Some of the trials of shrinks.py, which makes up others at random, and the program of the docs that loses ranks."""

import sys

import h5py
import launch
import numpy as np
import pytest
import shrinks

TRIALS = (
    "4/first/1/0+first/2/1",
    "3/planning/2/0",
    "4/steps/0/5",
    "5/post/3/9",
    "3/agree/1/6",
    "4/decode/2/0",
    "4/between/3/0",
    "4/close/0/1",
    "5/wait/4/30+steps/1/9",
)
PROGRAM = launch.DOCS / "shrink.py"
VICTIMS = "engine.executor.Executor.run/0/1", "plan.mesh_attention.MeshAttention.gather/2/2"


@pytest.mark.draw(2)
@pytest.mark.parametrize("trial", TRIALS)
def test_the_others_go_on(tmp_path, trial):
    shrinks.require_ulfm()
    wrong, seconds, wrote = shrinks.run(shrinks.Trial.parse(trial), tmp_path)
    assert not wrong and seconds is not None, (wrong, wrote)


@pytest.mark.skipif(not PROGRAM.is_file(), reason="takes the docs of a checkout")
def test_the_program_of_the_docs(tmp_path):
    """Whoever is lost, the results are those of dense attention."""
    shrinks.require_ulfm()
    shape, rng, folder = (1, 31, 2, 8), np.random.default_rng(1), tmp_path / "out"
    problems = {f"layer{i}": rng.standard_normal((3, *shape), np.float32) for i in range(3)}
    with h5py.File(tmp_path / "in.h5", "w") as file:
        for name, arrays in problems.items():
            for key, array in zip("qkv", arrays):
                file[f"{name}/{key}"] = array
    folder.mkdir()
    (tmp_path / "rank.py").write_text(shrinks.OTHER)
    started = [sys.executable, tmp_path / "rank.py", tmp_path / "mark", "+".join(VICTIMS), PROGRAM]
    done = launch.mpirun(4, [*shrinks.OPTIONS, *started, tmp_path / "in.h5", folder])
    assert {path.name for path in tmp_path.glob("mark.*")} == {"mark.0", "mark.2"}
    assert done.stdout == "done on 2 of 4 ranks\n"
    assert sorted(path.name for path in folder.iterdir()) == [f"{name}.npy" for name in problems]
    for name, (q, k, v) in problems.items():
        scores = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(8) + np.triu(np.full((31, 31), -np.inf), 1)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        dense = np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v)
        assert np.allclose(np.load(folder / f"{name}.npy"), dense, atol=1e-5)
