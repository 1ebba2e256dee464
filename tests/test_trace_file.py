"""What a trace file makes of the passes of ranks, by passes that are made up, and the clocks that it goes by."""

import gzip
import json
import os

import pytest
import warm
from files import write_input

from mpiattn.cli import main
from mpiattn.comm.clocks import Clock, of_nodes
from mpiattn.engine.record import Pass, Regrouped, Step, Transfer
from mpiattn.errors import FileError
from mpiattn.files.trace_file import RankTrace, Trace, events, read, write

SECOND = 1e6  # microseconds


def two_ranks():
    """Rank 0 sends rank 1 two chunks at once; rank 1, whose clock is 100 s ahead, sends by a collective."""
    steps = [Step(10.0, 11.0, 13.0, [(0, 1)]), Step(13.0, 14.0, 14.0, [(0, 0), (0, 2)]), Step(14.0, 14.5, 15.0, [])]
    sent = [
        Transfer("KV", 1, 0, 10.0, 12.0, [(1, 64)], []),
        Transfer("KV", 2, 0, 11.0, 13.0, [(1, 32)], []),
        Transfer("O", 0, 2, 14.0, 15.0, [], [(1, 8)]),
    ]
    received = [
        Transfer("KV", 1, 0, 110.0, 112.0, [], [(0, 64)]),
        Transfer("KV", 2, 0, 112.0, 113.0, [], [(0, 32)]),
        Transfer("O", 0, 2, 114.0, 115.0, [(0, 8)], []),
    ]
    late = [Step(*(time + 100 for time in step[:3]), step.blocks) for step in steps]
    exchange = [Regrouped(False, 109.0, 110.0, [(0, 5), (0, 6)])]
    return [
        RankTrace(0, "here", Clock(0.0, 0.0), [Pass("forward", 10.0, steps, sent, [Regrouped(False, 9.0, 10.0, [])])]),
        RankTrace(1, "there", Clock(100.0, 0.25), [Pass("forward", 110.0, late, received, exchange)]),
    ]


def shown(some, rank, thread):
    """(name, begin, length in seconds) of what a rank's thread shows."""
    named = {
        event["args"]["name"]: event["tid"]
        for event in some
        if event["ph"] == "M" and event["name"] == "thread_name" and event["pid"] == rank
    }
    return [
        (event["name"], event["ts"] / SECOND, event["dur"] / SECOND)
        for event in some
        if event["ph"] == "X" and (event["pid"], event["tid"]) == (rank, named.get(thread))
    ]


def test_threads():
    some = list(events(two_ranks()))
    for rank in range(2):
        assert shown(some, rank, "passes") == [("forward", 1, 5)]
        assert shown(some, rank, "regrouping") == [("before forward", 0, 1)]
        assert shown(some, rank, "blocks") == [("Q0 x KV1", 1, 1), ("2 blocks", 4, 1), ("posts transfers", 5, 0.5)]
        assert shown(some, rank, "waits") == [("for KV #1, KV #2", 2, 2), ("for O, all hops", 5.5, 0.5)]
        assert shown(some, rank, "O") == [("O, all hops", 5, 1)]
    assert shown(some, 0, "KV") == [("KV #1", 1, 2)] and shown(some, 0, "KV 2") == [("KV #2", 2, 2)]
    assert shown(some, 1, "KV") == [("KV #1", 1, 2), ("KV #2", 3, 1)] and not shown(some, 1, "KV 2")


def test_what_is_sent():
    some = list(events(two_ranks()))
    arguments = {(event["pid"], event["name"]): event["args"] for event in some if event["ph"] == "X"}
    assert arguments[0, "KV #2"] == {
        "pass": "forward", "kind": "KV", "hop": 2, "step": 0,
        "sent_bytes": 32, "sent": {"1": 32}, "received_bytes": 0, "received": {},
    }  # fmt: skip
    assert arguments[0, "forward"]["sent_bytes"] == 96 and arguments[1, "forward"]["sent_bytes"] == 8
    assert arguments[0, "before forward"]["received"] == {"1": 11}
    assert arguments[0, "2 blocks"]["blocks"] == ["Q0 x KV0", "Q0 x KV2"]


def test_arrows():
    """From where a message is sent to where it has arrived; none of a collective."""
    some = list(events(two_ranks()))
    arrows = [
        (event["ph"], event["id"], event["pid"], round(event["ts"] / SECOND, 6)) for event in some if "id" in event
    ]
    assert arrows == [("s", 0, 0, 1), ("f", 0, 1, 3), ("s", 1, 0, 2), ("f", 1, 1, 4)]


def test_the_file_says_how_clocks_were_compared(tmp_path):
    path = tmp_path / "trace.json"
    write("path", path, Trace({"tile": "1x2"}, two_ranks()))
    data = json.loads(path.read_text())
    assert path.read_text().startswith("{") and data["otherData"]["plan"] == {"tile": "1x2"}
    assert data["traceEvents"] == list(events(two_ranks()))
    clock = {"rank": 1, "host": "there", "clock_ahead_us": 1e8, "clock_error_us": 0.25e6}
    assert data["otherData"]["ranks"][1] == clock
    write("path", path, Trace({}, two_ranks()[:1]))  # which replaces it
    assert len(json.loads(path.read_text())["otherData"]["ranks"]) == 1


def test_whole_or_not_at_all(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FileError, match=r"--trace is .*; it cannot be written: No space left on device"):
        write("--trace", tmp_path / "trace.json", Trace({}, two_ranks()))
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    "nodes, expected",
    [
        ([0, 0, 0], [(0, 0), (1, 2), (7, 1)]),  # the last one's clock is not that of the others, as in a container
        ([0, 1, 1], [(0, 0), (1, 2), (7, 1)]),
        ([0, 1, 2], [(0, 0), (1, 2), (7, 1)]),
    ],
)
def test_ranks_with_clocks_of_their_own(nodes, expected):
    assert of_nodes([Clock(0, 0), Clock(1, 2), Clock(7, 1)], nodes) == expected


def test_ranks_of_a_node_have_one_clock():
    """What all of their answers allow: from 4 to 5."""
    measured = [Clock(0, 0), Clock(0.5, 1), Clock(3, 2), Clock(6, 2)]
    assert of_nodes(measured, [0, 0, 1, 1]) == [(0, 0), (0, 0), (4.5, 0.5), (4.5, 0.5)]


def passes_of(path):
    """The passes in a file by rank, and bytes by rank of all transfers."""
    some = json.loads(path.read_text())["traceEvents"]
    passes = [(event["pid"], event["name"]) for event in some if event.get("cat") == "passes"]
    return passes, sum(event["args"]["sent_bytes"] for event in some if event["ph"] == "X" and "hop" in event["args"])


def test_run(tmp_path):
    source, trace, report = write_input(tmp_path / "in.h5"), tmp_path / "t.json", tmp_path / "r.json"
    run = ["run", source, tmp_path / "out.h5", "--tile", "1x2", "--causal"]
    warm.command(2, [*run, "--trace", trace, "--json", report])
    passes, sent = passes_of(trace)
    assert passes == [(0, "forward"), (1, "forward")]
    assert sent == sum(rank["forward"]["sent_bytes"] for rank in json.loads(report.read_text())["per_rank"]) > 0
    trace.unlink()
    for bad, why in (
        (tmp_path / "no" / "t.json", "there is no folder"),
        (tmp_path, "it is a folder"),
        (source, "it must be another file than"),
        (report, "it must be another file than"),
    ):
        (tmp_path / "out.h5").unlink(missing_ok=True)
        outcome = warm.command(2, [*run, "--json", report, "--trace", bad], check=False)
        assert outcome.returncode == 1 and outcome.stderr.startswith(f"mpiattn: --trace is '{bad}'; {why}")
        assert not (tmp_path / "out.h5").exists()


def test_bench(tmp_path):
    trace, report = tmp_path / "t.json", tmp_path / "r.json"
    shape = "--seqlen 40 64 --heads 2 --head-dim 8 --runs 1 --backend numpy --direction both --tile 1x2 2x1".split()
    warm.command(2, ["bench", *shape, "--trace", trace, "--json", report])
    passes, sent = passes_of(trace)
    assert sorted(passes) == [(0, "backward"), (0, "forward"), (1, "backward"), (1, "forward")]
    case = next(each for each in json.loads(report.read_text())["cases"] if each["seqlen"] == 64)
    assert case["tile"] == "1x2" == json.loads(trace.read_text())["otherData"]["plan"]["tile"]
    assert sent == 2 * case["passes"]["both"]["sent_bytes"]["mean"]
    outcome = warm.command(2, ["bench", "--decode", "--trace", trace], check=False)
    assert outcome.returncode == 1 and "it has no meaning with --decode" in outcome.stderr


def test_read(tmp_path):
    """What was written, by direction and rank, in seconds since the first rank began the pass."""
    path = tmp_path / "trace.json"
    write("path", path, Trace({}, two_ranks()))
    packed = tmp_path / "trace.json.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    passes = read("FILE", path)
    assert read("FILE", packed) == passes
    assert {direction: list(ranks) for direction, ranks in passes.items()} == {"forward": [0, 1]}
    first, second = passes["forward"].values()
    assert first.timeline.steps == second.timeline.steps == ((0, 1, 3), (3, 4, 4), (4, 4.5, 5))
    assert second.timeline.moves == (("KV", 1, 0, 0, 2), ("KV", 2, 0, 2, 3), ("O", 0, 2, 4, 5))
    assert first.timeline.seconds == 5 and first.timeline.waiting == 2.5
    assert (first.sent, second.sent) == ({"KV": 96, "O": 0, "regrouping": 0}, {"KV": 0, "O": 8, "regrouping": 11})
    assert first.awaited == {"KV": 2, "O": 0.5} and second.regrouping == 1


def test_command(tmp_path, capsys):
    path = tmp_path / "trace.json"
    write("path", path, Trace({}, two_ranks()))
    assert main(["trace", str(path), "--json", str(tmp_path / "j.json")]) == 0
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    busiest = "the busiest is rank 0, whose blocks take 2.5 s, as long as the mean of all"
    assert said[0] == f"forward, 2 ranks: {busiest}".split()
    assert "rank time blocks waits regrouping KV sent O sent regrouping sent".split() in said
    assert "1 5 s 2.5 s 2.5 s 50.0 % 1 s 0 B 8 B 11 B".split() in said
    assert "KV 4 96 B 2 s 2 s on rank 0".split() in said
    first, second = json.loads((tmp_path / "j.json").read_text())["passes"]["forward"]
    assert (first["rank"], first["blocks_seconds"], second["waiting_seconds_by_kind"]["KV"]) == (0, 2.5, 2)


@pytest.mark.parametrize("ranks", [[], ["--ranks", "1"]])
def test_command_draws(tmp_path, capsys, ranks):
    pytest.importorskip("matplotlib", reason="takes matplotlib (extra plot)")
    path, picture = tmp_path / "trace.json", tmp_path / "trace.svg"
    write("path", path, Trace({}, two_ranks()))
    assert main(["trace", str(path), "--plot", str(picture), *ranks]) == 0
    assert capsys.readouterr().out == f"written  {picture}\n"
    drawn = picture.read_text()
    assert "rank 1" in drawn and ("rank 0<" in drawn) == (not ranks)


@pytest.mark.parametrize(
    "content, why",
    [
        (b"", "it is no file of --trace or save_trace"),
        (b"\x89HDF\r\n\x1a\n", "it is no file of --trace or save_trace"),
        (b"\x1f\x8b\x08", "it is no file of --trace or save_trace"),
        (b"[]", "it is no file of --trace or save_trace"),
        (b'{"traceEvents": [{"ph": "X", "ts": 0}]}', "it is no file of --trace or save_trace"),
        (b'{"traceEvents": []}', "it is no file of --trace or save_trace (it has no passes)"),
        (None, "it cannot be read: No such file or directory"),
    ],
)
def test_what_is_no_trace(tmp_path, capsys, content, why):
    path = tmp_path / "trace.json"
    if content is not None:
        path.write_bytes(content)
    assert main(["trace", str(path)]) == 1
    assert capsys.readouterr().err.startswith(f"mpiattn trace: FILE is '{path}'; {why}")


def test_a_trace_that_is_cut_off(tmp_path):
    path = tmp_path / "trace.json"
    write("path", path, Trace({}, two_ranks()))
    whole = path.read_bytes()
    for length in range(0, len(whole) - 5, 97):
        path.write_bytes(whole[:length])
        with pytest.raises(FileError, match="it is no file of --trace"):
            read("FILE", path)
