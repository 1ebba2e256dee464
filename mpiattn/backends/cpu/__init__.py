"""The back end for CPUs whose blocks are computed by compiled kernels."""
