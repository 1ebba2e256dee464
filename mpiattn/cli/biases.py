"""The biases and the dropout of `mpiattn run`: options, datasets of IN and OUT by tiles, and their verification."""

import operator

import numpy as np

from ..arguments.arrays import on_host
from ..arguments.biases import BiasArguments
from ..comm.agreement import agreement
from ..console import options
from ..errors import ArgumentError, FileError
from ..files import hdf5, pairs
from ..files.finite import nonfinite
from ..files.output import Written
from ..problem.distances import usual_slopes
from ..verify.bias_gradients import BiasGradients, TileGradient
from ..verify.spread_biases import rules_of

SHAPES = {
    "bias": ["(batch or 1, heads or 1, seqlen, seqlen_k)"],
    "key_bias": ["(seqlen_k,)", "(heads or 1, seqlen_k)", "(batch or 1, heads or 1, seqlen_k)"],
}


def add_arguments(parser):
    """Declare the options."""
    for name, meaning in (
        (
            "bias",
            "added to the scores, after --softcap: a dataset of IN (batch or 1, heads or 1, seqlen, seqlen_k) in the "
            "dtype of lse or of q, of which every rank reads its tile of the mesh; -inf hides a key",
        ),
        ("key-bias", "a number for each key, added to its scores: a dataset of IN, " + ", ".join(SHAPES["key_bias"])),
    ):
        dest = f"{name}_dataset".replace("-", "_")  # key_bias is an argument of a plan
        parser.add_argument(f"--{name}", metavar="DATASET", dest=dest, help=meaning)
    options.add(parser, "alibi")
    parser.add_argument(
        "--dropout",
        type=float,
        default=0.0,
        metavar="P",
        help="drop each weight with this probability, and divide the others by 1 - P; which ones depends on --seed and "
        "on positions alone, not on the mesh",
    )
    parser.add_argument("--seed", type=int, metavar="S", help="of --dropout, which needs one: from 0 to 2^64 - 1")


class RunBiases:
    """The biases of a run.

    source: the open `mpiattn.files.input.Input`.  problem: what it holds.
    `call` has the arguments of `MeshAttention.forward`: those that all ranks have alike, and the others after `read`.
    Raises FileError and ArgumentError on this rank, where a dataset does not fit and of --dropout.
    """

    def __init__(self, args, source, problem):
        self._source, self._problem, self._names = source, problem, {}
        self._data = {}
        for name in SHAPES:
            dataset = getattr(args, f"{name}_dataset")
            if dataset is not None:
                self._names[name], self._data[name] = dataset, self._dataset(name, dataset)
        BiasArguments(dropout=args.dropout, seed=args.seed).threshold()
        if args.seed is not None and not args.dropout:
            raise ArgumentError("--seed is given without --dropout, which alone depends on it")
        self.call = {"dropout": args.dropout, "seed": args.seed} if args.dropout else {}
        if args.alibi:
            self.call["alibi_slopes"] = usual_slopes(problem.heads).astype(problem.partial_dtype)
        self.plan = {"key_bias": "key_bias" in self._data}  # arguments of `MeshAttention`
        self._place, self._grads = None, {}

    def _dataset(self, name, dataset):
        p, source = self._problem, self._source
        argument = f"--{name.replace('_', '-')} is {dataset!r}"
        with hdf5.file_errors(source.argument, source.path, "read"):
            data = source.numbers(dataset, axis=2 if name == "bias" else None)
            if data is None:
                raise FileError(
                    f"{argument}; {source.argument} has no dataset of that name; it has"
                    f"{hdf5.listing(hdf5.contents(source.group))}"
                )
            shape, dtype = data.shape, data.dtype
        if name == "bias":
            fits = len(shape) == 4 and shape[0] in (1, p.batch) and shape[1] in (1, p.heads)
            fits, numbers = (
                fits and shape[2:] == (p.seqlen, p.seqlen_k),
                [f"({p.batch} or 1, {p.heads} or 1, {p.seqlen}, {p.seqlen_k})"],
            )
        else:
            lengths = (1, p.batch), (1, p.heads), (p.seqlen_k,)
            fits = 1 <= len(shape) <= 3 and all(map(operator.contains, lengths[-len(shape) :], shape))
            of_keys = f"{p.heads} or 1, {p.seqlen_k}"
            numbers = [f"({p.seqlen_k},)", f"({of_keys})", f"({p.batch} or 1, {of_keys})"]
        if not fits:
            raise FileError(
                f"{argument}, of shape {shape}; it must be {' or '.join(SHAPES[name])} = {' or '.join(numbers)}"
            )
        dtypes = dict.fromkeys((p.partial_dtype, p.dtype) if name == "bias" else (p.partial_dtype,))
        if dtype not in dtypes:
            raise FileError(f"{argument}, in {dtype}; it must be in {' or '.join(dtypes)}")
        return data

    def __bool__(self):
        return bool(self.call or self._data)

    @property
    def datasets(self):
        """Names of the datasets of biases."""
        return list(self._names.values())

    @property
    def asked(self):
        """The options given, by name."""
        asked = {**self._names, "alibi": True} if "alibi_slopes" in self.call else dict(self._names)
        return asked | {name: self.call[name] for name in ("dropout", "seed") if name in self.call}

    @property
    def dense(self):
        """Whether there is a bias with a number for every query and key."""
        return "bias" in self._data

    def check_tile(self, tile):
        """Raise ArgumentError if there is a dense bias, and the ranks of a plan with this tile have no tile of it."""
        if self.dense and tile.divided:
            raise ArgumentError(
                f"--bias is {self._names['bias']!r} and --tile {str(tile)!r}, whose ranks compute pieces of the "
                "scores: none of them has a tile of a bias; choose --tile mesh, or a tile AxB or HxAxB"
            )

    def read(self, peers, plan):
        """Read this rank's part of the datasets; collective."""
        source = self._source
        if "bias" in self._data:
            self._place = pairs.Place(plan.bias_sequences, plan.bias_heads, *plan.bias_positions)
        with agreement(peers), hdf5.file_errors(source.argument, source.path, "read"):
            if "bias" in self._data:
                of_plane = zip(self._data["bias"].shape, self._place)
                axes = [slice(0, 1) if length == 1 else of for length, of in of_plane][:2]
                self.call["bias"] = pairs.read_pairs(self._data["bias"], *axes, *self._place[2:])
            if "key_bias" in self._data:
                self.call["key_bias"] = self._keys(plan.positions_k)
        if self._data:
            source.check(read_elsewhere=[] if "bias" not in self._data or self._speaks else [self._names["bias"]])

    def _keys(self, positions):
        """The numbers of this rank's keys."""
        data = self._data["key_bias"]
        own = np.empty((*data.shape[:-1], len(positions)), data.dtype)
        for part, where in pairs.even_parts(positions):
            before = (0,) * (len(data.shape) - 1)
            steps = (*(1 for _ in before), part.step)
            own[..., where] = data.read((*before, part[0]), (*data.shape[:-1], len(part)), steps=steps)
        return own

    @property
    def of_backward(self):
        """More arguments of `MeshAttention.backward`."""
        if "bias" not in self._data:
            return {}
        return {"bias_shared": [name for name, n in zip(("batch", "heads"), self._data["bias"].shape) if n == 1]}

    @property
    def gradients(self):
        """Shape and dtype of the gradients' datasets of OUT."""
        shapes = {name: data.shape for name, data in self._data.items()}
        if "alibi_slopes" in self.call:
            shapes["alibi_slopes"] = self.call["alibi_slopes"].shape
        return {f"d{name}": (shape, self._problem.partial_dtype) for name, shape in shapes.items()}

    def odd(self):
        """The number of elements of this rank's part of IN's datasets that are NaN or inf, not -inf, by their role."""
        counted = {"bias": "bias" in self._data and self._speaks, "key_bias": True}
        return {name: nonfinite(self.call[name].reshape(1, -1), True) if counted[name] else 0 for name in self._data}

    def keep(self, grads):
        """Keep what `backward` returned for biases; returns the number of elements that are not finite, by dataset."""
        self._grads, odd = dict(zip(self.gradients, map(on_host, grads), strict=True)), {}
        for name, array in self._grads.items():
            counted = self._speaks if name == "dbias" else name == "dkey_bias" or self._source.peers.rank == 0
            odd[name] = nonfinite(array.reshape(1, -1)) if counted else 0
        return odd

    @property
    def _speaks(self):
        """Whether no other plane has the same tile."""
        return all(n > 1 or of.start == 0 for n, of in zip(self._data["bias"].shape, self._place))

    def rules(self, problem):
        """`mpiattn.verify.reference_biases.PairRules`, whose numbers are read again from IN; None without biases.

        problem: the plan's, with its masks.
        """
        if not self:
            return None
        dense, of_keys = self._data.get("bias"), self._data.get("key_bias")

        def of(data, b, h):
            return [slice(n, n + 1) for n in (b if data.shape[0] > 1 else 0, h if data.shape[1] > 1 else 0)]

        def read(b, h, positions, keys):
            return pairs.read_pairs(dense, *of(dense, b, h), positions, keys)[0, 0].astype(np.float64)

        def read_keys(b, h, keys):
            start, count = int(keys[0]), int(keys[-1] + 1 - keys[0])
            index = (b, h)[3 - len(of_keys.shape) :]
            shape = (*[1] * len(index), count)
            row = of_keys.read((*index, start), shape, axis=len(index)).reshape(-1)
            return row[keys - start].astype(np.float64)

        call = {name: value for name, value in self.call.items() if name not in SHAPES}
        return rules_of(problem, BiasArguments(**call), dense and read, of_keys and read_keys)

    def verification(self, peers, source):
        """`BiasGradients` of what was kept, or None.  source: of the float64 attention."""
        if not self._grads:
            return None
        tile = of_keys = None
        if "dbias" in self._grads:
            tile = TileGradient(self._grads["dbias"], self._data["bias"].shape[:2], *self._place)
        if "dkey_bias" in self._grads:
            of_keys = self._grads["dkey_bias"]
            of_keys = of_keys.reshape((1,) * (3 - of_keys.ndim) + of_keys.shape)
        return BiasGradients(peers, source, tile, of_keys, self._grads.get("dalibi_slopes"))

    def write(self, output, k_layout):
        """Write what was kept; collective."""
        for name, array in self._grads.items():
            if name == "dbias":
                output.write_pairs(name, array, self._place)
            elif name == "dkey_bias":
                output.write_each([Written(name, array, k_layout, axis=array.ndim - 1)])
            else:
                output.write_whole(name, array)
