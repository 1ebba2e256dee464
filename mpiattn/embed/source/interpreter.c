// Starts Python in the process, and calls functions of `mpiattn.embed.calls` there.

#define _GNU_SOURCE  // dladdr, pthread_getattr_np
#include "interpreter.h"

#include <dlfcn.h>
#include <fenv.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// Bytes of the calling thread's stack: the first calls were measured to take 54 KiB with Python 3.11, 76 with 3.10.
#define STACK_NEEDED (96 * 1024)
#define KEPT_BITS 8  // 2^8 descriptions of arrays
#define MPI_TEXT 16384  // MPI_MAX_LIBRARY_VERSION_STRING is 8192 at most in the MPIs of today

static atomic_bool busy;         // while a thread is inside a call
static atomic_bool interrupted;  // the call that runs is to end
static atomic_bool ended;        // the host program has ended Python
static bool half_started;        // Python has tried to start and failed, also where it takes itself for running
static PyObject* calls;          // the module mpiattn.embed.calls, once it is loaded
static mpiattn_output output;
static void* output_context;
static _Thread_local int last_status;
static _Thread_local char* message;  // of the last call of this thread that failed
static _Thread_local struct {
    int64_t* numbers;
    int64_t count;
} failed_ranks;  // that it failed for

static void set_failed_ranks(const char* numbers, size_t bytes) {
    free(failed_ranks.numbers);
    failed_ranks.numbers = bytes ? malloc(bytes) : NULL;
    failed_ranks.count = failed_ranks.numbers ? (int64_t)(bytes / sizeof(int64_t)) : 0;
    if (failed_ranks.numbers)
        memcpy(failed_ranks.numbers, numbers, bytes);
}

static int vfail(int status, const char* format, va_list arguments) {
    va_list again;
    last_status = status;
    set_failed_ranks(NULL, 0);
    va_copy(again, arguments);
    int length = vsnprintf(NULL, 0, format, again);
    va_end(again);
    free(message);
    message = malloc((size_t)length + 1);
    if (message)
        vsnprintf(message, (size_t)length + 1, format, arguments);
    return status;
}

int fail(int status, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vfail(status, format, arguments);
    va_end(arguments);
    return status;
}

const char* mpiattn_last_error(void) { return message ? message : ""; }

void mpiattn_print_error(int rank) {
    // Whoever calls MPI_Abort first ends the ranks that have not printed yet.
    if (rank > 0)
        sleep(1);
    // The rank that failed knows why; the others know only that it did.
    if (last_status == MPIATTN_ERR_PEER)
        sleep(2);
    fprintf(stderr, "mpiattn: rank %d: %s\n", rank, mpiattn_last_error());
    fflush(stderr);
    // A launcher that ends the job drops what it has not passed on yet (console/message.py has the same wait).
    usleep(500000);
}

int64_t mpiattn_failed_ranks(int64_t most, int64_t* ranks) {
    for (int64_t i = 0; ranks && i < most && i < failed_ranks.count; i++)
        ranks[i] = failed_ranks.numbers[i];
    return failed_ranks.count;
}

/* ---- Python's side ---- */

void mpiattn_interrupt(void) {
    if (!atomic_load(&busy) || !calls)
        return;
    atomic_store(&interrupted, true);
    PyErr_SetInterrupt();
}

/* Forgets an interruption that came too late for its call, so that it does not end the next one. */
static void drop_interruption(void) {
    if (atomic_exchange(&interrupted, false) && PyErr_CheckSignals())
        PyErr_Clear();
}

/* Python's handler of SIGINT is known to Python, for mpiattn_interrupt, but the process keeps the host program's. */
static void leave_signals_to_host(void) {
    struct sigaction of_host;
    sigaction(SIGINT, NULL, &of_host);
    PyObject* module = PyImport_ImportModule("_signal");  // installs Python's handler if the host program has none
    PyObject* known = module ? PyObject_CallMethod(module, "getsignal", "i", SIGINT) : NULL;
    if (known && !PyCallable_Check(known)) {
        PyObject* handler = PyObject_GetAttrString(module, "default_int_handler");
        PyObject* before = handler ? PyObject_CallMethod(module, "signal", "iO", SIGINT, handler) : NULL;
        Py_XDECREF(before);
        Py_XDECREF(handler);
    }
    PyErr_Clear();  // only a host program's Python on another thread refuses; its calls are not interrupted
    Py_XDECREF(known);
    Py_XDECREF(module);
    sigaction(SIGINT, &of_host, NULL);
}

static void note_end(void) { atomic_store(&ended, true); }

void take_output(mpiattn_output function, void* context) {
    output = function;
    output_context = context;
}

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

/* The variables by which the environment sends Python to modules elsewhere, for an error of its start. */
static const char* about_environment(void) {
    static const char* const names[] = {"PYTHONHOME", "PYTHONPATH"};
    static char hint[4096];
    size_t length = 0;
    hint[0] = 0;
    for (int i = 0; i < 2 && length < sizeof hint; i++) {
        const char* value = getenv(names[i]);
        if (value && *value)
            length += (size_t)snprintf(hint + length, sizeof hint - length,
                                       "; %s is %s: unset it if that is another Python's", names[i], value);
    }
    return hint;
}

static int start_python(void) {
    const char* path = interpreter();
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

    PyPreConfig before;
    PyPreConfig_InitPythonConfig(&before);
    before.parse_argv = before.configure_locale = before.coerce_c_locale = 0;  // the locale stays the host program's
    before.utf8_mode = 1;
    PyStatus status = Py_PreInitialize(&before);
    PyConfig config;
    PyConfig_InitPythonConfig(&config);
    config.install_signal_handlers = 0;  // signals stay the host program's
    config.parse_argv = 0;
    if (!PyStatus_Exception(status))
        status = PyConfig_SetBytesString(&config, &config.program_name, path);
    if (!PyStatus_Exception(status))
        status = PyConfig_SetBytesString(&config, &config.executable, path);
    if (!PyStatus_Exception(status))
        status = Py_InitializeFromConfig(&config);
    PyConfig_Clear(&config);
    if (PyStatus_Exception(status)) {
        half_started = true;
        return fail(MPIATTN_ERR_PYTHON, "Python %s does not start as %s: %s; MPIATTN_PYTHON may be of another Python%s",
                    PY_VERSION, path, status.err_msg ? status.err_msg : "no reason given", about_environment());
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
    const char *words = NULL, *ranks = NULL;
    Py_ssize_t bytes = 0;
    if (calls) {
        said = PyObject_CallMethod(calls, "describe", "O", error);
        if (said && !PyArg_ParseTuple(said, "isy#", &status, &words, &ranks, &bytes))
            words = NULL, bytes = 0;
    } else if (error) {
        text = PyObject_Str(error);
        words = text ? PyUnicode_AsUTF8(text) : NULL;
    }
    fail(status, "%s", words ? words : "an error that cannot be put into words");
    set_failed_ranks(ranks, (size_t)bytes);
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
    leave_signals_to_host();
    PyObject* package = PyImport_ImportModule("mpiattn.embed.calls");
    if (!package) {
        int status = failed_in_python(MPIATTN_ERR_PYTHON);
        PyObject* prefix = PySys_GetObject("prefix");
        char* why = strdup(mpiattn_last_error());
        fail(
            status,
            "Python %s of %s, started as %s, cannot load mpiattn: %s; set MPIATTN_PYTHON to the python of the environment that it is installed in, of the same version%s",
            PY_VERSION, prefix && PyUnicode_Check(prefix) ? PyUnicode_AsUTF8(prefix) : "no prefix", interpreter(),
            why ? why : "", about_environment());
        free(why);
        return status;
    }
    calls = package;
    PyObject* write = PyCFunction_New(&write_method, NULL);
    PyObject* done = PyObject_CallMethod(package, "start", "iOzz", MPIATTN_ABI, write, library_version ? version : NULL,
                                         library.dli_fname);
    int status = done ? MPIATTN_OK : failed_in_python(MPIATTN_ERR_OTHER);
    Py_XDECREF(done);
    Py_XDECREF(write);
    if (status)
        Py_CLEAR(calls);  // so that the next call tries again
    else
        Py_AtExit(note_end);
    return status;
}

/* Bytes of this thread's stack that are left; INT64_MAX if it is not known, as on the stack of a coroutine. */
static int64_t stack_left(void) {
    static _Thread_local char *first, *end;
    char here;
    if (!first) {  // once a thread: glibc reads a file for the main one
        pthread_attr_t attributes;
        void* lowest;
        size_t size;
        if (pthread_getattr_np(pthread_self(), &attributes))
            return INT64_MAX;
        if (!pthread_attr_getstack(&attributes, &lowest, &size))
            first = lowest, end = first + size;
        pthread_attr_destroy(&attributes);
    }
    return &here > first && &here < end ? &here - first : INT64_MAX;
}

/* Starts Python, if nobody has; the status. */
static int python_runs(void) {
    if (ended)
        return fail(
            MPIATTN_ERR_PYTHON,
            "the host program has ended Python (Py_Finalize), in which mpiattn ran; end it after the last call");
    const int64_t room = stack_left();
    if (room < STACK_NEEDED)
        return fail(MPIATTN_ERR_PYTHON,
                    "this thread has %lld KiB of its stack left; calls of mpiattn need %d KiB: raise the stack size of "
                    "the thread (pthread_attr_setstacksize, OMP_STACKSIZE, ulimit -s)",
                    (long long)room / 1024, STACK_NEEDED / 1024);
    if (half_started)
        return fail(MPIATTN_ERR_PYTHON, "Python did not start at the first call, and cannot be started again");
    return Py_IsInitialized() ? MPIATTN_OK : start_python();
}

/* Calls a function of mpiattn.embed.calls.  format, ...: its arguments, as Py_BuildValue has them. */
int call(const char* function, const char* format, ...) {
    if (atomic_exchange(&busy, true))
        return fail(
            MPIATTN_ERR_CALL,
            "mpiattn is already in a call, of another thread or of the function that takes output; call from one thread at a time");
    // A program may trap floating-point errors, as many climate codes do.  NumPy's and the kernels' are none: scores of
    // -inf, for example, are what masks are made of.  Only then, as kernels are slower after feholdexcept.
    fenv_t environment;
    const int traps = fegetexcept();
    if (traps)
        feholdexcept(&environment);
    int status = python_runs();
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
            drop_interruption();
        }
        PyGILState_Release(lock);
    }
    if (status == MPIATTN_OK) {
        last_status = MPIATTN_OK;
        if (message)
            message[0] = 0;
        set_failed_ranks(NULL, 0);
    }
    if (traps)
        fesetenv(&environment);
    atomic_store(&busy, false);
    return status;
}

/* ---- What Python gets of the arguments ---- */

PyObject* memory_object(void* given) {
    static char nothing;
    const memory* part = given;
    if (part->bytes < 0 || (part->bytes && !part->start))
        Py_RETURN_NONE;
    return PyMemoryView_FromMemory(part->bytes ? part->start : &nothing, (Py_ssize_t)part->bytes, PyBUF_WRITE);
}

PyObject* text_object(void* given) {
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
    const int64_t size = sizes[array->dtype];
    int64_t bytes = size, last = 0, empty = 0;  // NumPy refuses lengths that are too many also where others are 0
    for (int axis = 0; axis < array->axes; axis++) {
        const int64_t length = array->shape[axis], stride = strided ? array->strides[axis] : 0;
        int64_t far;
        if (length < 0 || stride < 0 || __builtin_mul_overflow(bytes, length > 1 ? length : 1, &bytes) ||
            __builtin_mul_overflow(stride, size, &far) ||
            (length > 1 && (__builtin_mul_overflow(length - 1, far, &far) || __builtin_add_overflow(last, far, &last))))
            return -1;
        empty |= length == 0;
    }
    if (empty)
        return 0;
    return !strided ? bytes : last > INT64_MAX - size ? -1 : last + size;
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
PyObject* array_object(void* given) {
    static struct {
        mpiattn_array array;
        PyObject* described;
    } kept[1 << KEPT_BITS];
    const mpiattn_array* array = given;
    if (!array)
        Py_RETURN_NONE;
    const uintptr_t address = (uintptr_t)array->data;
    const size_t place = (size_t)((address >> 4) * UINT64_C(0x9E3779B97F4A7C15) >> (64 - KEPT_BITS));
    if (!kept[place].described || memcmp(&kept[place].array, array, sizeof *array)) {
        PyObject* described = describe_array(array);
        if (!described)
            return NULL;
        Py_XSETREF(kept[place].described, described);
        kept[place].array = *array;
    }
    return Py_NewRef(kept[place].described);
}
