/* A host program that has a Python of its own, ends it, and starts another one. */
#include <Python.h>
#include <mpi.h>
#include <stdio.h>

#include "mpiattn.h"

static void says(const char* what, int status) { printf("%s: %d %s\n", what, status, mpiattn_last_error()); }

int main(int argc, char** argv) {
    MPI_Init(&argc, &argv);
    Py_Initialize();
    says("before", mpiattn_start());
    Py_Finalize();
    says("after", mpiattn_start());
    mpiattn_plan plan = {8};
    says("free", mpiattn_plan_free(&plan));
    Py_Initialize();
    says("again", mpiattn_start());
    MPI_Finalize();
    return 0;
}
