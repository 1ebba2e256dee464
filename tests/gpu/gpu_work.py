"""What run_all.py does, section by section: commands, and what their output says; standard library only."""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from gpu_install import HELLO, Installed, greeting
from gpu_sections import Skip
from rank_cases import CASES

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent
ROOT = next(folder for folder in HERE.parents if (folder / "mpiattn" / "__init__.py").is_file())
GROUP_SECONDS = 530  # that the sections of a group have together
DEVICE = """
import cupy, json
runtime = cupy.cuda.runtime
count = runtime.getDeviceCount()
of = runtime.getDeviceProperties(0)
print(json.dumps({"count": count, "name": of["name"].decode(), "memory": of["totalGlobalMem"],
      "multiprocessors": of["multiProcessorCount"], "capability": f"{of['major']}{of['minor']}",
      "cupy": cupy.__version__, "runtime": runtime.runtimeGetVersion(), "driver": runtime.driverGetVersion(),
      "nvrtc": cupy.cuda.nvrtc.getVersion()}))
"""
PYTEST = ("-m", "pytest", "-v", "--color=no", "--tb=short", "--durations=5", "-p", "no:cacheprovider")
SMALL = "not 256 and (windows or causal)"  # of the blocks' cases, under the sanitizer


class Section(NamedTuple):
    """A section: seconds that it should take and that it may take, and what does it."""

    group: str
    estimate: float
    limit: float
    about: str
    function: Callable
    arguments: tuple = ()
    options: dict = {}
    gpu: bool = True  # whether it needs one


class Work:
    """What the sections do: methods of `run(words, seconds, **environment)`, `record` and their own arguments."""

    def __init__(self, args):
        self.args, self.installed, self.no_gpu, self.architecture = args, Installed(args.work), "", "sm_90"
        self.threads = "1" if args.quick else str(max(1, len(os.sched_getaffinity(0)) // 2))  # of references

    def environment(self, **options):
        """Of the commands of a section."""
        return self.installed.environment(ROOT, **options)

    def install(self, run, record):
        """Wheels, for this Python."""
        self.installed.install(self.args.wheels, run, record)

    def device(self, run, record):
        """The GPU, as CuPy sees it."""
        if self.args.backend != "cuda":
            raise Skip(f"--backend is {self.args.backend}")

        def read(text):
            self.no_gpu = f"no GPU that CuPy can use: {(text.strip().splitlines() or ['no answer'])[-1][:300]}"

        try:
            record.update(json.loads(run([sys.executable, "-c", DEVICE], 120, read).splitlines()[-1]))
        except RuntimeError:
            raise RuntimeError(self.no_gpu) from None
        self.no_gpu, self.architecture = "", f"sm_{record['capability']}"
        record["result"] = f"{record['name']}, {record['multiprocessors']} multiprocessors, NVRTC {record['nvrtc']}"

    def smoke(self, run, record):
        """One of each kernel."""
        path = self.args.results / "smoke-steps.json"
        path.unlink(missing_ok=True)

        def read(text):
            record["steps"] = json.loads(path.read_text()) if path.is_file() else {}
            record["result"] = "; ".join(
                f"{name}: {step.get('result') or step['error']}" for name, step in record["steps"].items()
            )

        run(
            [
                sys.executable,
                HERE / "gpu_smoke.py",
                path,
                "--backend",
                self.args.backend,
                *(["--tokens", "64"] if self.args.quick else []),
            ],
            GROUP_SECONDS,
            read,
            OPENBLAS_NUM_THREADS=self.threads,
        )

    def mpi(self, run, record):
        """Four ranks."""
        text = run([self.installed.mpiexec("mpich"), "-n", "4", sys.executable, "-c", HELLO], 60)
        record["result"] = greeting(text)
        if "add up to 6:" not in record["result"]:
            raise RuntimeError("mpiexec and mpi4py belong to different MPIs: the ranks do not know of each other")

    def compile(self, run, record):
        """The tile table, as NVRTC and ptxas have it for this GPU."""

        def read(text):
            rows = re.findall(r"^(.*): (\d+) (\d+) (\d+)$", text, re.MULTILINE)
            record["kernels"] = {
                name: dict(zip(("registers", "spilled", "shared_bytes"), map(int, numbers))) for name, *numbers in rows
            }
            record["spilling"] = [name for name, of in record["kernels"].items() if of["spilled"]]
            record["result"] = f"{len(rows)} kernels for {self.architecture}, {len(record['spilling'])} of them spill"

        run([sys.executable, TESTS / "nvrtc.py", self.architecture], GROUP_SECONDS, read)
        if not record["kernels"]:
            raise RuntimeError("no kernel was compiled")

    def pytest(self, run, record, file, cases="", ranks=None, before=(), **environment):
        """Tests, whose counts are recorded even if some fail.

        ranks: (how many, of which MPI); before: what runs Python.
        """
        words = [*before, sys.executable, *PYTEST, TESTS / file, "-k", cases]
        if ranks:
            words = [self.installed.mpiexec(ranks[1]), "-n", ranks[0], *words]
            environment |= {"mpi": ranks[1], "OPENBLAS_NUM_THREADS": "1"}

        def read(text):
            counts = re.findall(r"^=+ (.*(?:passed|failed|skipped|error).*?) =+$", text, re.MULTILINE)
            record["result"] = counts[-1] if counts else ""
            record["failed"] = re.findall(r"^(?:FAILED|ERROR) (.{0,200})", text, re.MULTILINE)[:20]

        text = run(words, GROUP_SECONDS, read, **environment)
        if " passed" not in f" {record['result']}":
            raise RuntimeError(f"nothing was tested: {record['result'] or 'no tests'}")
        return text

    def ranks(self, run, record, file, transport="staged"):
        """Four ranks on the GPU, staged through host memory or by CUDA IPC."""
        self.pytest(
            run,
            record,
            f"mpi/{file}",
            CASES[file],
            (4, "mpich"),
            MPIATTN_BACKENDS=self.args.backend,
            MPIATTN_TRANSPORT=transport,
        )

    def openmpi(self, run, record):
        """An Open MPI with CUDA."""
        self.installed.unpack_openmpi(self.args.openmpi, run, record)

    def probe(self, run, record):
        """Whether this Open MPI takes device memory, in one process."""
        self.needs_openmpi()
        run([sys.executable, "-m", "mpiattn.system.gpu_probe"], 60, mpi="openmpi")
        record["result"] = "device buffers were sent"

    def direct(self, run, record, file):
        """Four ranks whose MPI takes device memory."""
        self.needs_openmpi()
        self.pytest(
            run,
            record,
            f"mpi/{file}",
            CASES[file],
            (4, "openmpi"),
            MPIATTN_BACKENDS=self.args.backend,
            MPIATTN_TRANSPORT="device",
        )

    def tiles(self, run, record):
        """Other tile sizes than the table's."""
        if self.args.backend not in ("cuda", "emulated"):
            raise Skip(f"--backend is {self.args.backend}, which has no tiles")
        path = self.args.results / "tiles.json"
        path.unlink(missing_ok=True)

        def read(text):
            record["tiles"] = json.loads(path.read_text()) if path.is_file() else {}
            quicker = [
                f"{entry}: {tile} takes {of['of_table']:.2f} of the time"
                for entry, tiles in record["tiles"].items()
                for tile, of in tiles.items()
                if of.get("of_table", 1) < 0.98
            ]
            record["result"] = "; ".join(quicker) or "none is quicker than the table's"

        words = [sys.executable, HERE / "gpu_tiles.py", path, "--backend", self.args.backend]
        run([*words, *(["--tokens", "40"] if self.args.quick else [])], GROUP_SECONDS, read)

    def needs_openmpi(self):
        """Skip where there is none."""
        if not (self.installed.openmpi / "bin" / "mpiexec").exists():
            raise Skip("there is no Open MPI with CUDA: see the section openmpi")

    def bench(self, run, record, tokens, *more, decode=0, carry=0):
        """Tables; decode, carry: keys of theirs, of which 0 leaves them out."""
        path = self.args.results / "table.json"
        sizes = ["--seqlen", *map(str, tokens), "--heads", "32", "--kv-heads", "8", "--runs", "7"]
        if self.args.quick:
            sizes, decode, carry = ["--seqlen", "40", "--heads", "2", "--runs", "2"], min(decode, 100), min(carry, 30)
            more = [word for word in more if word not in ("--kv-heads", "32")]
        run(
            [
                sys.executable,
                "-m",
                "mpiattn",
                "bench",
                "--kernel",
                "--backend",
                self.args.backend,
                "--dtype",
                "bfloat16",
                "--head-dim",
                "128",
                *sizes,
                "--decode-keys",
                decode,
                "--carry-keys",
                carry,
                *more,
                "--json",
                path,
            ],
            GROUP_SECONDS,
            OPENBLAS_NUM_THREADS=self.threads,
        )
        data = json.loads(path.read_text())
        path.unlink()
        record["tables"] = data.pop("sections")
        record.update(data)
        blocks = [table for table in record["tables"] if table["what"] in ("forward", "backward")]
        # Rows after mpiattn's: PyTorch's, which are compared with it, and the matrix product, which is not.
        if not any(row["difference"] is not None for table in blocks for row in table["results"][1:]):
            record["result"] = "compared with nothing: there is no PyTorch here that could do the same"

    def sanitize(self, run, record, tool, file, cases):
        """compute-sanitizer over small blocks, without CuPy's pool, which hides what is written beyond an array."""
        places = [shutil.which("compute-sanitizer"), *map(str, Path("/usr/local").glob("cuda*/bin/compute-sanitizer"))]
        program = next((place for place in places if place and os.access(place, os.X_OK)), None)
        if program is None:
            raise Skip("compute-sanitizer is neither on PATH nor in /usr/local/cuda*/bin")
        before = [program, "--tool", tool, "--report-api-errors", "no", "--error-exitcode", "9", "--print-limit", "20"]
        text = self.pytest(run, record, file, cases, before=before, MPIATTN_CUPY="unpooled")
        summaries = re.findall(r"^=+ ((?:ERROR|RACECHECK) SUMMARY: .*)$", text, re.MULTILINE)
        if not summaries:
            raise RuntimeError("the sanitizer printed no summary")
        record["result"] += f"; {summaries[-1]}"


BLOCKS, CALLERS = "gpu/test_gpu_blocks.py", "gpu/test_gpu_callers.py"
FORWARD, BACKWARD, PAGES = f"test_carry_in or (test_forward and {SMALL})", f"test_backward and {SMALL}", "test_pages"
FEW_PAGES = "test_pages and not 256 and not long"  # racecheck takes longer
LONG, BACKWARDS, BOTH = (8192, 16384), ("--direction", "backward"), ("--direction", "both", "--causal")
# In the order in which they are run.  Estimates are for an H100 with 16 cores, and nothing has been run there yet.
SECTIONS = {
    "install": Section("smoke", 15, 300, "wheels of what the machine lacks", Work.install, gpu=False),
    "device": Section("smoke", 5, 120, "the GPU, as CuPy sees it", Work.device, gpu=False),
    "smoke": Section("smoke", 20, 200, "forward, backward, decode, against float64", Work.smoke),
    "mpi": Section("smoke", 2, 60, "four ranks of the MPI that is used", Work.mpi, gpu=False),
    "compile": Section("smoke", 30, 400, "registers, spills, shared memory of the tile table", Work.compile, gpu=False),
    "forward": Section(
        "blocks",
        60,
        200,
        "blocks against float64, forward",
        Work.pytest,
        (BLOCKS, "test_forward or test_scores or test_carry_in"),
    ),
    "backward": Section("blocks", 60, 200, "the same, backward", Work.pytest, (BLOCKS, "test_backward")),
    "pages": Section("blocks", 40, 150, "keys in pages", Work.pytest, (BLOCKS, "test_pages")),
    "callers": Section("blocks", 15, 60, "streams and arrays of other libraries", Work.pytest, (CALLERS,)),
    "tiles": Section("blocks", 90, 200, "other tile sizes than the table's, timed", Work.tiles),
    **{
        f"ranks-{file[5:-3]}": Section("ranks", 60, 200, f"four ranks, staged: tests/mpi/{file}", Work.ranks, (file,))
        for file in CASES
    },
    **{
        f"ipc-{file[5:-3]}": Section(
            "ranks", 60, 200, f"four ranks, CUDA IPC: tests/mpi/{file}", Work.ranks, (file, "ipc")
        )
        for file in ("test_kernels.py", "test_decode.py")
    },
    "openmpi": Section("ranks", 5, 90, "unpack Open MPI with CUDA; four ranks of it", Work.openmpi, gpu=False),
    "probe": Section("ranks", 5, 60, "device memory through Open MPI, one process", Work.probe),
    **{
        f"direct-{file[5:-3]}": Section(
            "ranks", 60, 200, f"four ranks, device memory: tests/mpi/{file}", Work.direct, (file,)
        )
        for file in ("test_kernels.py", "test_decode.py")
    },
    "bench-forward": Section("bench", 50, 150, "bf16 d128 beside PyTorch, full", Work.bench, (LONG,)),
    "bench-forward-causal": Section("bench", 50, 150, "the same, causal", Work.bench, (LONG, "--causal")),
    "bench-decode": Section(
        "bench", 25, 100, "a query of 8 heads a KV head over 64k keys", Work.bench, ((512,),), {"decode": 65536}
    ),
    "bench-carry": Section(
        "bench", 25, 100, "adding 4k keys to 8k queries' partial", Work.bench, ((8192,),), {"carry": 4096}
    ),
    "bench-backward": Section("bench", 70, 180, "full, backward", Work.bench, (LONG, *BACKWARDS)),
    "bench-backward-causal": Section("bench", 70, 180, "causal, backward", Work.bench, (LONG, *BACKWARDS, "--causal")),
    "bench-lone-heads": Section(
        "bench", 40, 100, "as many KV heads as heads, causal", Work.bench, ((8192,), *BOTH, "--kv-heads", "32")
    ),
    "bench-d64": Section("bench", 40, 100, "head dim 64, causal", Work.bench, ((8192,), *BOTH, "--head-dim", "64")),
    "bench-d256": Section("bench", 40, 100, "head dim 256, causal", Work.bench, ((8192,), *BOTH, "--head-dim", "256")),
    "bench-float32": Section("bench", 40, 100, "float32, causal", Work.bench, ((4096,), *BOTH, "--dtype", "float32")),
    "memcheck-forward": Section(
        "sanitizer", 60, 150, "accesses outside of arrays", Work.sanitize, ("memcheck", BLOCKS, FORWARD)
    ),
    "memcheck-backward": Section(
        "sanitizer", 60, 150, "the same, backward", Work.sanitize, ("memcheck", BLOCKS, BACKWARD)
    ),
    "memcheck-pages": Section(
        "sanitizer", 60, 150, "the same, keys in pages, decoding", Work.sanitize, ("memcheck", BLOCKS, PAGES)
    ),
    "racecheck-forward": Section(
        "sanitizer", 90, 200, "hazards in shared memory", Work.sanitize, ("racecheck", BLOCKS, FORWARD)
    ),
    "racecheck-backward": Section(
        "sanitizer", 90, 200, "the same, backward", Work.sanitize, ("racecheck", BLOCKS, BACKWARD)
    ),
    "racecheck-pages": Section(
        "sanitizer", 60, 150, "the same, keys in pages", Work.sanitize, ("racecheck", BLOCKS, FEW_PAGES)
    ),
}
