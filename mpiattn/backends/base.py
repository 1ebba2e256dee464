"""The protocol between the executor and a back end, which holds arrays and computes on them asynchronously.

Launches (`clear`, `attend`, `merge`, `take`, `copy` and so on) run in order, as on one stream of a GPU.  Each also
waits for the events given as `after`, and returns an event.  Copies to and from the wire may overlap launches, so the
executor orders copies by events alone.

Shapes: the batch is folded into the heads, so a chunk is (tokens, heads, dim).  The number of KV heads divides the
number of heads.  Consecutive chunks of a buffer form one longer chunk.  A partial is out (tokens, heads, value_dim) and
lse (tokens, heads), in float32, or float64 for float64 inputs; the identity partial is (0, -inf).  What a block is:
`mpiattn.backends.block`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from .block import Array, BackwardInputs, BlockInputs, Gradients

if TYPE_CHECKING:
    from ..model.machine import Machine
    from .wire import WireBytes

Shape: TypeAlias = tuple[int, ...]
Event: TypeAlias = Any  # what `wait` takes
Meanwhile: TypeAlias = Callable[[float], object] | None  # called during a launch with the fraction that is done
Scratch: TypeAlias = Callable[[Shape, Any], Array]  # (shape, dtype) -> memory


class Backend(Protocol):
    """Arrays and launches on them.  An event is whatever `wait` takes; None stands for finished work."""

    # Plain attributes will do for these.

    @property
    def strided(self) -> bool:
        """Whether `attend`, `attend_backward`, `clear`, `zero`, `sink` and `delta` take strided arrays of a batch.

        These are (tokens, batch, heads, dim) in place of (tokens, batch * heads, dim), with any strides but that of
        the last axis; lse and delta stay (tokens, batch * heads).
        """

    @property
    def takes_lists(self) -> bool:
        """Whether `attend` and `attend_backward` take all interval lists of a block in one launch.

        begin and end are then (groups, tokens, lists), of blocks with more than one list.  Else each list is a launch.
        Such launches are done when they return, and take and change arrays of NumPy.
        """

    @property
    def sends_blocks(self) -> bool:
        """Whether `outgoing` and `incoming` take an array that lies in `Blocks`.  Else it must be contiguous."""

    @property
    def dlse_on_all(self) -> bool:
        """Whether all ranks of a backward pass, or none, must give `delta` a dlse."""

    @property
    def takes(self) -> tuple[str, ...]:
        """The fields of `BlockInputs` with which launches compute.  A block has None in all others."""

    @property
    def name(self) -> str:
        """What users call it, with its parameters.  With `version` it is a key of what was measured on a machine."""

    @property
    def version(self) -> str:
        """See `name`."""

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes of q, k and v that launches take."""

    @property
    def transport(self) -> str | None:
        """How its arrays reach other ranks; None if the back end has no choice of transports."""

    @property
    def transport_why(self) -> str:
        """Why it has this transport, in words; "" if it has no choice."""

    @property
    def assumed_machine(self) -> Machine:
        """The `Machine` that plans assume where `mpiattn tune` has measured none."""

    @property
    def emulated_flops(self) -> float | None:
        """The speed that it emulates, in operations per second; None for its real speed."""

    @property
    def staged_bytes(self) -> int:
        """Bytes of host memory held for copies to and from the wire."""

    @classmethod
    def missing(cls) -> str:
        """Why the back end cannot run in this process and what to install; "" if it can run."""

    @classmethod
    def adopt(cls, arrays: dict[str, Array]) -> dict[str, Array]:
        """The caller's arrays, a dict by argument name, as arrays of this back end, before an instance exists.

        Back ends created later use the GPU that holds the arrays.  Raises ArgumentError as `array` does.
        """

    def idle(self) -> None:
        """Called between two tests of the messages that this rank waits for: yield the core, or sleep."""

    def device_memory(self) -> tuple[int, str] | None:
        """Free bytes of the device, and a name for it that all processes of its node use; None without a device."""

    def empty(self, shape: Shape, dtype: Any) -> Array:
        """A new, uninitialized array."""

    def array(self, name: str, argument: Array) -> Array:
        """The caller's argument `name` as an object with shape and dtype that `contiguous` takes.

        Nothing is copied.  Raises ArgumentError if the back end cannot use it.
        """

    def writable(self, name: str, argument: Array) -> Array:
        """As `array`, for an array that receives a result.

        Raises ArgumentError if it is not an array of this back end or is read-only.
        """

    def result(self, shape: Shape, dtype: Any, like: Array = None) -> Array:
        """A new, uninitialized array to return to the caller; `array` makes it one that launches take.

        like: an argument of the call, of whose library it is if the back end can have memory of that; None for any.
        """

    def give(self, array: Array, like: Array = None) -> Array:
        """A NumPy array as a result for the caller, who then owns it.  like: as for `result`."""

    def contiguous(self, array: Array, alignment: int | None = None, empty: Scratch | None = None) -> Array:
        """The array itself if it belongs to this back end and is contiguous, else a contiguous copy, as a launch.

        alignment: bytes that divide the address; None for the alignment that launches need of q, k, v and dout.
        empty: empty(shape, dtype) returns memory for a copy of an array of this back end; None for new memory.
        """

    def accumulates(self, array: Array) -> bool:
        """Whether launches can add partials to an array of `result` or `writable` as it lies in memory."""

    def scratch_bytes(
        self,
        head_dim: int,
        value_dim: int,
        dtype: str,
        backward: bool = False,
        shared_kv: bool = False,
        lists: bool = False,
    ) -> int:
        """Bytes of working memory that launches on such inputs need, besides their arguments.

        shared_kv: whether v is None.
        lists: whether rows see several intervals, see `takes_lists`.
        Raises ArgumentError if launches cannot take such inputs.
        """

    # Begin and end of a library call

    def new_call(self) -> None:
        """A call of the library begins, whose arguments are still to come to `array` and `writable`."""

    def begin(self) -> None:
        """Order all later launches and copies after the caller's work so far and after all launches so far.

        The caller's work is that of the libraries whose arrays the call was given, on their current streams.
        """

    def finish(self) -> None:
        """Order the caller's later work after all launches and copies so far."""

    def drain(self) -> None:
        """Return when all launches and copies so far are done; raise if a launch has failed."""

    # Launches.  meanwhile: a callable or None.  A launch that computes before it returns calls it from time to time,
    # with the fraction of the launch that is done.

    def clear(self, out: Array, lse: Array) -> Event:
        """Make (out, lse) the identity partial."""

    def attend(
        self, block: BlockInputs, out: Array, lse: Array, after: Sequence[Event] = (), meanwhile: Meanwhile = None
    ) -> Event:
        """Add the attention of a block's rows to the keys of a chunk to the partial (out, lse)."""

    def attend_pages(
        self, block: BlockInputs, out: Array, lse: Array, after: Sequence[Event] = (), meanwhile: Meanwhile = None
    ) -> Event:
        """Set (out, lse) to the partial of the queries of one or more sequences over their keys in a pool of pages.

        Slots that no query sees may hold anything.
        """

    def unnormalize(self, out: Array, lse: Array, top: Array) -> Event:
        """Turn a partial into terms that ranks can sum: out *= exp(lse - top), lse = exp(lse - top).

        top (tokens, heads): the maximum of lse over all ranks.
        """

    def normalize(self, out: Array, lse: Array, top: Array) -> Event:
        """Turn the sums of such terms back into a partial."""

    def attend_backward(
        self,
        block: BlockInputs,
        given: BackwardInputs,
        grads: Gradients,
        after: Sequence[Event] = (),
        meanwhile: Meanwhile = None,
    ) -> Event:
        """Add a block's gradients to `grads`; the keys are a chunk."""

    def delta(self, delta: Array, dout: Array, out: Array, dlse: Array | None) -> Event:
        """delta = rowsum(dout * out) - dlse; dlse (tokens, heads) or None.

        A row whose out is 0, such as a row without keys, has rowsum 0 even if its dout is NaN.
        """

    def zero(self, arrays: Sequence[Array]) -> Event:
        """Fill arrays with 0."""

    def add(self, arrays: Sequence[Array], others: Sequence[Array], after: Sequence[Event] = ()) -> Event:
        """Add each of `others` to the array at the same position."""

    def merge(self, out: Array, lse: Array, out_b: Array, lse_b: Array, after: Sequence[Event] = ()) -> Event:
        """Merge the partial (out_b, lse_b) into (out, lse)."""

    def sink(self, out: Array, lse: Array, sinks: Array) -> Event:
        """Merge attention sinks (heads,) into the partial (out, lse): each is the score of a key with value 0."""

    def sink_gradient(self, gradient: Array, sinks: Array, lse: Array, delta: Array) -> Event:
        """gradient (heads,) = -sum over tokens of exp(sinks - lse) * delta."""

    def take(self, dst: Array, src: Array, rows: Array, after: Sequence[Event] = ()) -> Event:
        """dst = src[rows]."""

    def copy(self, dst: Array, src: Array, after: Sequence[Event] = ()) -> Event:
        """dst = src, cast to the dtype of dst."""

    def accumulate(self, dst: Array, src: Array) -> Event:
        """dst += src, both (sequences, heads, tokens, keys) with any strides, of biases or of their gradients.

        An axis of length 1 of src is the same for all; one of dst gets the sum along it, in the same order every time.
        """

    def sheared(self, array: Array, tokens: int) -> Array:
        """A view (sequences, heads, tokens, width - tokens + 1) of an array (sequences, heads, tokens or 1, width).

        Column j of row i is column tokens - 1 - i + j of the array: of one row, where that is the same for all.
        """

    def scatter(self, pool: Array, slots: Array, src: Array, entries: Array, tokens: Array) -> Event:
        """pool[:, slots[i]] = src[entries[i], tokens[i]] for every i.

        pool: (kv_heads, slots, dim).  src: (batch, tokens, kv_heads, dim), of the same dtype.  slots (different ones),
        entries, tokens: NumPy's int64 (any,), contiguous.  tokens may be one number for all; then entries are different
        and ascend.
        """

    # Wire.  Either every outgoing array has `ready` or none does; mixing would reorder messages.  The same holds for
    # incoming arrays, and of empty ones too.  collective: for an MPI collective.

    def outgoing(self, array: Array, after: Sequence[Event] = (), collective: bool = False) -> WireBytes:
        """`WireBytes` to send an array as it is after the events `after`; it must not change until `sent`."""

    def sent(self, array: Array) -> None:
        """Called when the send of an array is complete."""

    def incoming(self, array: Array, after: Sequence[Event] = (), collective: bool = False) -> WireBytes:
        """`WireBytes` to receive an array, last used by the events `after`; it is undefined until `arrived`."""

    def arrived(self, array: Array) -> Event:
        """Called when all bytes of an array are received; returns the event after which the array can be read."""

    def forget(self, array: Array) -> None:
        """Called when the contents of an array of `empty` are no longer needed and no pending launch uses it."""

    def wait(self, event: Event) -> None:
        """Return when an event is done; raise if it, or any launch so far, has failed."""

    def close(self) -> None:
        """Release the memory and threads of the back end."""
