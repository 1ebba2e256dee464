"""Convert tensors of other files to the HDF5 file that `mpiattn run` and `mpiattn decode` read.

FILES are one or more files: .npy (one tensor each, named after the file), .npz, safetensors (extra `convert`), PyTorch
.pt and .pth (no code in them is run; extra `convert`) or HDF5. OUT gets the tensors q, k and v, and dout, cu_seqlens
and cu_seqlens_k where FILES have them, in the order (batch, seqlen, heads, head_dim); dtypes are kept. Tensors without
a batch axis become a batch of one. Numbers that netCDF's attributes pack are unpacked. Tensors are read and written a
piece at a time, so they may be larger than memory. OUT appears whole or not at all; an existing file is replaced.

Many problems, such as the layers of a model, go into groups of one OUT. With a * in --names there is a problem for
each text that * stands for, in a group of that name. With --each-file every file is a problem, in a group named after
the file. A tensor whose name has no * is the same in all problems.

examples:
  mpiattn convert q.npy k.npy v.npy qkv.h5
  mpiattn convert dump.pt qkv.h5 --axes bhsd --names q=layers.0.q,k=layers.0.k,v=layers.0.v
  mpiattn convert model-00001.safetensors model-00002.safetensors cache.h5 --names k=k_cache,v=v_cache --only k,v
  mpiattn convert dump.pt layers.h5 --axes bhsd --names 'q=layers.*.q,k=layers.*.k,v=layers.*.v'
  mpiattn convert layer0.npz layer1.npz layers.h5 --each-file
"""

import argparse
import contextlib
import math
import os
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..console import options
from ..console.progress import Progress
from ..console.suggest import ROLE
from ..errors import ArgumentError, FileError
from ..files import hdf5
from ..files.hdf5 import AXES
from ..files.problems import by_number
from ..files.shapes import check_order, place_name, problem_of
from ..files.tensor_files import not_there, open_tensors, pieces
from ..problem.problem import ITEMSIZE, Problem, dtype_name
from ..system.atomic_file import HDF5, NewFile
from ..system.closest import closest
from ..system.launch_variables import launch_rank
from ..system.words import number, size
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
    options.add_missing(parser, "FILES")
    parser.add_argument(
        "--only",
        type=_parts,
        metavar="LIST",
        help="convert only these: k,v for a CACHE of `mpiattn decode`, q for its QUERIES",
    )
    parser.add_argument(
        "--each-file",
        action="store_true",
        help="each of FILES is a problem, in a group of OUT that is called as the file without its suffix",
    )


def run(args):
    """`mpiattn convert`; under a launcher only rank 0 works."""
    if launch_rank():
        return 0
    with NewFile("OUT", args.output, args.sources, HDF5) as new, contextlib.ExitStack() as stack:
        problems = _problems(args, stack)
        with hdf5.file_errors("OUT", args.output, "written"):
            _write(new.partial, problems, args.axes)
    print(f"{args.output}: {_summary(problems)}, {size(os.path.getsize(args.output))}")
    return 0


def _summary(problems):
    """What OUT holds, in words."""
    numbers = Counter(map(str, problems.values()))
    if "" in problems:
        return next(iter(numbers))
    several = [f"{number(count, 'problem')}, {'each ' * (count > 1)}with {text}" for text, count in numbers.items()]
    return "; ".join(several)


# Choosing tensors


class _Problem(NamedTuple):
    """The tensors of a problem by role (q, k, ...), and their (shape, dtype name) in OUT."""

    tensors: dict
    shapes: dict

    def __str__(self):
        dtypes = dict.fromkeys(self.shapes[name][1] for name in TENSORS if name in self.shapes)
        return ", ".join([*(f"{name} {shape}" for name, (shape, _) in self.shapes.items()), *dtypes])


def _problems(args, stack):
    """The problems of OUT by the path of their group, "" for the file; FileError where one does not fit."""
    if not args.each_file:
        return _of_files(args, args.sources, _all(args.sources, args.missing, stack))
    problems = {}
    for path in args.sources:
        name = Path(path).stem
        for group, problem in _of_files(args, [path], _all([path], args.missing, stack)).items():
            group = f"{name}/{group}" if group else name
            if group in problems:
                raise ArgumentError(f"FILES has two files called {name}; with --each-file their names must differ")
            problems[group] = problem
    return problems


def _of_files(args, sources, tensors):
    """The problems of some files by group, as `_problems`; tensors: those of the files, as of `_all`."""
    problems = {}
    for group, names in _groups(args.names, tensors).items():
        taken, axes = _chosen(args, sources, names, tensors), args.axes or AXES[0]
        where = place_name(", ".join(sources), group)
        shapes = {name: (_shape(tensor, axes), tensor.dtype) for name, tensor in taken.items() if name in TENSORS}
        if set(NEEDED) <= set(shapes):
            try:
                Problem(**problem_of("FILES", where, shapes))
            except ArgumentError as error:
                raise FileError(f"FILES is {where!r}; {error}") from error
        if args.axes is None and "k" in shapes:  # queries alone may be a few of many heads
            check_order("FILES", where, shapes["q"][0] if "q" in shapes else None, shapes["k"][0])
        for _, dtype in shapes.values():
            dtype_name(dtype)
        cuts = {name: (tensor.shape, "int64") for name, tensor in taken.items() if name in CUTS}
        problems[group] = _Problem(taken, shapes | cuts)
    return problems


def _all(sources, missing, stack):
    """The tensors of all files by name, with the files that have them: name -> [(path, `Tensor`)]."""
    tensors = {}
    for path in sources:
        if not os.path.exists(path) and ROLE.match(path):
            raise FileError(
                f"FILES has {path!r}, which is no file; --names is one word: --names q=NAME,k=NAME,v=NAME, with commas "
                "and without spaces"
            )
        for name, tensor in stack.enter_context(open_tensors(path, "FILES", missing)).items():
            tensors.setdefault(name, []).append((path, tensor))
    return tensors


def _groups(names, tensors):
    """The names of every problem's tensors, role -> name, by its group: of each text that * stands for in `names`."""
    patterns = {part: name for part, name in names.items() if "*" in name and name not in tensors}
    if not patterns:
        return {"": names}
    texts = set()
    for part, pattern in patterns.items():
        before, *after = pattern.split("*")
        if len(after) > 1:
            raise ArgumentError(f"--names has {part}={pattern}; a name may have one * and no more")
        of_pattern = re.compile(f"{re.escape(before)}(.+){re.escape(after[0])}", re.DOTALL)
        texts |= {match[1] for match in map(of_pattern.fullmatch, tensors) if match}
    if not texts:
        part, pattern = next(iter(patterns.items()))
        raise FileError(f"FILES has no tensor that {part}={pattern} of --names stands for; it has{_listed(tensors)}")
    for text in texts:
        first, *rest = text.split("/")
        if {"", "."} & {first, *rest} or {*TENSORS, *CUTS} & set(rest):
            raise FileError(f"FILES has a tensor in whose name * stands for {text!r}; no group of OUT can be called so")
    return {
        text: names | {part: pattern.replace("*", text) for part, pattern in patterns.items()}
        for text in sorted(texts, key=by_number)
    }


def _chosen(args, sources, names, tensors):
    """The tensors of a problem, by role (q, k, ...); FileError where one is missing or has a wrong shape or dtype."""
    wanted = args.only or (*NEEDED, *(part for part in ("dout", *CUTS) if part in names or part in tensors))
    for part in set(names) - set(wanted):
        raise ArgumentError(f"--names names {part}, which --only {','.join(wanted)} leaves out")
    taken = {}
    for part in wanted:
        name = names.get(part, part)
        if name not in tensors:
            for path in sources:
                why = not_there(path, name)
                if why:
                    raise FileError(f"FILES has {path!r}; it cannot be read: {why}")
            near = closest(name, tensors)
            raise FileError(
                f"FILES has {f'{sources[0]!r}, which has ' if sources != args.sources else ''}no tensor {name!r}"
                f"{f'; did you mean {near!r}?' if near else ''}"
                f"{'' if part in names else f', and --names gives no name for {part}'}; "
                f"it has{_listed(tensors) or ' none'}"
            )
        (path, tensor), *others = tensors[name]
        if others:
            raise FileError(
                f"FILES has {name!r} in {path!r} and in {others[0][0]!r}; only one may have it, unless each "
                "is a problem of its own, --each-file"
            )
        taken[part] = tensor
        dims, dtypes = ((3, 4), tuple(ITEMSIZE)) if part in TENSORS else ((1, 2), ("int32", "int64", "uint32"))
        if len(tensor.shape) not in dims or tensor.dtype not in dtypes:
            raise FileError(
                f"FILES has {name!r} in {path!r}, {tensor.shape} in {tensor.dtype}; {part} must have {dims[0]} or "
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


def _write(path, problems, axes):
    """axes: the order that the caller says, which is then recorded; None for bshd that nobody has said."""
    with hdf5.writing(path, create=True) as file:
        for group, problem in problems.items():
            hdf5.create_datasets(hdf5.group(file, group), problem.shapes)
        if axes is not None:
            file.attrs["axes"] = AXES[0]
    hdf5.reserve(path)
    total = sum(math.prod(problem.shapes[name][0]) for problem in problems.values() for name in problem.tensors)
    with hdf5.writing(path) as file, Progress("convert", total, " elements") as progress:
        for group, problem in problems.items():
            here = hdf5.group(file, group)
            for name, tensor in problem.tensors.items():
                if name in CUTS:
                    cut = tensor.read((slice(0, tensor.shape[0]),))
                    hdf5.write(here[name], (0,) * cut.ndim, cut.astype(np.int64))
                    progress(cut.size)
                else:
                    _copy(tensor, here[name], axes or AXES[0], progress)
                tensor.check()


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
