"""`mpiattn tune` as users run it: what it stores and prints, which figures later launches use, and its errors."""

import json
import sys

import launch
import pytest
import warm

from mpiattn.tuning.plausible import implausible
from mpiattn.tuning.samples import Sample

QUICK = ["tune", "--seconds", "0.2", "--head-dim", "8", "--dtype", "float32,float64"]
QUICK += ["--anyway"]  # more ranks than cores are slow
TWO_NODES = {"MPIR_CVAR_NUM_CLIQUES": "2"}


@pytest.fixture
def run(tmp_path):
    """run(n, *arguments) runs mpiattn with a store of this test's."""

    def start(n, *arguments, env=None, **options):
        env = {"XDG_CONFIG_HOME": str(tmp_path), **(env or {})}
        if "MPIR_CVAR_NUM_CLIQUES" in env:  # MPI looks at it when it starts
            return launch.mpirun(n, [sys.executable, "-m", "mpiattn", *arguments], env=env, **options)
        return warm.command(n, arguments, env=env, **options)

    start.store = tmp_path / "mpiattn" / "machines.json"
    return start


def machine_of(run, n, **options):
    return json.loads(run(n, "info", "--json", "-", **options).stdout)["machine"]


def test_one_rank(run):
    before = machine_of(run, 1)
    assert before["name"] == "default" and before["from"].startswith("default, since")
    text = run(1, *QUICK).stdout
    assert "inside (no node with two ranks); between (one node); collective (one rank)" in text
    assert "float64 blocks" in text and "bfloat16" not in text and "hidden by blocks" not in text
    assert f"{run.store}\n" in text
    after = machine_of(run, 1)
    assert after["name"] == "measured" and "with head_dim 8" in after["from"]
    assert set(after["figures"]["flops"]) == {"float32", "float64"}
    assert machine_of(run, 2)["name"] == "default"  # two ranks a node are another launch
    assert "in place of what was measured before" in run(1, *QUICK).stdout
    assert len(json.loads(run.store.read_text())["entries"]) == 1


def test_three_ranks(run):
    data = json.loads(run(3, *QUICK, "--json", "-").stdout)
    assert data["store"] == str(run.store) and data["replaced"] is False and set(data["default"]) == {"between"}
    assert data["key"]["ranks_per_node"] == 3 and not data["key"]["several_nodes"]
    assert {"inside latency", "inside bandwidth", "inside overlap", "collective"} < set(data["samples"])
    assert machine_of(run, 3)["figures"] == data["machine"]


def test_two_nodes_and_a_file(run, tmp_path):
    if launch.vendor() != "mpich":
        pytest.skip("only MPICH can pretend to have two nodes")
    file = tmp_path / "machine.json"
    outcome = run(4, *QUICK, "--out", file, "--json", tmp_path / "all.json", env=TWO_NODES)
    lines = outcome.stdout.splitlines()
    assert "ranks     4 on 2 nodes, 2 a node at most" in lines and "plans    unchanged" in lines, outcome.stdout
    assert sum("hidden by blocks" in line for line in lines) == 2
    data = json.loads((tmp_path / "all.json").read_text())
    assert data["machine"] == json.loads(file.read_text()) and data["default"] == {} and data["store"] is None
    assert data["key"]["ranks_per_node"] == 2 and data["key"]["several_nodes"]
    assert not run.store.exists()
    machine = machine_of(run, 2, env={"MPIATTN_MACHINE": str(file)})
    assert machine["figures"] == data["machine"] and machine["from"] == f"MPIATTN_MACHINE={file}"


# Rank 0's latency inside a node is told as that of a busy machine.
BUSY = """
import sys
from mpiattn.tuning import links
measured = links.measure
def measure(*arguments):
    figures = measured(*arguments)
    return figures and figures._replace(latency=links.Sample({seconds}, {seconds}, {seconds}, 9))
links.measure = measure
from mpiattn.cli import main
sys.exit(main(sys.argv[1:]))
"""


def busy(run, seconds, *arguments):
    words = [word for word in QUICK if word != "--anyway"]
    command = [sys.executable, "-c", BUSY.format(seconds=seconds), *words, *arguments]
    env = {"XDG_CONFIG_HOME": str(run.store.parent.parent)}
    return launch.mpirun(2, command, env=env, check=False)


def test_figures_of_a_busy_machine_are_not_kept(run, tmp_path):
    outcome = busy(run, 0.016, "--json", tmp_path / "all.json")
    said = "mpiattn tune: implausible: inside a node: latency 16 ms, where 1 ms is much"
    assert outcome.returncode == 1 and outcome.stderr.count(said) == 1, outcome.stderr
    assert "Measure when no other programs use the cores" in outcome.stderr
    assert "stored        no" in outcome.stdout and "16 ms" in outcome.stdout and not run.store.exists()
    data = json.loads((tmp_path / "all.json").read_text())
    assert len(data["implausible"]) >= 1 and data["store"] is None
    out = tmp_path / "machine.json"
    assert busy(run, 0.016, "--out", out).returncode == 1 and not out.exists()
    outcome = busy(run, 0.016, "--no-store")
    assert outcome.returncode == 0 and said in outcome.stderr  # it was only to be shown
    outcome = busy(run, 0.016, "--anyway")
    assert outcome.returncode == 0 and "were kept all the same" in outcome.stderr and run.store.exists()


SLOWEST = {  # of machines that there are: Ethernet by TCP between nodes, a slow core, a GPU through a host's memory
    "inside latency": 3e-5,
    "between latency": 5e-4,
    "launch": 1e-3,
    "inside bandwidth": 5e8,
    "between bandwidth": 1e7,
    "merging": 5e8,
}


def samples_of(figures):
    return {name: Sample(value, value, value, 9) for name, value in figures.items()}


def test_what_is_implausible():
    assert not implausible(samples_of(SLOWEST)) and not implausible({})
    for name, value in {"inside latency": 0.016, "between latency": 0.2, "launch": 2}.items():
        (text,) = implausible(samples_of(SLOWEST | {name: value}))
        assert " is much" in text
    for name in ("inside bandwidth", "merging"):
        (text,) = implausible(samples_of(SLOWEST | {name: 1e6}))
        assert " is little" in text


def test_trouble_with_the_store(run, tmp_path):
    """A broken one is said once and not used; one that cannot be made is said before the time is spent."""
    run.store.parent.mkdir()
    run.store.write_text("{")
    outcome = run(3, "info")
    assert outcome.stderr.count("is not used: it is not JSON") == 1 and "default, since" in outcome.stdout
    assert "MPIATTN_MACHINE is 'none'" in run(2, "info", env={"MPIATTN_MACHINE": "none"}).stdout
    outcome = run(2, *QUICK[:2], "1e6", env={"XDG_CONFIG_HOME": str(run.store)}, check=False)
    assert outcome.returncode and outcome.stderr.count("its folder cannot be made") == 1


@pytest.mark.draw(2)
@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--seconds", "0"], "0 is not a positive number"),
        (["--head-dim", "0"], "0 is not a whole number"),
        (["--dtype", "float8"], "--dtype is 'float8'; it may be float16"),
        (["--quick", "--seconds", "3"], "not allowed with"),
        (["--out", "/no/such/machine.json"], "--out is '/no/such/machine.json'; there is no folder"),
        (["--timeout", "0"], "timeout is 0"),
    ],
)
def test_wrong_options_are_said_once(run, arguments, text):
    outcome = run(2, "tune", *arguments, check=False)
    assert outcome.returncode and outcome.stderr.count(text) == 1, outcome.stderr
    assert "Traceback" not in outcome.stderr and not run.store.exists()
