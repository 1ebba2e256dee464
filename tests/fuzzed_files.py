"""Input files as nobody would write them, made at random, and what is promised of them.

    python tests/fuzzed_files.py --examples 5000 --seed 1        more of them than the tests make, in child processes

Promised is an error that names the argument and the file, or the numbers that somebody wrote; no other exception, no
wait, and no fill values for what is not there.
"""

import argparse
import contextlib
import faulthandler
import os
import random
import sys
import tempfile
import traceback
from pathlib import Path
from typing import NamedTuple

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import h5py  # noqa: E402
import numpy as np  # noqa: E402
from fuzzed_datasets import GONE, SOUND, another_kind, bfloat16, chunked, plain, virtual  # noqa: E402
from fuzzed_promises import judge  # noqa: E402

SECONDS = 40  # for an example


class Made(NamedTuple):
    """A file.

    given: arguments of `shapes.read_shapes`.  numbers: name -> array that somebody wrote.  gone: name -> how, of
    datasets of which a part is not there.  sound: whether all fits, so that no error is right.
    """

    path: Path
    given: dict
    numbers: dict
    gone: dict
    sound: bool


def odd_shape(rng, shape):
    which = rng.randrange(6)
    if which == 0:
        return tuple(rng.randint(0, 3) for _ in range(rng.randint(0, 6)))
    if which == 1:
        return tuple(rng.choice([n, 0]) for n in shape)
    if which == 2:
        return shape[: rng.randint(0, len(shape))]
    if which == 3:
        return (*shape, rng.randint(1, 2))
    if which == 4:
        return tuple(rng.sample(shape, len(shape)))
    at = rng.randrange(len(shape))
    return (*shape[:at], rng.randint(1, 4), *shape[at + 1 :])


def odd_value(rng, dims):
    return rng.choice(
        [
            *["bshd", "bhsd", b"bhsd", np.bytes_(b"bhsd"), ["bhsd"], "BHSD", "", "ü", b"\xff"],
            *[0, 1, dims, float(dims), dims + 0.5, -1, 2**31, 2**63 - 1, np.nan, np.inf, -np.inf, True, 1j],
            *[[], [dims], [dims, dims], [[dims]], str(dims), np.uint8(dims), h5py.Empty("f4"), np.float128(dims)],
            np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f4")]),
        ]
    )


NAMES = [
    "q",
    "/q",
    "a/q",
    "ü",
    "q q",
    "q\n",
    "a//q",
    ".",
    "..",
    "/",
    "",
    "q\0",
    "there",
    "x" * 300,
    "../q",
    "'\"",
    "%s",
]


def make(rng, folder):
    """A file in an empty folder; rng: a `random.Random`."""
    oddities = rng.choice([0, 1, 1, 1, 2, 3])
    batch, heads, tokens = rng.randint(1, 2), rng.randint(1, 2), rng.randint(3, 7)
    keys, kv_heads, dim, value = rng.choice([tokens, 9]), rng.choice([1, heads]), rng.randint(1, 4), rng.randint(1, 4)
    grid = (3, 2) if tokens == 6 and rng.random() < 0.7 else None
    axes, said = rng.choice(["bshd", "bhsd"]), rng.choice(["asked", "attribute", "both"])
    shapes = {
        "q": (batch, tokens, heads, dim),
        "k": (batch, keys, kv_heads, dim),
        "v": (batch, keys, kv_heads, value),
        "dout": (batch, tokens, heads, value),
        "bias": (1, 1, tokens, keys),
        "key_bias": (keys,),
        "cu_seqlens": (3,),
    }
    dtype = rng.choice(["f2", "f4", "f8"])
    odd = set(
        rng.sample(["q", "k", "v", "dout", "bias", "key_bias", "cu_seqlens", "axes", "value_dim", "names"], oddities)
    )
    path, numbers, gone = folder / rng.choice(["in.h5", "in.h5", "ü in.h5"]), {}, {}
    with h5py.File(
        path, "w", userblock_size=rng.choice([0, 0, 512]), libver=rng.choice(["earliest", "latest"])
    ) as file:
        for name, shape in shapes.items():
            if name in ("q", "k", "v", "dout"):
                if name in ("q", "dout") and grid:
                    shape = (batch, *grid, heads, shape[3]) if rng.random() < 0.5 else shape
                if axes == "bhsd":
                    shape = (batch, heads if name in ("q", "dout") else kv_heads, *shape[1:-2], shape[-1])
            array = np.random.default_rng(rng.randrange(2**32)).standard_normal(shape)
            of = dtype if name in ("q", "k", "v", "dout") or (name == "bias" and dtype != "f2") else "f4"
            array = array.astype(of if dtype != "f8" else "f8")
            if name == "cu_seqlens":
                array = np.array([0, rng.randint(0, keys), keys])
            if grid and name in ("q", "dout") and batch == 1 and name not in odd and rng.random() < 0.5:
                rng.choice(SOUND)(file, name, array[0], rng)  # without a batch axis
                numbers[name] = array
                continue
            _dataset(file, name, array, name in odd, rng, numbers, gone)
        if said != "asked":
            file.attrs["axes"] = axes
        for name in odd & {"axes", "value_dim"}:
            with contextlib.suppress(TypeError, OSError, ValueError):
                file.attrs[name] = odd_value(rng, value)
    given = {"axes": None if said == "attribute" else axes, "grid": grid, "backward": rng.random() < 0.5}
    if "names" in odd:
        given["names"] = {rng.choice("qkv"): rng.choice(NAMES)}
    return Made(path, given, numbers, gone, not odd)


def _dataset(file, name, array, odd, rng, numbers, gone):
    which = rng.randrange(6) if odd else 6
    if which in (0, 1):
        write = rng.choice(GONE)
        write(file, name, array, rng)
        gone[name] = write.__name__
    elif which == 2:
        another_kind(file, name, array, rng)
    elif which == 3:
        array = np.ones(odd_shape(rng, array.shape), array.dtype)
        rng.choice([plain, chunked, virtual])(file, name, array, rng)
    elif which == 4:
        (bfloat16 if array.dtype.kind == "f" else plain)(file, name, array, rng)
    elif which == 6:
        rng.choice(SOUND)(file, name, array, rng)
        numbers[name] = array


def damage(rng, path):
    """Cut a file short, or change some of its bytes."""
    raw = bytearray(path.read_bytes())
    if rng.random() < 0.3:
        del raw[rng.randint(0, len(raw)) :]
    else:
        for _ in range(rng.choice([1, 1, 2, 5])):
            at = rng.randrange(min(len(raw), rng.choice([100, 1000, 10**9])))
            raw[at] = rng.choice([0, 255, 1, raw[at] ^ 1 << rng.randrange(8), rng.randrange(256)])
    path.write_bytes(raw)


# By hand


def _example(seed, damaged):
    """Make and judge the example of a number."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="mpiattn-fuzz-") as folder:
        made = make(rng, Path(folder))
        if damaged:
            damage(rng, made.path)
        here = os.getcwd()
        os.chdir(folder)
        try:
            judge(made, damaged)
        finally:
            os.chdir(here)


def _in_child(seeds, damaged, show):
    """Judge examples in a child process until it ends; returns how many, and how many of them went wrong."""
    reading, writing = os.pipe()
    with tempfile.TemporaryFile("w+") as fate:
        child = os.fork()
        if not child:
            _judge_all(seeds, damaged, show, writing, fate)
            os._exit(0)
        os.close(writing)
        with open(reading, "rb") as file:
            done = file.read()
        _, status = os.waitpid(child, 0)
        fate.seek(0)
        report = fate.read()
    if status:
        print(f"{seeds[len(done)]}: {report}", flush=True)
        where = next((line for line in report.splitlines() if line.startswith("  ")), "")
        # Of all that the child calls, only HDF5 can crash.  A child that waits too long ends without a signal.
        of_hdf5 = os.WIFSIGNALED(status) or "/h5py/" in where
        done += b"." if damaged and of_hdf5 else b"x"
    return len(done), done.count(b"x")


def _judge_all(seeds, damaged, show, writing, fate):
    """Judge examples, and write for each what came of it.  fate: a file for what ends this process."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    faulthandler.enable(fate)
    for seed in seeds:
        faulthandler.dump_traceback_later(SECONDS, exit=True, file=fate)
        outcome = b"."
        try:
            _example(seed, damaged)
        except BaseException as error:
            outcome = b"x"
            text = traceback.format_exc() if show else f"{type(error).__name__}: {str(error)[:300]}"
            print(f"{seed}: {text}", flush=True)
        os.write(writing, outcome)
    faulthandler.cancel_dump_traceback_later()


def main():
    """The script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=1000, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first (default: %(default)s)")
    parser.add_argument("--damaged", action="store_true", help="cut them short, or change some of their bytes")
    parser.add_argument("--show", action="store_true", help="where each went wrong")
    args = parser.parse_args()
    first, end, wrong = args.seed, args.seed + args.examples, 0
    while first < end:
        done, bad = _in_child(range(first, min(first + 200, end)), args.damaged, args.show)
        first, wrong = first + done, wrong + bad
    print(f"{args.examples} examples, {wrong} went wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
