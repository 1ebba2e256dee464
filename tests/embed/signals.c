/* Signals of a C program, on two ranks: its handlers stay its own, and one that calls mpiattn_interrupt ends a call. */
#define _POSIX_C_SOURCE 200809L
#include <mpi.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "mpiattn.h"

static int rank;

static void says(const char* what, int status) { printf("%s %d: %d %s\n", what, rank, status, mpiattn_last_error()); }

static void look(struct sigaction* actions) {
    for (int number = 1; number < 32; number++)
        sigaction(number, NULL, &actions[number]);
}

static void interrupt(int number) {
    (void)number;
    mpiattn_interrupt();
}

int main(int argc, char** argv) {
    static struct sigaction before[32], after[32];
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (argc > 1) /* a program that handles Ctrl-C before Python is there */
        signal(SIGINT, interrupt);
    look(before);
    const int world = MPI_Comm_c2f(MPI_COMM_WORLD);
    mpiattn_plan plan = {0}, other = {0};
    int status = mpiattn_plan_create_text(world, "seqlen=16, heads=1, head_dim=8, timeout=60", &plan);
    says("plan", status);
    look(after);
    int changed = 0;
    for (int number = 1; number < 32; number++)
        if (before[number].sa_handler != after[number].sa_handler)
            changed = number;
    says("changed", changed);

    float memory[16 * 8 * 4] = {0};
    mpiattn_array arrays[4];
    int64_t tokens;
    mpiattn_plan_integer(plan, "tokens", &tokens);
    for (int i = 0; i < 4; i++)
        arrays[i] = mpiattn_array_4d(memory + 128 * i, MPIATTN_FLOAT32, 1, tokens, 1, 8);
    mpiattn_interrupt(); /* no call runs */
    status = mpiattn_forward(plan, &arrays[0], &arrays[1], &arrays[2], &arrays[3], NULL, MPIATTN_NO_OPTIONS);
    says("outside", status);

    if (rank == 1) {
        signal(SIGALRM, interrupt);
        alarm(1); /* while it waits for rank 0 */
    } else
        sleep(3);
    status = mpiattn_forward(plan, &arrays[0], &arrays[1], &arrays[2], &arrays[3], NULL, MPIATTN_NO_OPTIONS);
    says("inside", status);
    fflush(stdout);
    if (argc > 1) {
        mpiattn_print_error(rank);
        MPI_Abort(MPI_COMM_WORLD, 1);
        _exit(1);
    }
    mpiattn_plan_free(&plan);
    says("afterwards", mpiattn_plan_create_text(world, "seqlen=16, heads=1, head_dim=8, timeout=60", &other));
    mpiattn_plan_free(&other);
    MPI_Finalize();
    fflush(stdout);
    raise(SIGINT); /* which ends it: the program has no handler */
    says("survived", 1);
    return 0;
}
