"""Files of traces: the last passes of all ranks as events, in the format that Chrome defined and Perfetto opens.

A process is a rank.  Its threads are the passes, the blocks, the waits, the regrouping, and the transfers of each kind,
in several lanes where they overlap.  Times are microseconds since the first event, by the clock of rank 0.
"""

from __future__ import annotations

import gzip
import json
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import FileError
from ..schedule.kinds import NAMES
from ..schedule.timeline import Moved, StepTimes, Timeline
from ..system.atomic_file import JSON, NewFile
from ..system.os_errors import reason
from ..system.words import number
from ..version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from os import PathLike

    from ..comm.clocks import Clock
    from ..engine.record import Messages, Pass, Transfer

Event = dict[str, Any]
Regroup = tuple[str, bool, int]  # the exchange before a direction's pass or, True, after it, of a rank
LANES = 64  # of a thread at most, by which their numbers are apart
THREADS = ("passes", "blocks", "waits", "regrouping", *NAMES)  # in the order in which they are shown
MICRO = 1000  # nanoseconds
MICROSECONDS = 1e6  # in a second
GZIP = b"\x1f\x8b"  # with which a packed file begins
NO_TRACE = "it is no file of --trace or save_trace"


class Ends(NamedTuple):
    """A message of a transfer between two ranks, by what both of them know of it."""

    direction: str
    kind: str
    hop: int
    sender: int
    receiver: int


class RankTrace(NamedTuple):
    """The last passes of a rank by its own clock.

    rank: in the caller's communicator.
    """

    rank: int
    host: str
    clock: Clock
    passes: list[Pass]


class Trace(NamedTuple):
    """The last passes of all ranks.

    plan: what was chosen, by name.
    """

    plan: dict[str, str]
    ranks: list[RankTrace]


class Slice(NamedTuple):
    """An event with a length, in nanoseconds since the first event.

    thread: which shows it.  sends, receives: by whom its messages are known at both ends, for the arrows.
    """

    thread: str
    name: str
    start: int
    stop: int
    arguments: dict[str, Any]
    sends: list[Ends] = []
    receives: list[Ends] = []


def write(name: str, path: str | PathLike[str], trace: Trace) -> None:
    """Write a file, whole or not at all.  name: of the argument `path`, for the FileError where that is impossible."""
    about = {
        "program": f"mpiattn {__version__}",
        "plan": trace.plan,
        "clocks": "times are by the clock of rank 0; that of each other rank was compared with it",
        "ranks": [
            {
                "rank": each.rank,
                "host": each.host,
                "clock_ahead_us": round(each.clock.ahead * 1e6, 3),
                "clock_error_us": round(each.clock.bound * 1e6, 3),
            }
            for each in trace.ranks
        ],
    }
    with NewFile(name, path, (), JSON) as new, open(new.partial, "w") as file:
        file.write('{"displayTimeUnit": "ms", "otherData": ' + json.dumps(about) + ',\n"traceEvents": [\n')
        for i, event in enumerate(events(trace.ranks)):
            file.write((",\n" if i else "") + json.dumps(event, separators=(",", ":")))
        file.write("\n]}\n")


def events(traces: list[RankTrace]) -> Iterator[Event]:
    """The events of a file: of every rank what its threads are called and what they show, then the arrows."""
    first = min(
        min([done.began, *(part.begun for part in done.regrouped)]) - trace.clock.ahead
        for trace in traces
        for done in trace.passes
    )
    arriving = _regrouped_bytes(traces)
    sent: dict[Ends, Event] = {}
    received: dict[Ends, Event] = {}
    for trace in traces:
        threads = {}
        for piece, thread, lane in _in_lanes(_slices(trace, first, arriving)):
            place = {"pid": trace.rank, "tid": LANES * THREADS.index(thread) + lane + 1}
            threads[place["tid"]] = f"{thread} {lane + 1}" if lane else thread
            length = piece.stop - piece.start
            yield {"ph": "X", "name": piece.name, "cat": thread, **place, "ts": piece.start / MICRO,
                   "dur": length / MICRO, "args": piece.arguments}  # fmt: skip
            sent |= {ends: place | {"ts": piece.start / MICRO} for ends in piece.sends}
            received |= {ends: place | {"ts": (piece.stop - min(length, 1)) / MICRO} for ends in piece.receives}
        yield from _names(trace, threads)
    for i, ends in enumerate(ends for ends in sent if ends in received):
        arrow = {"name": ends.kind, "cat": "messages", "id": i}
        yield {"ph": "s", **arrow, **sent[ends]}
        yield {"ph": "f", "bp": "e", **arrow, **received[ends]}


def _names(trace: RankTrace, threads: dict[int, str]) -> Iterator[Event]:
    """What a process and its threads are called, and their order."""
    of_process = {"pid": trace.rank, "ph": "M", "tid": 0}
    yield of_process | {"name": "process_name", "args": {"name": f"rank {trace.rank} on {trace.host}"}}
    yield of_process | {"name": "process_sort_index", "args": {"sort_index": trace.rank}}
    for thread, name in sorted(threads.items()):
        of_thread = {"pid": trace.rank, "ph": "M", "tid": thread}
        yield of_thread | {"name": "thread_name", "args": {"name": name}}
        yield of_thread | {"name": "thread_sort_index", "args": {"sort_index": thread}}


def _slices(trace: RankTrace, first: float, arriving: dict[Regroup, dict[str, int]]) -> Iterator[Slice]:
    """What a rank did; first: when the first event began, by the clock of rank 0; arriving: of `_regrouped_bytes`."""

    def at(time: float) -> int:
        return round((time - trace.clock.ahead - first) * 1e9)

    for done in trace.passes:
        of_pass = {"pass": done.direction}
        sent = sum(nbytes for moved in done.transfers for _, nbytes in moved.sent)
        yield Slice("passes", done.direction, at(done.began), at(done.ended), of_pass | {"sent_bytes": sent})
        awaited: dict[int, list[str]] = {}
        for each in done.transfers:
            awaited.setdefault(each.step, []).append(_name(each))
            yield _of_transfer(trace.rank, done.direction, each, at)
        for i, step in enumerate(done.steps):
            name, of_step = _name_of_blocks(step.blocks), of_pass | {"step": i}
            if step.blocks or i in awaited:
                blocks = of_step | {"blocks": [f"Q{q} x KV{kv}" for q, kv in step.blocks]}
                yield Slice("blocks", name, at(step.posted), at(step.computed), blocks)
            if i in awaited:
                waits = of_step | {"for": awaited[i]}
                yield Slice("waits", f"for {', '.join(awaited[i])}", at(step.computed), at(step.ended), waits)
        for part in done.regrouped:
            received = arriving.get((done.direction, part.given, trace.rank), {})
            moves = _bytes("sent", _by_rank(part.sent)) | _bytes("received", received)
            name = f"{'after' if part.given else 'before'} {done.direction}"
            yield Slice("regrouping", name, at(part.begun), at(part.ended), of_pass | moves)


def _of_transfer(rank: int, direction: str, moved: Transfer, at: Callable[[float], int]) -> Slice:
    arguments = {"pass": direction, "kind": moved.kind, "hop": moved.hop, "step": moved.step}
    arguments |= _bytes("sent", _by_rank(moved.sent)) | _bytes("received", _by_rank(moved.received))
    sends, receives = [], []
    if moved.hop:  # MPI alone knows who sends what to whom in a collective
        sends = [Ends(direction, moved.kind, moved.hop, rank, peer) for peer, _ in moved.sent]
        receives = [Ends(direction, moved.kind, moved.hop, peer, rank) for peer, _ in moved.received]
    return Slice(moved.kind, _name(moved), at(moved.begun), at(moved.arrived), arguments, sends, receives)


def _name(moved: Transfer) -> str:
    return f"{moved.kind} #{moved.hop}" if moved.hop else f"{moved.kind}, all hops"


def _name_of_blocks(blocks: list[tuple[int, int]]) -> str:
    if len(blocks) == 1:
        return "Q{} x KV{}".format(*blocks[0])
    return number(len(blocks), "block") if blocks else "posts transfers"


def _by_rank(messages: Messages) -> dict[str, int]:
    """Bytes by rank, whose number is text: JSON has no other keys."""
    sums: dict[str, int] = {}
    for rank, nbytes in messages:
        sums[str(rank)] = sums.get(str(rank), 0) + nbytes
    return sums


def _bytes(name: str, by_rank: dict[str, int]) -> dict[str, Any]:
    """Arguments of an event: bytes by rank, and their sum.  name: "sent" or "received"."""
    return {f"{name}_bytes": sum(by_rank.values()), name: by_rank}


def _regrouped_bytes(traces: list[RankTrace]) -> dict[Regroup, dict[str, int]]:
    """Bytes that a rank gets in an exchange before or after a pass, by the rank that sends them."""
    arriving: dict[Regroup, dict[str, int]] = {}
    for trace in traces:
        for done in trace.passes:
            for part in done.regrouped:
                for peer, nbytes in _by_rank(part.sent).items():
                    arriving.setdefault((done.direction, part.given, int(peer)), {})[str(trace.rank)] = nbytes
    return arriving


def _in_lanes(slices: Iterator[Slice]) -> Iterator[tuple[Slice, str, int]]:
    """Every slice with its thread and the lane in which it overlaps no other: the first that is free."""
    free: dict[str, list[int]] = {}  # until when the lanes of a thread are taken
    for piece in sorted(slices, key=lambda piece: (piece.start, piece.stop)):
        until = free.setdefault(piece.thread, [])
        lane = next((i for i, end in enumerate(until) if end <= piece.start), len(until))
        until[lane : lane + 1] = [piece.stop]
        yield piece, piece.thread, lane


# Reading


class RankPass(NamedTuple):
    """A pass of a rank, as a file of traces has it.

    timeline: in seconds since the first rank began the pass.
    regrouping: seconds of the exchanges before and after it.
    sent: bytes by kind, and by "regrouping".
    awaited: seconds of waits by kind; a wait for several kinds counts for each.
    """

    timeline: Timeline
    regrouping: float
    sent: dict[str, int]
    awaited: dict[str, float]


def read(name: str, path: str | PathLike[str]) -> dict[str, dict[int, RankPass]]:
    """The passes in a file of traces, which may be packed by gzip: by direction and rank.

    Raises FileError, which names the argument `name`, if it is no such file.
    """
    try:
        with open(path, "rb") as file:
            content = file.read()
        if content.startswith(GZIP):
            content = gzip.decompress(content)
        passes = _passes(json.loads(content)["traceEvents"])
    except OSError as error:
        raise FileError(f"{name} is {str(path)!r}; it cannot be read: {reason(error)}") from None
    except (ValueError, KeyError, TypeError, EOFError, zlib.error) as error:
        raise FileError(f"{name} is {str(path)!r}; {NO_TRACE} ({type(error).__name__}: {error})") from None
    if not passes:
        raise FileError(f"{name} is {str(path)!r}; {NO_TRACE} (it has no passes)")
    return passes


def _passes(some: list[Event]) -> dict[str, dict[int, RankPass]]:
    """The passes of events, by direction and rank."""
    slices: dict[str, dict[int, list[Event]]] = {}
    for event in sorted((event for event in some if event["ph"] == "X"), key=lambda event: event["ts"]):
        slices.setdefault(event["args"]["pass"], {}).setdefault(event["pid"], []).append(event)
    passes = {}
    for direction in sorted(slices, reverse=True):  # forward first
        by_rank = slices[direction]
        first = min(event["ts"] for shown in by_rank.values() for event in shown if event["cat"] == "passes")
        passes[direction] = {rank: _pass_of(direction, by_rank[rank], first) for rank in sorted(by_rank)}
    return passes


def _pass_of(direction: str, shown: list[Event], first: float) -> RankPass:
    """A pass of a rank from its events in order of time; first: microseconds at which the pass began."""
    steps: dict[int, StepTimes] = {}
    moves, regrouping = [], 0.0
    sent: dict[str, int] = {}
    awaited: dict[str, float] = {}
    for event in shown:
        thread, arguments = event["cat"], event["args"]
        begun, ended = (event["ts"] - first) / MICROSECONDS, (event["ts"] + event["dur"] - first) / MICROSECONDS
        if thread == "blocks":
            steps[arguments["step"]] = StepTimes(begun, ended, ended)
        elif thread == "waits":
            posted = steps[arguments["step"]].posted
            steps[arguments["step"]] = StepTimes(posted, begun, ended)
            for kind in {transfer.split()[0].rstrip(",") for transfer in arguments["for"]}:
                awaited[kind] = awaited.get(kind, 0.0) + ended - begun
        elif thread == "regrouping":
            regrouping += ended - begun
        elif thread in NAMES:
            moves.append(Moved(thread, arguments["hop"], arguments["step"], begun, ended))
        if thread != "passes" and "sent_bytes" in arguments:
            sent[thread] = sent.get(thread, 0) + arguments["sent_bytes"]
    times = tuple(steps[step] for step in sorted(steps))
    seconds = next(event["dur"] for event in shown if event["cat"] == "passes") / MICROSECONDS
    return RankPass(Timeline(direction, times, tuple(moves), seconds), regrouping, sent, awaited)
