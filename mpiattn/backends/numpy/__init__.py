"""The back end for CPUs, in NumPy."""
