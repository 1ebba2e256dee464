"""Prints what every entry of the tile table takes on the architectures named in the arguments, without MPI; else see
`mpiattn info --kernels`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mpiattn.backends.cuda import kernel_table


def main():
    print("work, dtype, dim, architecture, tile: registers, bytes spilled, bytes of shared memory")
    for architecture in sys.argv[1:] or kernel_table.ARCHITECTURES:
        for row in kernel_table.rows(architecture):
            print(
                f"{row.work} {row.dtype} {row.head_dim} {row.architecture} {tuple(row.tile)}: "
                f"{row.registers} {row.spilled} {row.shared_bytes}",
                flush=True,
            )


if __name__ == "__main__":
    main()
