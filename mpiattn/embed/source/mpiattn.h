/* mpiattn: exact attention for sequences that are spread over the ranks of an MPI program, from C99 and C++.
 *
 *     mpiattn_plan plan;
 *     int status = mpiattn_plan_create_text(
 *         MPI_Comm_c2f(comm), "seqlen=4096, heads=8, head_dim=64, causal=1, timeout=60", &plan);
 *     if (status != MPIATTN_OK) fprintf(stderr, "%s\n", mpiattn_last_error());
 *
 * The library behind this header starts a Python interpreter in the process and calls the Python package mpiattn there.
 * docs/callers.md explains it; the Python interface (docs/api.md) explains every option by name.
 *
 * - Call MPI_Init first.  Every function returns a status, MPIATTN_OK = 0 or another one below, and none ends the
 * process.
 * - Functions that make, use or free a plan or a cache are collective, unless their comment says "not collective": all
 *   ranks of the communicator call them in the same order.  An invalid argument on one rank gives all ranks the same
 *   status and text, also an invalid handle of options.  That of a plan or a cache gives them to its own rank only.
 * - Call from one thread at a time.  Python's lock is taken and given back inside.  Threads other than the main one
 *   need MPI_THREAD_SERIALIZED.
 * - Arrays stay the caller's.  Inputs are read, results are written, where they lie.
 */
#ifndef MPIATTN_H
#define MPIATTN_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__)
#define MPIATTN_API __attribute__((visibility("default")))
#else
#define MPIATTN_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The version of this interface.  It is raised when a program that was compiled before has to be compiled again. */
#define MPIATTN_ABI 2

/* Status of a call. */
enum {
    MPIATTN_OK = 0,
    MPIATTN_ERR_ARGUMENT = 1, /* an argument is invalid, or differs between ranks where it must not */
    MPIATTN_ERR_HANDLE = 2,   /* no such plan, cache or options: never made, or freed; on this rank only */
    MPIATTN_ERR_CALL = 3,     /* ranks make different calls, another call is running, or one before it has failed */
    MPIATTN_ERR_PEER = 4,     /* another rank failed or timed out: free all plans and caches on the communicator */
    MPIATTN_ERR_MPI = 5,      /* MPI is not running, is not that of mpi4py, or reports an error */
    MPIATTN_ERR_FILE = 6,     /* a file cannot be read or written */
    MPIATTN_ERR_VERIFY = 7,   /* mpiattn_verify: a result is wrong */
    MPIATTN_ERR_MEMORY = 8,   /* there is not enough memory */
    MPIATTN_ERR_PYTHON = 9,   /* Python cannot start, or has no mpiattn */
    MPIATTN_ERR_OTHER = 10,   /* an error inside mpiattn or a library that it uses */
    MPIATTN_ERR_INTERRUPT = 11 /* mpiattn_interrupt has ended the call */
};

/* Types of elements.  16-bit floating-point numbers are passed as their bits. */
enum {
    MPIATTN_FLOAT16 = 1,
    MPIATTN_BFLOAT16 = 2,
    MPIATTN_FLOAT32 = 3,
    MPIATTN_FLOAT64 = 4,
    MPIATTN_INT32 = 5,
    MPIATTN_INT64 = 6
};

/* Handles.  All bits zero is no handle, as in MPIATTN_NO_OPTIONS; a number that was freed is never used again. */
typedef struct {
    int64_t number;
} mpiattn_plan;

typedef struct {
    int64_t number;
} mpiattn_cache;

typedef struct {
    int64_t number;
} mpiattn_options;

static const mpiattn_options MPIATTN_NO_OPTIONS = {0};

#define MPIATTN_MAX_AXES 8

/* An array of the caller's, in host memory or, with a back end of GPUs, in GPU memory. */
typedef struct {
    void* data;
    int32_t dtype; /* MPIATTN_FLOAT32 and so on */
    int32_t axes;  /* number of axes, to MPIATTN_MAX_AXES */
    int64_t shape[MPIATTN_MAX_AXES];
    int64_t strides[MPIATTN_MAX_AXES]; /* in elements, 0 or more; all 0: contiguous, the last axis varies fastest */
} mpiattn_array;

/* A contiguous array of so many axes and these lengths. */
static inline mpiattn_array mpiattn_array_of(void* data, int dtype, int axes, const int64_t* shape) {
    mpiattn_array array;
    memset(&array, 0, sizeof array);
    array.data = data;
    array.dtype = dtype;
    array.axes = axes;
    for (int axis = 0; axis < axes && axis < MPIATTN_MAX_AXES; axis++)
        array.shape[axis] = shape[axis];
    return array;
}

/* A contiguous array (sequences, tokens, heads, elements of a head), as q, k, v and out are. */
static inline mpiattn_array mpiattn_array_4d(void* data, int dtype, int64_t sequences, int64_t tokens, int64_t heads,
                                             int64_t elements) {
    const int64_t shape[4] = {sequences, tokens, heads, elements};
    return mpiattn_array_of(data, dtype, 4, shape);
}

/* A contiguous array (sequences, heads, tokens), as lse is. */
static inline mpiattn_array mpiattn_array_3d(void* data, int dtype, int64_t sequences, int64_t heads, int64_t tokens) {
    const int64_t shape[3] = {sequences, heads, tokens};
    return mpiattn_array_of(data, dtype, 3, shape);
}

/* Why the last call of this thread failed; "" if it succeeded.  Valid until this thread's next call. */
MPIATTN_API const char* mpiattn_last_error(void);

/* The ranks for which the last call of this thread failed with MPIATTN_ERR_PEER, by their numbers in the communicator
 * of the plan or cache: those that have ended, do not answer, or had an error.  Returns how many, 0 if all answer or it
 * is not known; writes up to `most` of them.  Not collective. */
MPIATTN_API int64_t mpiattn_failed_ranks(int64_t most, int64_t* ranks);

/* Prints the last error of this thread on stderr, for a program that then ends all ranks with MPI_Abort.  rank: of this
 * process among those that make the call.  All ranks may have the same error, or one rank its own: rank 0 prints at
 * once, the others after a second, and after three where another rank failed.  Not collective. */
MPIATTN_API void mpiattn_print_error(int rank);

/* Ends the call that this process is in, if there is one, with MPIATTN_ERR_INTERRUPT; the other ranks get
 * MPIATTN_ERR_PEER.  A handler of signals may call it.  It ends calls of the thread that made the first call. */
MPIATTN_API void mpiattn_interrupt(void);

/* Starts Python and loads mpiattn, which the first other call does else; not collective.  The interpreter is that of
 * the environment variable MPIATTN_PYTHON (the path of a `python`, such as that of a virtual environment), else the one
 * that this library was built with.  It stays until the process ends. */
MPIATTN_API int mpiattn_start(void);

/* The version of the Python package, such as "0.1.0"; NULL if the call fails.  Not collective. */
MPIATTN_API const char* mpiattn_version(void);

/* From now on, text that Python prints goes to this function; not collective.  is_error: whether it is for stderr.
 * The text ends with a zero, but is not always a whole line.  The function must not call mpiattn, and must return: no
 * exception, no longjmp.  NULL: to the process's stdout and stderr again. */
typedef void (*mpiattn_output)(const char* text, int is_error, void* context);
MPIATTN_API int mpiattn_set_output(mpiattn_output output, void* context);

/* Options: named arguments, of the names and values that the Python interface documents; not collective.
 *
 * text: "name=value, name=value", NULL or "" for none.  A value is a number, true or false (1 or 0), none, a list
 * ("window=128,0"; an empty element is none), or text as it is ("tile=2x2", "mask=neighborhood 15x15 cyclic=1").
 * Beside the names of Python there are, for plans, grid (such as 64x128), whose points in C order are the tokens and
 * whose blocks on the ranks are the layout; dims (such as 2x3), the ranks along its axes; and sizes (such as
 * 40,24xeven), the lengths of the blocks along each axis.  Without dims the ranks are those of the communicator, which
 * must then be Cartesian.  Without sizes the split is even: the first blocks have one point more than the last.
 * With order=fortran the first axis of grids is consecutive, in all of these and in the mask.
 * A name that is not known is an error of the call that gets the options. */
MPIATTN_API int mpiattn_options_create(const char* text, mpiattn_options* options);
MPIATTN_API int mpiattn_options_set_text(mpiattn_options options, const char* name, const char* value);
MPIATTN_API int mpiattn_options_set_integer(mpiattn_options options, const char* name, int64_t value);
MPIATTN_API int mpiattn_options_set_real(mpiattn_options options, const char* name, double value);
/* The numbers are copied. */
MPIATTN_API int mpiattn_options_set_integers(mpiattn_options options, const char* name, int64_t count,
                                             const int64_t* values);
/* The array is not copied: its memory must stay as long as calls get these options. */
MPIATTN_API int mpiattn_options_set_array(mpiattn_options options, const char* name, const mpiattn_array* array);
/* The layout of a plan's queries (keys = 0) or keys (keys = 1), for another plan or mpiattn_cache_append. */
MPIATTN_API int mpiattn_options_set_layout(mpiattn_options options, const char* name, mpiattn_plan plan, int keys);
MPIATTN_API int mpiattn_options_unset(mpiattn_options options, const char* name);
/* Frees the options and sets them to none.  So do the other functions that free. */
MPIATTN_API int mpiattn_options_free(mpiattn_options* options);

/* Makes a plan, `MeshAttention` in Python.  comm: MPI_Comm_c2f of the communicator, which stays the caller's.  Options:
 * seqlen (or grid), heads and head_dim are needed. */
MPIATTN_API int mpiattn_plan_create(int comm, mpiattn_options options, mpiattn_plan* plan);
MPIATTN_API int mpiattn_plan_create_text(int comm, const char* options, mpiattn_plan* plan);
/* A plan for other lengths with the choices of this one.  For another mask with the same positions, of as many keys as
 * queries: mpiattn_plan_create with mpiattn_options_set_layout(options, "layout", plan, 0). */
MPIATTN_API int mpiattn_plan_like(mpiattn_plan plan, int64_t seqlen, int64_t seqlen_k, mpiattn_plan* other);
/* Frees a plan.  After MPI_Finalize it frees this process's memory, and returns MPIATTN_ERR_MPI. */
MPIATTN_API int mpiattn_plan_free(mpiattn_plan* plan);

/* A number of a plan; not collective.  Names: tokens, tokens_k (of this rank), seqlen, seqlen_k, batch, heads,
 * kv_heads, head_dim, value_dim, chunk, bias_rows, bias_columns, bias_first_sequence, bias_sequences, bias_first_head,
 * bias_heads (of this rank's tile of a bias), nbytes, sent_bytes, sent_messages. */
MPIATTN_API int mpiattn_plan_integer(mpiattn_plan plan, const char* name, int64_t* value);
/* A text of a plan; not collective.  Names: tile, layout, layout_k, mesh_layout, schedule, route, backend, dtype,
 * description.  At most size bytes with the zero at the end; longer text is an error. */
MPIATTN_API int mpiattn_plan_text(mpiattn_plan plan, const char* name, char* text, size_t size);
/* Positions in the sequence of this rank's queries (keys = 0) or keys (keys = 1); not collective.  count: their number,
 * mpiattn_plan_integer's tokens or tokens_k. */
MPIATTN_API int mpiattn_plan_positions(mpiattn_plan plan, int keys, int64_t count, int64_t* positions);
/* Positions of the rows (columns = 0) or columns (columns = 1) of this rank's tile of a bias; not collective. */
MPIATTN_API int mpiattn_plan_bias_positions(mpiattn_plan plan, int columns, int64_t count, int64_t* positions);

/* Attention of this rank's tokens.
 * q (batch, tokens, heads, head_dim), k (batch, tokens_k, kv_heads, head_dim), v (batch, tokens_k, kv_heads,
 * value_dim); out (batch, tokens, heads, value_dim) and lse (batch, heads, tokens), which may be NULL.  v is NULL with
 * shared_kv. Options: cu_seqlens, sinks, bias, dropout, seed and the others of `MeshAttention.forward`. */
MPIATTN_API int mpiattn_forward(mpiattn_plan plan, const mpiattn_array* q, const mpiattn_array* k,
                                const mpiattn_array* v, const mpiattn_array* out, const mpiattn_array* lse,
                                mpiattn_options options);
/* Gradients.  dout is that of out; dq, dk and dv, in the shapes of q, k and v, are written and may be NULL.
 * Options: as for mpiattn_forward, with the same values, and those of `MeshAttention.backward`: dlse and dbias, and
 * memory for other gradients, dsinks, dkey_bias, dalibi_slopes and drelative_bias.  mpiattn_forward leaves these aside,
 * so that one set of options serves both. */
MPIATTN_API int mpiattn_backward(mpiattn_plan plan, const mpiattn_array* dout, const mpiattn_array* q,
                                 const mpiattn_array* k, const mpiattn_array* v, const mpiattn_array* out,
                                 const mpiattn_array* lse, const mpiattn_array* dq, const mpiattn_array* dk,
                                 const mpiattn_array* dv, mpiattn_options options);
/* Compares results of mpiattn_forward with float64 attention at some tokens; MPIATTN_ERR_VERIFY if they are wrong.
 * worst: the largest error of any result, over what it may be, or NULL. */
MPIATTN_API int mpiattn_verify(mpiattn_plan plan, const mpiattn_array* q, const mpiattn_array* k,
                               const mpiattn_array* v, const mpiattn_array* out, const mpiattn_array* lse,
                               mpiattn_options options, double* worst);

/* This rank's tokens, along an axis counted from 0, of a whole array that is in natural order on rank root, and back.
 * keys: whether the tokens are those of keys.  whole: NULL on the other ranks.  root = -1: every rank has or gets it.
 */
MPIATTN_API int mpiattn_scatter(mpiattn_plan plan, const mpiattn_array* whole, const mpiattn_array* chunk, int root,
                                int axis, int keys);
MPIATTN_API int mpiattn_gather(mpiattn_plan plan, const mpiattn_array* chunk, const mpiattn_array* whole, int root,
                               int axis, int keys);
/* This rank's tile of a whole bias (batch or 1, heads or 1, seqlen, seqlen_k), and back. */
MPIATTN_API int mpiattn_scatter_bias(mpiattn_plan plan, const mpiattn_array* whole, const mpiattn_array* tile,
                                     int root);
MPIATTN_API int mpiattn_gather_bias(mpiattn_plan plan, const mpiattn_array* tile, const mpiattn_array* whole, int root,
                                    mpiattn_options options);

/* A cache of keys and values for decoding, `KVCache` in Python.  Options: capacity, kv_heads and head_dim are needed.
 */
MPIATTN_API int mpiattn_cache_create(int comm, mpiattn_options options, mpiattn_cache* cache);
MPIATTN_API int mpiattn_cache_create_text(int comm, const char* options, mpiattn_cache* cache);
/* From an HDF5 file of mpiattn_cache_save or of k and v, and to one.  Options: those of `KVCache.load`. */
MPIATTN_API int mpiattn_cache_load(int comm, const char* path, mpiattn_options options, mpiattn_cache* cache);
MPIATTN_API int mpiattn_cache_save(mpiattn_cache cache, const char* path);
MPIATTN_API int mpiattn_cache_free(mpiattn_cache* cache);
/* Adds tokens; k, v (sequences, tokens, kv_heads, head_dim or value_dim).  Options: sequences, counts, layout. */
MPIATTN_API int mpiattn_cache_append(mpiattn_cache cache, const mpiattn_array* k, const mpiattn_array* v,
                                     mpiattn_options options);
/* Keeps the first tokens: count numbers, one for each sequence of the option sequences (default: all). */
MPIATTN_API int mpiattn_cache_truncate(mpiattn_cache cache, int64_t count, const int64_t* lengths,
                                       mpiattn_options options);
/* A number of a cache; not collective.  Names: capacity, sequences, kv_heads, head_dim, value_dim, page_size,
 * free_pages, nbytes, sent_bytes, sent_messages. */
MPIATTN_API int mpiattn_cache_integer(mpiattn_cache cache, const char* name, int64_t* value);
/* The number of tokens of every sequence: of all ranks (local = 0) or on this rank (local = 1); not collective. */
MPIATTN_API int mpiattn_cache_lengths(mpiattn_cache cache, int local, int64_t count, int64_t* lengths);
/* Positions of this rank's tokens of a sequence; not collective. */
MPIATTN_API int mpiattn_cache_positions(mpiattn_cache cache, int64_t sequence, int64_t count, int64_t* positions);
/* Attention of the last queries of every sequence over the cache: q (sequences, queries, heads, head_dim) the same on
 * every rank, out (sequences, queries, heads, value_dim) and lse (sequences, heads, queries), either may be NULL.
 * Options: those of `tree_decode`. */
MPIATTN_API int mpiattn_tree_decode(mpiattn_cache cache, const mpiattn_array* q, const mpiattn_array* out,
                                    const mpiattn_array* lse, mpiattn_options options);

#ifdef __cplusplus
}
#endif
#endif
