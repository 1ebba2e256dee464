// What threads and warps do besides meeting: asynchronous copies, ldmatrix, mma, conversions of half types.
//
// An asynchronous copy writes poison when it is issued and its data when the thread waits for it, so that a missing
// wait shows.
//
// grid and block: those of the emulated launch.
// shared memory: every access is checked against its size and alignment.
// tile sizes: those of the instructions, 16x8x16 for mma and 8x8 for ldmatrix.

#pragma once

namespace emulation {

// Copies of the current thread.  If not `valid`, zeros arrive.
void copy_async(unsigned to, const void* from, unsigned bytes, bool valid);
void commit_copies();
void wait_copies(unsigned pending);              // until no more than `pending` groups are left

void forget_copies();                            // of all threads, before a block starts
void expect_no_copies();                         // of the current thread, before it ends

void load_matrices(unsigned (&r)[4], unsigned row);
void load_matrices_transposed(unsigned (&r)[4], unsigned row);
void multiply_add_f16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);
void multiply_add_bf16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);

float float_of_f16(unsigned short bits);
unsigned pack_f16(float low, float high);
unsigned pack_bf16(float low, float high);

}  // namespace emulation
