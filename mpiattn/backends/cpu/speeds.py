"""How fast a core computes blocks with each instruction set, for plans where `mpiattn tune` has measured nothing.

amx, avx512, avx2 and plain were measured on an Intel Xeon of the Sapphire Rapids kind at 2.6 GHz, with head dims 64 and
128.  avx512bf16 lies between AMD's EPYC processors of family 26, 235 and 430 Gflop/s, and older ones.  The others were
not measured: sve512 has 80 % of the peak of an A64FX, sve256 of that of a Neoverse V1.
"""

from dataclasses import replace
from typing import NamedTuple

from ...model.machine import DEFAULT


class Speed(NamedTuple):
    """Gflop/s of a core by dtype, float16 as float32; edge: as of `Machine`."""

    float32: float
    bfloat16: float
    float64: float
    edge: float


SPEEDS = {
    "amx": Speed(150, 550, 70, edge=128),
    "avx512bf16": Speed(190, 340, 95, edge=128),
    "avx512": Speed(145, 145, 70, edge=128),
    "avx2": Speed(95, 95, 45, edge=80),
    "sve512": Speed(110, 110, 55, edge=96),
    "sve256": Speed(65, 65, 32, edge=56),
    "plain": Speed(30, 30, 15, edge=30),
}


MERGING = 5e9  # bytes of partials a second; 6.7e9 were measured on an AMD EPYC of family 26


def assumed(instruction_set, threads):
    """The default machine with the speed of so many threads of an instruction set."""
    speed = SPEEDS[instruction_set]
    gflops = {"float32": speed.float32, "float16": speed.float32, "bfloat16": speed.bfloat16, "float64": speed.float64}
    return replace(
        DEFAULT,
        flops={dtype: 1e9 * threads * rate for dtype, rate in gflops.items()},
        edge=speed.edge,
        merging=MERGING,
        assumes=f"threads of a rank: {threads}, as fast as usual with {instruction_set}; a core's share of a 100 Gb/s "
        "link; run `mpiattn tune` to measure yours",
    )
