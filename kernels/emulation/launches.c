// Runs launches of kernels/cpu for another process, so that kernels of another processor run under an emulator of it:
// reads them from standard input and writes their results to standard output, as tests/aarch64.py has them.  First it
// writes the name of the instruction set that it takes, the best of that processor.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "launch.h"

#define POINTERS 21  // of struct launch, which the caller fills
#define LISTS 7  // of these, of numbers
#define LINE 64
#define NAME 16

const char* mpiattn_instruction_set(int number);
int mpiattn_compiled(int number);
int mpiattn_supported(int number);
int mpiattn_slow(int number);
int64_t mpiattn_scratch_bytes(int number, const struct launch* of, enum operation operation);
int32_t mpiattn_run(int number, const struct launch* of, enum operation operation);

static void read_all(void* to, size_t bytes) {
    if (fread(to, 1, bytes, stdin) != bytes)
        exit(feof(stdin) ? 0 : 1);
}

static void* memory(int64_t bytes) {
    void* at = aligned_alloc(LINE, (bytes + LINE) / LINE * LINE);
    if (!at)
        exit(2);
    return at;
}

int main(void) {
    int set = 0;
    while (!mpiattn_compiled(set) || !mpiattn_supported(set) || mpiattn_slow(set))
        set++;
    char name[NAME] = {0};
    strncpy(name, mpiattn_instruction_set(set), NAME - 1);
    fwrite(name, 1, NAME, stdout);
    fflush(stdout);
    for (;;) {
        int32_t operation, results;
        int64_t bytes[POINTERS];
        struct launch of;
        read_all(&operation, sizeof operation);
        read_all(&results, sizeof results);  // bit i: pointer i is one
        read_all(bytes, sizeof bytes);
        read_all(&of, sizeof of);
        void* data[POINTERS];
        for (int i = 0; i < POINTERS; i++) {
            data[i] = bytes[i] ? memory(bytes[i]) : 0;
            read_all(data[i], bytes[i]);
        }
        of.begin = data[0], of.end = data[1], of.pages = data[2], of.tables = data[3];
        of.dropout.rows = data[4], of.dropout.keys = data[5], of.dropout.heads = data[6];
        struct array* const array[] = {&of.q,  &of.k,  &of.v,  &of.out,   &of.lse,       &of.dout, &of.delta,
                                       &of.dq, &of.dk, &of.dv, &of.other, &of.other_lse, &of.bias, &of.dbias};
        for (int i = LISTS; i < POINTERS; i++)
            array[i - LISTS]->data = data[i];
        if (!of.dv.data)
            of.dv.data = of.dk.data;  // shared keys and values: both gradients are added to one array
        of.poll = 0;
        const int64_t needed = mpiattn_scratch_bytes(set, &of, operation);
        of.scratch = memory(needed);
        const int32_t stopped = mpiattn_run(set, &of, operation);
        fwrite(&needed, sizeof needed, 1, stdout);
        fwrite(&stopped, sizeof stopped, 1, stdout);
        for (int i = 0; i < POINTERS; i++) {
            if (results >> i & 1)
                fwrite(data[i], 1, bytes[i], stdout);
            free(data[i]);
        }
        free(of.scratch);
        fflush(stdout);
    }
}
