"""The sections of run_all.py, group by group, in the order in which to run them; standard library only."""

from collections.abc import Callable
from typing import NamedTuple

from gpu_work import Work
from rank_cases import CASES

SMALL = "not 256 and (windows or causal)"  # of the blocks' cases, under the sanitizer
BLOCKS, CALLERS = "gpu/test_gpu_blocks.py", "gpu/test_gpu_callers.py"
FORWARD, BACKWARD, PAGES = f"test_carry_in or (test_forward and {SMALL})", f"test_backward and {SMALL}", "test_pages"
FEW_PAGES = "test_pages and not 256 and not long"  # racecheck takes longer
BOTH = ("--direction", "both", "--causal")


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


# Estimates are what an H200 with 16 cores took, or for sections that it has not run what similar ones took.
SECTIONS = {
    "install": Section("smoke", 10, 300, "wheels of what the machine lacks", Work.install, gpu=False),
    "device": Section("smoke", 3, 120, "the GPU, as CuPy sees it", Work.device, gpu=False),
    "ahead": Section("smoke", 10, 120, "kernels compiled into CuPy's cache, many at a time", Work.ahead),
    "smoke": Section("smoke", 15, 200, "forward, backward, decode, against float64", Work.smoke),
    "mpi": Section("smoke", 2, 60, "four ranks of the MPI that is used", Work.mpi, gpu=False),
    "blocks": Section("blocks", 55, 250, "every kind of block, and pages, against float64", Work.pytest, (BLOCKS,)),
    "callers": Section("blocks", 15, 60, "streams and arrays of other libraries", Work.pytest, (CALLERS,)),
    "cudnn": Section("blocks", 25, 90, "what cuDNN's attention takes and gives", Work.cudnn),
    "hopper": Section("blocks", 20, 60, "wgmma, TMA and setmaxnreg, for kernels to come", Work.hopper),
    "tiles": Section("blocks", 45, 120, "other tile sizes than the table's, timed", Work.tiles),
    "speed": Section(
        "bench", 60, 180, "forward and backward beside PyTorch's flash and cuDNN", Work.speed, ("blocks",)
    ),
    "decode": Section("bench", 10, 60, "decoding beside a copy", Work.speed, ("decode",)),
    "profile": Section("bench", 35, 90, "what ncu counts on the kernels", Work.profile),
    "bench-kernel": Section(
        "bench",
        60,
        150,
        "the command `mpiattn bench --kernel`",
        Work.bench,
        ((4096,), *BOTH),
        {"decode": 8192, "carry": 2048},
    ),
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
    "mps": Section("ranks", 5, 60, "MPS, with which ranks use the GPU at the same time", Work.together),
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
    "compile": Section("ranks", 30, 400, "registers, spills, shared memory of the tile table", Work.compile, gpu=False),
}
