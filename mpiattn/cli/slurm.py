"""List the Slurm batch scripts, or copy them so that you can change and submit them.

Without options it lists them. --copy DIR writes them into the folder DIR, which is created if needed; nothing is
overwritten. Then change DIR/env.sh, the only file that depends on your site, and submit from the folder above DIR.
DIR/README.md explains the rest.

examples:
  mpiattn slurm
  mpiattn slurm --copy slurm
  sbatch slurm/check.sbatch
"""

import os
import re

from ..console.table import facts
from ..errors import FileError
from ..system.atomic_file import NewFile
from ..system.launch_variables import launch_rank
from ..system.sources import slurm_dir

KINDS = (".md", ".sh", ".sbatch", ".py")
USUAL = "slurm"  # where the scripts look for each other, relative to the folder of submission


def add_arguments(parser):
    """Declare the arguments of `mpiattn slurm`."""
    parser.add_argument(
        "--copy",
        metavar="DIR",
        help="write the scripts into this folder; nothing is written if it already has one of them",
    )


def run(args):
    """`mpiattn slurm`; under a launcher only rank 0 works."""
    if launch_rank():
        return 0
    scripts = sorted((path for path in slurm_dir().iterdir() if path.suffix in KINDS), key=lambda path: path.name)
    if args.copy is None:
        print(facts([(path.name, _about(path.read_text())) for path in scripts]))
        print(
            "\n`mpiattn slurm --copy slurm` writes them into the folder slurm. Then change slurm/env.sh: modules, "
            "the environment\nthat holds mpiattn, threads, the fabric. The first job: sbatch slurm/check.sbatch"
        )
        return 0
    _copy(scripts, args.copy)
    print(f"{args.copy}: {', '.join(path.name for path in scripts)}")
    print(
        f"now change {os.path.join(args.copy, 'env.sh')}; the first job: "
        f"{_elsewhere(args.copy)}sbatch {os.path.join(args.copy, 'check.sbatch')}"
    )
    return 0


def _about(text):
    """The first sentence of a script's first comment or docstring, or of a page."""
    lines = [line for line in text.splitlines() if not line.startswith("#!")]
    comment = " ".join(line.strip('# "') for line in lines[:6])
    return re.split(r"(?<!\.)[.:](?:\s|$)|  ", comment)[0]


def _elsewhere(folder):
    """The variable to set before `sbatch` where the folder does not have the name that the scripts expect."""
    return "" if os.path.normpath(folder) == USUAL else f"MPIATTN_SLURM={os.path.abspath(folder)} "


def _copy(scripts, folder):
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise FileError(f"--copy is {folder!r}; it cannot be made: {error.strerror}") from None
    there = [path.name for path in scripts if os.path.lexists(os.path.join(folder, path.name))]
    if there:
        raise FileError(f"--copy is {folder!r}; it already has {', '.join(there)}, nothing is written")
    for path in scripts:
        with NewFile("--copy", os.path.join(folder, path.name)) as new, open(new.partial, "wb") as file:
            file.write(path.read_bytes())
