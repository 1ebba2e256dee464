/* The first calls of a program, made by a thread whose stack has as many KiB as the argument says. */
#include <mpi.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "mpiattn.h"

static float memory[4][512];

static void says(const char* what, int status) { printf("%s: %d %s\n", what, status, mpiattn_last_error()); }

static void* work(void* unused) {
    (void)unused;
    mpiattn_plan plan = {0};
    mpiattn_array arrays[4];
    for (int i = 0; i < 4; i++)
        arrays[i] = mpiattn_array_4d(memory[i], MPIATTN_FLOAT32, 1, 64, 1, 8);
    int status = mpiattn_plan_create_text(MPI_Comm_c2f(MPI_COMM_WORLD),
                                          "grid=8x8, dims=1, heads=1, head_dim=8, mask=neighborhood 3x3", &plan);
    says("plan", status);
    if (status)
        return NULL;
    says("forward", mpiattn_forward(plan, &arrays[0], &arrays[1], &arrays[2], &arrays[3], NULL, MPIATTN_NO_OPTIONS));
    arrays[0].shape[2] = 3;
    says("shape", mpiattn_forward(plan, &arrays[0], &arrays[1], &arrays[2], &arrays[3], NULL, MPIATTN_NO_OPTIONS));
    mpiattn_plan_free(&plan);
    return NULL;
}

int main(int argc, char** argv) {
    int provided;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &provided);
    pthread_attr_t attributes;
    pthread_t thread;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, (size_t)atol(argv[1]) * 1024);
    if (pthread_create(&thread, &attributes, work, NULL) || pthread_join(thread, NULL))
        return 1;
    MPI_Finalize();
    return 0;
}
