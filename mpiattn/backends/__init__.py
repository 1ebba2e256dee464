"""Back ends hold arrays and compute on them.  `registry` lists them by name and imports each only when it is used."""

from .registry import candidates, find, for_array, get, missing, usages

__all__ = ["candidates", "find", "for_array", "get", "missing", "usages"]
