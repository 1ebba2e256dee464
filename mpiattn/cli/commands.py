"""The subcommands by name, the parser of their arguments, and how one is run."""

import argparse
import os
import sys
from importlib import import_module

from ..console import interrupts, message, startup, witness
from ..console.blas_environment import limit_threads, name_core_type
from ..console.parser import Parser
from ..errors import MpiattnError
from ..system.launch_variables import launch_rank
from ..system.logs import print_notes_of_files
from ..version import __version__

COMMANDS = {
    "generate": "make an HDF5 file of random q, k, v",
    "convert": "convert your own q, k, v (.npy, .npz, safetensors, PyTorch, HDF5) to a file for run or decode",
    "run": "compute attention of an HDF5 file on the ranks of this launch (under mpiexec or srun)",
    "decode": "attention of a few queries over a cache of keys and values (under mpiexec or srun)",
    "plan": "list every tile of n ranks with its traffic, memory and predicted time (no MPI needed)",
    "bench": "measure the speed of attention on the ranks of this launch: sizes, tiles, schedules, routes; decoding; "
    "kernels",
    "check": "check that this installation and this launch work; the first thing to run on a new cluster",
    "tune": "measure links and speed of this machine; later plans use the figures (under mpiexec or srun)",
    "trace": "show what every rank did and when, from a file of --trace: a table, a picture (no MPI needed)",
    "slurm": "list the Slurm batch scripts, or copy them to submit (no MPI needed)",
    "info": "show versions, MPI, devices and hosts of this installation and this launch",
}

UNDER_MPI = ("run", "decode", "bench", "check", "tune", "info")  # under a launcher each rank has a witness
MAKES = {"generate": "FILE", "convert": "OUT", "run": "OUT", "decode": "OUT"}  # the argument that names the output

EXAMPLES = """\
examples:
  mpiattn generate qkv.h5 --seqlen 4099 --heads 8 --head-dim 64
  mpiattn convert q.npy k.npy v.npy qkv.h5
  mpiexec -n 4 mpiattn run qkv.h5 out.h5 --causal --verify
  mpiexec -n 4 mpiattn decode cache.h5 queries.h5 out.h5 --verify
  mpiattn plan --ranks 256 --seqlen 1048576 --heads 32 --head-dim 128 --causal --machine h100
  mpiexec -n 4 mpiattn check
"""


def parser_of(command):
    """The parser of a command line; of the subcommands, only that of this name has its arguments."""
    parser = Parser(
        prog="mpiattn",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Exact attention for sequences that do not fit on one device, native to MPI.",
    )
    parser.add_argument("--version", action="version", version=f"mpiattn {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        sub = commands.add_parser(name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter)
        if name == command:  # import only the modules of the chosen subcommand
            module = import_module(f".{name}", __package__)
            sub.description = module.__doc__
            module.add_arguments(sub)
            sub.set_defaults(run=module.run)
            parser.chosen = sub
            message.options.update(sub.options)
    return parser


def run(argv=None):
    """Run the command of a command line, that of the process by default; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    message.print_any_text()
    limit_threads()  # before anything imports NumPy
    name_core_type()
    print_notes_of_files()
    command = next((word for word in argv if word in COMMANDS), None)
    waits = command in UNDER_MPI and launch_rank(None) is not None
    if waits:
        witness.watch(launch_rank())
    if command in UNDER_MPI:
        startup.defer()
    with interrupts.handled(command or "", MAKES.get(command), launch_rank() == 0, waits):
        try:
            return _run(parser_of(command).parse_args(argv, argparse.Namespace(words=list(argv))))
        except (ImportError, RuntimeError) as error:
            story = startup.unloadable(error)
            if story is None:
                raise
            message.speak(f"mpiattn {command}: {story}\n", launch_rank(), os.getppid())
            return 1
        finally:
            witness.end()


def _run(args):
    try:
        return args.run(args)
    except MpiattnError as error:
        if launch_rank() == 0 or not error.everywhere:
            print(f"mpiattn {args.command}: {message.as_typed(error)}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # as in `mpiattn plan ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that Python's last flush cannot fail
        return 141  # the exit code that shells report for SIGPIPE
