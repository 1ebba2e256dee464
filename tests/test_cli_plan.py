"""`mpiattn plan`: its figures against the papers' and against traffic and cost."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import launch
import numpy as np
import pytest
from searches import choices

from mpiattn.cli import main, pieces_text
from mpiattn.cli.mesh_picture import picture
from mpiattn.model import cost
from mpiattn.model.divided import PassLoad, divide
from mpiattn.model.machine import DEFAULT
from mpiattn.model.space import DIRECTIONS
from mpiattn.plots.style import passes_in_words
from mpiattn.problem.layout import Layout
from mpiattn.problem.problem import Problem
from mpiattn.schedule import travels
from mpiattn.schedule.tile import Tile, divided, parse_tile, tiles

MHA = ["--seqlen", "1048576", "--heads", "32", "--head-dim", "128"]


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ.copy())  # main sets the BLAS variables


def plan(capsys, *arguments):
    assert main(["plan", *map(str, arguments)]) == 0
    printed = capsys.readouterr()
    assert not printed.err
    return printed.out


def refused(capsys, *arguments):
    """The message of a plan that fails."""
    assert main(["plan", *map(str, arguments)]) == 1
    return capsys.readouterr().err


def as_json(capsys, *arguments):
    return json.loads(plan(capsys, *arguments, "--json", "-"))


def row(data, tile):
    return next(row for row in data["tiles"] if row["tile"] == tile)


def flat(data):
    """The tiles of one plane."""
    return [row for row in data["tiles"] if row["tile"].count("x") == 1]


@pytest.mark.parametrize(
    "ranks, tile, saving",
    [
        (32, "4x8", "67.7 %"),
        (64, "8x8", "77.8 %"),
        (128, "8x16", "82.7 %"),
        (256, "16x16", "88.2 %"),
        (256, "8x32", "85.1 %"),
    ],
)
def test_savings_of_the_paper(capsys, ranks, tile, saving):
    line = next(line for line in plan(capsys, "--ranks", ranks, *MHA).splitlines() if line.startswith(tile))
    columns = line.replace(" %", "%").replace("iB", "").split()
    assert columns[10].replace("%", " %") == saving  # tile, four sizes with units, saved, elements


def test_savings_with_fewer_kv_heads_and_float16(capsys):
    data = as_json(capsys, "--ranks", 256, *MHA, "--kv-heads", 8)
    assert max(row["saving_elements"] for row in flat(data)) == pytest.approx(0.769, abs=5e-4)
    assert max(row["saving_elements"] for row in data["tiles"] if "x" in row["tile"]) >= 0.90
    usp = row(data, "8x1x32")
    assert (usp["method"], round(usp["saving"], 3), round(usp["saving_elements"], 3)) == ("USP", 0.861, 0.861)
    data = as_json(capsys, "--ranks", 256, *MHA, "--dtype", "float16")
    # 16x16, a chunk's token and head: q 2 * 128, partial 4 * (128 + 1), k and v 2 * 256 bytes
    saving = 1 - 15 * (256 + 516 + 512) / (255 * 512)
    assert max(row["saving"] for row in flat(data)) == pytest.approx(saving) == pytest.approx(0.8525, abs=1e-4)
    assert row(data, data["auto"])["saving"] >= 0.97 and data["auto"] == "32x2x4"
    assert row(data, "32x1x8")["saving"] == pytest.approx(0.965, abs=5e-4)


@pytest.mark.parametrize("route", ["direct", "ring"])
def test_bytes_are_those_that_ranks_send(capsys, route):
    arguments = {
        "seqlen": 1003,
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 8,
        "value_dim": 5,
        "seqlen_k": 509,
        "batch": 2,
        "dtype": "float16",
    }
    options = [text for name, value in arguments.items() for text in (f"--{name.replace('_', '-')}", value)]
    data = as_json(capsys, "--ranks", 6, "--route", route, *options)
    problem = Problem(**arguments)
    lengths = Layout("contiguous", 1003, 6).lengths, Layout("contiguous", 509, 6).lengths
    assert [row["tile"] for row in flat(data)] == ["1x6", "2x3", "3x2", "6x1"]
    others = ["2x1x3", "6x1x1", *["bands"] * (route == "direct")]
    assert [row["tile"] for row in data["tiles"][4:]] == others
    for tile in tiles(6):
        sent = [travels.sent(problem, lengths, tile, rank, route) for rank in range(6)]
        printed = row(data, str(tile))["sent_bytes"]
        means = [sum(values) / 6 for values in zip(*sent)]
        assert [printed[kind] for kind in ("Q", "KV", "O")] == pytest.approx(means)
        assert printed["total"] == pytest.approx(sum(means))


def test_keys_that_hold_the_values(capsys):
    mla = "--ranks", 16, "--seqlen", 4096, "--heads", 16, "--kv-heads", 1, "--head-dim", 576, "--value-dim", 512
    apart, together = (row(as_json(capsys, *mla, *extra), "1x16") for extra in ([], ["--shared-kv"]))
    assert apart["sent_bytes"]["KV"] == 15 * 256 * 1088 * 4 and together["sent_bytes"]["KV"] == 15 * 256 * 576 * 4
    assert together["memory_bytes"] < apart["memory_bytes"]


@pytest.mark.parametrize("schedule", ["greedy", "collective", "auto"])
def test_choice_is_that_of_cost(capsys, schedule):
    data = as_json(capsys, "--ranks", 12, "--seqlen", 5000, "--heads", 4, "--head-dim", 16, "--schedule", schedule)
    kinds = cost.SCHEDULES if schedule == "auto" else (schedule,)
    best = choices(Problem(5000, 4, 16), 12, schedules=kinds)[0]
    chosen = row(data, data["auto"])
    assert data["auto"] == data["tile"] == str(best.tile)
    assert (chosen["schedule"], chosen["seconds"], chosen["memory_bytes"]) == (best.schedule, best.seconds, best.nbytes)


def test_marks_the_tile_that_auto_takes(capsys):
    text = plan(capsys, "--ranks", 256, *MHA, "--tile", "8x32")
    marked = {line.split("<- ")[1]: line.split()[0] for line in text.splitlines() if "<- " in line}
    assert marked == {"auto": "bands", "--tile": "8x32"}
    assert "mesh of tile 8x32: A = 8 columns x B = 32 rows" in text
    text = plan(capsys, "--ranks", 256, *MHA, "--tile", "mesh")
    assert [line.split()[0] for line in text.splitlines() if line.endswith("<- auto")] == ["32x2x4"]
    assert "each of the 32 planes of tile 32x2x4" in text and "\nbands " not in text


def test_best_mesh_beside_bands(capsys):
    """It is listed and predicted where auto takes bands, with any number of ranks."""
    for ranks, mesh in (256, "32x2x4"), (320, "32x2x5"):
        data = as_json(capsys, "--ranks", ranks, *MHA, "--causal")
        meshes = as_json(capsys, "--ranks", ranks, *MHA, "--causal", "--tile", "mesh")
        assert (data["auto"], meshes["auto"]) == ("bands", mesh)
        assert row(data, mesh) == row(meshes, mesh) and row(data, mesh)["seconds"]


def test_documents_are_dealt(capsys, tmp_path):
    """The tile is listed where documents are expected, and any plan may ask for it."""
    arguments = ["--ranks", 4, "--seqlen", 4096, "--heads", 4, "--head-dim", 64, "--causal"]
    divided = ["bands", "dealt"]
    assert [row["tile"] for row in as_json(capsys, *arguments)["tiles"] if row["tile"] in divided] == ["bands"]
    asked = as_json(capsys, *arguments, "--tile", "dealt")
    assert asked["tile"] == "dealt" and [row["tile"] for row in asked["tiles"] if row["tile"] in divided] == divided
    np.savetxt(file := tmp_path / "cuts.txt", [0, 300, 3000, 3500, 4096], "%d")
    data = as_json(capsys, *arguments, "--documents", file)
    assert [row["tile"] for row in data["tiles"] if row["tile"] in divided] == divided
    assert row(data, "dealt")["balance"] < 1.1
    assert "the schedule of bands and dealt: " in plan(capsys, *arguments, "--documents", file)


def test_causal_takes_half_the_time(capsys):
    """Stripes are all needed; of zigzag chunks the later keys are, by half of the ranks, and some queries by none."""
    full, striped, zigzag = (
        as_json(capsys, "--ranks", 16, *MHA, *extra)
        for extra in ([], ["--causal", "--layout", "striped"], ["--causal", "--layout", "zigzag"])
    )
    assert row(striped, "4x4")["seconds"] == pytest.approx(row(full, "4x4")["seconds"] / 2, rel=0.01)
    assert row(striped, "4x4")["sent_bytes"] == row(full, "4x4")["sent_bytes"]
    assert row(zigzag, "4x4")["sent_bytes"]["KV"] == 3 / 4 * row(full, "4x4")["sent_bytes"]["KV"]
    assert row(zigzag, "4x4")["sent_bytes"]["Q"] == 15 / 16 * row(full, "4x4")["sent_bytes"]["Q"]


def test_window_and_wire_dtype(capsys):
    """A window leaves little to send in contiguous chunks; 16-bit partials take half the bytes, lse apart."""
    full = as_json(capsys, "--ranks", 16, *MHA, "--causal")
    windowed = as_json(capsys, "--ranks", 16, *MHA, "--causal", "--window", "4096,0")
    ring = row(windowed, "1x16")
    assert [other["sent_bytes"] for other in windowed["others"] if other["method"] == "halo exchange"] == [
        ring["sent_bytes"]["total"]
    ]
    assert ring["layout"] == "contiguous"
    seen = 15 / 16 * 4096 * 2 * 32 * 128 * 4  # by all but the first rank
    assert ring["sent_bytes"]["total"] == seen
    assert "window 4096,0" in plan(capsys, "--ranks", 16, *MHA, "--causal", "--window", "4096,0")
    narrow = row(as_json(capsys, "--ranks", 16, *MHA, "--causal", "--wire-dtype", "bfloat16"), "4x4")["sent_bytes"]["O"]
    assert narrow == pytest.approx(row(full, "4x4")["sent_bytes"]["O"] * (2 * 128 + 4) / (4 * 128 + 4))


def test_ulysses_and_usp(capsys):
    data = as_json(capsys, "--ranks", 8, *MHA)
    paper = 4 * 7 / 64 * 1048576 * 32 * 128 * 4  # and lse
    assert row(data, "8x1x1")["method"] == "Ulysses"
    assert row(data, "8x1x1")["sent_bytes"]["total"] == pytest.approx(paper * (1 + 1 / 512))
    assert not data["others"]
    text = plan(capsys, "--ranks", 5, *MHA)
    assert "Ulysses: not possible, 32 KV heads cannot be divided among 5 ranks" in text
    assert "USP: not possible" in text


def test_says_what_the_machine_is(capsys):
    text = plan(capsys, "--ranks", 4, *MHA)
    assert "60 in float32" in text and "3 GB/s and 10 us a message" in text and "50 us a block" in text
    assert "100 Gb/s" in text and "waits" in text
    text = plan(capsys, "--ranks", 4, *MHA, "--machine", "h100", "--ranks-per-node", 2)
    assert "machine h100:" in text and "inside a node of 2 ranks" in text and "as fast as measured on one H200" in text


def test_machine_of_a_file(capsys, tmp_path):
    """A machine file changes the predictions; an error names a wrong one and what it may be."""
    file = tmp_path / "slow.json"
    slow = replace(DEFAULT, name="slow", flops={"float32": 1e9})
    file.write_text(json.dumps(slow.as_dict()))
    fast, printed = (as_json(capsys, "--ranks", 4, *MHA, *extra) for extra in ([], ["--machine", file]))
    assert printed["machine"] == slow.as_dict() and printed["machine"]["name"] == "slow"
    assert row(printed, "2x2")["seconds"] == pytest.approx(60 * row(fast, "2x2")["seconds"], rel=0.01)
    for text, wrong in (
        ("{", "slow.json"),
        ("[]", "slow.json"),
        ('{"name": "x"}', "slow.json"),
        (json.dumps({**slow.as_dict(), "color": 1}), "color"),
        (json.dumps({**slow.as_dict(), "launch": -1}), "launch"),
    ):
        file.write_text(text)
        assert wrong in refused(capsys, "--ranks", 4, *MHA, "--machine", file)
    assert "default, h100" in refused(capsys, "--ranks", 4, *MHA, "--machine", "cray")


def test_memory_limit(capsys):
    """The fastest plan within the limit, and its cost in time; the error names the least memory if none fits."""
    free = as_json(capsys, "--ranks", 64, *MHA, "--machine", "h100")
    most = row(free, free["tile"])["memory_bytes"]
    least = min(choice["memory_bytes"] for choice in free["tiles"])
    assert free["memory_cost"] == 1
    limited = as_json(capsys, "--ranks", 64, *MHA, "--machine", "h100", "--max-memory", least)
    chosen = row(limited, limited["tile"])
    assert chosen["memory_bytes"] <= least < most
    assert limited["memory_cost"] >= 1 and limited["tile"] != free["tile"]
    assert "times as long as without that limit" in plan(capsys, "--ranks", 64, *MHA, "--max-memory", f"{2 * most}B")
    for text in ("much", "-1", "1P", ""):
        with pytest.raises(SystemExit):
            plan(capsys, "--ranks", 64, *MHA, "--max-memory", text)
        assert "is not a number of bytes" in capsys.readouterr().err or text == "-1"
    text = refused(capsys, "--ranks", 64, *MHA, "--machine", "h100", "--max-memory", "1M")
    assert "--max-memory is 1048576 bytes a rank; the smallest plan" in text and "tile 1x64" in text


@pytest.mark.parametrize("kind", cost.SCHEDULES)
def test_steps(capsys, kind):
    arguments = [
        "--ranks",
        6,
        "--seqlen",
        600,
        "--heads",
        4,
        "--head-dim",
        16,
        "--tile",
        "3x2",
        "--schedule",
        kind,
        "--steps",
    ]
    text, data = plan(capsys, *arguments), as_json(capsys, *arguments)
    schedule = cost.build(kind, Tile(1, 3, 2), "direct", Problem(600, 4, 16))
    assert str(schedule) in text
    assert "slots ever in use: 2 Q, 1 KV, 2 O" in text
    assert len(data["steps"]["forward"]["steps"]) == len(schedule.steps)
    assert data["steps"]["forward"]["validated_slots"] == schedule.slots


def test_pieces(capsys):
    """Every tile is listed with bands; their bytes are those that the ranks send, and --steps has all scores once."""
    arguments = ["--ranks", 5, "--seqlen", 700, "--heads", 4, "--kv-heads", 2, "--head-dim", 16, "--causal"]
    auto, data = as_json(capsys, *arguments), as_json(capsys, *arguments, "--tile", "bands", "--steps")
    bands = row(data, "bands")
    assert bands == row(auto, "bands") and data["tile"] == "bands" and [*data["steps"]] == ["forward"]
    assert (bands["schedule"], bands["route"], bands["method"], bands["saving_elements"]) == (
        "pieces", "direct", None, None,
    )  # fmt: skip
    assert bands["times_least"] > 1 and bands["seconds"] and bands["memory_bytes"] and bands["balance"] < 1.1
    problem = Problem(700, 4, 16, kv_heads=2, causal=True)
    pair = (Layout(bands["layout"], 700, 5),) * 2
    load = PassLoad(divided("bands", 5), problem, problem.whole_mask, pair, "forward", DEFAULT)
    assert bands["sent_bytes"] == load.sent() | {"total": pytest.approx(sum(load.sent().values()))}
    pieces = [piece for of_rank in data["steps"]["forward"]["ranks"] for piece in of_rank]
    scores = np.zeros((2, 700, 700), int)
    for piece in pieces:
        scores[piece["kv_head"], slice(*piece["queries"]), slice(*piece["keys"])] += 1
    assert (scores == 1).all()
    text = plan(capsys, *arguments, "--tile", "bands", "--steps", "--direction", "both")
    line = next(line for line in text.splitlines() if line.startswith("bands "))
    assert "pieces" in line and line.endswith("<- auto")
    assert "pieces of the forward pass\n" in text and "  KV head 0             KV head 1\n  0.." in text
    assert f"forward: {len(pieces)} pieces of 5 ranks\n  rank 0  KV head 0: queries 0 to " in text
    assert "\nbackward: " in text


def test_pieces_have_no_schedule_to_choose(capsys):
    arguments = ["--ranks", 5, "--seqlen", 700, "--heads", 4, "--head-dim", 16]
    for option, value in ("schedule", "greedy"), ("route", "ring"), ("mesh-layout", "striped"):
        assert "bands" not in {row["tile"] for row in as_json(capsys, *arguments, f"--{option}", value)["tiles"]}
        text = refused(capsys, *arguments, f"--{option}", value, "--tile", "bands")
        assert f"--{option} is '{value}'; with tile bands" in text


def test_picture_of_pieces():
    problem = Problem(10, 4, 8, kv_heads=2, batch=3, causal=True)
    divisions = [
        divide(divided("bands", ranks), problem, problem.whole_mask, (Layout("contiguous", 10, ranks),) * 2, "forward")
        for ranks in (1, 6, 12, 99)
    ]
    alone, six, twelve, many = (pieces_text.picture(each, problem, problem.whole_mask, "forward") for each in divisions)
    assert alone == "" and "of 99 ranks; --steps lists them" in many
    assert six.splitlines()[:3] == [
        "pieces of the forward pass",
        "  queries from top to bottom x keys from left to right, the first 4 of 6; a character is a rank, . is hidden",
        "  sequence 0, KV head 0  sequence 0, KV head 1  sequence 1, KV head 0  sequence 1, KV head 1",
    ]
    assert six.splitlines()[3].split() == [f"{rank}........." for rank in range(4)]
    assert six.splitlines()[-1].split() == [str(rank) * 10 for rank in range(4)]
    assert ", a rank 10, . is hidden" in twelve and max(map(len, twelve.splitlines())) < 120


def test_backward_and_both(capsys):
    tables = {
        direction: as_json(capsys, "--ranks", 12, *MHA, "--direction", direction, "--steps") for direction in DIRECTIONS
    }
    problem = Problem(1048576, 32, 128)
    for tile in ("1x12", "3x4", "12x1"):
        sent = {direction: row(data, tile)["sent_bytes"] for direction, data in tables.items()}
        mean = travels.mean_sent(problem, parse_tile(tile, 12), "backward")
        assert sent["backward"]["total"] == pytest.approx(mean, rel=1e-5)
        assert list(sent["backward"]) == ["Q", "KV", "dQ", "dKV", "total"]
        assert sent["both"] == {
            "forward": sent["forward"]["total"],
            "backward": sent["backward"]["total"],
            "total": sent["forward"]["total"] + sent["backward"]["total"],
        }
    assert list(tables["both"]["steps"]) == ["forward", "backward"]
    assert row(tables["backward"], "3x4")["saving_elements"] == pytest.approx(1 - (3 * 2 + 4 * 3) / (4 * 11))
    for direction in DIRECTIONS:
        text = plan(capsys, "--ranks", 12, *MHA, "--direction", direction)
        assert passes_in_words(direction) in text.splitlines()[0] and "<- auto" in text


def test_balance(capsys):
    arguments = ["--ranks", 8, "--seqlen", 8000, "--heads", 4, "--head-dim", 16, "--causal"]
    alone = "--layout", "contiguous", "--mesh-layout", "contiguous"
    contiguous, auto = as_json(capsys, *arguments, *alone), as_json(capsys, *arguments)
    assert row(contiguous, "1x8")["balance"] == pytest.approx(15 / 8, rel=1e-2)
    assert row(auto, "1x8")["balance"] == pytest.approx(1, abs=1e-3)
    assert (row(auto, "1x8")["layout"], row(auto, "1x8")["mesh_layout"]) == ("contiguous", "zigzag")
    assert row(auto, "bands")["balance"] == pytest.approx(1, abs=0.01)
    text = plan(capsys, *arguments, *alone)
    assert "1.87" in next(line for line in text.splitlines() if line.startswith("1x8"))


@pytest.mark.parametrize("ranks, seqlen", [(1, 100), (1, 0), (7, 3)])
def test_little(capsys, ranks, seqlen):
    arguments = ["--ranks", ranks, "--seqlen", seqlen, "--heads", 1, "--head-dim", 1, "--steps"]
    assert f"{ranks} rank" in plan(capsys, *arguments)
    as_json(capsys, *arguments)


def test_many_ranks(capsys):
    """Tiles that cannot be the best have a bound instead of a predicted time, and their bytes."""
    masked = [*MHA, "--causal", "--layout", "zigzag", "--schedule", "greedy"]
    every = as_json(capsys, "--ranks", 256, *masked)
    arguments = ["--ranks", 512, *masked, "--tile", "8x64"]
    data, text = as_json(capsys, *arguments), plan(capsys, *arguments)
    assert all(row["seconds"] == row["least_seconds"] for row in every["tiles"])
    assert row(data, "8x64")["seconds"] and row(data, data["auto"])["seconds"]
    ring = row(data, "1x512")
    assert ring["seconds"] is None and ring["least_seconds"] >= row(data, data["auto"])["seconds"] * 0.9
    ring_before = row(every, "1x256")["sent_bytes"]["total"]
    assert ring["sent_bytes"]["total"] == pytest.approx(ring_before, rel=0.01)
    line = next(line for line in text.splitlines() if line.startswith("1x512"))
    assert (
        " > " in line
        and "cannot be the best" in text
        and "cannot be the best" not in plan(capsys, *arguments[2:], "--ranks", 4, "--tile", "2x2")
    )


def test_picture():
    assert picture(Tile(2, 4, 2)).splitlines()[0] == (
        "each of the 2 planes of tile 2x4x2: A = 4 columns x B = 2 rows, n = 4 * row + column; n of plane p is rank "
        "2 * n + p"
    )
    assert picture(Tile(1, 4, 2)).splitlines()[1:4] == [
        "       |  c=0  c=1  c=2  c=3",
        "  r=0  |    0    1    2    3",
        "  r=1  |    4    5    6    7",
    ]
    large = picture(Tile(1, 64, 64))
    assert max(map(len, large.splitlines())) < 100 and len(large.splitlines()) < 12
    assert "4095" in large


@pytest.mark.draw(4)
@pytest.mark.parametrize(
    "arguments, code, message",
    [
        (["--ranks", "0", *MHA], 1, "ranks is 0"),
        (["--ranks", "4", *MHA, "--tile", "3x2"], 1, "it may be 1x4, 2x2, 4x1"),
        (["--ranks", "4", *MHA, "--kv-heads", "5"], 1, "must divide heads"),
        (["--ranks", "4", *MHA, "--json", "/no/such/folder/plan.json"], 1, "--json is '/no/such/folder/plan.json'"),
        (["--ranks", "4", *MHA, "--plot", "page.jpg"], 1, "--plot is 'page.jpg'; it must end in .png, .svg, .pdf"),
        (["--ranks", "4", *MHA, "--route", "star"], 2, "--route"),
        (["--ranks", "4", *MHA, "--route", "ring", "--wire-dtype", "float16"], 1, "on the ring route"),
        (["--ranks", "4", *MHA, "--window", "1"], 2, "--window"),
        (["--ranks", "four", *MHA], 2, "--ranks"),
        (MHA, 2, "--ranks"),
    ],
)
def test_errors(arguments, code, message):
    outcome = run(*arguments)
    assert outcome.returncode == code
    assert outcome.stderr.count("mpiattn plan: ") == 1 and message in outcome.stderr
    assert not outcome.stdout and "Traceback" not in outcome.stderr


def test_without_matplotlib_names_the_extra(tmp_path):
    """Before any work: the table would come after it."""
    (tmp_path / "matplotlib.py").write_text("raise ImportError('not here')\n")
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(launch.ROOT)])}
    outcome = run("--ranks", "4", *MHA, "--plot", str(tmp_path / "page.svg"), env=path)
    assert outcome.returncode == 1 and not outcome.stdout and "Traceback" not in outcome.stderr
    assert "pictures need matplotlib (not here)" in outcome.stderr and "pip install 'mpiattn[plot]'" in outcome.stderr
    assert not (tmp_path / "page.svg").exists()


def run(*arguments, env=None):
    return subprocess.run(
        [sys.executable, "-m", "mpiattn", "plan", *arguments],
        env=launch.environment(env),
        text=True,
        capture_output=True,
        timeout=launch.patience(60),
    )


def test_starts_no_mpi():
    code = (
        "import sys; from mpiattn.cli import main\n"
        f"main({['plan', '--ranks', '4', *MHA, '--steps']!r})\n"
        "assert 'mpi4py' not in sys.modules, 'MPI is imported'"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        env=launch.environment(),
        check=True,
        capture_output=True,
        timeout=launch.patience(60),
    )


def test_says_it_once_under_mpiexec():
    outcome = launch.mpirun(2, [sys.executable, "-m", "mpiattn", "plan", "--ranks", "4", *MHA])
    assert outcome.stdout.count(" of tile ") == 1


def test_a_reader_that_leaves_early_gets_no_traceback():
    command = f"{sys.executable} -m mpiattn plan --ranks 256 {' '.join(MHA)} | head -n 1"
    outcome = subprocess.run(
        ["bash", "-c", command], env=launch.environment(), text=True, capture_output=True, timeout=launch.patience(60)
    )
    assert "256 ranks" in outcome.stdout and not outcome.stderr


def test_json_file_beside_the_table(capsys, tmp_path):
    path = tmp_path / "plan.json"
    text = plan(capsys, "--ranks", 4, *MHA, "--json", path)
    data = json.loads(path.read_text())
    assert f"{data['auto']} " in text and data["ranks"] == 4
    assert os.listdir(tmp_path) == ["plan.json"]
