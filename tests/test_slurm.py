"""The scripts of slurm/ as batch jobs of a real Slurm, four nodes on this machine."""

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import h5py
import launch
import numpy as np
import pytest
import slurm_cluster
import slurm_jobs
from files import assert_right, datasets, write_input, write_problems

pytestmark = pytest.mark.workshop

SCRIPTS = launch.SLURM
# In env.sh: as if there were no mpiexec, so srun has to do.  By default it speaks PMIx, which can't start ranks on two
# nodes of one host: the next type is tried.
SRUN = "mpiexec() { return 127; }\nexport SLURM_MPI_TYPE=pmix\n"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    launch.require_launch()
    if slurm_cluster.missing():
        pytest.skip(f"no Slurm to start here: {', '.join(slurm_cluster.missing())} not found")
    try:
        with slurm_cluster.Cluster(tmp_path_factory.mktemp("slurm")) as cluster:
            yield cluster
    except slurm_cluster.NotUpError as error:
        pytest.skip(f"Slurm can't be started here: {error}")
    assert not list(slurm_cluster.processes(cluster.conf))


@pytest.fixture
def submit(cluster, tmp_path):
    """submit(script, *arguments, options, site, **variables): a job from a folder with slurm/, .venv and in.h5.

    site: what is added to env.sh.  variables: set where sbatch is called.
    """
    env = slurm_jobs.prepare(tmp_path)
    write_input(tmp_path / "in.h5")

    def submit(script, *arguments, options=(), site="", meanwhile=None, **variables):
        with open(tmp_path / "slurm/env.sh", "a") as file:
            file.write(site)
        how = {"options": options, "cwd": tmp_path, "env": env | variables, "meanwhile": meanwhile}
        return cluster.submit(script, *arguments, **how)

    return submit


def needs_pmi2():
    if launch.vendor() != "mpich":
        pytest.skip("srun --mpi=pmi2 starts ranks of MPICH")


def launchers(test):
    return pytest.mark.parametrize(
        "site, launcher", [("", "mpiexec"), (SRUN, "srun --mpi=pmi2")], ids=["mpiexec", "srun"]
    )(test)


@pytest.mark.draw(1)
@launchers
@pytest.mark.parametrize("nodes, per_node", [(2, 2), (3, 1)])
def test_run(submit, tmp_path, site, launcher, nodes, per_node):
    if site:
        needs_pmi2()
    job = submit(
        "slurm/run.sbatch",
        "in.h5",
        "out.h5",
        "--causal",
        "--verify",
        site=site,
        options=[f"--nodes={nodes}", f"--ntasks-per-node={per_node}"],
    )
    assert job.state == "COMPLETED", job.log
    assert f"{nodes * per_node} ranks on {nodes} nodes (n[1-{nodes}]), started by {launcher}" in job.log
    assert re.search(r" \(tried: two ranks on \S+ \S+\)\n", job.log)
    assert job.log.count("mpiattn: not by srun: code ") == bool(site), job.log
    assert "passed" in job.log
    assert assert_right(tmp_path / "in.h5", tmp_path / "out.h5", causal=True)["ranks"] == nodes * per_node


@launchers
def test_ranks_threads_and_devices(submit, tmp_path, site, launcher):
    """Ranks fill the nodes that were asked for, know their cores, of two hardware threads each, see all GPUs of their
    node; a rank that is killed ends the job.  All that without the environment of the shell that called sbatch."""
    if site:
        needs_pmi2()
    (tmp_path / "probe.sbatch").write_text(
        "#!/bin/bash\nsource slurm/launch.sh\n"
        "says='echo rank on $SLURMD_NODENAME, threads $OMP_NUM_THREADS, GPUs $CUDA_VISIBLE_DEVICES'\n"
        'launch 2 4 bash -c "$says"\necho one node\nlaunch 1 2 bash -c "$says"\n'
        "launch 2 4 python3 fails.py\n"
    )
    (tmp_path / "fails.py").write_text(
        "import os, time\nfrom mpi4py import MPI\n"
        "if MPI.COMM_WORLD.rank == 1:\n    os.kill(os.getpid(), 9)\ntime.sleep(100)\n"
    )
    job = submit(
        "probe.sbatch",
        site=site,
        options=["--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=4", "--gpus-per-node=2", "--export=NONE"],
    )
    assert job.state == "FAILED", job.log
    all_, of_one_node = job.log.split("one node\n")
    said = "rank on {}, threads 2, GPUs 0,1\n"
    assert [all_.count(said.format(node)) for node in ("n1", "n2")] == [2, 2], job.log
    assert [of_one_node.count(said.format(node)) for node in ("n1", "n2")] == [2, 0], job.log


@pytest.mark.draw(1, slow=1)
@pytest.mark.parametrize(
    "variables, counts, options",
    [
        ({}, [1, 2, 3], []),
        ({"MPIATTN_NODES": "3 1", "MPIATTN_LAUNCH": "srun --mpi=pmi2"}, [1, 3], ["--backward"]),
        pytest.param({}, [1, 2], ["--window", "20,0"], marks=pytest.mark.slow),
    ],
    ids=["mpiexec", "srun", "two nodes"],
)
def test_bench(submit, tmp_path, variables, counts, options):
    if variables:
        needs_pmi2()
    write_input(tmp_path / "in.h5", backward=True)
    job = submit(
        "slurm/bench.sbatch",
        "in.h5",
        "--causal",
        *options,
        options=[f"--nodes={max(counts)}", "--ntasks-per-node=2"],
        **variables,
    )
    assert job.state == "COMPLETED", job.log
    assert f"started by {variables.get('MPIATTN_LAUNCH', 'mpiexec')}" in job.log
    _, *tables = re.split(r"\nnodes +ranks +tile +forward +speed-up +waiting +sent per rank", job.log)
    assert len(tables) == len(counts), job.log  # after each number of nodes
    assert [row.split()[:2] for row in tables[-1].splitlines()[2:-1]] == [[str(n), str(2 * n)] for n in counts]
    (result,) = tmp_path.glob("mpiattn-scaling-*.h5")
    assert result.name in tables[-1].splitlines()[-1]
    with h5py.File(result) as file:
        assert list(file["nodes"]) == counts
        assert list(file["ranks"]) == [2 * n for n in counts]
        assert set(file) - {"backward"} == {"nodes", "ranks", "tile", "json", "forward"}
        assert ("backward" in file) == ("--backward" in options)
        for name in {"forward", "backward"} & set(file):
            seconds = file[name]["seconds"][:]
            assert np.allclose(file[name]["speedup"][:], seconds[0] / seconds)
            assert (file[name]["wait_seconds"][:] < seconds).all()
            assert (file[name]["sent_bytes"][:] > 0).all()
        assert '"per_rank"' in file["json"].asstr()[-1]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir() and path.name.startswith("mpiattn-")] == []


@pytest.mark.draw(1)
@pytest.mark.parametrize("nodes, per_node", [(2, 2), (3, 1)])
def test_check(submit, nodes, per_node):
    job = submit("slurm/check.sbatch", options=[f"--nodes={nodes}", f"--ntasks-per-node={per_node}"])
    assert job.state == "COMPLETED", job.log
    assert f"{nodes * per_node} ranks on {nodes} nodes" in job.log
    assert "0 FAIL" in job.log


@pytest.mark.draw(3)
@pytest.mark.parametrize(
    "script, arguments, site, variables, message",
    [
        ("run", ["no.h5", "out.h5"], "", {}, "no file 'no.h5' that"),
        ("run", ["in.h5"], "", {}, "usage: sbatch slurm/run.sbatch IN.h5 OUT.h5"),
        ("run", ["in.h5", "--causal"], "", {}, "usage: "),
        ("bench", [], "", {}, "usage: sbatch slurm/bench.sbatch IN.h5"),
        ("bench", ["no.h5"], "", {}, "no file 'no.h5' that"),
        ("bench", ["in.h5"], "", {"MPIATTN_NODES": "1 9"}, "MPIATTN_NODES is '1 9'; it must be numbers from 1 to"),
        ("bench", ["in.h5"], "", {"MPIATTN_SCRATCH": "/none"}, "MPIATTN_SCRATCH is '/none'; it must be a folder"),
        ("check", [], "", {"MPIATTN_SLURM": "elsewhere"}, "submit beside slurm/ or export MPIATTN_SLURM"),
        ("check", [], "source none/activate || return\n", {}, "slurm/env.sh failed, see above"),
        ("check", [], "python3() { return 1; }\n", {}, "has no mpiattn: activate its environment in slurm/env.sh"),
        ("run", ["in.h5", "out-%a.h5"], "", {}, "'out-%a.h5' has %a, the task of an array; this job is none"),
        ("check", [], 'python3() { [ "$1" = -c ]; }\n', {}, "mpi4py can't load its MPI, see above"),
    ],
)
def test_clear_errors(submit, tmp_path, script, arguments, site, variables, message):
    """Said before any rank is started, and the job has failed."""
    before = set(tmp_path.iterdir())
    job = submit(f"slurm/{script}.sbatch", *arguments, site=site, options=["--nodes=2"], **variables)
    assert (job.state, job.exit_code) == ("FAILED", 2), job.log
    assert message in job.log
    assert {path.suffix for path in set(tmp_path.iterdir()) - before} == {".log"}


@pytest.mark.parametrize(
    "on_node_2, said",
    [
        pytest.param("sleep 100", "FAILS: no answer within 15 s (MPIATTN_LOOK_SECONDS)", marks=pytest.mark.slow),
        ('exec {python} -I -S "$@"', "FAILS: {python}: ModuleNotFoundError: No module named"),
        ("exit 127", "FAILS: no python3"),
        ("kill -SEGV $$", "FAILS: python3 ended without a word"),
        ('PYTHONPATH=$(dirname "$0")/other:$PYTHONPATH exec {python} "$@"', "mpiattn 0.0.other, Python "),
    ],
    ids=["silence", "no mpiattn", "no python3", "crash", "another version"],
)
def test_a_node_that_lacks_something(submit, tmp_path, on_node_2, said):
    """It is named before any rank is started: ranks of the other nodes would wait for its own."""
    (tmp_path / "bin/other/mpiattn").mkdir(parents=True)
    (tmp_path / "bin/other/mpiattn/__init__.py").write_text('__version__ = "0.0.other"\n')
    python = tmp_path / "bin/python3"
    python.write_text(
        f'#!/bin/bash\n[ "$SLURMD_NODENAME" != n2 ] || {{ {on_node_2.format(python=sys.executable)}; }}\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    job = submit(
        "slurm/run.sbatch",
        "in.h5",
        "out.h5",
        site="PATH=$PWD/bin:$PATH\n",
        options=["--nodes=3"],
        MPIATTN_LOOK_SECONDS="15" if "sleep" in on_node_2 else "60",
    )
    assert (job.state, job.exit_code) == ("FAILED", 2), job.log
    (named,) = [line for line in job.log.splitlines() if line.startswith(" n2: ")]
    assert said.format(python=sys.executable) in named
    (others,) = [line for line in job.log.splitlines() if line.startswith(" n1 n3: mpiattn ")]
    assert "MPI" in others and not (tmp_path / "out.h5").exists()


def test_srun_without_an_interface_to_mpi(submit, tmp_path):
    """It starts ranks that do not know of each other; they do nothing, and say so once."""
    job = submit(
        "slurm/run.sbatch",
        "in.h5",
        "out.h5",
        options=["--nodes=2", "--ntasks-per-node=2"],
        MPIATTN_LAUNCH="srun --mpi=none",
    )
    assert job.state == "FAILED" and not (tmp_path / "out.h5").exists(), job.log
    assert job.log.count("srun started 4 ranks, each of which is alone in ") == 1
    assert job.log.count("Nothing was done. ") == 1


def test_a_plan_warns_where_a_step_has_ranks_that_are_alone(submit, tmp_path):
    """Not a serial program of a batch script or of a step of one task, in an allocation of more."""
    (tmp_path / "serial.sbatch").write_text(
        "#!/bin/bash\nsource .venv/bin/activate\n"
        "for start in '' 'srun --mpi=none -n 1' 'srun --mpi=none -n 4'; do\n"
        '  echo "started by $start:" >&2\n  $start python3 serial.py\ndone\n'
    )
    (tmp_path / "serial.py").write_text(
        "import mpiattn\nfrom mpi4py import MPI\n"
        "mpiattn.MeshAttention(MPI.COMM_WORLD, seqlen=8, heads=1, head_dim=8).close()\nprint('made', flush=True)\n"
    )
    job = submit("serial.sbatch", options=["--nodes=2", "--ntasks-per-node=2"])
    alone = [part.count("RuntimeWarning") for part in job.log.split("started by ")]
    assert alone == [0, 0, 0, 1] and job.log.count("made") == 6, job.log


def test_nothing_that_starts_ranks(submit, tmp_path):
    """No mpiexec of this MPI, and an srun without an interface to it: tried, and said before any rank is started."""
    site = "mpiexec() { return 127; }\nsrun() { echo none; }\n"
    job = submit("slurm/run.sbatch", "in.h5", "out.h5", site=site, options=["--nodes=2"])
    assert (job.state, job.exit_code) == ("FAILED", 2) and not (tmp_path / "out.h5").exists(), job.log
    _, said = job.log.split("mpiattn: nothing starts ranks of ")
    assert " that see each other:\n    srun: it starts two programs of one rank each\nmpiexec on PATH: " in said
    assert "types of srun: none\n" in said and "or set MPIATTN_LAUNCH, in slurm/env.sh" in said


@pytest.mark.draw(1)
@pytest.mark.parametrize("script", ["run", "bench"])
def test_array(submit, tmp_path, script):
    """Each of four tasks has a file of its own to read and to write, by its number."""
    for task in range(4):
        write_input(tmp_path / f"in-{task}.h5", seed=task)
    files = ["in-%a.h5", "out-%A-%3a.h5"] if script == "run" else ["in-%a.h5"]
    options = ["--array=0-3", "--nodes=1", "--ntasks-per-node=2"]
    job = submit(f"slurm/{script}.sbatch", *files, "--causal", options=options)
    assert job.state == "COMPLETED", job.log
    (number,) = set(re.findall(r"mpiattn: task \d of array (\d+), 2 ranks on 1 node ", job.log))
    if script == "bench":
        results = list(tmp_path.glob("mpiattn-scaling-*.h5"))
        inputs = [re.search(r"in-\d.h5", h5py.File(path)["json"].asstr()[0])[0] for path in results]
        assert sorted(inputs) == [f"in-{task}.h5" for task in range(4)]
        return
    for task in range(4):
        assert_right(tmp_path / f"in-{task}.h5", tmp_path / f"out-{number}-{task:03d}.h5", causal=True)


def test_an_array_that_would_write_one_file(submit, tmp_path):
    """IN has the number of the task, and OUT has none of its own."""
    shutil.copy(tmp_path / "in.h5", tmp_path / "in-3.h5")
    options = ["--array=3", "--nodes=1", "--ntasks-per-node=1"]
    for out in ("out.h5", "out-%A.h5", "out-%%a.h5"):
        job = submit("slurm/run.sbatch", "in-%a.h5", out, options=options)
        assert (
            job.state == "FAILED"
            and f"IN is 'in-%a.h5', another file for each task of the array, and OUT is '{out}'" in job.log
        )
    for source, out in (("in-%a.h5", "out-%j.h5"), ("in-%1a.h5", "out-%2a.h5"), ("in.h5", "one.h5")):
        job = submit("slurm/run.sbatch", source, out, options=options)
        assert job.state == "COMPLETED", job.log
    assert (tmp_path / "out-03.h5").is_file() and (tmp_path / "one.h5").is_file()


def test_a_heterogeneous_job_of_which_one_component_runs(submit, tmp_path):
    """The variable is what Slurm gives such a job; srun, which would look for the components, does not see it here."""
    said = "mpiattn: WARNING: this is a heterogeneous job of 2 components, of which the first alone runs ranks"
    options = ["--nodes=1", "--ntasks-per-node=1"]
    job = submit("slurm/run.sbatch", "in.h5", "out.h5", options=options)
    assert job.state == "COMPLETED" and said not in job.log, job.log
    job = submit("slurm/run.sbatch", "in.h5", "out.h5", options=options, site="SLURM_HET_SIZE=2\n")
    assert job.state == "COMPLETED" and job.log.count(said) == 1, job.log


@pytest.mark.slow
@pytest.mark.parametrize("cancelled", [False, True])
def test_a_job_without_resume_whose_time_is_up(submit, cluster, tmp_path, cancelled):
    """Its last line says so, and none says so of a job that its user has ended."""
    write_input(tmp_path / "in.h5", seqlen=4096, heads=2, kv_heads=2, head_dim=64)
    asked = []

    def cancel(number, state):
        if cancelled and not asked and list(tmp_path.glob(".out.h5.*.partial")):
            asked.append(number)
            cluster.client("scancel", number)

    words = "slurm/run.sbatch", "in.h5", "out.h5", "--backend", "paced:0.02"
    job = submit(*words, options=["--nodes=2", "--ntasks-per-node=1", "--time=1"], meanwhile=cancel)
    assert job.state == ("CANCELLED" if cancelled else "TIMEOUT") and not (tmp_path / "out.h5").exists(), job.log
    said = "mpiattn: the job's time was up, and 'out.h5' was not written; give more with --time"
    assert (said in job.log) == (not cancelled), job.log


class Signals:
    """Slurm's signals for a job: the first once three problems are finished; a requeued job starts soon."""

    def __init__(self, cluster, folder, *scancel):
        self.cluster, self.left, self.scancel, self.states = cluster, folder, scancel, []
        self.since = None

    def __call__(self, number, state):
        self.states += [state] * (state not in self.states[-1:])
        if self.scancel and len(list(self.left.glob("*.json"))) > 2:
            self.cluster.client("scancel", *self.scancel, number)
            self.scancel = ()
        # It would wait for two minutes.  Slurm takes the late end of its first script for that of the second, if that
        # is started at once.
        if state == "PENDING" and "RUNNING" in self.states:
            self.since = self.since or time.monotonic()
        if self.since and time.monotonic() > self.since + 4:
            self.cluster.client("scontrol", "update", f"JobId={number}", "StartTime=now", check=False)
            self.since = None


MANY = {f"layers/{number}": {"seqlen": 1200, "heads": 8} for number in range(30)}


@pytest.mark.draw(1)
@launchers
def test_a_job_goes_on_after_its_time(submit, cluster, tmp_path, site, launcher):
    """SIGUSR1, as before a time limit: back into the queue, and at the end the bits of an undisturbed job."""
    if site:
        needs_pmi2()
    write_problems(tmp_path / "in.h5", MANY)
    options = ["--nodes=2", "--ntasks-per-node=1"]
    signals = Signals(cluster, tmp_path / "out.h5.unfinished", "--batch", "--signal=USR1")
    job = submit(
        "slurm/run.sbatch", "in.h5", "out.h5", "--resume", "--causal", site=site, options=options, meanwhile=signals
    )
    assert job.state == "COMPLETED" and job.log.count(f"started by {launcher}") == 2, job.log
    assert "mpiattn: back into the queue, for the other problems" in job.log
    assert "of them finished before" in job.log and job.log.count("layers/29 ") == 1
    assert signals.states.count("RUNNING") == 2
    other = submit("slurm/run.sbatch", "in.h5", "whole.h5", "--causal", options=options)
    assert other.state == "COMPLETED", other.log
    assert datasets(tmp_path / "out.h5") == datasets(tmp_path / "whole.h5")
    assert not list(tmp_path.glob("*unfinished")) and not list(tmp_path.glob(".*.partial"))


@pytest.mark.draw(1)
@pytest.mark.parametrize("resume", [True, False])
def test_scancel(submit, cluster, tmp_path, resume):
    """Leaves nothing that is half written, and what is finished for --resume."""
    write_problems(tmp_path / "in.h5", MANY)

    def cancel(number, state):
        pattern = "out.h5.unfinished/*.json" if resume else ".out.h5.*.partial"
        begun = list(tmp_path.glob(pattern))
        if begun and state == "RUNNING":
            cluster.client("scancel", number)

    job = submit("slurm/run.sbatch", "in.h5", "out.h5", *["--resume"] * resume, options=["--nodes=2"], meanwhile=cancel)
    assert job.state == "CANCELLED" and not (tmp_path / "out.h5").exists(), job.log
    assert not list(tmp_path.glob(".*.partial")) and (tmp_path / "out.h5.unfinished").exists() == resume


@pytest.mark.parametrize("script, arguments", [("run", ["bad.h5", "out.h5"]), ("bench", ["bad.h5"])])
def test_a_failed_run_fails_the_job(submit, tmp_path, script, arguments):
    (tmp_path / "bad.h5").write_text("not HDF5")
    job = submit(f"slurm/{script}.sbatch", *arguments, options=["--nodes=2"])
    assert job.state == "FAILED", job.log
    assert "IN is 'bad.h5'" in job.log
    assert "Traceback" not in job.log
    assert not list(tmp_path.glob("*out.h5*")) and not list(tmp_path.glob("mpiattn-*"))


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.s*")), ids=lambda path: path.name)
def test_shell(script):
    subprocess.run(["bash", "-n", script], check=True, timeout=launch.patience(60))
    if shellcheck := shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{slurm_cluster.PATH}"):
        subprocess.run(
            [shellcheck, "--external-sources", "--shell=bash", script],
            check=True,
            cwd=SCRIPTS,
            timeout=launch.patience(60),
        )
