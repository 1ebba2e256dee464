"""cuDNN's frontend, NVIDIA's module `cudnn`, found and loaded."""

import ctypes
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from sysconfig import get_path

EXTRA = "cudnn"  # this package's extra that installs it
LEAST_VERSION = 91900  # the first cuDNN on which the back end has run


def _files(pattern):
    """Libraries of NVIDIA's wheels, in any folder of packages."""
    return sorted(path for folder in sys.path if folder for path in Path(folder).glob(f"nvidia/*/lib/{pattern}"))


def _load_first(names):
    """Load the first of some libraries that loads."""
    for name in names:
        with suppress(OSError):
            ctypes.CDLL(str(name))
            return


@cache
def load():
    """The module, with cuDNN behind it.  Raises ImportError or RuntimeError if either is missing."""
    # The frontend opens both libraries by name, and cuDNN also in the folder of this interpreter's packages.  It finds
    # what is loaded already; the loader does not search the folders into which pip installs them.
    _load_first(["libcudart.so.13", "libcudart.so.12", *_files("libcudart.so.1?")])
    if not list(Path(get_path("purelib")).glob("nvidia/cudnn/lib/libcudnn.so.9")):
        _load_first(_files("libcudnn.so.9"))
    import cudnn

    cudnn.backend_version()
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
