"""`mpiattn bench --kernel`: its options, and the measurement of one rank's back end."""

from .. import backends
from ..bench import environment, kernel
from ..bench.baseline import load_torch
from ..bench.clock import clock_of
from ..bench.kernel_report import as_text
from ..comm.agreement import agreement
from ..console import options
from ..errors import ArgumentError
from ..model.space import DIRECTIONS
from ..problem.problem import Problem
from ..system import host
from ..system.installation import CUPY
from ..version import __version__

KEYS = {"decode_keys": 65536, "carry_keys": 4096}
OWN = {"kernel", *KEYS}  # options that only --kernel takes
SHARED = set("seqlen heads kv_heads head_dim dtype causal direction backend runs timeout json".split())


def add_arguments(parser):
    """Declare --kernel and its options, after all others."""
    group = parser.add_argument_group(
        "one rank's kernels",
        "Of the options above, --kernel uses the sizes (without "
        "--batch), --dtype, --causal, --direction, --backend and --runs.",
    )
    group.add_argument(
        "--kernel", action="store_true", help="measure the launches of one rank's back end instead of plans"
    )
    group.add_argument(
        "--decode-keys",
        type=int,
        metavar="N",
        help=f"keys that a decoded token sees; measured with heads/kv-heads query heads per KV head, and with "
        f"{kernel.QUERIES} (default: {KEYS['decode_keys']}; 0: do not measure decoding)",
    )
    group.add_argument(
        "--carry-keys",
        type=int,
        metavar="N",
        help=f"keys of the block that is added to a partial result (default: {KEYS['carry_keys']}; "
        "0: do not measure this)",
    )


def measure(job, args):
    """Yield the figures of one rank, as data and text."""
    with agreement(job.peers):
        if job.comm.size > 1:
            raise ArgumentError(f"--kernel measures one rank; this launch has {job.comm.size}")
        options.check_least("seqlen", min(args.seqlen), 1)
        keys = {name: KEYS[name] if asked is None else asked for name, asked in options.given(args, *KEYS).items()}
        for name, number in keys.items():
            options.check_least(name, number, 0)
        shape = options.given(args, "heads", "kv-heads", "head-dim", "dtype", "causal")
        problems = [Problem(seqlen=seqlen, **shape) for seqlen in args.seqlen]
        backend = backends.get(args.backend)
    data = _measured(backend, problems, args, **keys)
    backend.close()
    yield data, as_text(data)


def _measured(backend, problems, args, decode_keys, carry_keys):
    clock, first = clock_of(backend), problems[0]
    sections = [
        kernel.measure_block(backend, clock, problem, direction, args.runs)
        for problem in problems
        for direction in DIRECTIONS[args.direction]
    ]
    if decode_keys:
        for queries in sorted({first.heads // first.kv_heads, kernel.QUERIES}):
            sections.append(kernel.measure_decode(backend, clock, first, decode_keys, args.runs, queries))
    if carry_keys:
        sections.append(kernel.measure_carry(backend, clock, first, carry_keys, args.runs))
    sections.append(kernel.measure_launch(backend, clock, first, args.runs))
    torch = load_torch()
    versions = {"torch": torch.__version__ if torch else None, "cupy": host.version(*CUPY)}
    return {
        "mpiattn": __version__,
        "backend": backend.name,
        "compute": _compute(backend),
        "runs": args.runs,
        "problem": {name: getattr(first, name) for name in ("heads", "kv_heads", "head_dim", "dtype", "causal")},
        "environment": {
            "device": clock.device,
            **environment.machine(cores=len(host.cores())),
            "torch_threads": torch.get_num_threads() if torch else None,
        },
        "versions": {"numpy": host.version("numpy"), **versions},
        "sections": sections,
    }


def _compute(backend):
    """ "real", or which back end for tests was measured."""
    return f"back end for tests: {backend.name}" if backends.find(backend.name).tests else "real"
