"""Convert tensors of other files to the HDF5 file that `mpiattn run` and `mpiattn decode` read.

FILES are one or more files: .npy (one tensor each, named after the file), .npz, safetensors (extra `convert`), PyTorch
.pt and .pth (no code in them is run; extra `convert`) or HDF5. OUT gets the tensors q, k and v, and dout, cu_seqlens
and cu_seqlens_k where FILES have them, in the order (batch, seqlen, heads, head_dim); dtypes are kept. Tensors without
a batch axis become a batch of one. Tensors are read and written a piece at a time, so they may be larger than memory.
OUT appears whole or not at all; an existing file is replaced.

examples:
  mpiattn convert q.npy k.npy v.npy qkv.h5
  mpiattn convert dump.pt qkv.h5 --axes bhsd --names q=layers.0.q,k=layers.0.k,v=layers.0.v
  mpiattn convert model-00001.safetensors model-00002.safetensors cache.h5 --names k=k_cache,v=v_cache --only k,v
"""

import argparse
import contextlib
import math
import os

import numpy as np

from ..console.progress import Progress
from ..console.suggest import ROLE
from ..errors import ArgumentError, FileError
from ..files import hdf5
from ..files.hdf5 import AXES
from ..files.shapes import check_order, problem_of
from ..files.tensor_files import not_there, open_tensors, pieces
from ..problem.problem import ITEMSIZE, Problem, dtype_name
from ..system.atomic_file import HDF5, NewFile
from ..system.closest import closest
from ..system.launch_variables import launch_rank
from ..system.words import size
from .names import CUTS, TENSORS, add_names

PIECE_ELEMENTS = 2**22
NEEDED = ("q", "k", "v")


def _parts(text):
    parts = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if not set(parts) <= {*TENSORS, *CUTS}:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list, with commas between, of {', '.join(TENSORS + CUTS)}")
    return parts


def add_arguments(parser):
    """Declare the arguments of `mpiattn convert`."""
    parser.add_argument("sources", nargs="+", metavar="FILES", help="files that hold the tensors")
    parser.add_argument("output", metavar="OUT", help="HDF5 file to make; an existing one is replaced")
    add_names(parser, TENSORS + CUTS, "FILES")
    parser.add_argument(
        "--axes",
        choices=AXES,
        help="the order of the tensors' axes in FILES: b batch, s seqlen, h heads, d head_dim; bhsd is "
        "(batch, heads, seqlen, head_dim), PyTorch's; in OUT it is always bshd "
        "(default: bshd; an error if there would then be more heads than tokens)",
    )
    parser.add_argument(
        "--only",
        type=_parts,
        metavar="LIST",
        help="convert only these: k,v for a CACHE of `mpiattn decode`, q for its QUERIES",
    )


def run(args):
    """`mpiattn convert`; under a launcher only rank 0 works."""
    if launch_rank():
        return 0
    with NewFile("OUT", args.output, args.sources, HDF5) as new, contextlib.ExitStack() as stack:
        taken, axes = _chosen(args, _all(args.sources, stack)), args.axes or AXES[0]
        sources = ", ".join(args.sources)
        shapes = {name: (_shape(tensor, axes), tensor.dtype) for name, tensor in taken.items() if name in TENSORS}
        if set(NEEDED) <= set(shapes):
            Problem(**problem_of("FILES", sources, shapes))
        if args.axes is None and "k" in shapes:  # queries alone may be a few of many heads
            check_order("FILES", sources, shapes["q"][0] if "q" in shapes else None, shapes["k"][0])
        for _, dtype in shapes.values():
            dtype_name(dtype)
        with hdf5.file_errors("OUT", args.output, "written"):
            _write(new.partial, taken, shapes, args.axes)
    listed = ", ".join(f"{name} {shape}" for name, (shape, _) in shapes.items())
    listed += "".join(f", {name} {taken[name].shape}" for name in CUTS if name in taken)
    dtypes = ", ".join(dict.fromkeys(dtype for _, dtype in shapes.values()))
    print(
        ", ".join(
            filter(None, [f"{args.output}: {listed}".replace(": , ", ": "), dtypes, size(os.path.getsize(args.output))])
        )
    )
    return 0


# Choosing tensors


def _all(sources, stack):
    """The tensors of all files by name, with the files that have them: name -> [(path, `Tensor`)]."""
    tensors = {}
    for path in sources:
        if not os.path.exists(path) and ROLE.match(path):
            raise FileError(
                f"FILES has {path!r}, which is no file; --names is one word: --names q=NAME,k=NAME,v=NAME, with commas "
                "and without spaces"
            )
        for name, tensor in stack.enter_context(open_tensors(path, "FILES")).items():
            tensors.setdefault(name, []).append((path, tensor))
    return tensors


def _chosen(args, tensors):
    """The tensors that OUT gets, by role (q, k, ...); FileError where one is missing or has a wrong shape or dtype."""
    wanted = args.only or (*NEEDED, *(part for part in ("dout", *CUTS) if part in args.names or part in tensors))
    for part in set(args.names) - set(wanted):
        raise ArgumentError(f"--names names {part}, which --only {','.join(wanted)} leaves out")
    taken = {}
    for part in wanted:
        name = args.names.get(part, part)
        if name not in tensors:
            for path in args.sources:
                why = not_there(path, name)
                if why:
                    raise FileError(f"FILES has {path!r}; it cannot be read: {why}")
            near = closest(name, tensors)
            raise FileError(
                f"FILES has no tensor {name!r}{f'; did you mean {near!r}?' if near else ''}"
                f"{'' if part in args.names else f', and --names gives no name for {part}'}; "
                f"it has{_listed(tensors) or ' none'}"
            )
        (path, tensor), *others = tensors[name]
        if others:
            raise FileError(f"FILES has {name!r} in {path!r} and in {others[0][0]!r}; only one may have it")
        taken[part] = tensor
        dims, dtypes = ((3, 4), tuple(ITEMSIZE)) if part in TENSORS else ((1, 2), ("int32", "int64", "uint32"))
        if len(tensor.shape) not in dims or tensor.dtype not in dtypes:
            raise FileError(
                f"FILES has {name!r}, {tensor.shape} in {tensor.dtype}; {part} must have {dims[0]} or "
                f"{dims[1]} dimensions and be of {', '.join(dtypes)}"
            )
    return taken


def _listed(tensors):
    return hdf5.listing({name: (tensor.shape, tensor.dtype) for name, [(_, tensor), *_] in tensors.items()})


def _shape(tensor, axes):
    """The shape that a tensor has in OUT."""
    whole = (1,) * (4 - len(tensor.shape)) + tensor.shape
    return tuple(whole[axes.index(axis)] for axis in AXES[0])


# Writing


def _write(path, taken, shapes, axes):
    """axes: the order that the caller says, which is then recorded; None for bshd that nobody has said."""
    cuts = {name: taken[name].read((slice(0, taken[name].shape[0]),)) for name in CUTS if name in taken}
    with hdf5.writing(path, create=True) as file:
        hdf5.create_datasets(file, shapes | {name: (cut.shape, np.int64) for name, cut in cuts.items()})
        if axes is not None:
            file.attrs["axes"] = AXES[0]
    hdf5.reserve(path)
    total = sum(math.prod(shape) for shape, _ in shapes.values())
    with hdf5.writing(path) as file, Progress("convert", total, " elements") as progress:
        for name in shapes:
            _copy(taken[name], file[name], axes or AXES[0], progress)
        for name, cut in cuts.items():
            hdf5.write(file[name], (0,) * cut.ndim, cut.astype(np.int64))


def _copy(tensor, dataset, axes, progress):
    """Write a tensor into its dataset, piece by piece in the order in which it is stored."""
    order = [axes.index(axis) for axis in AXES[0]]
    for index in pieces(tensor.shape, PIECE_ELEMENTS) if math.prod(tensor.shape) else ():
        in_four = (*[0] * (4 - len(tensor.shape)), *index)
        *leading, last = in_four
        piece = tensor.read(index)
        piece = piece.reshape((1,) * len(leading) + piece.shape)
        starts = (*leading, last.start, *[0] * (3 - len(leading)))
        hdf5.write(dataset, tuple(starts[axis] for axis in order), piece.transpose(order))
        progress(piece.size)
