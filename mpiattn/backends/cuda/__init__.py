"""The back end for NVIDIA GPUs, through CuPy."""
