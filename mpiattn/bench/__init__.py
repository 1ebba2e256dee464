"""Benchmarks: the parts of `mpiattn bench`, and `mpiexec -n N python -m mpiattn.bench.sdpa`.

Ranks are the parallelism that is measured, so each gets one BLAS thread unless the user has said otherwise.
That has to be set before NumPy is first imported, which is why it happens here.
"""

import os

from ..system.host import BLAS_VARIABLES

if not any(name in os.environ for name in BLAS_VARIABLES):
    os.environ.update(dict.fromkeys(BLAS_VARIABLES, "1"))
