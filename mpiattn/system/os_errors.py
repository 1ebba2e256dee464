"""The system's errors in words, with what a user can do about them."""

import errno
import resource


def reason(error):
    """Why a call of the system failed, of an OSError; the limit that a file has reached is named."""
    text = error.strerror or str(error)
    if error.errno == errno.EFBIG:
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        if limit != resource.RLIM_INFINITY:
            text += f": this process may write files of at most {limit} bytes (ulimit -f)"
    return text
