// Runs a grid on one CPU core, one thread block after another.  Every CUDA thread is a fiber that runs until it waits.
//
// Threads wait only at a barrier of the block and in an operation of a warp (a shuffle, a vote, ldmatrix, mma).  The
// last of the 32 lanes to arrive executes a warp's operation for all lanes.  It is an error if lanes of a warp arrive
// at different operations, or if all threads of a block wait.  Warps run in ascending or descending order: a missing
// barrier then shows as results that differ between the two orders.
//
// grid: any, in three dimensions.
// block: a multiple of 32 threads, at most MAX_THREADS, in one dimension.
// shared memory: the launch's bytes, filled with 0xff before each block, and GUARD bytes behind them to detect
// overruns.
// tile sizes: those that the kernel is compiled with.

#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

namespace emulation {

constexpr int LANES = 32;
constexpr int MAX_THREADS = 512;
constexpr size_t STACK_BYTES = 256 * 1024;       // per thread; untouched pages take no memory
constexpr size_t GUARD = 64;                     // bytes of poison behind the launch's shared memory

struct Index {
    unsigned x, y, z;
};

struct AsyncCopy {
    unsigned to;
    const void* from;                            // null: zeros
    unsigned bytes;
};

struct Meeting {                                 // a barrier of a warp's lanes or of a block's threads
    int arrived = 0;
    unsigned generation = 0;
    const char* operation = nullptr;
    int flag = 0, flag_result = 0;
};

struct Thread {
    jmp_buf state;
    ucontext_t start;
    bool started, done;
    const Meeting* awaits;                       // the thread waits until its generation differs from `seen`
    unsigned seen;
    const void* in;                              // operands and results of the warp's operation
    void* out;
    std::vector<std::vector<AsyncCopy>> groups;  // committed, oldest first
    std::vector<AsyncCopy> copies;               // not committed yet
};

struct Block {
    Index index, grid;
    unsigned threads;
    std::vector<unsigned char> shared;
    size_t shared_bytes;
    std::vector<Thread> thread;
    std::vector<Meeting> warp;
    Meeting all;
    int current;
    jmp_buf scheduler;
    std::vector<unsigned char> stacks;
    void (*body)(void*);
    void* arguments;
    std::string error;
};

inline Block block;

[[noreturn]] inline void leave() {
    _longjmp(block.scheduler, 1);
}

[[noreturn]] inline void fail(const std::string& what) {
    const Index at = block.index;
    block.error = what + " (block " + std::to_string(at.x) + "," + std::to_string(at.y) + "," + std::to_string(at.z)
                  + ", thread " + std::to_string(block.current) + ")";
    leave();
}

inline Thread& self() { return block.thread[block.current]; }
inline int lane() { return block.current % LANES; }
inline Thread& lane_of_warp(int i) { return block.thread[block.current / LANES * LANES + i]; }

__attribute__((noinline)) inline void wait_for(const Meeting& meeting, unsigned seen) {
    Thread& me = self();
    me.awaits = &meeting;
    me.seen = seen;
    if (!_setjmp(me.state))
        leave();
}

// Waits for all `members` threads.  The last to arrive calls finish(); then all return.
template <class Finish>
inline void meet(Meeting& meeting, int members, const char* operation, Finish finish) {
    if (meeting.arrived && strcmp(meeting.operation, operation))
        fail(std::string("threads that have to act together are at ") + meeting.operation + " and at " + operation);
    meeting.operation = operation;
    if (++meeting.arrived < members) {
        wait_for(meeting, meeting.generation);
        return;
    }
    finish();
    meeting.arrived = 0;
    ++meeting.generation;
}

template <class Finish>
inline void warp_operation(const char* operation, const void* in, void* out, Finish finish) {
    self().in = in;
    self().out = out;
    meet(block.warp[block.current / LANES], LANES, operation, finish);
}

inline void start_thread() {
    block.body(block.arguments);
    Thread& me = self();
    for (const auto& group : me.groups)
        if (!group.empty())
            fail("a thread ends before its asynchronous copies");
    if (!me.copies.empty())
        fail("a thread ends with copies that it did not commit");
    me.done = true;
    leave();
}

inline bool runnable(const Thread& thread) {
    return !thread.done && (!thread.awaits || thread.awaits->generation != thread.seen);
}

// Runs the current thread until it waits or ends.
__attribute__((noinline)) inline void resume() {
    Thread& thread = self();
    thread.awaits = nullptr;
    if (_setjmp(block.scheduler))
        return;
    if (thread.started)
        _longjmp(thread.state, 1);
    thread.started = true;
    setcontext(&thread.start);
}

// Runs a warp's lanes in turn until none is runnable.  Returns whether any ran.
inline bool run_warp(int warp) {
    bool any = false;
    for (bool more = true; more;) {
        more = false;
        for (int i = 0; i < LANES; ++i) {
            block.current = warp * LANES + i;
            if (runnable(self())) {
                resume();
                if (!block.error.empty())
                    return false;
                any = more = true;
            }
        }
    }
    return any;
}

inline void start_block(Index index) {
    block.index = index;
    memset(block.shared.data(), 0xff, block.shared.size());       // NaN, and an invalid index
    block.all = {};
    for (Meeting& warp : block.warp)
        warp = {};
    for (unsigned i = 0; i < block.threads; ++i) {
        Thread& thread = block.thread[i];
        thread.started = thread.done = false;
        thread.awaits = nullptr;
        thread.groups.clear();
        thread.copies.clear();
        getcontext(&thread.start);
        thread.start.uc_stack.ss_sp = block.stacks.data() + i * STACK_BYTES;
        thread.start.uc_stack.ss_size = STACK_BYTES;
        thread.start.uc_link = nullptr;
        makecontext(&thread.start, start_thread, 0);
    }
}

inline bool finished() {
    for (unsigned i = 0; i < block.threads; ++i)
        if (!block.thread[i].done)
            return false;
    return true;
}

// Runs every block of the grid, one after another.  Returns false and sets block.error if one fails.
inline bool run_grid(Index grid, unsigned threads, size_t shared_bytes, bool descending, void (*body)(void*),
                     void* arguments) {
    block.error.clear();
    block.grid = grid;
    block.threads = threads;
    block.body = body;
    block.arguments = arguments;
    block.shared_bytes = shared_bytes;
    block.shared.resize(shared_bytes + GUARD);
    block.thread.resize(threads);
    block.warp.resize(threads / LANES);
    block.stacks.resize(threads * STACK_BYTES);
    if (threads % LANES || !threads || threads > MAX_THREADS) {
        block.error = "the number of threads has to be a multiple of 32";
        return false;
    }
    const int warps = threads / LANES;
    for (unsigned z = 0; z < grid.z; ++z)
        for (unsigned y = 0; y < grid.y; ++y)
            for (unsigned x = 0; x < grid.x; ++x) {
                start_block({x, y, z});
                while (!finished()) {
                    bool any = false;
                    for (int i = 0; i < warps; ++i) {
                        any |= run_warp(descending ? warps - 1 - i : i);
                        if (!block.error.empty())
                            return false;
                    }
                    if (!any) {
                        block.error = "every thread waits; some are at " + std::string(
                            block.all.arrived ? "a barrier that others never reach" : "an operation of their warp");
                        return false;
                    }
                }
                for (size_t i = shared_bytes; i < block.shared.size(); ++i)
                    if (block.shared[i] != 0xff) {
                        block.error = "a write behind the end of the shared memory";
                        return false;
                    }
            }
    return true;
}

}  // namespace emulation
