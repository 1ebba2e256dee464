"""What run_all.py does, section by section: commands, and what their output says; standard library only."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from gpu_install import HELLO, Installed, greeting, program_path
from gpu_mps import Mps
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


class Work:
    """What the sections do: methods of `run(words, seconds, **environment)`, `record` and their own arguments."""

    def __init__(self, args):
        self.args, self.installed, self.no_gpu, self.architecture = args, Installed(args.work), "", "sm_90"
        self.mps = Mps(args.work / "mps")
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
        if not ranks and not before and self.has("xdist"):  # most of their time is the compiler's and the references'
            words += ["-n", str(max(1, len(os.sched_getaffinity(0)) - 2))]
        if ranks:
            words = [self.installed.mpiexec(ranks[1]), "-n", ranks[0], *words]
            environment |= {"mpi": ranks[1], "OPENBLAS_NUM_THREADS": "1", **self.mps.variables}

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

    def together(self, run, record):
        """Let ranks use the GPU at the same time."""
        self.mps.start(run, record)

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

    def script(self, run, record, name, *more, seconds=GROUP_SECONDS):
        """A script of this folder, which writes RESULT.json; the lines that it prints are the result."""
        path = self.args.results / f"{name}.json"
        path.unlink(missing_ok=True)

        def read(text):
            record["lines"] = [line for line in text.splitlines() if ": " in line and "Warning" not in line]
            record["data"] = json.loads(path.read_text()) if path.is_file() else None

        run([sys.executable, HERE / f"gpu_{name}.py", path, *more], seconds, read, PYTHONWARNINGS="ignore")

    def ahead(self, run, record):
        """Kernels into CuPy's cache."""
        record["result"] = run([sys.executable, HERE / "gpu_compile.py"], GROUP_SECONDS).strip().splitlines()[-1]

    def speed(self, run, record, what):
        """Own kernels and cuDNN's beside PyTorch's, in one process."""
        self.needs("torch")
        names = ["cuda"] + ["cuda+cudnn"] * (what == "blocks" and self.has("cudnn"))
        self.script(run, record, "speed", "--what", what, "--backends", *names)

    def profile(self, run, record):
        """What ncu counts on a forward pass, the gradients, and decoding."""
        self.needs("torch")
        program = program_path("ncu")
        report = self.args.results / "profile.ncu-rep"
        counted = [program, "--clock-control", "none", "--set", "full", "-k", "regex:forward|gradient|merge_parts"]
        run([*counted, "-f", "-o", report, sys.executable, HERE / "gpu_profile.py"], GROUP_SECONDS)
        text = run([program, "--import", report, "--page", "details"], 60)
        kernels = re.findall(r"^  (\w+) \(.*?Duration +(\w+) +([\d.,]+)", text, re.MULTILINE | re.DOTALL)
        record["result"] = "; ".join(f"{name} {time} {unit}" for name, unit, time in kernels)
        source = run([program, "--import", report, "--page", "source", "--csv"], 60)
        (self.args.results / "profile-source.csv").write_text(source)  # what each instruction waits for
        report.unlink()

    def has(self, module):
        """Whether Python finds a module, of the machine or brought along."""
        words = [sys.executable, "-c", f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"]
        return subprocess.run(words, env=self.environment(), check=False).returncode == 0

    def needs(self, module):
        """Skip where there is no such module."""
        if not self.has(module):
            raise Skip(f"there is no {module}")

    def hopper(self, run, record):
        """Matrix instructions, copies and registers of sm_90a."""
        if self.architecture != "sm_90":
            raise Skip(f"this GPU is {self.architecture}")
        self.script(run, record, "hopper")

    def cudnn(self, run, record):
        """What cuDNN takes and gives."""
        self.needs("cudnn")
        text = run([sys.executable, HERE / "gpu_cudnn.py", "--no-speed"], GROUP_SECONDS)
        record["lines"] = [line for line in text.splitlines() if ": " in line]

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
        before = [
            program_path("compute-sanitizer"),
            "--tool",
            tool,
            "--report-api-errors",
            "no",
            "--error-exitcode",
            "9",
            "--print-limit",
            "20",
        ]
        text = self.pytest(run, record, file, cases, before=before, MPIATTN_CUPY="unpooled")
        summaries = re.findall(r"^=+ ((?:ERROR|RACECHECK) SUMMARY: .*)$", text, re.MULTILINE)
        if not summaries:
            raise RuntimeError("the sanitizer printed no summary")
        record["result"] += f"; {summaries[-1]}"
