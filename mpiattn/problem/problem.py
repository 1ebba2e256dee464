"""The parameters of one attention problem, checked once; plans, traffic, costs and the command line share them."""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from numbers import Integral, Real
from typing import Any

import numpy as np

from ..errors import ArgumentError
from ..masks.interval_mask import IntervalMask, check_fits, checked_mask
from ..masks.places import Places
from ..masks.sequence import Window as SequenceWindow
from ..system.closest import of_choices
from ..system.values import UNLIMITED, truth, whole_number
from ..system.words import number
from .mask import MASK_FIELDS, Mask, Window

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
# Names of dtypes elsewhere; what has two meanings, as "float" does in NumPy and torch, is not among them.
ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
ALIASES |= {"half": "float16", "single": "float32", "double": "float64"}
TO_FILL_IN: Any = None  # the default of fields that depend on other fields


def _finite(name: str, value: Any) -> float:
    try:
        if not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value):
            return float(value)
    except OverflowError:  # an int too large for a float
        pass
    raise ArgumentError(f"{name} is {value!r}; it must be a finite number")


def _computable(name: str, value: float, dtype: str, least: float, most: float) -> None:
    """Raise ArgumentError unless a number is 0 or its magnitude is from `least` to `most`."""
    if value and not least <= abs(value) <= most:
        raise ArgumentError(
            f"{name} is {value!r}; scores are {dtype} here, in which it must be 0 or from {least:.3g} to {most:.3g}"
        )


def _side(side: Any) -> int | None:
    count = -1 if side is None else whole_number("window", side, -1, most=UNLIMITED)
    return None if count == -1 else count


def _window(window: Any) -> Window:
    try:
        left, right = (None, None) if window is None else window
        left, right = (_side(side) for side in (left, right))
    except (TypeError, ValueError):
        raise ArgumentError(
            f"window is {window!r}; it must be (left, right), whole numbers from 0, or None or -1 for no limit: "
            "(128, 0) is a query's own key and the 128 before it"
        ) from None
    return left, right


def dtype_name(dtype: Any, argument: str = "dtype", choices: Collection[str] = tuple(ITEMSIZE)) -> str:
    """The name of a supported dtype, given as a name, a dtype of NumPy or torch, or a scalar type.

    Names that others use, of `ALIASES`, are taken too.

    For bfloat16 it imports ml_dtypes, after which NumPy accepts the name.  Raises ArgumentError.
    """
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", getattr(dtype, "__name__", repr(dtype)))
    name = name.removeprefix("torch.")
    name = ALIASES.get(name, name)
    if name not in choices:
        meant = "; did you mean float32 or float64?" if name == "float" else of_choices(name, choices)
        raise ArgumentError(f"{argument} is {name!r}; it may be {', '.join(choices)}{meant}")
    if name == "bfloat16":
        try:
            import ml_dtypes  # noqa: F401  (NumPy learns the dtype)
        except ImportError:
            raise ArgumentError(
                f"{argument} is 'bfloat16'; it needs the package ml_dtypes, which is not installed"
            ) from None
    return name


def partial_dtype(dtype: str) -> str:
    """dtype of partials and lse where q, k and v have this one: float64 if that is float64, else float32."""
    return "float64" if dtype == "float64" else "float32"


def check_shared_kv(shared_kv: Any, head_dim: int, value_dim: int) -> bool:
    """The argument shared_kv as a bool.  Raises ArgumentError, also where a value does not fit in its key."""
    shared_kv = truth("shared_kv", shared_kv)
    if shared_kv and value_dim > head_dim:
        raise ArgumentError(
            f"value_dim is {value_dim}; with shared_kv, by which a value is the first numbers of its key, "
            f"it may be at most head_dim, which is {head_dim}"
        )
    return shared_kv


def check_scale_given(scale: object, shared_kv: bool, head_dim: int) -> None:
    """Raise ArgumentError where no default of `scale` is right."""
    if scale is None and shared_kv:
        raise ArgumentError(
            "scale is left out; where keys hold the values (shared_kv) it must be given (of a command: --scale): that "
            "of the layer before its absorption, in MLA 1/sqrt(nope + rope), such as 192**-0.5 for 128 + 64; it does "
            f"not follow from head_dim, here {head_dim}, which counts compressed numbers"
        )


def dims_in_words(head_dim: int, value_dim: int, shared_kv: bool) -> str:
    """The dims of keys and values, such as "576 (512 of values, in the keys)"."""
    values = ", ".join([f"{value_dim} of values"] * (shared_kv or value_dim != head_dim) + ["in the keys"] * shared_kv)
    return f"{head_dim}" + (f" ({values})" if values else "")


@dataclass(frozen=True)
class Problem:
    """The parameters of one attention problem.  Raises ArgumentError.

    The arrays are q (batch, seqlen, heads, head_dim), k (batch, seqlen_k, kv_heads, head_dim) and
    v (batch, seqlen_k, kv_heads, value_dim).

    kv_heads: divides heads; query head h uses KV head h // (heads // kv_heads).  Default heads.
    value_dim: default head_dim.
    shared_kv: whether there is no array v, because a value is the first value_dim numbers of its key.
    seqlen_k: default seqlen.
    scale: default 1/sqrt(head_dim).  It must be representable in partial_dtype.
    window: as in `mpiattn.problem.mask`.
    softcap: scores s become softcap * tanh(s / softcap); None or 0 for none.  It must be representable too.
    wire_dtype: dtype of partials in messages, at most as wide as partial_dtype, the dtype in which they accumulate and
        the default.  lse always travels in partial_dtype.
    prefix, causal_block: as in `mpiattn.problem.mask`; either makes the problem causal.
    mask: a mask of several intervals, of `mpiattn.masks`; it hides keys besides those that the others hide.
    key_bias: whether each key has a number that is added to its scores, of each head, which travels with it.
    """

    seqlen: int
    heads: int
    head_dim: int
    batch: int = 1
    kv_heads: int = TO_FILL_IN
    value_dim: int = TO_FILL_IN
    seqlen_k: int = TO_FILL_IN
    dtype: str = "float32"
    causal: bool = False
    scale: float = TO_FILL_IN
    window: Window = TO_FILL_IN
    softcap: float | None = None
    wire_dtype: str = TO_FILL_IN
    prefix: int = 0
    causal_block: int | None = None
    shared_kv: bool = False
    mask: IntervalMask | None = None
    key_bias: bool = False

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        defaults = {"kv_heads": self.heads, "value_dim": self.head_dim, "seqlen_k": self.seqlen}
        for name, default in defaults.items():
            if getattr(self, name) is None:
                put(name, default)
        for name, least in (
            ("batch", 1),
            ("seqlen", 0),
            ("seqlen_k", 0),
            ("heads", 1),
            ("kv_heads", 1),
            ("head_dim", 1),
            ("value_dim", 1),
        ):
            put(name, whole_number(name, getattr(self, name), least))
        if self.heads % self.kv_heads:
            raise ArgumentError(f"kv_heads is {self.kv_heads}; it must divide heads, which is {self.heads}")
        self._check_sizes()
        put("dtype", dtype_name(self.dtype))
        if self.scale is None:
            put("scale", 1 / math.sqrt(self.head_dim))
        put("scale", _finite("scale", self.scale))
        if not isinstance(self.causal, bool | np.bool_ | Integral) or self.causal not in (0, 1):
            raise ArgumentError(f"causal is {self.causal!r}; it must be True or False")
        put("key_bias", truth("key_bias", self.key_bias))
        put("shared_kv", check_shared_kv(self.shared_kv, self.head_dim, self.value_dim))
        everything = self.seqlen + self.seqlen_k  # a longer side of a window has no effect
        put("window", tuple(side if side is None else min(side, everything) for side in _window(self.window)))
        prefix = whole_number("prefix", self.prefix, 0, most=UNLIMITED)
        put("prefix", min(prefix, self.seqlen_k))
        if self.causal_block is not None:
            block = whole_number("causal_block", self.causal_block, 1, most=UNLIMITED)
            put("causal_block", min(block, max(self.seqlen_k, 1)))
        put("causal", bool(self.causal or prefix or self.causal_block))
        if self.softcap is not None:
            put("softcap", _finite("softcap", self.softcap) or None)
            if self.softcap is not None and self.softcap < 0:
                raise ArgumentError(f"softcap is {self.softcap!r}; it must be positive, or None or 0 for none")
        if self.mask is not None:
            check_fits(checked_mask(self.mask), self.seqlen, self.seqlen_k)
            if self.window != (None, None):
                self.mask.places(self.seqlen_k)  # raises where parts of the mask disagree
        limits = np.finfo(self.partial_dtype)
        # Half the largest number, since a back end may convert scores to base 2.  Subnormal numbers lose digits.
        tiny, most = float(limits.tiny), float(limits.max) / 2
        _computable("scale", self.scale, self.partial_dtype, tiny, most)
        if self.softcap is not None:
            _computable("softcap", self.softcap, self.partial_dtype, tiny, 1 / tiny)
            _computable("scale / softcap", self.scale / self.softcap, self.partial_dtype, tiny, most)
        narrower = [name for name, size in ITEMSIZE.items() if size <= self.partial_itemsize]
        put(
            "wire_dtype",
            self.partial_dtype if self.wire_dtype is None else dtype_name(self.wire_dtype, "wire_dtype", narrower),
        )

    def _check_sizes(self) -> None:
        """Raise ArgumentError where numbers of pairs or of bytes, which are int64 in plans, would overflow."""
        rows = max(self.seqlen, self.seqlen_k, 1)
        products = (
            # of the longer one twice, since triangles are counted too
            (("seqlen", "seqlen_k"), rows**2, "the square of the larger", 63),
            # the arrays of a backward pass and their partials are fewer than 16, of 8 bytes a number at most
            (
                ("batch", "seqlen", "heads", "head_dim"),
                self.batch * rows * self.heads * self.head_dim,
                "their product",
                56,
            ),
            (
                ("batch", "seqlen_k", "heads", "value_dim"),
                self.batch * rows * self.heads * self.value_dim,
                "their product",
                56,
            ),
        )
        for names, product, what, bits in products:
            if product >= 2**bits:
                values = ", ".join(f"{name} is {getattr(self, name)}" for name in names)
                raise ArgumentError(f"{values}; {what} must be below 2^{bits}")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(self.__getstate__().values()))

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone: what is cached can be made again."""
        return {name: self.__dict__[name] for name in self.__dataclass_fields__}

    def __str__(self) -> str:
        """The problem in one line."""
        tokens = number(self.seqlen, "token")
        if self.seqlen_k != self.seqlen:
            tokens = f"{self.seqlen} x {number(self.seqlen_k, 'token')}"
        heads = number(self.heads, "head") + (f" ({self.kv_heads} KV)" if self.kv_heads != self.heads else "")
        dims = dims_in_words(self.head_dim, self.value_dim, self.shared_kv)
        return f"batch {self.batch}, {tokens}, {heads} x {dims}, {self.dtype}, {self.whole_mask}"

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, the mask as text: for JSON."""
        return {**self.__getstate__(), "mask": None if self.mask is None else str(self.mask)}

    @cached_property
    def without_tokens(self) -> "Problem":
        """The problem without tokens and mask: what is cached by it, such as bytes a token, serves all lengths."""
        return _without_tokens(
            self.heads,
            self.head_dim,
            self.batch,
            self.kv_heads,
            self.value_dim,
            self.dtype,
            self.wire_dtype,
            self.shared_kv,
            self.key_bias,
        )

    @cached_property
    def whole_mask(self) -> Mask:
        """The `Mask`: the keys that each query sees, by all of the problem's masks."""
        fields = {name: getattr(self, name) for name in MASK_FIELDS}
        # beside places, the window goes by them as a part of the mask
        if self.mask is not None and self.window != (None, None) and self.places is not None:
            fields |= {"window": (None, None), "mask": SequenceWindow(*self.window) & self.mask}
        return Mask(**fields)

    @cached_property
    def places(self) -> Places | None:
        """The `Places` of the keys, by which distances go; None where they are the positions."""
        return None if self.mask is None else self.mask.places(self.seqlen_k)

    def mask_of(self, cuts: tuple[int, ...] | None) -> Mask:
        """The mask of a call with documents; without cuts, that of a call without.  cuts: as of `Mask`."""
        return self.whole_mask if cuts is None else replace(self.whole_mask, cuts=cuts)

    @property
    def itemsize(self) -> int:
        """Bytes of an element of q, k, v and out."""
        return ITEMSIZE[self.dtype]

    @property
    def partial_dtype(self) -> str:
        """dtype of partials and lse: float64 if dtype is float64, else float32."""
        return partial_dtype(self.dtype)

    @property
    def partial_itemsize(self) -> int:
        """Bytes of an element of a partial and of lse."""
        return ITEMSIZE[self.partial_dtype]

    @property
    def flops_per_pair(self) -> int:
        """Floating-point operations of one attended (query, key) pair, summed over batch and heads."""
        return 2 * self.batch * self.heads * (self.head_dim + self.value_dim)

    @property
    def flops(self) -> int:
        """Floating-point operations of the forward pass: two matrix products, attended pairs only."""
        return self.flops_per_pair * self.pairs

    @cached_property
    def pairs(self) -> int:
        """Number of attended (query, key) pairs without documents."""
        return self.whole_mask.pairs()


@lru_cache(64)
def _without_tokens(
    heads: int,
    head_dim: int,
    batch: int,
    kv_heads: int,
    value_dim: int,
    dtype: str,
    wire_dtype: str,
    shared_kv: bool,
    key_bias: bool,
) -> Problem:
    return Problem(
        0,
        heads,
        head_dim,
        batch,
        kv_heads,
        value_dim,
        dtype=dtype,
        wire_dtype=wire_dtype,
        shared_kv=shared_kv,
        key_bias=key_bias,
    )
