"""`mpiattn bench --kernel`: its options, and the measurement of one rank's back end."""

from .. import __version__, backends
from ..bench import kernel
from ..bench.baseline import load_torch
from ..bench.clock import clock_of
from ..bench.kernel_report import as_text
from ..comm.agreement import agreement
from ..console.json_file import check_json, write_json
from ..errors import ArgumentError
from ..model.space import DIRECTIONS
from ..problem.problem import Problem
from ..system import host
from ..system.installation import CUPY

KEYS = {"decode_keys": 65536, "carry_keys": 4096}
OWN = {"kernel", *KEYS}  # options that only --kernel takes
SHARED = {
    "seqlen",
    "heads",
    "kv_heads",
    "head_dim",
    "dtype",
    "causal",
    "direction",
    "backend",
    "runs",
    "timeout",
    "json",
}


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


def run(job, args):
    """Measure, on one rank; returns the exit code."""
    with agreement(job.peers):
        if job.comm.size > 1:
            raise ArgumentError(f"--kernel measures one rank; this launch has {job.comm.size}")
        sizes = {
            name: default if getattr(args, name) is None else getattr(args, name) for name, default in KEYS.items()
        }
        least = {"runs": 1, "seqlen": 1, **dict.fromkeys(KEYS, 0)}
        for name, value in {"runs": args.runs, "seqlen": min(args.seqlen), **sizes}.items():
            if value < least[name]:
                raise ArgumentError(f"--{name.replace('_', '-')} is {value}; it must be at least {least[name]}")
        check_json(args.json)
        problems = [
            Problem(
                seqlen=seqlen,
                heads=args.heads,
                kv_heads=args.kv_heads,
                head_dim=args.head_dim,
                dtype=args.dtype,
                causal=args.causal,
            )
            for seqlen in args.seqlen
        ]
        backend = backends.get(args.backend)
    data = _measured(backend, problems, args, **sizes)
    backend.close()
    if args.json:
        write_json(args.json, data)
    if args.json != "-":
        print(as_text(data), flush=True)
    return 0


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
    torch, (blas, threads) = load_torch(), host.blas()
    return {
        "mpiattn": __version__,
        "backend": backend.name,
        "compute": _compute(backend),
        "runs": args.runs,
        "problem": {
            "heads": first.heads,
            "kv_heads": first.kv_heads,
            "head_dim": first.head_dim,
            "dtype": first.dtype,
            "causal": first.causal,
        },
        "environment": {
            "device": clock.device,
            "processor": host.processor(),
            "cores": len(host.cores()),
            "blas": blas,
            "blas_threads": threads,
            "torch_threads": torch.get_num_threads() if torch else None,
        },
        "versions": {
            "numpy": host.version("numpy"),
            "torch": torch.__version__ if torch else None,
            "cupy": host.version(*CUPY),
        },
        "sections": sections,
    }


def _compute(backend):
    """ "real", or which back end for tests was measured."""
    return f"back end for tests: {backend.name}" if backends.find(backend.name).tests else "real"
