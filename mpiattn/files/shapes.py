"""What an input file determines: the shapes of its tensors, their order of dimensions, and whether they fit."""

import contextlib

import h5py

from ..arguments.arrays import heads_first
from ..errors import FileError
from ..problem.problem import ITEMSIZE
from . import grids
from .attributes import dim_of, has, text_of
from .hdf5 import AXES, check_is_file, contents, dataset_of, file_errors, listing, natural, token_axis
from .numbers import Numbers

INPUTS = ("q", "k", "v")


def order_of(group, argument, axes=None, path=None):
    """The order of dimensions in an open file or group, one of AXES: as asked for, or as its attribute says, or None.

    Files of mpiattn have that attribute; that of a group counts before its file's.  path: of the file or group in
    errors, by default the file's.  Raises FileError if the attribute says something else than what is asked for.
    """
    said = text_of(group, "axes")
    if said not in AXES:
        return axes
    if axes not in (None, said):
        path = group.file.filename if path is None else str(path)
        raise FileError(f"{argument} is {path!r}; its attribute axes is {said!r}, but the call says {axes!r}")
    return said


def check_order(argument, path, q, k):
    """Raise FileError if tensors of an order that nobody says look like (batch, heads, seqlen, head_dim).

    q, k: as of `heads_first`.
    """
    name = heads_first(q, k)
    if name:
        _, tokens, heads, _ = {"q": q, "k": k}[name]
        say = 'axes="{}"' if argument == "path" else "--axes {}"
        raise FileError(
            f"{argument} is {str(path)!r}; its {name} would have {heads} heads and {tokens} tokens; say "
            f"{say.format(AXES[1])} if it is (batch, heads, seqlen, head_dim), and {say.format(AXES[0])} if it is "
            "(batch, seqlen, heads, head_dim) nevertheless"
        )


def place_name(path, group):
    """A group of a file in errors; "" is the file itself."""
    return f"{path}:/{group}" if group else path


def read_shapes(path, axes=None, **how):
    """What `shapes_of` finds in the input file `path`; FileError where the file does not fit."""
    with input_file(path) as file:
        return shapes_of(file, path, axes, **how)


@contextlib.contextmanager
def input_file(path):
    """The open input file `path`; FileError where there is none, and where the body cannot read it."""
    check_is_file("IN", path)
    with file_errors("IN", path, "read"), h5py.File(path, "r") as file:
        yield file


def shapes_of(group, path, axes=None, backward=False, names=None, grid=None):
    """The keyword arguments of `Problem` that a file or group determines, and the order of its datasets' dimensions.

    path: of the file or group in errors.
    axes: that order, one of AXES, or None: as the file says, else "bshd".  backward: the file must hold dout too, the
    gradient of the result.  names: role ("q", ...) -> name of the dataset, where they differ.  A file with an attribute
    value_dim needs no v: a value is then as many numbers of its key.  grid: its shape, if datasets may have its axes.
    Raises FileError where the file does not fit.
    """
    names = names or {}
    with file_errors("IN", path, "read"):
        tensors, value_dim, order = {}, None, order_of(group, "IN", axes, path)
        axis = token_axis((), order or AXES[0])
        shared = has(group, "value_dim") and dataset_of(group, names.get("v", "v")) is None
        for name in (*(("q", "k") if shared else INPUTS), *["dout"] * backward):
            dataset = names.get(name, name)
            numbers = Numbers.of(group, dataset)
            if numbers is None:
                needs = "q, k and v, and dout for gradients" if backward else "q, k and v"
                raise FileError(
                    f"IN is {str(path)!r}; it has no dataset {dataset!r}, it must have {needs}, or "
                    f"datasets that --names names; it has{listing(contents(group)) or ' none'}"
                )
            tensors[name] = grids.flat(numbers.shape, axis, grid), numbers.dtype
        if shared:
            shape, _ = tensors["k"]
            value_dim = dim_of(group, "value_dim", "IN", path, shape[-1]) if shape else 0
    fitting = grids.fitting([shape for shape, _ in tensors.values()], axis, grid)
    problem = problem_of("IN", path, tensors, order or AXES[0], value_dim, fitting)
    if order is None:
        check_order("IN", path, tensors["q"][0], tensors["k"][0])
    return problem, order or AXES[0]


def problem_of(argument, path, tensors, axes="bshd", value_dim=None, grid=""):
    """The keyword arguments of `Problem` that tensors determine; FileError, naming the argument, where they do not fit.

    tensors: q, k, v and perhaps dout -> (shape, dtype name), with dimensions in the order `axes`.
    value_dim: where keys hold the values, and there is no v; else None.  grid: when their tokens may be the points of
    one, for the error.
    """
    shared = value_dim is not None
    if shared:
        sizes, dtype = tensors["k"]
        tensors = {**tensors, "v": ((*sizes[:-1], value_dim), dtype)}
    (q, k, v), names = zip(*((natural(tensors[name][0], axes), tensors[name][1]) for name in INPUTS))
    shapes = ", ".join(f"{name} {tensors[name][0]}" for name in INPUTS)
    if not (len(q) == len(k) == len(v) == 4 and q[0] == k[0] and q[3] == k[3] and k[:3] == v[:3]):
        sizes = {
            "q": ("batch", "seqlen", "heads", "head_dim"),
            "k": ("batch", "seqlen_k", "kv_heads", "head_dim"),
            "v": ("batch", "seqlen_k", "kv_heads", "value_dim"),
        }
        fitting = ", ".join(f"{name} ({', '.join(natural(size, axes))})" for name, size in sizes.items())
        raise FileError(f"{argument} is {str(path)!r}; its shapes do not fit: {shapes}; they must be {fitting}{grid}")
    if len(set(names)) > 1 or names[0] not in ITEMSIZE:
        raise FileError(
            f"{argument} is {str(path)!r}; its q, k, v have dtypes {', '.join(names)}; they must have the "
            f"same, one of {', '.join(ITEMSIZE)}"
        )
    if "dout" in tensors:
        stored, wanted = tensors["dout"], (natural((*q[:3], v[3]), axes), names[0])
        if stored != wanted:
            sizes = ", ".join(natural(("batch", "seqlen", "heads", "value_dim"), axes))
            raise FileError(
                f"{argument} is {str(path)!r}; its dout is {stored[0]} in {stored[1]}; it must be "
                f"({sizes}) = {wanted[0]} in {wanted[1]}"
            )
    return {
        "batch": q[0],
        "seqlen": q[1],
        "heads": q[2],
        "head_dim": q[3],
        "seqlen_k": k[1],
        "kv_heads": k[2],
        "value_dim": v[3],
        "shared_kv": shared,
        "dtype": names[0],
    }
