"""The problems of an input file: its tensors q, k, v, or those of each of its groups, for example a group a layer."""

import re
from fnmatch import fnmatchcase

import h5py

from ..errors import FileError
from .hdf5 import contents, listing, members
from .presence import AbsentError, opened
from .shapes import input_file, place_name, shapes_of


def read_problems(path, axes=None, chosen=None, names=None, **how):
    """The problems of a file, as a `look` of `Input`: what `shapes_of` finds in each, by the path of its group; axes.

    A group is a problem if it has a dataset q.  If the file itself has one, it is the only problem, under the path "".
    The others are in the order of their paths, numbers in them by value.
    chosen: a pattern, as of a shell, that paths must match; "*" also stands for "/".  names, how: as of `shapes_of`.
    Raises FileError where there is no problem, and where one does not fit.
    """
    names = names or {}
    with input_file(path) as file:
        role = names.get("q", "q")
        if chosen is None and _has(file, role):
            groups = [""]
        else:
            groups = [group for group in _groups(file, role) if chosen is None or fnmatchcase(group, chosen)]
        if chosen is not None and not groups:
            there = _groups(file, role)
            has = ", ".join(there) if there else f"none such, but{listing(contents(file)) or ' nothing'}"
            raise FileError(
                f"--problems is {chosen!r}; it matches no group with a dataset {role!r} of IN, {str(path)!r}, "
                f"which has {has}"
            )
        problems = {
            group: shapes_of(file[group or "/"], place_name(path, group), axes, names=names, **how)
            for group in groups or [""]  # which says what is missing
        }
        return problems, axes


def _has(group, name):
    """Whether there is such a dataset, or a link that leads nowhere, which is an error for `dataset_of` to tell."""
    try:
        return isinstance(opened(group, name, whole=False), h5py.Dataset)
    except AbsentError:
        return True


def _groups(file, role):
    """Paths of the groups that have a dataset `role`, in order."""
    groups = (path for path, item in members(file, datasets=False) if _has(item, role))
    return sorted(groups, key=by_number)


def by_number(path):
    """A key that sorts layer10 after layer9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path)]
