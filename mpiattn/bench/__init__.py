"""Benchmarks: the parts of `mpiattn bench`, and `mpiexec -n N python -m mpiattn.bench.sdpa`.

The benchmarks measure ranks as the parallelism, so each rank gets one BLAS thread unless the user has set it.
This must happen before NumPy is first imported, so it happens here.
"""

import os

from ..system.host import BLAS_VARIABLES

if not any(name in os.environ for name in BLAS_VARIABLES):
    os.environ.update(dict.fromkeys(BLAS_VARIABLES, "1"))
