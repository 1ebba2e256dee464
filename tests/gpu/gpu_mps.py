"""NVIDIA's MPS, with which the ranks of a launch use a GPU at the same time and not in turn; standard library only."""

import contextlib
import os
import subprocess
import sys

from gpu_install import program_path

SECONDS = 20
CONTROL = "nvidia-cuda-mps-control"
CLIENT = "import cupy; print('adds up to', int(cupy.arange(4).sum()))"  # the first one starts the server


class Mps:
    """A daemon of this run, whose pipes and logs are in a folder of its own; no setting of the GPU is changed.

    variables: for the programs that are to use it; none before it runs.
    """

    def __init__(self, folder):
        self.folder, self.variables = folder, {}
        self._own = {"CUDA_MPS_PIPE_DIRECTORY": str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}

    def start(self, run, record):
        """The section: the daemon, and a program that uses the GPU through it.  If either fails, it is stopped."""
        control = program_path(CONTROL)
        self.folder.mkdir(exist_ok=True)
        self.stop()  # that of a command that was killed
        run([control, "-d"], SECONDS, **self._own)
        self.variables = self._own
        try:
            text = run([sys.executable, "-c", CLIENT], 3 * SECONDS, **self._own)
            said = run(["sh", "-c", f"echo get_server_list | '{control}'"], SECONDS, **self._own).split()
            servers = [word for word in said if word.isdecimal()]  # it says in words that there is no daemon
            if "adds up to 6" not in text or not servers:
                raise RuntimeError("a program has used the GPU, but not through MPS: it has no server")
        except BaseException:
            self.stop()
            raise
        record["result"] = f"server {servers[-1]}; the ranks share it"

    def stop(self):
        """End the daemon, if it runs."""
        self.variables = {}
        if self.folder.is_dir():
            with contextlib.suppress(Exception):  # there is no daemon, or no such program
                environment = os.environ | self._own
                subprocess.run(
                    [program_path(CONTROL)],
                    input=b"quit\n",
                    env=environment,
                    timeout=SECONDS,
                    capture_output=True,
                    check=False,
                )
