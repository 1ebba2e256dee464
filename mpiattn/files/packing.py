"""netCDF's attributes that say which numbers the elements of a dataset stand for.

A number is scale_factor * element + add_offset.  Elements equal to _FillValue or to one of missing_value, and those
outside valid_range, valid_min and valid_max, stand for numbers that are missing.
"""

from typing import NamedTuple

import h5py
import numpy as np

from ..problem.problem import dtype_name

SCALE = ("scale_factor", "add_offset")
FILL = ("_FillValue", "missing_value")
RANGE = ("valid_range", "valid_min", "valid_max")
# What netCDF's library leaves where nobody has written, if the writer names no other number.  Bytes have none.
UNWRITTEN = {
    "int16": -(2**15) + 1,
    "uint16": 2**16 - 1,
    "int32": -(2**31) + 1,
    "uint32": 2**32 - 1,
    "int64": -(2**63) + 2,
    "uint64": 2**64 - 2,
    "float32": 9.969209968386869e36,
    "float64": 9.969209968386869e36,
}
NO_NUMBERS = np.empty(0)


class Packing(NamedTuple):
    """How the elements of a dataset are made into numbers.

    elements: their dtype, unsigned where _Unsigned says so.  dtype: name of that of the numbers.  scale, offset: None
    where numbers are the elements.  fill: elements that stand for missing numbers.  least, most: of the elements that
    stand for others; None without such a bound.
    """

    elements: np.dtype
    dtype: str
    scale: float | None
    offset: float
    fill: np.ndarray
    least: np.generic | None
    most: np.generic | None

    @property
    def may_miss(self):
        """Whether numbers may be missing."""
        return bool(len(self.fill)) or self.least is not None or self.most is not None

    def __str__(self):
        """What a number is of its element; "" where it is the element."""
        if self.scale is None:
            return ""
        return f"{self.scale:.7g} * element + {self.offset:.7g}"

    def unpack(self, stored, into):
        """Make numbers of stored elements, in an array that they fill; returns where they are missing, or None.

        A missing number is NaN, if its dtype has that.
        """
        elements = stored.view(self.elements)
        missing = self._missing(elements)
        with np.errstate(all="ignore"):  # a number too large for its dtype is infinite, which is reported
            if self.scale is None:
                into[...] = elements
            else:
                into[...] = elements.astype(np.float64) * self.scale + self.offset
        if missing is not None and into.dtype.kind not in "iu":
            into[missing] = np.nan
        return missing

    def _missing(self, elements):
        """Which elements stand for missing numbers; None if none does."""
        tests = [elements == number for number in self.fill]
        if np.isnan(self.fill.astype(np.float64)).any():
            tests.append(np.isnan(elements))
        if self.least is not None:
            tests.append(elements < self.least)
        if self.most is not None:
            tests.append(elements > self.most)
        missing = np.logical_or.reduce(tests) if tests else np.zeros((), bool)
        return missing if missing.any() else None


def packing_of(data, dtype):
    """The `Packing` of a dataset; None where its numbers are its elements, and none may be missing.

    dtype: name of that of its elements.  Raises ValueError where they cannot be known.
    """
    named = {*SCALE, *FILL, *RANGE, "_Unsigned"} & _names(data)
    unwritten, stored = _unwritten(data, dtype), _dtype(dtype)
    if stored is None or (not named and unwritten is None):
        return None
    unsigned = _is_unsigned(data, stored)
    elements = np.dtype(f"u{stored}") if unsigned else stored
    scale, offset = (_one_number(data, name, named) for name in SCALE)
    fill = [_as_elements(_numbers(data, name, named), elements, unsigned) for name in FILL]
    if unwritten is not None and "_FillValue" not in named:
        fill.append(np.array([unwritten], elements))
    numbers = _unpacked(elements, scale, offset)
    least, most = _bounds(data, named, elements, unsigned)
    packing = Packing(elements, numbers.name, None, 0.0, np.concatenate(fill), least, most)
    if scale is None and offset is None:
        return packing
    packing = packing._replace(scale=1.0 if scale is None else float(scale), offset=float(offset or 0))
    return _with_packed_bounds(packing)


def _names(data):
    """The names of a dataset's attributes."""
    return set(data.attrs) if h5py.h5a.get_num_attrs(data.id) else set()


def _unwritten(data, dtype):
    """What the dataset holds where nobody has written, if that is netCDF's own number for it; else None."""
    if dtype not in UNWRITTEN:
        return None
    how = data.id.get_create_plist()
    if how.fill_value_defined() != h5py.h5d.FILL_VALUE_USER_DEFINED:
        return None
    value = np.array(UNWRITTEN[dtype], dtype)
    return value if data.fillvalue == value else None


def _dtype(name):
    """The NumPy dtype of elements that are numbers; None of others."""
    try:
        dtype = np.dtype(dtype_name(name) if name == "bfloat16" else name)
    except TypeError:
        return None
    return dtype if name == "bfloat16" or dtype.kind in "iuf" else None


def _is_unsigned(data, stored):
    """Whether elements are unsigned that are stored as if they were not, as formats without such types do."""
    try:
        said = data.attrs.get("_Unsigned", "")
    except (TypeError, OSError, RuntimeError):
        return False
    said = said.decode(errors="replace") if isinstance(said, bytes) else str(said)
    return stored.kind == "i" and said.strip("\0 ").lower() == "true"


def _numbers(data, name, named):
    """The numbers of an attribute, also if they are written as text; none where it holds something else."""
    if name not in named:
        return NO_NUMBERS
    try:
        values = np.asarray(data.attrs[name]).reshape(-1)
        if values.dtype.kind in "SUO":  # text
            return np.array([float(value) for value in values])
        return values if values.dtype.kind in "iuf" else NO_NUMBERS
    except (TypeError, ValueError, OSError, OverflowError, RuntimeError):
        return NO_NUMBERS


def _one_number(data, name, named):
    """The number that elements are multiplied by, or that is added; None without; ValueError if it is no number."""
    if name not in named:
        return None
    values = _numbers(data, name, named)
    if len(values) == 1 and np.isfinite(values[0]):
        return values[0]
    raise ValueError(
        f"the attribute {name} of its dataset {data.name!r} must be one number, by which its elements are unpacked"
    )


def _as_elements(values, dtype, unsigned):
    """Those of some numbers that elements of a dtype may be, in that dtype."""
    if unsigned and values.dtype == np.dtype(dtype.name[1:]):
        return values.view(dtype)
    with np.errstate(all="ignore"):
        elements = values.astype(dtype)
        if dtype.kind in "iu":
            return elements[elements == values]
        return elements[np.isfinite(elements.astype(np.float64)) | ~np.isfinite(values)]


def _unpacked(elements, scale, offset):
    """The dtype of numbers: that of whole elements follows their attributes."""
    types = [np.dtype(type(number)) for number in (scale, offset) if number is not None]
    if not types:
        return elements
    if elements.kind in "iu":
        return np.result_type(*(of if of.kind == "f" else np.dtype(np.float64) for of in types))
    if elements.kind != "f":  # bfloat16
        elements = np.dtype(np.float32)
    return np.result_type(elements, *types)


def _bounds(data, named, elements, unsigned):
    """The least and the largest element that stands for a number; None for no bound."""
    both = _numbers(data, "valid_range", named)
    least, most = both[:1], both[1:]
    if len(both) != 2:
        least, most = (_numbers(data, name, named) for name in RANGE[1:])
    return [_bound(values, elements, unsigned) for values in (least, most)]


def _bound(values, elements, unsigned):
    if len(values) != 1:
        return None
    if elements.kind in "iu" and not unsigned:
        return values[0]  # may lie outside what elements can be
    fitting = _as_elements(values, elements, unsigned)
    return fitting[0] if len(fitting) else None


def _with_packed_bounds(packing):
    """The same, where bounds in the dtype of the numbers, wider than that of the elements, are bounds of numbers."""
    numbers = np.dtype(packing.dtype)
    if numbers.itemsize <= packing.elements.itemsize or packing.elements.kind not in "iu" or not packing.scale:
        return packing
    bounds = [packing.least, packing.most]
    if any(bound is not None and bound.dtype != numbers for bound in bounds):
        return packing
    bounds = [
        None if bound is None else np.rint((np.float64(bound) - packing.offset) / packing.scale) for bound in bounds
    ]
    if packing.scale < 0:
        bounds.reverse()
    return packing._replace(least=bounds[0], most=bounds[1])
