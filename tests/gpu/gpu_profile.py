"""Launches once what a profiler is to look at: forward, gradients and decoding, bfloat16, head dim 128.

ncu --clock-control none --set full -k regex:forward\\|gradient -o report python gpu_profile.py
"""

import sys

from gpu_subjects import Block, Decode, Own

from mpiattn import backends


def main():
    """Two blocks, each compared with float64 by the way, and a call of decoding."""
    backend = backends.get("cuda")
    for tokens, causal in ((8192, False),):
        own = Own(backend, Block(128, 32, tokens, causal))
        for direction in ("forward", "backward"):
            own.prepare(direction)
            getattr(own, direction)()
    Decode(backend, [65536], 8, 8).launch()
    backend.drain()


if __name__ == "__main__":
    sys.exit(main())
