"""Times of the kernels beside PyTorch's flash and cuDNN attention, in one process, and decoding beside a copy.

  python gpu_speed.py RESULT.json [--backends cuda ...] [--what blocks decode] [--limit SECONDS]

Inputs are drawn on the GPU, and some rows of every result are compared with float64 there, so nearly all of the time is
measurement.  Subjects of a case are timed in turn, by events.  RESULT.json has a list of cases, each with its rows:
the name, the median of seconds per pass, useful TFLOP/s or GB/s, and what it is off float64, of the largest value.  A
subject that fails is reported, and keeps no other from being measured.
"""

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from gpu_subjects import KV_HEADS, Block, Copy, Decode, Own, Torch

from mpiattn import backends

RUNS, LEAST = 5, 0.015  # measurements of each subject, seconds of a measurement
ALLOWED = 3e-2  # of the largest value, of bfloat16
BLOCKS = [  # head dim, query heads, tokens, causal
    (dim, heads, tokens, causal)
    for dim, heads in ((128, 32), (64, 32), (256, 16))
    for tokens in (8192, 16384)
    for causal in (False, True)
]
DECODES = {  # keys of each sequence, KV heads, query heads of each
    "64k keys": ([65536], 8, 8),
    "64k keys, 1 query head": ([65536], 8, 1),
    "64 sequences of 4k": ([4096] * 64, 8, 8),
    "a sequence of 128k, 63 of 2k": ([131072] + [2048] * 63, 8, 8),
    "100 sequences of 1k to 16k": (list(np.random.default_rng(0).integers(1024, 16384, 100)), 8, 8),
    "16 sequences of 8k, window of 4k": ([8192] * 16, 8, 8, 4096),
}


def in_turn(subjects, work, direction=None):
    """Rows of a case: (name, median seconds, off or an error); subjects: made by functions that may fail."""
    ready, rows = [], []
    for name, make in subjects:
        try:
            subject = make()
            error = subject.check(direction)
            if error is not None and not error <= ALLOWED:
                raise ValueError(f"off by {error:.2g} of the largest value")
            times = max(1, min(100, round(LEAST / subject.seconds(direction, 1))))
            ready.append((subject, error, partial(subject.seconds, direction, times), []))
        except Exception as failure:
            rows.append({"name": name, "error": " ".join(f"{type(failure).__name__}: {failure}".split())[:300]})
    for _ in range(RUNS):
        for *_, timed, seconds in ready:
            seconds.append(timed())
    done = []
    for subject, error, _, seconds in ready:
        median = float(np.median(seconds))
        done.append({"name": subject.name, "seconds": median, "off": error, "rate": work / median / 1e9})
    return done + rows


def blocks(made, record):
    """Cases of BLOCKS, forward and backward."""
    for dim, heads, tokens, causal in BLOCKS:
        block = Block(dim, heads, tokens, causal)
        own = {name: Own(backend, block) for name, backend in made.items()}
        for direction in ("forward", "backward"):
            subjects = [(name, partial(own.get, name)) for name in own]
            for kind, deterministic in (("FLASH", False), ("FLASH", True), ("CUDNN", False), ("CUDNN", True)):
                if direction == "backward" or not deterministic:
                    subjects.append((f"{kind.lower()} {deterministic}", partial(Torch, kind, block, deterministic)))
            rows = in_turn(subjects, block.flops[direction], direction)
            mask = "causal" if causal else "full"
            record(f"{direction} d{dim} {heads}/{KV_HEADS} heads {tokens} {mask}, TFLOP/s", rows, 1e3)


def decode(made, record):
    """Cases of DECODES."""
    for name, case in DECODES.items():
        subjects = {each: partial(Decode, backend, *case) for each, backend in made.items()}
        first = next(iter(subjects.values()))()
        rows = in_turn([*subjects.items(), ("a copy", partial(Copy, first.nbytes))], first.nbytes)
        del first
        record(f"decode d128 {name}, {case[2]} heads a KV head of {case[1]}, GB/s", rows, 1)


def main():
    """Measure; the exit code is 1 if an own result is wrong or failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--backends", nargs="+", default=["cuda"])
    parser.add_argument("--what", nargs="+", default=["blocks", "decode"], choices=["blocks", "decode"])
    parser.add_argument("--limit", type=float, default=1e9, metavar="SECONDS", help="begin no case after them")
    args = parser.parse_args()
    begun, cases, failed = time.monotonic(), [], []

    def record(case, rows, divisor):
        for row in rows:
            if "rate" in row:
                row["rate"] /= divisor
            elif "mpiattn" in row["name"] or row["name"] in args.backends:
                failed.append(case)
        cases.append({"case": case, "rows": rows})
        args.result.write_text(json.dumps(cases, indent=1))
        cells = [
            f"{row['name']} {row['rate']:.4g}" + (f" (off {row['off']:.1e})" if row["off"] is not None else "")
            if "rate" in row
            else f"{row['name']}: {row['error']}"
            for row in rows
        ]
        print(f"{time.monotonic() - begun:5.1f} s  {case}: {'; '.join(cells)}", flush=True)
        torch.cuda.empty_cache()
        if time.monotonic() - begun > args.limit:
            sys.exit("the time is over")

    made = {name: backends.get(name) for name in args.backends}
    for kind in args.what:
        {"blocks": blocks, "decode": decode}[kind](made, record)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
