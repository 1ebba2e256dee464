"""Whether this MPI really takes buffers of a device, tried in a process of its own: it may end in a crash.

The process is alone in its MPI world, whatever launch it was started from, and sends device buffers to itself.
"""

import os
import signal
import subprocess
import sys

COMMAND = (sys.executable, "-m", __name__)
TIMEOUT = 60.0             # seconds; a first use of a device takes some
SIZES = (8, 4 * 2 ** 20)   # bytes: one that MPI sends at once and one that it does not
SENDING = "sending"        # what the process prints before it does what may crash
# What a launcher leaves in the environment of its ranks; the process must not take itself for one of them.
LAUNCHER_PREFIXES = ("PMI_", "PMIX_", "PMI2_", "PALS_", "MV2_COMM_", "HYDI_", "HYDRA_", "OMPI_COMM_WORLD_",
                     "OMPI_MCA_ess", "OMPI_MCA_orte", "PRTE_", "MPI_LOCAL", "SLURM_")


def probe(command=COMMAND, timeout=TIMEOUT):
    """Run the probe: {"answer": "yes", "no" or "unknown", "text": what it did}."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_PREFIXES)}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))       # it must find what this process has found
    try:
        child = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                               timeout=timeout)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"answer": "unknown", "text": f"the probe could not be run: {error}"}
    if not child.returncode:
        return {"answer": "yes", "text": "a child process sent device buffers to itself"}
    how = (f"was ended by {signal.Signals(-child.returncode).name}" if child.returncode < 0
           else f"ended with code {child.returncode}")
    said = child.stderr.strip().splitlines()
    if SENDING not in child.stdout.split():
        return {"answer": "unknown", "text": f"the probe {how} before it sent: {said[-1] if said else 'no message'}"}
    return {"answer": "no", "text": f"a child process that sent a device buffer to itself {how}"}


def main():
    """The probe itself."""
    import cupy
    from mpi4py import MPI
    for size in SIZES:
        given, taken = cupy.arange(size, dtype="uint8"), cupy.zeros(size, dtype="uint8")
        cupy.cuda.runtime.deviceSynchronize()              # mpi4py does not
        print(SENDING, flush=True)
        MPI.COMM_WORLD.Sendrecv(given, 0, 0, taken, 0, 0)
        if not bool((given == taken).all()):
            sys.exit("what arrived is not what was sent")


if __name__ == "__main__":
    main()
