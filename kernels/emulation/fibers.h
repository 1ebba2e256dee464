// Fibers as kernels see them: a thread's block and warp, and the waits for each other.
//
// Every kernel's translation unit reads this, so it includes little; what depends on no kernel is in fibers.cpp.
//
// grid: any, in three dimensions.
// block: a multiple of 32 threads, at most MAX_THREADS, in one dimension.
// shared memory: the launch's bytes, filled with 0xff before each block, and poison behind them to detect overruns.
// tile sizes: none.

#pragma once

#include <stddef.h>
#include <string.h>

namespace emulation {

constexpr int LANES = 32;
constexpr int MAX_THREADS = 512;

struct Index {
    unsigned x, y, z;
};

struct Block {
    Index index, grid;
    unsigned threads;
    int current;                                 // the thread that runs
    unsigned char* shared;
    size_t shared_bytes;
};

extern Block block;

// Ends the launch with an error: a format and values as of printf.
[[noreturn]] __attribute__((format(printf, 1, 2))) void fail(const char* format, ...);

inline unsigned char* shared_bytes(unsigned offset, unsigned bytes, const char* what) {
    if (offset % bytes || offset + bytes > block.shared_bytes)
        fail("%s at byte %u of %zu of shared memory", what, offset, block.shared_bytes);
    return block.shared + offset;
}

// Waits for all threads of the block; returns whether any thread's flag is set.
bool barrier(bool flag);

// Waits for all lanes of the warp.  The last to arrive calls finish(); then all return.
void warp_operation(const char* operation, const void* in, void* out, void (*finish)());

// The operands and the result that a lane of the current warp gave to warp_operation.
const void* in_of_lane(int lane);
void* out_of_lane(int lane);

inline int lane() { return block.current % LANES; }

// Runs every block of the grid, one after another; each of its threads calls body(arguments).  Returns nullptr, or a
// text that describes the error.
const char* run_grid(Index grid, unsigned threads, size_t shared_bytes, bool descending, void (*body)(void**),
                     void** arguments);

}  // namespace emulation
