"""The protocol between the executor and what holds and computes arrays, asynchronous from the start.

Launches (`clear`, `attend`, `merge`, `take`, `copy` and so on) run in the order in which they are made, as on one
stream of a GPU, each also after the events given as `after`, and return an event.  Copies to and from the
wire may run beside them, so the executor orders these by events alone.

Shapes: the batch is folded into the heads, so that a chunk is (tokens, heads, dim), KV heads dividing heads,
and consecutive chunks of a buffer are one longer chunk.  A partial is out (tokens, heads, value_dim) and lse
(tokens, heads), in float32, or float64 for float64 inputs; its identity is (0, -inf).
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol


class WireBytes(NamedTuple):
    """The bytes of an array as MPI reads or writes them: a flat uint8 array, in memory that MPI can reach.

    ready: ready(stop) tells whether MPI may have the bytes up to `stop` by now; None where it may have all at once.
    taken: taken(start, stop) is called as soon as MPI has received these bytes; None where nobody needs to know.
    piece: bytes of a message at most, so that the pieces before can travel while the next one is made ready; None for
    any number.  It is the same on every rank.
    """

    array: Any
    ready: Callable = None
    taken: Callable = None
    piece: int = None


class Backend(Protocol):
    """Arrays and work on them; an event is whatever `wait` takes, None for work that is done.

    name, version: what its speed depends on; figures measured with another are not those of this one.
    dtypes: of what it attends to.  transport: how its arrays travel, None where that is not for it to say.
    emulated_flops: operations a second whose time it takes, None for the time that it really needs.
    staged_bytes: of host memory that is held for copies to and from the wire.
    """

    name: str
    version: str
    dtypes: tuple
    transport = None
    emulated_flops = None
    staged_bytes = 0

    @classmethod
    def missing(cls):
        """Why it cannot run in this process and what to install, "" where it can run."""

    @classmethod
    def adopt(cls, arrays):
        """Arrays of the caller's, by name of the argument, as the back end's own, where it has yet to be made.

        On a GPU back ends made from now on are on that of the arrays.  Raises ArgumentError as `array` does.
        """

    def idle(self):
        """What a rank does between two looks at the messages that it waits for."""

    def empty(self, shape, dtype):
        """A new array with no contents yet."""

    def array(self, name, thing):
        """An array of the caller's, an argument `name`: something with a shape and a dtype that `contiguous` takes.

        Nothing is copied.  Raises ArgumentError where the back end cannot use it.
        """

    def writable(self, name, thing):
        """As `array`, of one of this back end's that a result is written into; ArgumentError if it is read-only."""

    def result(self, shape, dtype):
        """A new array for the caller, with no contents yet."""

    def give(self, array):
        """A NumPy array as a result for the caller, who alone has it."""

    def contiguous(self, array, alignment=None, empty=None):
        """The array itself if it is this back end's and contiguous, else a contiguous copy, which is launched.

        alignment: bytes that its address has to be a multiple of; None for what launches need of q, k, v and dout.
        empty: empty(shape, dtype) gives the memory for a copy of an array of this back end; None for new memory.
        """

    def scratch_bytes(self, head_dim, value_dim, dtype, backward=False):
        """Bytes of working memory that launches on such inputs take, besides their arguments.

        Raises ArgumentError where they cannot work on such inputs.
        """

    # A call of the library's

    def begin(self):
        """What follows, copies too, comes after what the caller has done so far and after all launches so far."""

    def finish(self):
        """What the caller does from now on comes after all launches and copies so far."""

    def drain(self):
        """Return when all launches and copies so far are done; raise if a launch has failed."""

    # Launches.  meanwhile: a callable or None, which a launch that computes before it returns calls every now and then,
    # with a share of the launch that is done by then.

    def clear(self, out, lse):
        """Make (out, lse) the identity partial."""

    def attend(self, q, k, v, begin, end, out, lse, scale, softcap=None, after=(), meanwhile=None):
        """Add to the partial (out, lse) what each row q[i] sees: the keys [begin[g, i], end[g, i]).

        begin, end: int32 (groups, tokens); the heads divide into that many equal groups.
        softcap: scores s become softcap * tanh(s / softcap); None for none.
        """

    def attend_pages(self, q, keys, values, pages, page_size, begin, end, out, lse, scale, softcap=None, after=(),
                     meanwhile=None):
        """Make (out, lse) the partial of what the queries of one sequence, or of several, see of their keys in a pool.

        q (queries, heads, head_dim).  keys (kv_heads, slots, head_dim), values (kv_heads, slots, value_dim): the pool;
        pages: int32, the numbers of the sequence's pages in order, each page_size consecutive slots.  Query i sees
        the keys [begin[i], end[i]) of those, int32 (queries,); slots that nobody sees may hold anything.

        Of several sequences pages is a list of such tables; the queries are those of each in turn, as many of each.
        """

    def unnormalize(self, out, lse, top):
        """Make a partial sums, to be added up over ranks: out *= exp(lse - top), lse = exp(lse - top).

        top (tokens, heads): the largest lse of all ranks.
        """

    def normalize(self, out, lse, top):
        """Make sums that have been added up a partial again."""

    def attend_backward(self, q, dout, lse, delta, k, v, begin, end, dq, dk, dv, scale, softcap=None, after=(),
                        meanwhile=None):
        """Add to dq, dk and dv, in the partial's dtype, what a block contributes.

        lse (tokens, heads) is that of the whole row, delta (tokens, heads) as `delta` makes it.
        """

    def delta(self, delta, dout, out, dlse):
        """delta = rowsum(dout * out) - dlse; dlse (tokens, heads) or None.

        A row whose out is 0, as that of one which sees no key is, has rowsum 0 whatever its dout, which may be NaN.
        """

    def zero(self, arrays):
        """Fill arrays with 0."""

    def add(self, arrays, others, after=()):
        """Add every one of `others` to its array."""

    def merge(self, out, lse, out_b, lse_b, after=()):
        """Merge the partial (out_b, lse_b) into (out, lse)."""

    def sink(self, out, lse, sinks):
        """Merge attention sinks (heads,) into the partial (out, lse): keys of that score with values 0."""

    def sink_gradient(self, gradient, sinks, lse, delta):
        """gradient (heads,) = -sum over tokens of exp(sinks - lse) * delta."""

    def take(self, dst, src, rows, after=()):
        """dst = src[rows]."""

    def copy(self, dst, src):
        """dst = src, cast to the dtype of dst."""

    # Wire.  A back end tells of all that leaves when it is `ready`, or of nothing, and the same of what comes, so that
    # messages keep their order.  collective: for a collective of MPI, which takes the array whole.

    def outgoing(self, array, after=(), collective=False):
        """The `WireBytes` of an array as it is after the events `after`; it must not change until `sent`."""

    def sent(self, array):
        """The send of an array is complete."""

    def incoming(self, array, after=(), collective=False):
        """`WireBytes` to receive an array whose last uses are `after`; it has no contents until `arrived`."""

    def arrived(self, array):
        """The bytes for an array have been received; returns the event after which it can be read."""

    def forget(self, array):
        """What an array of `empty` holds is not needed any more, and no launch that uses it is left."""

    def wait(self, event):
        """Return when an event is done; raise if it, or any launch so far, has failed."""

    def close(self):
        """Give up what the back end holds."""
