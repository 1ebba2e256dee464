"""Errors of C programs alone."""

from ..errors import MpiattnError


class HandleError(MpiattnError):
    """A program names a plan, a cache or options that do not exist."""


class HostError(MpiattnError):
    """The host program's MPI cannot be used."""
