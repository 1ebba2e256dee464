"""Probes whether this MPI really takes device buffers, in a child process because the attempt may crash.

The child is alone in its MPI world, even if this process runs under a launcher, and sends device buffers to itself.
"""

import os
import signal
import subprocess
import sys

from .words import reason

COMMAND = (sys.executable, "-m", __name__)
TIMEOUT = 60.0  # seconds; the first use of a device takes some
SIZES = (8, 4 * 2**20)  # bytes: an eager and a rendezvous message
SENDING = "sending"  # printed by the child before the send, which may crash
# Variables that launchers set for their ranks; without them the child does not take itself for a rank.
LAUNCHER_PREFIXES = (
    "PMI_",
    "PMIX_",
    "PMI2_",
    "PALS_",
    "MV2_COMM_",
    "HYDI_",
    "HYDRA_",
    "OMPI_COMM_WORLD_",
    "OMPI_MCA_ess",
    "OMPI_MCA_orte",
    "PRTE_",
    "MPI_LOCAL",
    "SLURM_",
)


def probe(command=COMMAND, timeout=TIMEOUT):
    """Run the probe: {"answer": "yes", "no" or "unknown", "text": what happened}."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_PREFIXES)}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # the same import path as here
    try:
        child = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"answer": "unknown", "text": f"the probe could not be run: {error}"}
    if not child.returncode:
        return {"answer": "yes", "text": "a child process sent device buffers to itself"}
    how = (
        f"was ended by {signal.Signals(-child.returncode).name}"
        if child.returncode < 0
        else f"ended with code {child.returncode}"
    )
    if SENDING not in child.stdout.split():
        why = reason(child.stderr) or "no message"
        return {"answer": "unknown", "text": f"the probe {how} before it sent: {why}"}
    return {"answer": "no", "text": f"a child process that sent a device buffer to itself {how}"}


def main():
    """The child: send device buffers to itself."""
    import cupy
    from mpi4py import MPI

    for size in SIZES:
        given, taken = cupy.arange(size, dtype="uint8"), cupy.zeros(size, dtype="uint8")
        cupy.cuda.runtime.deviceSynchronize()  # mpi4py does not
        print(SENDING, flush=True)
        MPI.COMM_WORLD.Sendrecv(given, 0, 0, taken, 0, 0)
        if not bool((given == taken).all()):
            sys.exit("what arrived is not what was sent")


if __name__ == "__main__":
    main()
