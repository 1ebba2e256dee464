"""HDF5 files and tensor files, read and written by all ranks."""
