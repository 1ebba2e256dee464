// Calls of Python, and what it gets of the arguments; for mpiattn.c alone.
#ifndef MPIATTN_INTERPRETER_H
#define MPIATTN_INTERPRETER_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "mpiattn.h"

// Names of functions are those of this library, which shows others only what mpiattn.h declares.

/* Calls a function of mpiattn.embed.calls; the status.  format, ...: its arguments, as Py_BuildValue has them. */
int call(const char* function, const char* format, ...);
/* The status, after this text has become the thread's last error. */
int fail(int status, const char* format, ...);
/* From now on, what Python prints goes to this function. */
void take_output(mpiattn_output function, void* context);

/* Memory of the caller's; bytes: -1 if it cannot be. */
typedef struct {
    void* start;
    int64_t bytes;
} memory;

/* Converters of "O&", to what Python gets of a description of an array, a text and a memory. */
PyObject* array_object(void* given);
PyObject* text_object(void* given);
PyObject* memory_object(void* given);

// Arguments for "O&".
#define ARRAY(array) array_object, (void*)(array)
#define TEXT(text) text_object, (void*)(text)
#define MEMORY(part) memory_object, (void*)&(part)
#define NUMBER(handle) ((long long)(handle).number)

#endif
