"""Back ends: what holds arrays and computes.  `registry` has them by name; the heavy imports are inside."""

from .registry import candidates, find, for_array, get, usages

__all__ = ["candidates", "find", "for_array", "get", "usages"]
