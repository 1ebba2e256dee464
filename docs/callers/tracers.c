/* Tracers on a longitude-latitude grid: a code with its own MPI, halo exchange and time steps, which calls attention.
 *
 *     mpiattn-config --build
 *     mpicc -O2 tracers.c -o tracers $(mpiattn-config --cflags --libs) -lm
 *     mpiexec -n 4 ./tracers [folder for the arrays of every rank]
 *
 * The last of several ranks only writes diagnostics.  The others hold the grid in blocks on a Cartesian communicator.
 * They diffuse the tracers and, every few steps, mix them by attention: every point looks at its neighbourhood of 7 x 9
 * points, around the globe in longitude.  At the end the adjoint of the mixing gives the gradients.
 * This is C99 and C++.
 */
#include <math.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "mpiattn.h"

enum { LATITUDES = 20, LONGITUDES = 31, TRACERS = 4, HEADS = 2, HEAD_DIM = 8, STEPS = 6, EVERY = 3 };

/* This rank's block of the grid: ny x nx points, around which fields have a halo of one point. */
typedef struct {
    MPI_Comm cart;
    int rank, y0, x0, ny, nx, south, north, west, east;
    MPI_Datatype column;
} block;

static void stop(void) {
    MPI_Abort(MPI_COMM_WORLD, 1);
    exit(1); /* MPI_Abort of MPICH 5 may return before the launcher ends the process */
}

static void part(int points, int parts, int number, int* first, int* count) {
    const int size = points / parts, extra = points % parts; /* the first blocks have one point more */
    *first = number * size + (number < extra ? number : extra);
    *count = size + (number < extra);
}

static void make_block(MPI_Comm computing, block* b) {
    int dims[2] = {0, 0}, coords[2], size;
    const int periods[2] = {0, 1}; /* longitude has no end */
    MPI_Comm_size(computing, &size);
    MPI_Dims_create(size, 2, dims);
    if (dims[0] > LATITUDES || dims[1] > LONGITUDES) /* a block without points has no halo to give */
        stop();
    MPI_Cart_create(computing, 2, dims, periods, 1, &b->cart);
    MPI_Comm_rank(b->cart, &b->rank);
    MPI_Cart_coords(b->cart, b->rank, 2, coords);
    part(LATITUDES, dims[0], coords[0], &b->y0, &b->ny);
    part(LONGITUDES, dims[1], coords[1], &b->x0, &b->nx);
    MPI_Cart_shift(b->cart, 0, 1, &b->south, &b->north);
    MPI_Cart_shift(b->cart, 1, 1, &b->west, &b->east);
    MPI_Type_vector(b->ny + 2, 1, b->nx + 2, MPI_FLOAT, &b->column);
    MPI_Type_commit(&b->column);
}

/* A point of a field with its halo, counted from the block's first point. */
static float* at(const block* b, float* field, int y, int x) {
    return field + (size_t)(y + 1) * (size_t)(b->nx + 2) + (size_t)(x + 1);
}

static void exchange_halo(const block* b, float* f) {
    const int nx = b->nx, ny = b->ny, row = nx + 2;
    for (int x = -1; x <= nx; x++) { /* at the poles the field goes on as it is */
        if (b->south == MPI_PROC_NULL)
            *at(b, f, -1, x) = *at(b, f, 0, x);
        if (b->north == MPI_PROC_NULL)
            *at(b, f, ny, x) = *at(b, f, ny - 1, x);
    }
    MPI_Sendrecv(at(b, f, ny - 1, -1), row, MPI_FLOAT, b->north, 0, at(b, f, -1, -1), row, MPI_FLOAT, b->south, 0,
                 b->cart, MPI_STATUS_IGNORE);
    MPI_Sendrecv(at(b, f, 0, -1), row, MPI_FLOAT, b->south, 1, at(b, f, ny, -1), row, MPI_FLOAT, b->north, 1, b->cart,
                 MPI_STATUS_IGNORE);
    MPI_Sendrecv(at(b, f, -1, nx - 1), 1, b->column, b->east, 2, at(b, f, -1, -1), 1, b->column, b->west, 2, b->cart,
                 MPI_STATUS_IGNORE);
    MPI_Sendrecv(at(b, f, -1, 0), 1, b->column, b->west, 3, at(b, f, -1, nx), 1, b->column, b->east, 3, b->cart,
                 MPI_STATUS_IGNORE);
}

static void diffuse(const block* b, float* f, float* before) {
    exchange_halo(b, f);
    memcpy(before, f, sizeof(float) * (size_t)(b->ny + 2) * (size_t)(b->nx + 2));
    for (int y = 0; y < b->ny; y++)
        for (int x = 0; x < b->nx; x++)
            *at(b, f, y, x) += 0.1f * (*at(b, before, y - 1, x) + *at(b, before, y + 1, x) + *at(b, before, y, x - 1) +
                                       *at(b, before, y, x + 1) - 4 * *at(b, before, y, x));
}

/* A learned matrix in a real code: what head h takes of a tracer for element e, of q, k and v. */
static float weight(int of, int h, int e, int tracer) {
    return 0.5f * cosf(1.3f * (float)(of + 1) * (float)(tracer + 1) + 0.7f * (float)e + 2.1f * (float)h);
}

/* The rows of the block's points in C order, (1, ny * nx, HEADS, HEAD_DIM), of all tracers. */
static void project(const block* b, float* tracers[TRACERS], int of, float* rows) {
    for (int y = 0; y < b->ny; y++)
        for (int x = 0; x < b->nx; x++)
            for (int h = 0; h < HEADS; h++)
                for (int e = 0; e < HEAD_DIM; e++, rows++) {
                    *rows = 0;
                    for (int t = 0; t < TRACERS; t++)
                        *rows += weight(of, h, e, t) * *at(b, tracers[t], y, x);
                }
}

static void mix(const block* b, float* tracers[TRACERS], const float* out) {
    for (int y = 0; y < b->ny; y++)
        for (int x = 0; x < b->nx; x++, out += HEADS * HEAD_DIM)
            for (int t = 0; t < TRACERS; t++)
                *at(b, tracers[t], y, x) += 0.05f * out[t];
}

/* All ranks of the communicator come here with the same error, or one with its own: rank 0 prints before the others. */
static void check(int status, const block* b) {
    if (status == MPIATTN_OK)
        return;
    mpiattn_print_error(b->rank);
    stop();
}

static float* floats(size_t count) {
    float* made = (float*)calloc(count ? count : 1, sizeof(float));
    if (!made)
        stop();
    return made;
}

/* Runs the model on the computing ranks; the sum of the first tracer after every step goes to the last rank. */
static void run(MPI_Comm computing, int writer, const char* folder) {
    block b;
    make_block(computing, &b);
    float* tracers[TRACERS];
    const size_t with_halo = (size_t)(b.ny + 2) * (size_t)(b.nx + 2);
    for (int t = 0; t < TRACERS; t++) {
        tracers[t] = floats(with_halo);
        for (int y = 0; y < b.ny; y++)
            for (int x = 0; x < b.nx; x++)
                *at(&b, tracers[t], y, x) = sinf(0.4f * (float)((y + b.y0) * (t + 1)) + 0.6f * (float)(x + b.x0));
    }

    /* The plan: the blocks as they lie are its layout.  It is made once, and used in every step. */
    mpiattn_options options = MPIATTN_NO_OPTIONS;
    mpiattn_plan plan;
    char mask[64], grid[32];
    snprintf(grid, sizeof grid, "%dx%d", LATITUDES, LONGITUDES);
    snprintf(mask, sizeof mask, "neighborhood %dx%d cyclic=1", 7, 9);
    check(mpiattn_options_create("timeout=60", &options), &b);
    check(mpiattn_options_set_text(options, "grid", grid), &b);
    check(mpiattn_options_set_text(options, "mask", mask), &b);
    check(mpiattn_options_set_integer(options, "heads", HEADS), &b);
    check(mpiattn_options_set_integer(options, "head_dim", HEAD_DIM), &b);
    check(mpiattn_plan_create(MPI_Comm_c2f(b.cart), options, &plan), &b);
    check(mpiattn_options_free(&options), &b);
    char description[512];
    check(mpiattn_plan_text(plan, "description", description, sizeof description), &b);
    if (b.rank == 0)
        puts(description);

    /* This program's arrays: q, k, v, out, dout, dq, dk, dv and lse. */
    enum { Q, K, V, OUT, DOUT, DQ, DK, DV, LSE, ARRAYS };
    const int64_t points = (int64_t)b.ny * b.nx;
    const size_t elements = (size_t)points * HEADS * HEAD_DIM;
    float* data[ARRAYS];
    mpiattn_array arrays[ARRAYS];
    for (int i = 0; i < LSE; i++) {
        data[i] = floats(elements);
        arrays[i] = mpiattn_array_4d(data[i], MPIATTN_FLOAT32, 1, points, HEADS, HEAD_DIM);
    }
    data[LSE] = floats((size_t)points * HEADS);
    arrays[LSE] = mpiattn_array_3d(data[LSE], MPIATTN_FLOAT32, 1, HEADS, points);

    float* before = floats(with_halo);
    for (int step = 1; step <= STEPS; step++) {
        for (int t = 0; t < TRACERS; t++)
            diffuse(&b, tracers[t], before);
        if (step % EVERY == 0) {
            for (int of = Q; of <= V; of++)
                project(&b, tracers, of, data[of]);
            check(mpiattn_forward(plan, &arrays[Q], &arrays[K], &arrays[V], &arrays[OUT], &arrays[LSE],
                                  MPIATTN_NO_OPTIONS),
                  &b);
            mix(&b, tracers, data[OUT]);
        }
        double sum = 0;
        for (int y = 0; y < b.ny; y++)
            for (int x = 0; x < b.nx; x++)
                sum += *at(&b, tracers[0], y, x);
        double total;
        MPI_Reduce(&sum, &total, 1, MPI_DOUBLE, MPI_SUM, 0, b.cart);
        if (b.rank == 0)
            MPI_Send(&total, 1, MPI_DOUBLE, writer, step, MPI_COMM_WORLD);
    }

    /* The adjoint of the last mixing, of the loss sum(out^2) / 2, whose gradient is out. */
    memcpy(data[DOUT], data[OUT], elements * sizeof(float));
    check(mpiattn_backward(plan, &arrays[DOUT], &arrays[Q], &arrays[K], &arrays[V], &arrays[OUT], &arrays[LSE],
                           &arrays[DQ], &arrays[DK], &arrays[DV], MPIATTN_NO_OPTIONS),
          &b);

    if (folder) {
        char path[1024];
        snprintf(path, sizeof path, "%s/%d", folder, b.rank);
        FILE* file = fopen(path, "wb");
        if (!file)
            stop();
        for (int i = 0; i < ARRAYS; i++)
            fwrite(data[i], sizeof(float), i == LSE ? (size_t)points * HEADS : elements, file);
        fclose(file);
    }
    check(mpiattn_plan_free(&plan), &b);
    for (int i = 0; i < ARRAYS; i++)
        free(data[i]);
    for (int t = 0; t < TRACERS; t++)
        free(tracers[t]);
    free(before);
    MPI_Type_free(&b.column);
    MPI_Comm_free(&b.cart);
}

int main(int argc, char** argv) {
    int rank, size;
    MPI_Comm computing;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    const int writes = rank == size - 1, computes = size == 1 || !writes;
    MPI_Comm_split(MPI_COMM_WORLD, computes ? 0 : MPI_UNDEFINED, rank, &computing);
    double totals[STEPS + 1];
    MPI_Request requests[STEPS + 1];
    for (int step = 1; writes && step <= STEPS; step++)
        MPI_Irecv(&totals[step], 1, MPI_DOUBLE, MPI_ANY_SOURCE, step, MPI_COMM_WORLD, &requests[step]);
    if (computes)
        run(computing, size - 1, argc > 1 ? argv[1] : NULL);
    for (int step = 1; writes && step <= STEPS; step++) {
        MPI_Wait(&requests[step], MPI_STATUS_IGNORE);
        printf("step %d: the sum of the first tracer is %.6f\n", step, totals[step]);
    }
    if (computes)
        MPI_Comm_free(&computing);
    MPI_Finalize();
    return 0;
}
