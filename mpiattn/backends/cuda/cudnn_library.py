"""cuDNN's frontend, NVIDIA's module `cudnn`, found and loaded."""

import ctypes
import sys
from functools import cache
from pathlib import Path

EXTRA = "cudnn"  # this package's extra that installs it
LEAST_VERSION = 91900  # the first cuDNN on which the back end has run


def _files(pattern):
    """Libraries of NVIDIA's wheels, in any folder of packages."""
    return sorted(path for folder in sys.path if folder for path in Path(folder).glob(f"nvidia/*/lib/{pattern}"))


def _load_first(names):
    """Load the first of some libraries that loads; returns it, None if none does."""
    for name in names:
        try:
            return ctypes.CDLL(str(name))
        except OSError:
            pass
    return None


@cache
def load():
    """The module, with cuDNN behind it.  Raises ImportError or RuntimeError if either is missing."""
    # The frontend opens the CUDA runtime by this name, which lies in no folder that the loader searches if pip has
    # installed it.  What is loaded already, it finds.
    _load_first(["libcudart.so.13", "libcudart.so.12", *_files("libcudart.so.1?")])
    import cudnn

    try:
        cudnn.backend_version()
    except RuntimeError:  # it looks for cuDNN in one folder of packages alone
        library = _load_first(_files("libcudnn.so.9"))
        if library is None:
            raise
        cudnn._pybind_module._set_dlhandle_cudnn(library._handle)
    return cudnn


def missing():
    """Why it cannot be used in this process and what to install; "" if it can be used."""
    try:
        version = load().backend_version()
    except (ImportError, RuntimeError) as error:
        return f"it needs cuDNN ({error}): pip install 'mpiattn[{EXTRA}]'"
    if version < LEAST_VERSION:
        return f"cuDNN is {_words(version)}; it must be {_words(LEAST_VERSION)} or newer"
    return ""


def _words(version):
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
