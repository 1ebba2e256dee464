// The last accesses to every four bytes of shared memory; see hazards.h.
//
// grid and block: those of the emulated launch.
// shared memory: four bytes are the unit.
// tile sizes: none.

#include "hazards.h"

#include <cstdio>
#include <vector>

#include "fibers.h"

namespace emulation {

constexpr int SEVERAL = MAX_THREADS;  // in place of a thread: several of a warp; of several warps from 2 * on

// When: since which barrier of the block, and which __syncwarp of the thread's warp.
struct Access {
    unsigned barrier = 0, warp_sync = 0;
    int thread = 0;
};

struct Word {
    Access write, read;
};

static std::vector<Word> words;
static unsigned barrier_number;  // counts on from block to block; 0 is never
static unsigned warp_syncs[MAX_THREADS / LANES];

void order_block() {
    words.resize((block.shared_bytes + 3) / 4);
    if (!++barrier_number)  // after 2^32 barriers
        words.assign(words.size(), {}), barrier_number = 1;
}

void order_warp() { ++warp_syncs[block.current / LANES]; }

static int warp_of(int thread) { return thread % MAX_THREADS / LANES; }

// Whether an access of `thread` is in order after the earlier one.
static bool in_order(const Access& earlier, int thread) {
    if (earlier.barrier != barrier_number || earlier.thread == thread)
        return true;
    return earlier.thread < 2 * SEVERAL && warp_of(earlier.thread) == warp_of(thread) &&
           earlier.warp_sync != warp_syncs[warp_of(thread)];
}

static void fail_at(const char* what, const char* before, int thread, const Access& earlier, unsigned offset) {
    char who[32] = "several warps have";
    if (earlier.thread < 2 * SEVERAL)
        snprintf(who, sizeof(who), earlier.thread < SEVERAL ? "thread %d has" : "warp %d has",
                 earlier.thread < SEVERAL ? earlier.thread : warp_of(earlier.thread));
    fail("thread %d %s shared memory at byte %u, which %s %s, and no barrier lies between", thread, what, offset, who,
         before);
}

void read_shared_by(int thread, unsigned offset, unsigned bytes) {
    for (unsigned at = offset / 4; at < (offset + bytes + 3) / 4; ++at) {
        Word& word = words[at];
        if (!in_order(word.write, thread))
            fail_at("reads", "written", thread, word.write, 4 * at);
        Access& read = word.read;
        const bool shared = read.barrier == barrier_number && read.thread != thread;
        const bool same_warp = read.thread < 2 * SEVERAL && warp_of(read.thread) == warp_of(thread);
        read = {barrier_number, warp_syncs[warp_of(thread)],
                !shared     ? thread
                : same_warp ? SEVERAL + warp_of(thread) * LANES
                            : 2 * SEVERAL};
    }
}

void read_shared(unsigned offset, unsigned bytes) { read_shared_by(block.current, offset, bytes); }

void write_shared(unsigned offset, unsigned bytes) {
    const int thread = block.current;
    for (unsigned at = offset / 4; at < (offset + bytes + 3) / 4; ++at) {
        Word& word = words[at];
        if (!in_order(word.write, thread))
            fail_at("writes to", "written", thread, word.write, 4 * at);
        if (!in_order(word.read, thread))
            fail_at("writes to", "read", thread, word.read, 4 * at);
        word.write = {barrier_number, warp_syncs[warp_of(thread)], thread};
    }
}

}  // namespace emulation
