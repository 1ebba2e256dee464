"""What BLAS libraries read from the environment when NumPy loads them: threads and, of OpenBLAS, the type of core.

What the user has set stays.
"""

import os

from ..system.host import BLAS_VARIABLES, CORE_TYPE, cores, mistaken_by_openblas
from ..system.launch_variables import local_ranks


def limit_threads():
    """Set the variables that BLAS libraries read when NumPy is first imported, so that ranks share the cores.

    Otherwise every rank would start a thread on every core, and fully used hosts would be several times slower.
    """
    if any(name in os.environ for name in BLAS_VARIABLES):
        return
    for name in BLAS_VARIABLES:
        os.environ[name] = str(max(1, len(cores()) // local_ranks()))


def name_core_type():
    """Tell OpenBLAS to use its kernels for AVX-512 on processors that it takes for older ones."""
    if CORE_TYPE not in os.environ and mistaken_by_openblas():
        os.environ[CORE_TYPE] = "SKYLAKEX"
