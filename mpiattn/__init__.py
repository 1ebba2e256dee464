"""mpiattn: exact attention for sequences that do not fit on one device, native to MPI.

    from mpi4py import MPI
    import mpiattn

    with mpiattn.MeshAttention(MPI.COMM_WORLD, seqlen=100_000, heads=32, head_dim=128, causal=True) as plan:
        out, lse = plan.forward(q, k, v)         # this rank's chunks: the tokens in plan.positions

Importing mpiattn does not initialize MPI or a GPU; each public name loads its modules on first use.
"""

from importlib import import_module

from .version import __version__

_HOMES = {
    "MeshAttention": ".plan.mesh_attention",
    "attention": ".plan.one_call",
    "merge": ".plan.merging",
    "Layout": ".problem.layout",
    "Machine": ".model.machine",
    "Tile": ".schedule.tile",
    "Timeline": ".schedule.timeline",
    "KVCache": ".decode.cache",
    "tree_decode": ".decode.tree",
    "ring_decode": ".decode.rings",
    "query_ring_decode": ".decode.rings",
    "MpiattnError": ".errors",
    "ArgumentError": ".errors",
    "CallError": ".errors",
    "FileError": ".errors",
    "PeerFailure": ".errors",
    "VerificationError": ".errors",
}
_MODULES = ("masks",)
__all__ = [*_HOMES, *_MODULES, "__version__"]

TYPE_CHECKING = False  # type checkers take it for true; the module typing is not loaded for it
if TYPE_CHECKING:
    from . import masks as masks
    from .decode.cache import KVCache as KVCache
    from .decode.rings import query_ring_decode as query_ring_decode
    from .decode.rings import ring_decode as ring_decode
    from .decode.tree import tree_decode as tree_decode
    from .errors import ArgumentError as ArgumentError
    from .errors import CallError as CallError
    from .errors import FileError as FileError
    from .errors import MpiattnError as MpiattnError
    from .errors import PeerFailure as PeerFailure
    from .errors import VerificationError as VerificationError
    from .model.machine import Machine as Machine
    from .plan.merging import merge as merge
    from .plan.mesh_attention import MeshAttention as MeshAttention
    from .plan.one_call import attention as attention
    from .problem.layout import Layout as Layout
    from .schedule.tile import Tile as Tile
    from .schedule.timeline import Timeline as Timeline
else:

    def __getattr__(name):
        if name in _MODULES:
            return import_module(f".{name}", __name__)  # which makes it an attribute
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_HOMES[name], __name__), name)  # next time it is there
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
