// The shared library behind mpiattn.h: every function hands its arguments to one of `mpiattn.embed.calls` in Python.
//
// It links Python and no MPI, so that it serves every MPI: the host program's MPI is the one that is in the process.
// `mpiattn-config --build` compiles it.

#include "interpreter.h"

static memory words(const void* start, int64_t count) {
    memory part = {(void*)start, count < 0 || count > INT64_MAX / 8 ? -1 : count * 8};
    return part;
}

/* Memory for a handle, which is none until there is an object. */
static memory made(void* handle) {
    if (handle)
        memset(handle, 0, sizeof(int64_t));
    return words(handle, 1);
}

int mpiattn_start(void) { return call("nothing", "()"); }

const char* mpiattn_version(void) {
    static char version[64];
    memory part = {version, sizeof version};
    return version[0] || !call("version", "(O&)", MEMORY(part)) ? version : NULL;
}

int mpiattn_set_output(mpiattn_output function, void* context) {
    int status = call("set_output", "(i)", function != NULL);
    if (status == MPIATTN_OK)
        take_output(function, context);
    return status;
}

int mpiattn_options_create(const char* text, mpiattn_options* options) {
    memory number = made(options);
    return call("options_create", "(O&O&)", TEXT(text), MEMORY(number));
}

int mpiattn_options_set_text(mpiattn_options options, const char* name, const char* value) {
    return call("options_set_text", "(LO&O&)", NUMBER(options), TEXT(name), TEXT(value));
}

int mpiattn_options_set_integer(mpiattn_options options, const char* name, int64_t value) {
    return call("options_set", "(LO&L)", NUMBER(options), TEXT(name), (long long)value);
}

int mpiattn_options_set_real(mpiattn_options options, const char* name, double value) {
    return call("options_set", "(LO&d)", NUMBER(options), TEXT(name), value);
}

int mpiattn_options_set_integers(mpiattn_options options, const char* name, int64_t count, const int64_t* values) {
    memory part = words(values, count);
    return call("options_set_integers", "(LO&O&)", NUMBER(options), TEXT(name), MEMORY(part));
}

int mpiattn_options_set_array(mpiattn_options options, const char* name, const mpiattn_array* array) {
    return call("options_set_array", "(LO&O&)", NUMBER(options), TEXT(name), ARRAY(array));
}

int mpiattn_options_set_layout(mpiattn_options options, const char* name, mpiattn_plan plan, int keys) {
    return call("options_set_layout", "(LO&Li)", NUMBER(options), TEXT(name), NUMBER(plan), keys);
}

int mpiattn_options_unset(mpiattn_options options, const char* name) {
    return call("options_unset", "(LO&)", NUMBER(options), TEXT(name));
}

int mpiattn_options_free(mpiattn_options* options) {
    if (!options)
        return fail(MPIATTN_ERR_ARGUMENT, "options is NULL; it must point to options");
    int status = call("options_free", "(L)", NUMBER(*options));
    if (status != MPIATTN_ERR_CALL)
        options->number = 0;
    return status;
}

int mpiattn_plan_create(int comm, mpiattn_options options, mpiattn_plan* plan) {
    memory number = made(plan);
    return call("plan_create", "(iLO&)", comm, NUMBER(options), MEMORY(number));
}

int mpiattn_plan_create_text(int comm, const char* options, mpiattn_plan* plan) {
    memory number = made(plan);
    return call("plan_create_text", "(iO&O&)", comm, TEXT(options), MEMORY(number));
}

int mpiattn_plan_like(mpiattn_plan plan, int64_t seqlen, int64_t seqlen_k, mpiattn_plan* other) {
    memory number = made(other);
    return call("plan_like", "(LLLO&)", NUMBER(plan), (long long)seqlen, (long long)seqlen_k, MEMORY(number));
}

int mpiattn_plan_free(mpiattn_plan* plan) {
    if (!plan)
        return fail(MPIATTN_ERR_ARGUMENT, "plan is NULL; it must point to a plan");
    int status = call("plan_free", "(L)", NUMBER(*plan));
    if (status != MPIATTN_ERR_CALL)
        plan->number = 0;
    return status;
}

int mpiattn_plan_integer(mpiattn_plan plan, const char* name, int64_t* value) {
    memory part = words(value, 1);
    return call("plan_integer", "(LO&O&)", NUMBER(plan), TEXT(name), MEMORY(part));
}

int mpiattn_plan_text(mpiattn_plan plan, const char* name, char* text, size_t size) {
    memory part = {text, size > INT64_MAX ? -1 : (int64_t)size};
    return call("plan_text", "(LO&O&)", NUMBER(plan), TEXT(name), MEMORY(part));
}

int mpiattn_plan_positions(mpiattn_plan plan, int keys, int64_t count, int64_t* positions) {
    memory part = words(positions, count);
    return call("plan_positions", "(LiO&)", NUMBER(plan), keys, MEMORY(part));
}

int mpiattn_plan_bias_positions(mpiattn_plan plan, int columns, int64_t count, int64_t* positions) {
    memory part = words(positions, count);
    return call("plan_bias_positions", "(LiO&)", NUMBER(plan), columns, MEMORY(part));
}

int mpiattn_forward(mpiattn_plan plan, const mpiattn_array* q, const mpiattn_array* k, const mpiattn_array* v,
                    const mpiattn_array* out, const mpiattn_array* lse, mpiattn_options options) {
    return call("forward", "(LO&O&O&O&O&L)", NUMBER(plan), ARRAY(q), ARRAY(k), ARRAY(v), ARRAY(out), ARRAY(lse),
                NUMBER(options));
}

int mpiattn_backward(mpiattn_plan plan, const mpiattn_array* dout, const mpiattn_array* q, const mpiattn_array* k,
                     const mpiattn_array* v, const mpiattn_array* out, const mpiattn_array* lse,
                     const mpiattn_array* dq, const mpiattn_array* dk, const mpiattn_array* dv,
                     mpiattn_options options) {
    return call("backward", "(LO&O&O&O&O&O&O&O&O&L)", NUMBER(plan), ARRAY(dout), ARRAY(q), ARRAY(k), ARRAY(v),
                ARRAY(out), ARRAY(lse), ARRAY(dq), ARRAY(dk), ARRAY(dv), NUMBER(options));
}

int mpiattn_verify(mpiattn_plan plan, const mpiattn_array* q, const mpiattn_array* k, const mpiattn_array* v,
                   const mpiattn_array* out, const mpiattn_array* lse, mpiattn_options options, double* worst) {
    memory part = words(worst, 1);
    return call("verify", "(LO&O&O&O&O&LO&)", NUMBER(plan), ARRAY(q), ARRAY(k), ARRAY(v), ARRAY(out), ARRAY(lse),
                NUMBER(options), MEMORY(part));
}

int mpiattn_scatter(mpiattn_plan plan, const mpiattn_array* whole, const mpiattn_array* chunk, int root, int axis,
                    int keys) {
    return call("scatter", "(LO&O&iii)", NUMBER(plan), ARRAY(whole), ARRAY(chunk), root, axis, keys);
}

int mpiattn_gather(mpiattn_plan plan, const mpiattn_array* chunk, const mpiattn_array* whole, int root, int axis,
                   int keys) {
    return call("gather", "(LO&O&iii)", NUMBER(plan), ARRAY(chunk), ARRAY(whole), root, axis, keys);
}

int mpiattn_scatter_bias(mpiattn_plan plan, const mpiattn_array* whole, const mpiattn_array* tile, int root) {
    return call("scatter_bias", "(LO&O&i)", NUMBER(plan), ARRAY(whole), ARRAY(tile), root);
}

int mpiattn_gather_bias(mpiattn_plan plan, const mpiattn_array* tile, const mpiattn_array* whole, int root,
                        mpiattn_options options) {
    return call("gather_bias", "(LO&O&iL)", NUMBER(plan), ARRAY(tile), ARRAY(whole), root, NUMBER(options));
}

int mpiattn_cache_create(int comm, mpiattn_options options, mpiattn_cache* cache) {
    memory number = made(cache);
    return call("cache_create", "(iLO&)", comm, NUMBER(options), MEMORY(number));
}

int mpiattn_cache_create_text(int comm, const char* options, mpiattn_cache* cache) {
    memory number = made(cache);
    return call("cache_create_text", "(iO&O&)", comm, TEXT(options), MEMORY(number));
}

int mpiattn_cache_load(int comm, const char* path, mpiattn_options options, mpiattn_cache* cache) {
    memory number = made(cache);
    return call("cache_load", "(iO&LO&)", comm, TEXT(path), NUMBER(options), MEMORY(number));
}

int mpiattn_cache_save(mpiattn_cache cache, const char* path) {
    return call("cache_save", "(LO&)", NUMBER(cache), TEXT(path));
}

int mpiattn_cache_free(mpiattn_cache* cache) {
    if (!cache)
        return fail(MPIATTN_ERR_ARGUMENT, "cache is NULL; it must point to a cache");
    int status = call("cache_free", "(L)", NUMBER(*cache));
    if (status != MPIATTN_ERR_CALL)
        cache->number = 0;
    return status;
}

int mpiattn_cache_append(mpiattn_cache cache, const mpiattn_array* k, const mpiattn_array* v, mpiattn_options options) {
    return call("cache_append", "(LO&O&L)", NUMBER(cache), ARRAY(k), ARRAY(v), NUMBER(options));
}

int mpiattn_cache_truncate(mpiattn_cache cache, int64_t count, const int64_t* lengths, mpiattn_options options) {
    memory part = words(lengths, count);
    return call("cache_truncate", "(LO&L)", NUMBER(cache), MEMORY(part), NUMBER(options));
}

int mpiattn_cache_integer(mpiattn_cache cache, const char* name, int64_t* value) {
    memory part = words(value, 1);
    return call("cache_integer", "(LO&O&)", NUMBER(cache), TEXT(name), MEMORY(part));
}

int mpiattn_cache_lengths(mpiattn_cache cache, int local, int64_t count, int64_t* lengths) {
    memory part = words(lengths, count);
    return call("cache_lengths", "(LiO&)", NUMBER(cache), local, MEMORY(part));
}

int mpiattn_cache_positions(mpiattn_cache cache, int64_t sequence, int64_t count, int64_t* positions) {
    memory part = words(positions, count);
    return call("cache_positions", "(LLO&)", NUMBER(cache), (long long)sequence, MEMORY(part));
}

int mpiattn_tree_decode(mpiattn_cache cache, const mpiattn_array* q, const mpiattn_array* out, const mpiattn_array* lse,
                        mpiattn_options options) {
    return call("tree_decode", "(LO&O&O&L)", NUMBER(cache), ARRAY(q), ARRAY(out), ARRAY(lse), NUMBER(options));
}
