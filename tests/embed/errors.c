/* Errors of a C program, each printed as "case: status text", in the order of the calls. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "mpiattn.h"

static int rank;

static void says(const char* what, int status) {
    if (rank == 0)
        printf("%s: %d %s\n", what, status, status ? mpiattn_last_error() : "");
}

int main(int argc, char** argv) {
    mpiattn_plan plan = {0}, copy, other = {0};
    mpiattn_options options = MPIATTN_NO_OPTIONS;
    says("before MPI_Init", mpiattn_start());
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    const int world = MPI_Comm_c2f(MPI_COMM_WORLD);
    says("start", mpiattn_start());
    if (argc > 1) { /* the start alone */
        MPI_Finalize();
        return 0;
    }
    const char* text = "seqlen=24, heads=2, head_dim=8, timeout=60";
    says("plan", mpiattn_plan_create_text(world, text, &plan));
    int64_t tokens = 0;
    says("tokens", mpiattn_plan_integer(plan, "tokens", &tokens));
    const size_t count = (size_t)tokens * 16;
    float* memory = (float*)calloc(count * 4 + 1, sizeof(float));
    mpiattn_array q = mpiattn_array_4d(memory, MPIATTN_FLOAT32, 1, tokens, 2, 8), wrong = q;
    mpiattn_array k = mpiattn_array_4d(memory + count, MPIATTN_FLOAT32, 1, tokens, 2, 8);
    mpiattn_array v = mpiattn_array_4d(memory + 2 * count, MPIATTN_FLOAT32, 1, tokens, 2, 8);
    mpiattn_array out = mpiattn_array_4d(memory + 3 * count, MPIATTN_FLOAT32, 1, tokens, 2, 8);
    wrong.shape[2] = 3;
    says("shape", mpiattn_forward(plan, &wrong, &k, &v, &out, NULL, options));
    wrong.data = NULL;
    says("no data", mpiattn_forward(plan, &wrong, &k, &v, &out, NULL, options));
    says("NULL", mpiattn_forward(plan, &q, rank == 0 ? NULL : &k, &v, &out, NULL, options));
    says("overlap", mpiattn_forward(plan, &q, &k, &v, &q, NULL, options));
    says("right", mpiattn_forward(plan, &q, &k, &v, &out, NULL, options));
    says("no communicator", mpiattn_plan_create_text(world + 12345678, text, &other));
    says("null communicator", mpiattn_plan_create_text(MPI_Comm_c2f(MPI_COMM_NULL), text, &other));
    options.number = 99;
    says("options", mpiattn_forward(plan, &q, &k, &v, &out, NULL, options));
    copy = plan;
    says("free", mpiattn_plan_free(&plan));
    says("free again", mpiattn_plan_free(&plan));
    says("freed", mpiattn_forward(copy, &q, &k, &v, &out, NULL, MPIATTN_NO_OPTIONS));
    MPI_Errhandler handler;
    MPI_Comm_get_errhandler(MPI_COMM_WORLD, &handler);
    says("error handler", handler == MPI_ERRORS_ARE_FATAL ? 0 : 99);
    says("another plan", mpiattn_plan_create_text(world, text, &plan));
    MPI_Finalize();
    says("after MPI_Finalize", mpiattn_forward(plan, &q, &k, &v, &out, NULL, MPIATTN_NO_OPTIONS));
    says("free after MPI_Finalize", mpiattn_plan_free(&plan));
    says("freed handle", plan.number == 0 ? 0 : 99);
    free(memory);
    return 0;
}
