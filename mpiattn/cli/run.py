"""Compute exact attention of an HDF5 file on the ranks of this launch.

IN holds q (batch, seqlen, heads, head_dim), k and v (batch, seqlen_k, kv_heads, ...) in natural token order; with
--axes bhsd, heads come before tokens. Every rank reads its own tokens. With a striped layout on several hosts, every
rank reads consecutive tokens, and the ranks exchange them. OUT holds out, shaped as q, and lse (batch, heads, seqlen).
Its attributes hold the chosen plan, the command, the date and the versions. OUT appears whole or not at all; an
existing file is replaced.

A field on a grid has the grid's axes in place of seqlen, (batch, 721, 1440, heads, head_dim), or its points in C order;
with --grid every rank holds a block of it, and OUT has the axes of IN.

With --backward IN also holds dout, shaped as out, and OUT gets dq, dk, dv: the gradients of sum(dout * out). With
biases it gets their gradients too: dbias and dkey_bias in the shapes of what --bias and --key-bias name, dalibi_slopes.

A file may hold many problems, one a group, for example a layer each. They are computed in turn, with one plan for all
of one shape, and OUT gets the same groups. Names of datasets are then those in the group; "/name" is one of the file.
With --resume a run that ends early (time limit, preemption, failure) keeps what it has finished in the folder
OUT.unfinished, and the same command goes on with the first problem that is left. SIGUSR1 then ends the run after the
problem at hand, with exit code 138.

examples:
  mpiexec -n 4 mpiattn run qkv.h5 out.h5 --window 1024,0 --verify
  mpiexec -n 4 mpiattn run qkv.h5 out.h5 --causal --documents cu_seqlens --backward
  mpiexec -n 4 mpiattn run layers.h5 out.h5 --problems 'layers/1?' --resume
  mpiexec -n 16 mpiattn run field.h5 out.h5 --grid 721x1440 --dims 4x4
"""

import contextlib
import sys
from functools import partial
from typing import NamedTuple

from .. import backends
from ..comm.agreement import agreement
from ..console import options
from ..console.interrupts import EndRequest
from ..console.json_file import check_json, report
from ..console.launch import on_all_ranks
from ..console.progress import Progress, Whole
from ..errors import ArgumentError
from ..files.input import Input
from ..files.output import Contents, Output
from ..files.problems import read_problems
from ..files.trace_file import write as write_trace
from ..files.unfinished import MADE_BY, Unfinished, note_unused
from ..system import memory_limits, partial_files
from ..system.atomic_file import JSON, check_target
from . import biases, opening, run_problem
from .names import add_names
from .report import as_json, as_text
from .report_of_many import as_json_of_all, as_text_of_all, problems_text
from .run_attributes import PLAN, made_by


def add_arguments(parser):
    """Declare the arguments of `mpiattn run`."""
    parser.add_argument("input", metavar="IN", help="HDF5 file with datasets q, k, v, and dout for --backward")
    parser.add_argument("output", metavar="OUT", help="HDF5 file to make, with datasets out, lse, and dq, dk, dv")
    add_names(parser)
    parser.add_argument("--backward", action="store_true", help="gradients too: dq, dk, dv of sum(dout * out)")
    options.add_axes(parser, "IN and OUT")
    options.add(parser, *options.MASKS, "mask", "documents", "documents-k")
    options.add_padding(parser, "the first document")
    options.add_missing(parser, "IN")
    options.add(parser, "softcap", "scale")
    biases.add_arguments(parser)
    options.add(parser, "layout", "grid", "dims", *PLAN)
    options.add_max_message(parser)
    options.add(parser, "max-memory", "machine")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="check the results before OUT is written: every rank compares its rows, and with --backward its keys, "
        "with float64 attention of IN, or a sample of them if all are too much work; a wrong row or key gives exit "
        "code 1 and no OUT",
    )
    options.add_timeout(parser)
    options.add(parser, "json")
    parser.add_argument(
        "--problems",
        metavar="PATTERN",
        help="of a file of many problems, those in groups whose path matches, for example 'layers/1?'; * also stands "
        "for / (default: the datasets that are in no group, or if there are none, all groups that have q)",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with what an earlier run of this command has left in OUT.unfinished, if there is anything, and "
        "leave there what is finished if this run ends early; does nothing if OUT is whole",
    )
    options.add_trace(parser, "of the forward pass and, with --backward, the backward pass")


def run(args):
    """`mpiattn run`."""
    return on_all_ranks(lambda job: _run(job, args), args.timeout)


def _check(args):
    """Raise FileError if a file that the run makes could not be written, or is one that it needs."""
    others = args.input, args.output
    check_json(args.json, others)
    if args.trace is not None:
        check_target("--trace", args.trace, [*others, *filter(None, [args.json])], JSON)


def _run(job, args):
    comm, peers, before = job.comm, job.peers, memory_limits.peak()
    job.on_rank_0(lambda: _check(args))
    look = partial(read_problems, chosen=args.problems, names=args.names, backward=args.backward, grid=args.grid)
    how = options.given(args, "names", "axes", "grid", "missing")
    source = Input(peers, args.input, args.max_message, look, **how)
    with agreement(peers):
        _check_trace(args, len(source.shapes))
    tasks = run_problem.tasks_of(comm, peers, args, source)
    peers.timeout = max(peers.timeout, *(task.plan.timeout for task in tasks))  # phases may take as long as a pass
    origin, kept = opening.origin(peers, args.words), None
    if args.resume:
        kept = Unfinished(peers, args.output, source, made_by(tasks, args), len(tasks))
    elif not peers.rank:
        note_unused(args.output)
    if kept and kept.whole:
        source.close()
        text = f"mpiattn run: {args.output} is whole, made by the same command; nothing is left to do"
        report(job, args.json, lambda: ({"input": args.input, "output": args.output, "whole": True}, text))
        return 0
    output = None
    try:
        with EndRequest(kept is not None) as request:
            _open(peers, args, tasks, origin, kept)
            output = _output(peers, args, tasks, origin, kept)
            left = _left(tasks, kept)
            many = len(tasks) > 1 or not left
            del tasks  # which would keep the biases of problems that are done
            done = _solve_each(job, args, left, many, output, kept, request, before)
            if left:
                return _ended(peers, request)
            source.close()
            job("commit", output.commit)
            if args.trace:
                job.on_rank_0(lambda: write_trace("--trace", args.trace, done.trace))
            report(job, args.json, lambda: _report(args, origin, source.shapes, many, done))
    finally:  # what does nothing once the file has its name
        if output is not None:
            output.abandon()
        if kept is not None:
            kept.discard()
    return 0


class _Done(NamedTuple):
    """What came of a run.

    reports: on rank 0, of all problems, by path.  facts, trace: of the last problem of this run.
    """

    reports: dict
    facts: tuple | None = None
    trace: object = None


def _left(tasks, kept):
    """The tasks that are not finished, those of a plan together: one plan after the other has its buffers."""
    plans = list(dict.fromkeys(task.plan for task in tasks))
    left = [task for task in tasks if not (kept and task.group in kept.finished)]
    return sorted(left, key=lambda task: plans.index(task.plan))


def _ended(peers, request):
    """Say on rank 0 that a signal has ended the run; returns the exit code."""
    if not peers.rank:
        text = f"mpiattn run: ended by SIGUSR1, OUT was not written{partial_files.kept()}"
        print(text, file=sys.stderr, flush=True)
    return request.code


def _report(args, origin, groups, many, done):
    """The report as a dict for JSON and as text."""
    if not many:
        return origin | as_json(*done.facts), as_text(*done.facts)
    reports = {group: done.reports[group] for group in groups}
    return as_json_of_all(args, origin, reports), as_text_of_all(args, reports)


def _check_trace(args, problems):
    if args.trace is not None and problems > 1:
        raise ArgumentError(f"--trace is given, and IN has {problems} problems; choose one by --problems")
    if args.trace is not None and args.resume:
        raise ArgumentError("--trace is given with --resume; give one of them: a trace is of a problem computed now")


def _solve_each(job, args, left, many, output, kept, request, before):
    """Compute, verify and write the tasks `left`, and take each off that list, until a signal asks for the end.

    Returns `_Done`.  before: peak resident bytes before the plans were made.
    """
    done = _Done(dict(kept.reports) if kept else {})
    with _progress(many, left) as phases:
        while left and not request.of_any(job.peers):
            task = left.pop(0)
            job.seconds, job.of = {}, task.group
            last = all(other.plan is not task.plan for other in left)
            solved = run_problem.solve(job, args, task, phases(task), last)
            run_problem.write(job, output, task, solved, phases(task))
            local = solved.local | {"peak_bytes": memory_limits.peak(), "peak_bytes_before": before}
            ranks = job.peers.gather(local)
            if ranks is not None:
                facts = args, task.plan, task.chosen, job.seconds, ranks, solved.reports, solved.odd
                done.reports[task.group] = as_json(*facts)
                done = done._replace(facts=facts, trace=solved.trace)
            del solved  # frees the results
            if kept:
                output.flush()
                kept.add(task.group, done.reports.get(task.group))
    job.of = ""
    return done


def _output(peers, args, tasks, origin, kept):
    """The output file; collective."""
    attributes = origin if kept is None else origin | {MADE_BY: kept.made_by}
    contents = {"": Contents({}, attributes)}
    for task in tasks:
        of_file = {} if task.group else attributes
        contents[task.group] = run_problem.contents(task, args, of_file | task.chosen)
    with agreement(peers):
        run_problem.check_places(contents)
    return Output(peers, args.output, contents, (args.input,), args.max_message, unfinished=kept)


@contextlib.contextmanager
def _progress(many, left):
    """A function that gives, for a task, what makes the `Progress` of its phases."""
    if not many:
        yield lambda task: Progress
        return
    flops = sum(task.flops for task in left) or 1
    with Whole("run", len(left), " problems") as whole:
        yield lambda task: whole.phases(task.group, task.shares(len(left) * task.flops / flops))


def _open(peers, args, tasks, origin, kept):
    """Print the opening text on rank 0; collective."""
    hosts = opening.hosts_of(peers)
    if peers.rank:
        return
    plan = tasks[0].plan
    on_cores = not backends.find(plan.backend).on_gpu and not backends.find(plan.backend).tests
    warning = opening.crowded(hosts) if on_cores else None
    if args.json == "-":
        if warning:
            print(f"mpiattn run: WARNING: {warning}", file=sys.stderr, flush=True)
    else:
        passes = ["forward", "backward"][: 1 + args.backward]
        done = kept.finished if kept else ()
        seconds = [task.plan.predicted_seconds for task in tasks if task.group not in done]
        problem = problems_text(tasks, len(done))
        print(opening.text(plan, origin, hosts, problem, passes, seconds, warning), flush=True)
