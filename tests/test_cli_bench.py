"""`mpiattn bench` as a user calls it: every case right and measured, in a table, JSON and HDF5."""

import json
import sys

import h5py
import numpy as np
import pytest
import warm
from launch import mpirun

BENCH = [sys.executable, "-m", "mpiattn", "bench", "--seqlen", "130", "--heads", "4", "--head-dim", "16", "--runs", "2"]


def bench(n, *options, **how):
    return warm.command(n, [*BENCH[3:], *options], **how)


@pytest.mark.slow
def test_sweep(tmp_path):
    """Two sizes, every tile, both schedules and routes, with and without overlap, forward and backward."""
    outcome = bench(
        4,
        *"--seqlen 130 67 --kv-heads 2 --causal --direction both --tile all auto".split(),
        *"--layout zigzag --mesh-layout zigzag".split(),
        *"--schedule greedy collective --route direct ring --no-overlap --json".split(),
        tmp_path / "b.json",
        "--hdf5",
        tmp_path / "b.h5",
    )
    assert "both" in outcome.stdout and "BYTES" not in outcome.stdout
    data = json.loads((tmp_path / "b.json").read_text())
    sizes = {seqlen: [case for case in data["cases"] if case["seqlen"] == seqlen] for seqlen in (130, 67)}
    assert data["compute"] == "real" and [len(cases) for cases in sizes.values()] == [42, 42]
    for seqlen, cases in sizes.items():
        pairs = seqlen * (seqlen + 1) // 2
        for number, case in enumerate(cases):
            first = cases[case["measured_as"]]
            assert (case["measured_as"] == number) == (case["asked"]["tile"] != "auto")  # every tile was asked for
            assert [case[name] for name in ("tile", "schedule", "route")] == [
                first[name] for name in ("tile", "schedule", "route")
            ]
            assert case["asked"]["tile"] in (case["tile"], "auto")
            assert case["checked"]["forward"]["rows"] == case["checked"]["backward"]["keys"] == seqlen
            for name, products in (("forward", 2), ("backward", 5), ("both", 7)):
                figures = case["passes"][name]
                assert figures["counted"] and len(figures["runs"]) == 2 and figures["ideal_seconds"] > 0
                flops = figures["gflops_per_second"] * figures["seconds"]["median"] * 1e9
                assert flops == pytest.approx(products * 2 * 16 * 4 * pairs)
    ring = next(case for case in sizes[130] if case["tile"] == "1x4" and case["schedule"] == "greedy")
    halves = [17, 17] + [16] * 6  # rank r holds halves r and 7 - r of every two; later ranks see nothing of the second
    keys = sum(3 * halves[rank] + rank * halves[7 - rank] for rank in range(4))
    assert ring["passes"]["forward"]["sent_bytes"]["mean"] == keys / 4 * 2 * 2 * 16 * 4
    with h5py.File(tmp_path / "b.h5") as file:
        assert file.attrs["ranks"] == 4 and file.attrs["problem.kv_heads"] == 2
        for case, group in (
            (case, file[f"{seqlen}/{number}"]) for seqlen, cases in sizes.items() for number, case in enumerate(cases)
        ):
            for name, figures in case["passes"].items():
                raw = group[name]
                assert np.median(raw["seconds"][:].max(axis=1)) == figures["seconds"]["median"]
                assert raw["waiting"].shape == raw["sent"].shape == (2, 4)
                assert (raw["sent"][:] == raw["formula"][:]).all() and raw["ideal"].shape == (4,)
                assert raw.attrs["waiting.mean"] == figures["waiting"]["mean"]
            assert group.attrs["tile"] == case["tile"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.h5", "b.json"]


def test_keys_that_hold_the_values():
    """Only keys are made, travel and are counted; forward and backward are checked."""
    sent = {}
    for shared in ([], ["--shared-kv"]):
        outcome = bench(
            2,
            *"--kv-heads 1 --head-dim 24 --value-dim 16 --direction both --layout contiguous".split(),
            *"--mesh-layout contiguous --tile ring 2x1x1 --schedule greedy --json -".split(),
            *shared,
        )
        data = json.loads(outcome.stdout)
        assert data["problem"]["value_dim"] == 16 and data["problem"]["shared_kv"] == bool(shared)
        assert all(figures["counted"] for case in data["cases"] for figures in case["passes"].values())
        ring = data["cases"][0]
        assert ring["tile"] == "1x2" and ring["checked"]["backward"]["keys"] == 130
        sent[bool(shared)] = ring["passes"]["forward"]["sent_bytes"]["max"]
    assert sent == {False: 65 * (24 + 16) * 4, True: 65 * 24 * 4}


def test_biases():
    """ALiBi and a dense bias, whose gradients are checked too; they send nothing."""
    options = "--direction both --tile 2x2 2x1x2 --batch 2 --layout striped --alibi --bias --backend numpy --json -"
    data = json.loads(bench(4, *options.split()).stdout)
    assert data["alibi"] and data["bias"]
    for case in data["cases"]:
        assert "dbias off by" in case["checked"]["biases"]["summary"]
        assert case["checked"]["biases"]["rows"] == 4 * 65
        assert all(figures["counted"] for figures in case["passes"].values())


def test_pieces(tmp_path):
    """Beside every tile, with and without overlap, biases by distance, and a trace."""
    options = "--direction both --tile bands all --causal --alibi --no-overlap --json - --hdf5"
    files = [tmp_path / "b.h5", "--trace", tmp_path / "trace.json"]
    data = json.loads(bench(3, *options.split(), *files).stdout)
    assert [case["tile"] for case in data["cases"]] == ["bands"] * 2 + ["1x3"] * 2 + ["3x1"] * 2
    for case in data["cases"][:2]:
        assert (case["schedule"], case["route"], case["measured_as"]) == ("pieces", "direct", 1 - case["overlap"])
        assert case["checked"]["forward"]["rows"] == 130 and "dalibi_slopes" in case["checked"]["biases"]["summary"]
        assert all(figures["counted"] for figures in case["passes"].values())


def test_emulated_compute_is_called_so():
    outcome = bench(
        2, "--backend", "paced:0.05", "--tile", "qring", "--schedule", "greedy", "--layout", "contiguous", "--json", "-"
    )
    data = json.loads(outcome.stdout)
    figures = data["cases"][0]["passes"]["forward"]
    assert (data["compute"], data["backend"]) == ("emulated compute", "paced:0.05")
    assert figures["ideal_seconds"] == pytest.approx(2 * 2 * 16 * 4 * 65 * 130 / 0.05e9)
    assert figures["seconds"]["min"] > 0.9 * figures["ideal_seconds"]  # no faster, but for the first block's slack
    assert data["machine"]["flops"]["float32"] == 0.05e9
    assert bench(2, "--backend", "paced:1").stdout.count("emulated compute") == 2


def test_a_wrong_result_is_not_measured(tmp_path):
    """A back end that is wrong with two blocks or more: the case is named, and nothing is written."""
    code = (
        "import sys; from mpiattn import backends; B = type(backends.get()); merge = B.merge\n"
        "def wrong(self, out, lse, *rest, **more):\n"
        "    merge(self, out, lse, *rest, **more)\n"
        "    out += 0.01\n"
        "B.merge = wrong\n"
        "from mpiattn.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    outcome = mpirun(
        3,
        [
            sys.executable,
            "-c",
            code,
            *BENCH[3:],
            "--tile",
            "ring",
            "qring",
            "--json",
            tmp_path / "b.json",
            "--hdf5",
            tmp_path / "b.h5",
        ],
        check=False,
    )
    assert outcome.returncode == 1 and not outcome.stdout
    assert outcome.stderr.count("130 tokens, tile 3x1") == 1 and "FAILED" in outcome.stderr
    assert list(tmp_path.iterdir()) == []


ENDED = (
    "import os, sys, mpiattn.bench.{0} as module; measure, sizes = module.{1}, []\n"
    "def second_never_ends(*given, **how):\n"
    "    sizes.append(given)\n"
    "    os._exit(3) if len(sizes) == 2 else None\n"
    "    return measure(*given, **how)\n"
    "module.{1} = second_never_ends\n"
    "from mpiattn.cli import main; sys.exit(main(sys.argv[1:]))"
)


@pytest.mark.parametrize("place, options", [(("measure", "measure"), []), (("decode", "_measure"), ["--decode"])])
def test_what_is_done_is_kept(tmp_path, place, options):
    """A job that is ended in its second size leaves the first one's table, on its way by then, and whole files."""
    files = ["--json", tmp_path / "b.json", *([] if options else ["--hdf5", tmp_path / "b.h5"])]
    command = [sys.executable, "-c", ENDED.format(*place), *BENCH[3:], *options, *files, "--seqlen", "60", "70"]
    outcome = mpirun(1, command, check=False)
    assert outcome.returncode == 3
    assert outcome.stdout.count("\nproblem ") + outcome.stdout.startswith("problem ") == 1
    assert "\n60 tokens" in outcome.stdout and "\n70 tokens" not in outcome.stdout
    data = json.loads((tmp_path / "b.json").read_text())
    if options:
        assert [result["context"] for result in data["results"]] == [60]
        return
    assert {case["seqlen"] for case in data["cases"]} == {60}
    with h5py.File(tmp_path / "b.h5") as file:
        assert list(file) == ["60"]


@pytest.mark.draw(1)
@pytest.mark.parametrize("ranks, options", [(1, ["--kv-heads", "1"]), (3, ["--queries", "2", "--batch", "2"])])
def test_decode(ranks, options):
    """Two contexts, the shorter one shorter than a page: every algorithm is there, and what it sends."""
    sizes = ["--decode", "--seqlen", "50", "7", *options]
    data = json.loads(bench(ranks, *sizes, "--json", "-").stdout)
    few, fewer = data["results"]
    assert set(few["sent_bytes"]) == {"allreduce", "butterfly", "ring", "query-ring"}
    assert few["sent_bytes"]["butterfly"] == fewer["sent_bytes"]["butterfly"]
    assert max(few["difference"], few["error"], fewer["error"]) < 1e-5 and few["error"] > 0
    assert (ranks == 1) or few["sent_bytes"]["ring"] > 4 * fewer["sent_bytes"]["ring"] > 0
    assert all(len(timed) == 2 and min(timed) > 0 for timed in few["seconds"].values())
    text = bench(ranks, *sizes, "--algorithm", "auto", "ring").stdout
    algorithm = few["chosen"]
    assert f"\ncombining {algorithm} " in text and "of MPI_Allreduce" in text and "\nring " in text
    assert "query-ring" not in text and (algorithm == "allreduce" or "\nallreduce" not in text)


def test_wrong_decoding_is_not_measured():
    """All algorithms agree, and all are wrong."""
    code = (
        "import sys; from mpiattn import backends; B = type(backends.get()); attend = B.attend_pages\n"
        "def wrong(self, block, *rest, **more):\n"
        "    attend(self, block._replace(q=1.01 * block.q), *rest, **more)\n"
        "B.attend_pages = wrong\n"
        "from mpiattn.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    outcome = mpirun(2, [sys.executable, "-c", code, *BENCH[3:], "--decode"], check=False)
    assert outcome.returncode == 1 and not outcome.stdout
    assert outcome.stderr.count("results differ from float64 attention by") == 1 and "Traceback" not in outcome.stderr


@pytest.mark.draw(3)
@pytest.mark.parametrize(
    "options, message",
    [
        (["--runs", "0"], "--runs is 0"),
        (["--tile", "3x1"], "--tile is 3x1"),
        (["--seqlen", "0"], "seqlen is 0"),
        (["--kv-heads", "3"], "--kv-heads is 3"),
        (["--hdf5", "/nowhere/b.h5"], "--hdf5 is '/nowhere/b.h5'"),
        (["--tile", "ring", "--route", "ring", "--wire-dtype", "float16"], "--wire-dtype is 'float16'"),
        (["--tile", "ring", "bands", "--bias"], "--bias and --tile ring bands are given; ranks that compute pieces"),
        (["--queries", "3"], "--queries is 3; it has no meaning without --decode"),
        (["--decode", "--tile", "ring"], "--tile is ['ring']; it has no meaning with --decode"),
        (["--limits"], "--head-dim is 16; it has no meaning with --limits"),
        (["--decode", "--queries", "0"], "--queries is 0"),
        (["--decode", "--seqlen", "9", "0"], "--seqlen is 0"),
        (["--decode", "--kv-heads", "3"], "--kv-heads is 3"),
    ],
)
def test_errors(options, message):
    outcome = bench(2, *options, check=False)
    assert outcome.returncode and outcome.stderr.count(message) == 1 and "Traceback" not in outcome.stderr


@pytest.mark.slow
@pytest.mark.draw(1)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_limits(ranks, tmp_path):
    """Every operation is there beside its bound, and no file stays."""
    path, folder = tmp_path / "limits.json", tmp_path / "temporary"
    folder.mkdir()
    options = "--limits", "--runs", "1", "--json", path
    text = mpirun(ranks, [*BENCH[:4], *options], timeout=200, env={"TMPDIR": str(folder)}).stdout
    data = json.loads(path.read_text())
    assert (data["ranks"], data["hosts"]) == (ranks, 1) and not list(folder.iterdir())
    assert len(data["results"]) == len({row["name"] for row in data["results"]}) == 38
    predicted = [row["name"] for row in data["results"] if row["bounded_by"] == "predicted"]
    assert predicted == ["forward, a window of 64 keys"]
    for row in data["results"]:
        assert row["median"] > 0 and row["bound"] > 0 and row["passes"] == (row["ratio"] <= row["limit"])
        ratio = row["median"] / row["bound"]
        if row["name"] in predicted:
            ratio = max(ratio, 1 / ratio)
        assert row["limit"] == (1.5 if row["name"] in predicted else 2.5)
        assert row["ratio"] == pytest.approx(ratio)
        assert f"\n{row['name']} " in text and row["bounded_by"] in text


LIMITS_OF = (
    "import sys, mpiattn.bench.limits as limits; from mpiattn import backends\n"
    "{}\n"
    "from mpiattn.cli import main; sys.exit(main(sys.argv[1:]))"
)


def limits_of(change, **how):
    """The launch of `bench --limits` on two ranks after a change."""
    command = [sys.executable, "-c", LIMITS_OF.format(change), "bench", "--limits", "--runs", "1"]
    return mpirun(2, command, **how)


def test_limits_on_several_hosts():
    """No file of one host is read on another: these rows are left out, and the table says so."""
    outcome = limits_of(
        "limits.GROUPS = (limits.appending, limits.files); limits.nodes_of = lambda peers: range(peers.size)"
    )
    assert outcome.stdout.count("\nappend ") == 3 and "\nload " not in outcome.stdout
    assert "files: the ranks are on 2 hosts" in outcome.stdout


@pytest.mark.draw(1)
@pytest.mark.parametrize(
    "group, change, message",
    [
        (
            "decoding",
            "attend_pages = lambda self, b, *rest, **more: right(self, b._replace(q=1.01 * b.q), *rest, **more)",
            "decoding 64 sequences of 1024 keys",
        ),
        ("half_types", "delta = lambda self, delta, *rest: delta.fill(1)", "is not the sum of dout * out"),
    ],
    ids=["decode", "delta"],
)
def test_limits_of_wrong_results(group, change, message):
    name = change.split()[0]
    outcome = limits_of(
        f"limits.GROUPS = (limits.{group},); B = type(backends.get()); right = B.{name}; B.{change}", check=False
    )
    assert outcome.returncode == 1 and not outcome.stdout
    assert outcome.stderr.count(message) == 1 and "Traceback" not in outcome.stderr
