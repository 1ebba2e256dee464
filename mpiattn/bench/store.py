"""Results of a benchmark as HDF5: every run of every rank, and the summary figures; whole or not at all."""

import h5py
import numpy as np

from ..files import hdf5
from ..system.atomic_file import HDF5, NewFile


def _flat(data, prefix=""):
    """Nested dicts as attributes, a.b for b inside a; None and lists are left out."""
    for name, value in data.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        elif value is not None and not isinstance(value, list):
            yield prefix + name, value


def write_hdf5(path, data, passes):
    """Write the file: /SEQLEN/N is case N of a size, /SEQLEN/N/PASS one of its passes.

    data: the JSON; its figures become attributes.  passes: for every case of `data`, `mpiattn.bench.summary.Pass` by
    name; their arrays become datasets.  A case that was measured as another one is a link to it.  Raises FileError,
    which names --hdf5.
    """
    with (
        NewFile("--hdf5", path, (), HDF5) as new,
        hdf5.file_errors("--hdf5", path, "written"),
        hdf5.writing(new.partial, create=True) as file,
    ):
        file.attrs.update(_flat({name: value for name, value in data.items() if name != "cases"}))
        counts = {}
        for case, by_name in zip(data["cases"], passes):
            size = file.require_group(str(case["seqlen"]))
            number = counts[case["seqlen"]] = counts.get(case["seqlen"], -1) + 1
            _write_case(size, number, case, by_name)


def _write_case(size, number, case, passes):
    if case["measured_as"] != number:
        size[str(number)] = h5py.SoftLink(f"{size.name}/{case['measured_as']}")
        return
    group = size.create_group(str(number))
    group.attrs.update(_flat({name: value for name, value in case.items() if name != "passes"}))
    for name, measured in passes.items():
        of_pass = group.create_group(name)
        for field in ("seconds", "waiting", "sent"):
            dataset = of_pass.create_dataset(field, data=getattr(measured, field))
            dataset.dims[0].label, dataset.dims[1].label = "run", "rank"
        for field in ("formula", "ideal"):
            of_pass.create_dataset(field, data=np.asarray(getattr(measured, field))).dims[0].label = "rank"
        of_pass.attrs.update(_flat(case["passes"][name]))
