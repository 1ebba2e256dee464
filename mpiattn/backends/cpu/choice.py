"""The instruction set that a process takes: the best of those that compute a trial block right."""

import os
import warnings
from functools import cache

from ...system.launch_variables import launch_rank
from . import library, trial

REMEDY = "compile them without options that change arithmetic, see `mpiattn info`"


@cache
def fault(name):
    """The fault of the kernels of a set that is `library.runnable`, in words; "" if there is none."""
    return trial.fault(library.Kernels(name))


def missing():
    """Why no kernels can serve this process and what to do; "" if some can."""
    why = library.missing()
    if why or chosen():
        return why
    return f"its kernels compute a trial block wrong ({_faults(_candidates(_wanted()))}): {REMEDY}"


def chosen():
    """The name of the set, None if all compute wrong; `library.missing` must be "".  Warns of those that do, once."""
    return _chosen(_wanted())


def better():
    """The name of a faster set that this processor has and that was not compiled; None if there is none."""
    for name, state in library.instruction_sets().items():
        if state.compiled and state.supported:
            return None
        if state.supported and not state.slow:
            return name
    return None


def _wanted():
    return os.environ.get(library.VARIABLE) or None


def _candidates(wanted):
    """The sets that may be taken, the best first."""
    if wanted:
        return [wanted]
    return [name for name in library.runnable() if not library.instruction_sets()[name].slow]


@cache
def _chosen(wanted):
    candidates = _candidates(wanted)
    for number, name in enumerate(candidates):
        if not fault(name):
            if number and launch_rank() == 0:
                warnings.warn(
                    f"back end cpu takes the instruction set {name}, since kernels of better ones compute a trial "
                    f"block wrong ({_faults(candidates[:number])}): {REMEDY}",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return name
    return None


def _faults(names):
    return "; ".join(f"{name}: {fault(name)}" for name in names)
