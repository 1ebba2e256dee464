/* Errors of a C program, each printed as "case: status text", in the order of the calls. */
#define _GNU_SOURCE /* feenableexcept */
#include <fenv.h>
#include <locale.h>
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

static void ignore(MPI_Comm* comm, int* code, ...) {
    (void)comm;
    (void)code;
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
    float* memory = (float*)calloc(count * 5 + 1, sizeof(float));
    mpiattn_array q = mpiattn_array_4d(memory, MPIATTN_FLOAT32, 1, tokens, 2, 8), wrong = q;
    mpiattn_array k = mpiattn_array_4d(memory + count, MPIATTN_FLOAT32, 1, tokens, 2, 8);
    mpiattn_array v = mpiattn_array_4d(memory + 2 * count, MPIATTN_FLOAT32, 1, tokens, 2, 8);
    mpiattn_array out = mpiattn_array_4d(memory + 3 * count, MPIATTN_FLOAT32, 1, tokens, 2, 8);
    mpiattn_array dq = mpiattn_array_4d(memory + 4 * count, MPIATTN_FLOAT32, 1, tokens, 2, 8);
    float* sums = (float*)calloc((size_t)tokens * 2 + 1, sizeof(float));
    mpiattn_array lse = mpiattn_array_3d(sums, MPIATTN_FLOAT32, 1, 2, tokens);
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
    MPI_Errhandler handler, of_world, own;
    MPI_Comm_get_errhandler(MPI_COMM_WORLD, &of_world);
    MPI_Comm_create_errhandler(ignore, &own);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, own);
    says("another plan", mpiattn_plan_create_text(world, text, &plan));
    MPI_Comm_get_errhandler(MPI_COMM_WORLD, &handler);
    says("error handlers", of_world == MPI_ERRORS_ARE_FATAL && handler == own ? 0 : 99);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_ARE_FATAL);
    says("locale", strcmp(setlocale(LC_ALL, NULL), "C") ? 99 : 0);
    feenableexcept(FE_INVALID | FE_DIVBYZERO | FE_OVERFLOW); /* as many climate codes do */
    for (int64_t i = 0; i < tokens * 48; i++)
        memory[i] = (float)(i % 17) - 8;
    int status = mpiattn_forward(plan, &q, &k, &v, &out, &lse, MPIATTN_NO_OPTIONS);
    if (status == MPIATTN_OK)
        status = mpiattn_backward(plan, &v, &q, &k, &v, &out, &lse, &dq, NULL, NULL, MPIATTN_NO_OPTIONS);
    says("traps", fegetexcept() == (FE_INVALID | FE_DIVBYZERO | FE_OVERFLOW) ? status : 99);
    fedisableexcept(FE_ALL_EXCEPT);
    MPI_Finalize();
    says("after MPI_Finalize", mpiattn_forward(plan, &q, &k, &v, &out, NULL, MPIATTN_NO_OPTIONS));
    says("free after MPI_Finalize", mpiattn_plan_free(&plan));
    says("freed handle", plan.number == 0 ? 0 : 99);
    free(memory);
    free(sums);
    return 0;
}
