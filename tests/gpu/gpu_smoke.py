"""The first twenty seconds on a GPU: each kind of kernel once, against float64, and one speed.

  python gpu_smoke.py RESULT.json [--backend NAME]

Each step is printed when it is done, with its seconds, the compiler's among them; one that fails keeps no other from
being done.  RESULT.json is {step: {"seconds", "result" or "error"}}.
"""

import argparse
import json
import sys
import time
import traceback
from pathlib import Path

KEYS = 4096  # that a query sees in decoding
SHAPE = {"heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}


class Smoke:
    """The steps, in the order in which they are done."""

    def __init__(self, name, tokens):
        self.name, self.tokens = name, tokens
        self.steps = {
            "back end": self.make,
            "forward": lambda: self.check(False),
            "backward": lambda: self.check(True),
            "a head alone": self.lone,
            "speed": self.speed,
            "decode": self.decode,
        }

    def make(self):
        """The back end and its clock."""
        from mpiattn import backends
        from mpiattn.bench.clock import clock_of

        self.backend = backends.get(self.name)
        self.clock = clock_of(self.backend)
        return self.clock.device

    def problem(self, **more):
        """A causal block."""
        from mpiattn.problem.problem import Problem

        return Problem(**{"seqlen": self.tokens, "causal": True, **SHAPE, **more})

    def check(self, backward, **more):
        """One pass of few tokens."""
        from mpiattn.bench import kernel

        off = kernel.check_small(self.backend, self.problem(**more), backward)
        return f"off by {off:.1e} of the largest value"

    def lone(self):
        """Both passes with one head, where nothing is copied by folding, in float32."""
        more = {"heads": 1, "kv_heads": 1, "dtype": "float32"}
        return "; ".join(self.check(backward, **more) for backward in (False, True))

    def decode(self):
        """One query over pages."""
        from mpiattn.bench import kernel

        section = kernel.measure_decode(self.backend, self.clock, self.problem(), min(KEYS, 8 * self.tokens), 1)
        return ", ".join(f"{row['name']} {row['median'] * 1e6:.0f} us" for row in section["results"])

    def speed(self):
        """A causal block, timed."""
        from mpiattn.bench import kernel

        block = kernel.Block(self.backend, self.problem())
        seconds = kernel.timed_by(self.clock, block.attend, block.clear)()
        flops = 2 * (block.problem.head_dim + block.problem.value_dim) * block.pairs
        return f"{self.tokens} tokens, causal: {flops / seconds / 1e12:.3g} TFLOP/s"


def main():
    """Run the steps; the exit code is 1 if one has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--tokens", type=int, default=4096)
    args = parser.parse_args()
    smoke, done = Smoke(args.backend, args.tokens), {}
    for name, step in smoke.steps.items():
        start = time.perf_counter()
        try:
            outcome = {"result": step()}
        except Exception as error:  # of whatever kind: what else works is worth knowing
            traceback.print_exc()
            outcome = {"error": f"{type(error).__name__}: {error}"[:500]}
        done[name] = {"seconds": round(time.perf_counter() - start, 2), **outcome}
        print(f"{name}: {done[name]}", flush=True)
        args.result.write_text(json.dumps(done, indent=1))
        if name == "back end" and "error" in outcome:
            break
    return int(any("error" in outcome for outcome in done.values()))


if __name__ == "__main__":
    sys.exit(main())
