"""Benchmarks, started as `mpiexec -n N python -m mpiattn.bench.NAME`.

Ranks are the parallelism that is measured, so each gets one BLAS thread unless the user has said otherwise.
That has to be set before NumPy is first imported, which is why it happens here.
"""

import os

from ..cli.threads import VARIABLES

if not any(name in os.environ for name in VARIABLES):
    os.environ.update(dict.fromkeys(VARIABLES, "1"))
