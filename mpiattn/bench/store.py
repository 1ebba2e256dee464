"""Results of a benchmark as HDF5: every run of every rank, with the figures they come to; whole or not at all."""

import h5py
import numpy as np

from ..files import hdf5
from ..system.atomic_file import NewFile


def _flat(data, prefix=""):
    """A dict of dicts as attributes: a.b for what is inside a; what is not known is left out."""
    for name, value in data.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        elif value is not None and not isinstance(value, list):
            yield prefix + name, value


def write_hdf5(path, data, passes):
    """Write the file: /SEQLEN/N is case N of a size, /SEQLEN/N/PASS a pass of it with its runs and ranks.

    data: as for JSON, whose figures become attributes.  passes: for every case of `data`, `mpiattn.bench.summary.Pass`
    by name, whose arrays become datasets; a case that was measured as another is a link to it.  Raises FileError, which
    names --hdf5.
    """
    new = NewFile("--hdf5", path)
    try:
        with hdf5.file_errors("--hdf5", path, "written"), hdf5.writing(new.partial, create=True) as file:
            file.attrs.update(_flat({name: value for name, value in data.items() if name != "cases"}))
            counts = {}
            for case, found in zip(data["cases"], passes):
                size = file.require_group(str(case["seqlen"]))
                number = counts[case["seqlen"]] = counts.get(case["seqlen"], -1) + 1
                _write_case(size, number, case, found)
        new.publish()
    finally:
        new.discard()


def _write_case(size, number, case, found):
    if case["measured_as"] != number:
        size[str(number)] = h5py.SoftLink(f"{size.name}/{case['measured_as']}")
        return
    group = size.create_group(str(number))
    group.attrs.update(_flat({name: value for name, value in case.items() if name != "passes"}))
    for name, one in found.items():
        of_pass = group.create_group(name)
        for what in ("seconds", "waiting", "sent"):
            dataset = of_pass.create_dataset(what, data=getattr(one, what))
            dataset.dims[0].label, dataset.dims[1].label = "run", "rank"
        for what in ("formula", "ideal"):
            of_pass.create_dataset(what, data=np.asarray(getattr(one, what))).dims[0].label = "rank"
        of_pass.attrs.update(_flat(case["passes"][name]))
