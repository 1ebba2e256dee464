"""The back end for NVIDIA GPUs, which uses CuPy."""
