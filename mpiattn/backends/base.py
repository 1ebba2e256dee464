"""The protocol between the executor and a back end, which holds arrays and computes on them asynchronously.

Launches (`clear`, `attend`, `merge`, `take`, `copy` and so on) run in order, as on one stream of a GPU.  Each also
waits for the events given as `after`, and returns an event.  Copies to and from the wire may overlap launches, so the
executor orders copies by events alone.

Shapes: the batch is folded into the heads, so a chunk is (tokens, heads, dim).  The number of KV heads divides the
number of heads.  Consecutive chunks of a buffer form one longer chunk.  A partial is out (tokens, heads, value_dim) and
lse (tokens, heads), in float32, or float64 for float64 inputs; the identity partial is (0, -inf).
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol


class WireBytes(NamedTuple):
    """The bytes that MPI sends or receives for an array: a flat uint8 array, in memory that MPI can access.

    ready: ready(stop) returns whether MPI may use the bytes before `stop` now; None if MPI may use all at once.
    taken: taken(start, stop) is called as soon as MPI has received these bytes; None if no call is needed.
    piece: maximum bytes of a message, the same on every rank.  It lets one piece travel while the next is made ready.
    None for no maximum.
    """

    array: Any
    ready: Callable = None
    taken: Callable = None
    piece: int = None


class Backend(Protocol):
    """Arrays and launches on them.  An event is whatever `wait` takes; None stands for finished work.

    name, version: identify its speed.  Figures measured with another name or version do not apply.
    dtypes: of the inputs that it takes.
    transport: how its arrays reach MPI; None if the back end has no choice of transports.
    emulated_flops: the speed that it emulates, in operations per second; None for its real speed.
    staged_bytes: bytes of host memory held for copies to and from the wire.
    """

    name: str
    version: str
    dtypes: tuple
    transport = None
    emulated_flops = None
    staged_bytes = 0

    @classmethod
    def missing(cls):
        """Why the back end cannot run in this process and what to install; "" if it can run."""

    @classmethod
    def adopt(cls, arrays):
        """The caller's arrays, a dict by argument name, as arrays of this back end, before an instance exists.

        Back ends created later use the GPU that holds the arrays.  Raises ArgumentError as `array` does.
        """

    def idle(self):
        """Called between two tests of the messages that this rank waits for: yield the core, or sleep."""

    def empty(self, shape, dtype):
        """A new, uninitialized array."""

    def array(self, name, thing):
        """The caller's argument `name` as an object with shape and dtype that `contiguous` takes.

        Nothing is copied.  Raises ArgumentError if the back end cannot use it.
        """

    def writable(self, name, thing):
        """As `array`, for an array that receives a result.

        Raises ArgumentError if it is not an array of this back end or is read-only.
        """

    def result(self, shape, dtype):
        """A new, uninitialized array to return to the caller."""

    def give(self, array):
        """A NumPy array as a result for the caller, who then owns it."""

    def contiguous(self, array, alignment=None, empty=None):
        """The array itself if it belongs to this back end and is contiguous, else a contiguous copy, as a launch.

        alignment: bytes that divide the address; None for the alignment that launches need of q, k, v and dout.
        empty: empty(shape, dtype) returns memory for a copy of an array of this back end; None for new memory.
        """

    def scratch_bytes(self, head_dim, value_dim, dtype, backward=False):
        """Bytes of working memory that launches on such inputs need, besides their arguments.

        Raises ArgumentError if launches cannot take such inputs.
        """

    # Begin and end of a library call

    def begin(self):
        """Order all later launches and copies after the caller's work so far and after all launches so far."""

    def finish(self):
        """Order the caller's later work after all launches and copies so far."""

    def drain(self):
        """Return when all launches and copies so far are done; raise if a launch has failed."""

    # Launches.  meanwhile: a callable or None.  A launch that computes before it returns calls it from time to time,
    # with the fraction of the launch that is done.

    def clear(self, out, lse):
        """Make (out, lse) the identity partial."""

    def attend(self, q, k, v, begin, end, out, lse, scale, softcap=None, after=(), meanwhile=None):
        """Add the attention of each row q[i] to its keys [begin[g, i], end[g, i]) to the partial (out, lse).

        begin, end: int32 (groups, tokens).  The heads are split into `groups` equal groups; g is the group of the head.
        softcap: scores s become softcap * tanh(s / softcap); None for none.
        """

    def attend_pages(self, q, keys, values, pages, page_size, begin, end, out, lse, scale, softcap=None, after=(),
                     meanwhile=None):
        """Set (out, lse) to the partial of the queries of one or more sequences over their keys in a pool of pages.

        q: (queries, heads, head_dim).
        keys, values: the pool, (kv_heads, slots, head_dim) and (kv_heads, slots, value_dim).
        pages: int32, the numbers of the sequence's pages in order.  A page is page_size consecutive slots.
        begin, end: int32 (queries,).  Query i sees the sequence's keys [begin[i], end[i]).

        Slots that no query sees may hold anything.  For several sequences, pages is a list of tables, one a sequence;
        q holds the queries of each sequence in turn, the same number for each.
        """

    def unnormalize(self, out, lse, top):
        """Turn a partial into terms that ranks can sum: out *= exp(lse - top), lse = exp(lse - top).

        top (tokens, heads): the maximum of lse over all ranks.
        """

    def normalize(self, out, lse, top):
        """Turn the sums of such terms back into a partial."""

    def attend_backward(self, q, dout, lse, delta, k, v, begin, end, dq, dk, dv, scale, softcap=None, after=(),
                        meanwhile=None):
        """Add a block's gradients to dq, dk and dv, which have the dtype of partials.

        lse (tokens, heads): over all keys of the row.  delta (tokens, heads): from `delta`.
        """

    def delta(self, delta, dout, out, dlse):
        """delta = rowsum(dout * out) - dlse; dlse (tokens, heads) or None.

        A row whose out is 0, such as a row without keys, has rowsum 0 even if its dout is NaN.
        """

    def zero(self, arrays):
        """Fill arrays with 0."""

    def add(self, arrays, others, after=()):
        """Add each of `others` to the array at the same position."""

    def merge(self, out, lse, out_b, lse_b, after=()):
        """Merge the partial (out_b, lse_b) into (out, lse)."""

    def sink(self, out, lse, sinks):
        """Merge attention sinks (heads,) into the partial (out, lse): each is the score of a key with value 0."""

    def sink_gradient(self, gradient, sinks, lse, delta):
        """gradient (heads,) = -sum over tokens of exp(sinks - lse) * delta."""

    def take(self, dst, src, rows, after=()):
        """dst = src[rows]."""

    def copy(self, dst, src):
        """dst = src, cast to the dtype of dst."""

    # Wire.  Either every outgoing array has `ready` or none does; mixing would reorder messages.  The same holds for
    # incoming arrays.  collective: for an MPI collective, which takes the whole array at once.

    def outgoing(self, array, after=(), collective=False):
        """`WireBytes` to send an array as it is after the events `after`; it must not change until `sent`."""

    def sent(self, array):
        """Called when the send of an array is complete."""

    def incoming(self, array, after=(), collective=False):
        """`WireBytes` to receive an array, last used by the events `after`; it is undefined until `arrived`."""

    def arrived(self, array):
        """Called when all bytes of an array are received; returns the event after which the array can be read."""

    def forget(self, array):
        """Called when the contents of an array of `empty` are no longer needed and no pending launch uses it."""

    def wait(self, event):
        """Return when an event is done; raise if it, or any launch so far, has failed."""

    def close(self):
        """Release the memory and threads of the back end."""
