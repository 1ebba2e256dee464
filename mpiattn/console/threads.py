"""BLAS threads of a rank: its share of the host's cores, unless the user has set them."""

import os

from ..system.host import BLAS_VARIABLES
from ..system.launch_variables import local_ranks


def limit_threads():
    """Set the variables that BLAS libraries read when NumPy is first imported, so that ranks share the cores.

    Otherwise every rank would start a thread on every core, and fully used hosts would be several times slower.
    """
    if any(name in os.environ for name in BLAS_VARIABLES):
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for name in BLAS_VARIABLES:
        os.environ[name] = str(max(1, cores // local_ranks()))
