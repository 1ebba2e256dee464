"""What is promised of input files: an error that names argument and file, or the numbers that somebody wrote."""

import contextlib
from functools import partial
from types import SimpleNamespace

import h5py
import ml_dtypes
import numpy as np
from mpi4py import MPI

from mpiattn import KVCache
from mpiattn.cli.biases import RunBiases
from mpiattn.cli.documents import read_documents
from mpiattn.comm.peers import Peers
from mpiattn.errors import ArgumentError, FileError
from mpiattn.files.input import Input, Wanted
from mpiattn.files.problems import read_problems
from mpiattn.files.shapes import read_shapes
from mpiattn.problem.layout import Layout
from mpiattn.problem.problem import Problem


class BrokenPromise(AssertionError):
    """What is wrong."""


def _promised(work, argument, path, also=()):
    """The value of work(), or None if it raises an error as it should be."""
    try:
        return work()
    except (FileError, ArgumentError) as error:
        text = str(error)
        if not (str(path) in text or repr(str(path))[1:-1] in text or isinstance(error, ArgumentError)):
            raise BrokenPromise(f"the error does not name the file: {error}") from error
        if not (text.startswith((argument, *also)) or isinstance(error, ArgumentError)):
            raise BrokenPromise(f"the error does not name the argument: {error}") from error
        return None
    except Exception as error:
        raise BrokenPromise(f"{type(error).__name__} where a FileError is due: {error}") from error


def judge(made, damaged=False):
    """Read a file in every way that the commands have; BrokenPromise where the numbers or the error are wrong."""
    peers = Peers(MPI.COMM_SELF)
    numbers = {} if damaged else made.numbers
    given = {"names": made.given.get("names"), "grid": made.given["grid"], "backward": made.given["backward"]}
    look = partial(read_shapes, **given)
    for chosen in (None, "*"):
        _promised(partial(read_problems, made.path, chosen=chosen, **given), "IN", made.path, ("--problems",))
    here = {"names": made.given.get("names"), "axes": made.given["axes"], "grid": made.given["grid"]}
    source = _promised(lambda: Input(peers, made.path, look=look, **here), "IN", made.path)
    if source is None and made.sound and not damaged:
        raise BrokenPromise("a sound file is refused")
    if source is not None:
        with contextlib.closing(source):
            _judge_tensors(made, source, numbers, damaged)
            for name in ("cu_seqlens", "k", "q"):
                specs = {"cu_seqlens": ("--documents", name)}
                documents = _promised(
                    lambda specs=specs: read_documents(source.file, specs), "--documents", name, ("IN",)
                )
                if documents is not None and name == "cu_seqlens" and name in numbers:
                    _same(documents["cu_seqlens"], numbers[name], name)
                if documents is not None and name in made.gone and not damaged:
                    raise BrokenPromise(f"{name} is not all there ({made.gone[name]}), and was read")
            _judge_biases(made, source, damaged)
    _judge_cache(made, damaged)


def _judge_tensors(made, source, numbers, damaged):
    p = source.shapes
    roles = ["q", "k", *["v"] * (not p["shared_kv"]), *["dout"] * made.given["backward"]]
    wanted = [
        Wanted(role, Layout("contiguous", p["seqlen" if role in ("q", "dout") else "seqlen_k"], 1)) for role in roles
    ]
    read = _promised(lambda: source.chunks(wanted), "IN", made.path)
    if read is None:
        if made.sound and not damaged:
            raise BrokenPromise("a sound file is not read")
        return
    for role, array in zip(roles, read):
        name = source.names.get(role, role)
        if name in made.gone and not damaged:
            raise BrokenPromise(f"{name} is not all there ({made.gone[name]}), and was read")
        if damaged or (name not in numbers and name != role):
            continue
        right = numbers[name] if name in numbers else _plainly(made.path, name)
        if source.axes == "bhsd":
            right = np.moveaxis(right, 1, -2)
        _same(array, right.reshape(array.shape), name)


def _plainly(path, name):
    with h5py.File(path, "r") as file:
        data = file[name]
        array = data[()]
        if array.dtype.kind == "V":
            array = array.view(ml_dtypes.bfloat16)
        return array


def _same(array, right, name):
    if not np.array_equal(np.asarray(array, np.float64), np.asarray(right, np.float64), equal_nan=True):
        raise BrokenPromise(f"{name} is read wrongly")


def _judge_biases(made, source, damaged):
    problem = _promised(lambda: Problem(**source.shapes), "", made.path)
    if problem is None:
        return
    for name in ("bias", "key_bias"):
        of = {f"{other}_dataset": name if name == other else None for other in ("bias", "key_bias")}
        args = SimpleNamespace(**of, dropout=0.0, seed=None, alibi=False)
        option = f"--{name.replace('_', '-')}"
        biases = _promised(lambda args=args: RunBiases(args, source, problem), option, "", ("IN",))
        if biases is None:
            if made.sound and not damaged:
                raise BrokenPromise(f"a sound {name} is refused")
            continue
        if name in made.gone and not damaged:
            raise BrokenPromise(f"{name} is not all there ({made.gone[name]}), and was taken")
        plan = SimpleNamespace(
            bias_sequences=slice(0, problem.batch),
            bias_heads=slice(0, problem.heads),
            bias_positions=(np.arange(problem.seqlen), np.arange(problem.seqlen_k)),
            positions_k=np.arange(problem.seqlen_k),
        )
        read = _promised(lambda biases=biases, plan=plan: biases.read(source.peers, plan) or True, "IN", made.path)
        if read and name in made.numbers and not damaged:
            _same(biases.call[name], made.numbers[name], name)


def _judge_cache(made, damaged):
    cache = _promised(
        lambda: KVCache.load(MPI.COMM_SELF, str(made.path), axes=made.given["axes"], padding=True, backend="numpy"),
        "path",
        made.path,
    )
    if cache is None:
        if made.sound and not damaged:
            raise BrokenPromise("a sound cache is refused")
        return
    with cache:
        if not damaged and made.gone.keys() & {"k", "cu_seqlens", *["v"] * (len(cache.dims) == 2)}:
            raise BrokenPromise("a cache that is not all there was read")
