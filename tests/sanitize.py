"""Runs the tests of the CPU kernels with a sanitizer of GCC in the kernels: `python tests/sanitize.py --help`.

The kernels are compiled into a temporary folder.  Python itself is as it was: it starts with the sanitizer's library
loaded first, which sees every allocation, also NumPy's, and every thread.  The first report ends the run.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = [path for path in sorted((ROOT / "tests").glob("test_cpu*.py")) if "cpu_kernels" in path.read_text()]
# By name: flags of the compiler, libraries to load first, and the sanitizer's settings.
SANITIZERS = {
    "thread": ("-fsanitize=thread", ["libtsan.so"], {"TSAN_OPTIONS": "halt_on_error=1"}),
    "address": (
        "-fsanitize=address,undefined -fno-sanitize-recover=undefined",
        ["libasan.so", "libubsan.so"],
        {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"},
    ),
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Other arguments go to pytest, in place of the tests of the kernels.",
        allow_abbrev=False,
    )
    parser.add_argument("sanitizer", choices=SANITIZERS, help="thread: data races; address: also undefined behaviour")
    parser.add_argument("--threads", type=int, default=4, help="of each launch (default 4)")
    arguments, others = parser.parse_known_args()
    flags, libraries, settings = SANITIZERS[arguments.sanitizer]
    with tempfile.TemporaryDirectory() as folder:
        build = [sys.executable, "setup.py", "build_ext", "--build-temp", f"{folder}/temp", "--build-lib", folder]
        compiler = {"MPIATTN_BUILD_KERNELS": "1", "CC": "gcc", "CFLAGS": flags, "LDFLAGS": flags}
        subprocess.run(build, cwd=ROOT, env={**os.environ, **compiler}, check=True, stdout=subprocess.DEVNULL)
        print_path = [["gcc", f"-print-file-name={name}"] for name in libraries]
        paths = [subprocess.run(command, capture_output=True, text=True, check=True) for command in print_path]
        env = {
            **os.environ,
            **settings,
            "LD_PRELOAD": ":".join(path.stdout.strip() for path in paths),
            "MPIATTN_TEST_KERNELS": f"{folder}/mpiattn/backends/cpu/_kernels.so",
            "OMP_NUM_THREADS": str(arguments.threads),  # the kernels'
            "OPENBLAS_NUM_THREADS": "1",
        }
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "--capture=sys", *(others or FILES)], cwd=ROOT, env=env
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
