// The shared library behind mpiattn.h: it starts Python and hands every call to a function of `mpiattn.embed.calls`.
//
// It links Python and no MPI, so that it serves every MPI: the host program's MPI is the one that is in the process.
// `mpiattn-config --build` compiles it; MPIATTN_BUILT_FOR is the interpreter that it then takes by default.

#define _GNU_SOURCE  // dladdr
#define PY_SSIZE_T_CLEAN
#include "mpiattn.h"

#include <Python.h>
#include <dlfcn.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define KEPT 64         // descriptions of arrays
#define MPI_TEXT 16384  // MPI_MAX_LIBRARY_VERSION_STRING is 8192 at most in the MPIs of today

static atomic_flag busy = ATOMIC_FLAG_INIT;  // while a thread is inside a call
static PyObject* calls;                      // the module mpiattn.embed.calls, once it is loaded
static mpiattn_output output;
static void* output_context;
static _Thread_local char* message;  // of the last call of this thread that failed

static int vfail(int status, const char* format, va_list arguments) {
    va_list again;
    va_copy(again, arguments);
    int length = vsnprintf(NULL, 0, format, again);
    va_end(again);
    free(message);
    message = malloc((size_t)length + 1);
    if (message)
        vsnprintf(message, (size_t)length + 1, format, arguments);
    return status;
}

/* The status, after this text has become the thread's last error. */
static int fail(int status, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vfail(status, format, arguments);
    va_end(arguments);
    return status;
}

const char* mpiattn_last_error(void) { return message ? message : ""; }

/* ---- Python's side ---- */

/* What Python prints; it is given to Python as a function of (text, is_error). */
static PyObject* write_output(PyObject* self, PyObject* arguments) {
    const char* text;
    int is_error;
    (void)self;
    if (!PyArg_ParseTuple(arguments, "si", &text, &is_error))
        return NULL;
    if (output)
        output(text, is_error, output_context);
    Py_RETURN_NONE;
}

static PyMethodDef write_method = {"write", write_output, METH_VARARGS, NULL};

static const char* interpreter(void) {
    const char* named = getenv("MPIATTN_PYTHON");
    return named && *named ? named : MPIATTN_BUILT_FOR;
}

static int start_python(void) {
    static int failed;
    const char* path = interpreter();
    if (failed)
        return fail(MPIATTN_ERR_PYTHON, "Python did not start at the first call, and cannot be started again");
    if (access(path, X_OK))
        return fail(
            MPIATTN_ERR_PYTHON,
            "there is no program %s; set MPIATTN_PYTHON to the python %s of the environment that mpiattn is installed in",
            path, PY_VERSION);
    // Modules in C take Python's functions from those that all libraries see.  A host program that loads this library
    // by dlopen may have hidden them.
    Dl_info python;
    if (dladdr((void*)Py_IsInitialized, &python))
        dlopen(python.dli_fname, RTLD_NOW | RTLD_GLOBAL | RTLD_NOLOAD);

    PyConfig config;
    PyConfig_InitPythonConfig(&config);
    config.install_signal_handlers = 0;  // signals stay the host program's
    config.parse_argv = 0;
    PyStatus status = PyConfig_SetBytesString(&config, &config.program_name, path);
    if (!PyStatus_Exception(status))
        status = PyConfig_SetBytesString(&config, &config.executable, path);
    if (!PyStatus_Exception(status))
        status = Py_InitializeFromConfig(&config);
    PyConfig_Clear(&config);
    if (PyStatus_Exception(status)) {
        failed = 1;
        return fail(MPIATTN_ERR_PYTHON,
                    "Python %s does not start as %s: %s; is MPIATTN_PYTHON or PYTHONHOME of another Python?",
                    PY_VERSION, path, status.err_msg ? status.err_msg : "no reason given");
    }
    PyEval_SaveThread();  // every call takes the lock anew
    return MPIATTN_OK;
}

/* Turns the exception that Python has set into a status and the last error. */
static int failed_in_python(int status) {
#if PY_VERSION_HEX >= 0x030C0000
    PyObject* error = PyErr_GetRaisedException();
#else
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace)
        PyException_SetTraceback(error, trace);
    Py_XDECREF(type);
    Py_XDECREF(trace);
#endif
    PyObject *said = NULL, *text = NULL;
    const char* words = NULL;
    if (calls) {
        said = PyObject_CallMethod(calls, "describe", "O", error);
        if (said && !PyArg_ParseTuple(said, "is", &status, &words))
            words = NULL;
    } else if (error) {
        text = PyObject_Str(error);
        words = text ? PyUnicode_AsUTF8(text) : NULL;
    }
    fail(status, "%s", words ? words : "an error that cannot be put into words");
    PyErr_Clear();
    Py_XDECREF(said);
    Py_XDECREF(text);
    Py_XDECREF(error);
    return status;
}

/* Loads the Python package; the caller holds the lock. */
static int load_package(void) {
    int (*library_version)(char*, int*) = NULL;
    char version[MPI_TEXT] = "";
    int length = 0;
    Dl_info library = {0};
    *(void**)&library_version = dlsym(RTLD_DEFAULT, "MPI_Get_library_version");
    if (library_version) {
        dladdr(*(void**)&library_version, &library);
        if (library_version(version, &length))
            version[0] = 0;
    }
    PyObject* package = PyImport_ImportModule("mpiattn.embed.calls");
    if (!package) {
        int status = failed_in_python(MPIATTN_ERR_PYTHON);
        PyObject* prefix = PySys_GetObject("prefix");
        char* why = strdup(mpiattn_last_error());
        fail(
            status,
            "Python %s of %s cannot load mpiattn: %s; set MPIATTN_PYTHON to the python of the environment that it is installed in, of the same version",
            PY_VERSION, prefix && PyUnicode_Check(prefix) ? PyUnicode_AsUTF8(prefix) : interpreter(), why ? why : "");
        free(why);
        return status;
    }
    calls = package;
    PyObject* write = PyCFunction_New(&write_method, NULL);
    PyObject* done =
        PyObject_CallMethod(package, "start", "Ozz", write, library_version ? version : NULL, library.dli_fname);
    int status = done ? MPIATTN_OK : failed_in_python(MPIATTN_ERR_OTHER);
    Py_XDECREF(done);
    Py_XDECREF(write);
    if (status)
        Py_CLEAR(calls);  // so that the next call tries again
    return status;
}

/* Calls a function of mpiattn.embed.calls.  format, ...: its arguments, as Py_BuildValue has them. */
static int call(const char* function, const char* format, ...) {
    if (atomic_flag_test_and_set(&busy))
        return fail(
            MPIATTN_ERR_CALL,
            "mpiattn is already in a call, of another thread or of the function that takes output; call from one thread at a time");
    int status = Py_IsInitialized() ? MPIATTN_OK : start_python();
    if (status == MPIATTN_OK) {
        PyGILState_STATE lock = PyGILState_Ensure();
        if (!calls)
            status = load_package();
        if (status == MPIATTN_OK) {
            va_list arguments;
            va_start(arguments, format);
            PyObject* method = PyObject_GetAttrString(calls, function);
            PyObject* given = method ? Py_VaBuildValue(format, arguments) : NULL;
            PyObject* done = given ? PyObject_Call(method, given, NULL) : NULL;
            va_end(arguments);
            if (!done)
                status = failed_in_python(MPIATTN_ERR_OTHER);
            Py_XDECREF(done);
            Py_XDECREF(given);
            Py_XDECREF(method);
        }
        PyGILState_Release(lock);
    }
    if (status == MPIATTN_OK && message)
        message[0] = 0;
    atomic_flag_clear(&busy);
    return status;
}

/* ---- What Python gets of the arguments ---- */

typedef struct {
    void* start;
    int64_t bytes;
} memory;

static PyObject* memory_object(void* given) {
    static char nothing;
    const memory* part = given;
    if (part->bytes < 0 || (part->bytes && !part->start))
        Py_RETURN_NONE;
    return PyMemoryView_FromMemory(part->bytes ? part->start : &nothing, (Py_ssize_t)part->bytes, PyBUF_WRITE);
}

static PyObject* text_object(void* given) {
    const char* text = given;
    if (!text)
        Py_RETURN_NONE;
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "surrogateescape");
}

/* Bytes from the first element to the last one's end; -1 if the description is not one of an array. */
static int64_t extent(const mpiattn_array* array, int strided) {
    static const int64_t sizes[] = {0, 2, 2, 4, 8, 4, 8};
    if (array->dtype < MPIATTN_FLOAT16 || array->dtype > MPIATTN_INT64)
        return -1;
    int64_t last = 0, count = 1;
    for (int axis = 0; axis < array->axes; axis++) {
        int64_t length = array->shape[axis], far;
        if (length < 0 || (strided && array->strides[axis] < 0))
            return -1;
        if (__builtin_mul_overflow(count, length, &count))
            return -1;
        if (strided && length > 1 &&
            (__builtin_mul_overflow(length - 1, array->strides[axis], &far) ||
             __builtin_add_overflow(last, far, &last)))
            return -1;
    }
    if (!count)
        return 0;
    int64_t bytes;
    if (__builtin_mul_overflow(strided ? last + 1 : count, sizes[array->dtype], &bytes))
        return -1;
    return bytes;
}

/* A new object of mpiattn.embed.calls.Described. */
static PyObject* describe_array(const mpiattn_array* array) {
    int axes = array->axes < 0 || array->axes > MPIATTN_MAX_AXES ? -1 : array->axes, strided = 0;
    for (int axis = 0; axis < axes; axis++)
        strided |= array->strides[axis] != 0;
    memory part = {array->data, axes < 0 ? -1 : extent(array, strided)};
    PyObject *shape = PyTuple_New(axes < 0 ? 0 : axes), *strides = PyTuple_New(strided ? axes : 0);
    if (!shape || !strides) {
        Py_XDECREF(shape);
        Py_XDECREF(strides);
        return NULL;
    }
    for (int axis = 0; axis < axes; axis++) {
        PyTuple_SET_ITEM(shape, axis, PyLong_FromLongLong(array->shape[axis]));
        if (strided)
            PyTuple_SET_ITEM(strides, axis, PyLong_FromLongLong(array->strides[axis]));
    }
    return PyObject_CallMethod(calls, "Described", "O&KiiNN", memory_object, &part,
                               (unsigned long long)(uintptr_t)array->data, (int)array->dtype, (int)array->axes, shape,
                               strides);
}

/* The description of an array for Python, None for NULL.  Those of recent calls are kept: programs pass the same arrays
 * again and again. */
static PyObject* array_object(void* given) {
    static struct {
        mpiattn_array array;
        PyObject* described;
    } kept[KEPT];
    const mpiattn_array* array = given;
    if (!array)
        Py_RETURN_NONE;
    const uintptr_t address = (uintptr_t)array->data;
    const size_t place = (address >> 4 ^ address >> 10 ^ address >> 16) % KEPT;
    if (!kept[place].described || memcmp(&kept[place].array, array, sizeof *array)) {
        PyObject* described = describe_array(array);
        if (!described)
            return NULL;
        Py_XSETREF(kept[place].described, described);
        kept[place].array = *array;
    }
    return Py_NewRef(kept[place].described);
}

// Arguments for "O&".
#define ARRAY(array) array_object, (void*)(array)
#define TEXT(text) text_object, (void*)(text)
#define MEMORY(part) memory_object, (void*)&(part)
#define NUMBER(handle) ((long long)(handle).number)

static memory words(const void* start, int64_t count) {
    memory part = {(void*)start, count < 0 || count > INT64_MAX / 8 ? -1 : count * 8};
    return part;
}

/* ---- The interface ---- */

int mpiattn_start(void) { return call("nothing", "()"); }

const char* mpiattn_version(void) {
    static char version[64];
    memory part = {version, sizeof version};
    return version[0] || !call("version", "(O&)", MEMORY(part)) ? version : NULL;
}

int mpiattn_set_output(mpiattn_output function, void* context) {
    int status = call("set_output", "(i)", function != NULL);
    if (status == MPIATTN_OK)
        output = function, output_context = context;
    return status;
}

int mpiattn_options_create(const char* text, mpiattn_options* options) {
    memory number = words(options, 1);
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
    options->number = 0;
    return status;
}

int mpiattn_plan_create(int comm, mpiattn_options options, mpiattn_plan* plan) {
    memory number = words(plan, 1);
    return call("plan_create", "(iLO&)", comm, NUMBER(options), MEMORY(number));
}

int mpiattn_plan_create_text(int comm, const char* options, mpiattn_plan* plan) {
    memory number = words(plan, 1);
    return call("plan_create_text", "(iO&O&)", comm, TEXT(options), MEMORY(number));
}

int mpiattn_plan_like(mpiattn_plan plan, int64_t seqlen, int64_t seqlen_k, mpiattn_plan* other) {
    memory number = words(other, 1);
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
    memory number = words(cache, 1);
    return call("cache_create", "(iLO&)", comm, NUMBER(options), MEMORY(number));
}

int mpiattn_cache_create_text(int comm, const char* options, mpiattn_cache* cache) {
    memory number = words(cache, 1);
    return call("cache_create_text", "(iO&O&)", comm, TEXT(options), MEMORY(number));
}

int mpiattn_cache_load(int comm, const char* path, mpiattn_options options, mpiattn_cache* cache) {
    memory number = words(cache, 1);
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
