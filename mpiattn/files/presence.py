"""What is not there of a dataset: HDF5 would read its fill value, mostly zeros, for every element of it.

Links are followed here one by one before HDF5 follows them, which would wait for ever where one leads to a pipe.
"""

import importlib
import os
from contextlib import nullcontext, suppress
from math import prod

import h5py

# Filters that HDF5 does not have itself, by the numbers that the HDF Group gives them.
FILTERS = {
    4: "szip",
    305: "LZO",
    307: "bzip2",
    32000: "LZF",
    32001: "Blosc",
    32003: "Snappy",
    32004: "LZ4",
    32008: "Bitshuffle",
    32013: "ZFP",
    32014: "fpzip",
    32015: "Zstandard",
    32017: "SZ",
    32018: "FCIDECOMP",
    32022: "BitGroom",
    32023: "Granular BitRound",
    32024: "SZ3",
    32026: "Blosc2",
    32028: "SPERR",
}
LINKS = 16  # of more, one after another, HDF5 finds nothing either


class AbsentError(ValueError):
    """What is not there, in words."""


class _CycleError(AbsentError):
    """Of links that lead back."""


def missing_source(group, name):
    """What HDF5 does not find of a dataset of an open file or group, in words; "" if all is there or no such name.

    It may be behind a link, in a part of a virtual dataset or in another file, or nobody has ever written it.
    """
    try:
        _leads(group, name)
    except AbsentError as error:
        return str(error)
    return ""


def opened(group, name, whole=True):
    """The object of that name, None if there is none; AbsentError as `missing_source` has it.

    whole: whether all numbers of a dataset must be there, and not only the dataset.
    """
    item = _leads(group, name, whole)
    return group[name] if item is True else item or None


def _leads(group, name, whole=True, links=0):
    """What a name leads to, True for something behind a link, False for nothing; AbsentError if it is not there."""
    if "\0" in name or not name:
        return False
    if links > LINKS:
        raise _CycleError(f"{name!r} leads on over more than {LINKS} links")
    at, path = group["/"] if name.startswith("/") else group, ""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    for i, part in enumerate(parts):
        if not isinstance(at, h5py.Group):
            return False
        link, rest = _link(at, part), "/".join(["", *parts[i + 1 :]])
        path = f"{path}/{part}".lstrip("/")
        if link is None:
            return False
        if isinstance(link, h5py.SoftLink):
            return _behind(at, path, link, rest, whole, links)
        if isinstance(link, h5py.ExternalLink):
            return _outside(at, path, link, rest, whole, links)
        at = at[part]
    if whole and isinstance(at, h5py.Dataset):
        _check_all_there(at, name, links)
    return at


def _link(group, part):
    """The link of a name of a group; None if there is none."""
    try:
        return group.get(part, getlink=True)
    except TypeError as error:  # of a program that has made up its own
        raise AbsentError(f"{part!r} is a link of a kind that HDF5 does not have") from error


def _behind(group, path, link, rest, whole, links):
    target = f"{path!r} is a link to {link.path!r}, "
    try:
        there = _leads(group, link.path + rest, whole, links + 1)
    except _CycleError:
        raise  # said once, not for every link
    except AbsentError as error:
        raise AbsentError(f"{target}and {error}") from None
    if not there:
        raise AbsentError(f"{target}which is not there")
    return True


def _outside(group, path, link, rest, whole, links):
    target = f"{path!r} is a link to {link.path!r} of the file {link.filename!r}, which"
    with _other_file(group, link.filename, "HDF5_EXT_PREFIX", target) as other:
        if not _leads(other, (link.path or "/") + rest, whole, links + 1):
            raise AbsentError(f"{target} has none")
    return True


def _other_file(group, name, variable, subject):
    """The file that another one names, opened.  variable: a folder where it may be; subject: of the error."""
    return _open(_existing(os.fsdecode(group.file.filename), name, variable), subject)


def _open(path, subject):
    _check_file(path, subject)
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise AbsentError(f"{subject} cannot be read: {error}") from error


def _check_file(path, subject):
    if path is None:
        raise AbsentError(f"{subject} is not there")
    if not os.path.isfile(path):
        raise AbsentError(f"{subject} is a folder, a pipe or a device")


def _existing(path, name, variable):
    """Where HDF5 finds the file that another one, at `path`, names; None if it is nowhere."""
    if os.path.isabs(name) and os.path.exists(name):
        return name
    folders = [*os.environ.get(variable, "").split(":"), os.path.dirname(os.path.abspath(path)), os.curdir]
    folders.append(os.path.dirname(os.path.realpath(path)))
    name = os.path.basename(name) if os.path.isabs(name) else name  # both files may have moved
    return next(filter(os.path.exists, (os.path.join(folder, name) for folder in folders if folder)), None)


def _check_all_there(data, name, links):
    how = data.id.get_create_plist()
    if data.shape is None:
        raise AbsentError(f"its dataset {name!r} has no elements, it has a null dataspace")
    if data.is_virtual:
        _check_virtual(data, name, links)
    elif how.get_external_count():
        _check_raw_files(data, name, how)
    elif data.size and data.id.get_space_status() == h5py.h5d.SPACE_STATUS_NOT_ALLOCATED:
        raise AbsentError(f"nothing was ever written to its dataset {name!r}")
    elif data.size and data.chunks:
        chunks, written = prod(-(-n // of) for n, of in zip(data.shape, data.chunks)), data.id.get_num_chunks()
        if written < chunks:
            raise AbsentError(f"only {written} of {chunks} chunks of its dataset {name!r} were ever written")
        _check_filters(data, name, how)


def _check_filters(data, name, how):
    """Raise AbsentError if HDF5 lacks a filter that has made the chunks of a dataset, for example a compression."""
    for i in range(how.get_nfilters()):
        number, *_, in_words = how.get_filter(i)
        if not _has_filter(number) and not _reads(data):
            known = FILTERS.get(number) or in_words.decode(errors="replace") or "unknown"
            raise AbsentError(
                f"its dataset {name!r} needs the filter {known} (number {number}), which this HDF5 does not have; "
                "install the package hdf5plugin, or name the folder of the filter's library in HDF5_PLUGIN_PATH"
            )


def _has_filter(number):
    if not h5py.h5z.filter_avail(number):
        with suppress(ImportError):
            importlib.import_module("hdf5plugin")  # which hands its filters to HDF5
    return h5py.h5z.filter_avail(number)


def _reads(data):
    """Whether an element can be read: a writer may leave out a filter that is optional."""
    try:
        data[(0,) * data.ndim]
    except OSError:
        return False
    return True


def _check_virtual(data, name, links):
    covered, known = h5py.h5s.create_simple(data.shape), True
    covered.select_none()
    for part, file_name, source_name, selected in data.virtual_sources():
        if "%b" in file_name + source_name:
            return  # as many files as there are, which decide how large it is
        inside = file_name == "."
        subject = f"{name!r} is virtual: a part of it is {source_name!r} of "
        subject += "this file, which" if inside else f"the file {file_name!r}, which"
        with nullcontext(data.file) if inside else _other_file(data, file_name, "HDF5_VDS_PREFIX", subject) as other:
            try:
                source = other[source_name] if _leads(other, source_name, links=links + 1) else None
            except _CycleError:
                raise
            except AbsentError as error:
                raise AbsentError(f"{subject} is not all there: {error}") from None
            if not isinstance(source, h5py.Dataset):
                raise AbsentError(f"{subject} has none")
            if not _is_limited(part):
                known = False  # the source decides
                continue
            if not _holds(source.shape, selected, part.get_select_npoints()):
                raise AbsentError(f"{subject} is {source.shape} there, which does not hold that part")
        _select(covered, part)
    if known and covered.get_select_npoints() < data.size:
        raise AbsentError(
            f"{name!r} is virtual, and {data.size - covered.get_select_npoints()} elements are in no part"
        )


def _is_limited(part):
    """Whether a selection has an end; one that has none grows with the dataset."""
    if part.get_select_type() == h5py.h5s.SEL_ALL or not part.is_regular_hyperslab():
        return True
    _, _, count, block = part.get_regular_hyperslab()
    return max(*count, *block) < h5py.h5s.UNLIMITED


def _holds(shape, selected, count):
    """Whether a dataset of this shape has the elements that are selected of it, `count`."""
    if selected.get_select_type() == h5py.h5s.SEL_ALL:
        return prod(shape) == count
    return len(selected.shape) == len(shape) and all(end < n for end, n in zip(selected.get_select_bounds()[1], shape))


def _select(space, part):
    """Add what is selected in a dataspace to what is in another."""
    if part.get_select_type() == h5py.h5s.SEL_ALL:
        space.select_all()
    elif space.get_select_type() != h5py.h5s.SEL_ALL:
        if part.is_regular_hyperslab():
            start, stride, count, block = part.get_regular_hyperslab()
            space.select_hyperslab(start, count, stride, block, op=h5py.h5s.SELECT_OR)
        else:
            for first, last in part.get_select_hyper_blocklist():
                size = tuple(int(b - a) + 1 for a, b in zip(first, last))
                space.select_hyperslab(tuple(map(int, first)), size, op=h5py.h5s.SELECT_OR)


def _check_raw_files(data, name, how):
    """Of numbers that lie in plain files: HDF5 reads zeros past their ends."""
    rest = data.size * data.dtype.itemsize
    for i in range(how.get_external_count()):
        file_name, offset, size = how.get_external(i)
        path = os.path.join(_raw_folder(data), os.fsdecode(file_name))
        subject = f"the numbers of its dataset {name!r} are in the file {os.fsdecode(file_name)!r}, which"
        _check_file(path if os.path.exists(path) else None, subject)
        size = min(size, rest)  # it may be without limit
        if os.path.getsize(path) < offset + size:
            raise AbsentError(f"{subject} ends too early")
        rest -= size


def _raw_folder(data):
    given = os.environ.get("HDF5_EXTFILE_PREFIX") or os.fsdecode(data.id.get_access_plist().get_efile_prefix() or b"")
    return given.replace("${ORIGIN}", os.path.dirname(os.path.abspath(data.file.filename)))
