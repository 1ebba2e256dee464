// Runs a grid on one CPU core, one thread block after another.  Every CUDA thread is a fiber that runs until it waits.
//
// Threads wait only at a barrier of the block and in an operation of a warp (a shuffle, a vote, ldmatrix, mma).  The
// last of the 32 lanes to arrive executes a warp's operation for all lanes.  It is an error if lanes of a warp arrive
// at different operations, or if all threads of a block wait.  Warps run in ascending or descending order, so that
// tests can compare the bits of their results.
//
// grid: any, in three dimensions.
// block: a multiple of 32 threads, at most MAX_THREADS, in one dimension.
// shared memory: the launch's bytes, filled with 0xff before each block, and GUARD bytes behind them to detect
// overruns.
// tile sizes: none.

#include "fibers.h"

#include <setjmp.h>
#include <stdarg.h>
#include <ucontext.h>

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "hazards.h"
#include "operations.h"

namespace emulation {

constexpr size_t STACK_BYTES = 256 * 1024;       // per thread; untouched pages take no memory
constexpr size_t GUARD = 64;                     // bytes of poison behind the launch's shared memory

struct Meeting {                                 // a barrier of a warp's lanes or of a block's threads
    int arrived = 0;
    unsigned generation = 0;
    const char* operation = nullptr;
};

struct Thread {
    jmp_buf state;
    ucontext_t start;
    bool started, done;
    const Meeting* awaits;                       // the thread waits until its generation differs from `seen`
    unsigned seen;
    const void* in;                              // operands and results of the warp's operation
    void* out;
};

Block block;

static std::vector<Thread> threads;
static std::vector<Meeting> warps;
static Meeting all;
static bool flag, flag_result;                   // of the block's barrier
static jmp_buf scheduler;
static void (*body)(void**);
static void** arguments;
static std::string error;

[[noreturn]] static void leave() { _longjmp(scheduler, 1); }

void fail(const char* format, ...) {
    char what[256], where[96];
    va_list values;
    va_start(values, format);
    vsnprintf(what, sizeof(what), format, values);
    va_end(values);
    const Index at = block.index;
    snprintf(where, sizeof(where), " (block %u,%u,%u, thread %d)", at.x, at.y, at.z, block.current);
    error = std::string(what) + where;
    leave();
}

static Thread& self() { return threads[block.current]; }
static Thread& of_warp(int lane) { return threads[block.current / LANES * LANES + lane]; }
const void* in_of_lane(int lane) { return of_warp(lane).in; }
void* out_of_lane(int lane) { return of_warp(lane).out; }

__attribute__((noinline)) static void wait_for(const Meeting& meeting) {
    Thread& me = self();
    me.awaits = &meeting;
    me.seen = meeting.generation;
    if (!_setjmp(me.state))
        leave();
}

// Waits for all `members` threads.  The last to arrive calls finish(); then all return.
static void meet(Meeting& meeting, int members, const char* operation, void (*finish)()) {
    if (meeting.arrived && strcmp(meeting.operation, operation))
        fail("threads that have to act together are at %s and at %s", meeting.operation, operation);
    meeting.operation = operation;
    if (++meeting.arrived < members) {
        wait_for(meeting);
        return;
    }
    finish();
    meeting.arrived = 0;
    ++meeting.generation;
}

bool barrier(bool mine) {
    flag |= mine;
    meet(all, block.threads, "__syncthreads", [] {
        flag_result = flag;
        flag = false;
        order_block();
    });
    return flag_result;
}

void warp_operation(const char* operation, const void* in, void* out, void (*finish)()) {
    self().in = in;
    self().out = out;
    meet(warps[block.current / LANES], LANES, operation, finish);
}

static void start_thread() {
    body(arguments);
    expect_no_copies();
    self().done = true;
    leave();
}

static bool runnable(const Thread& thread) {
    return !thread.done && (!thread.awaits || thread.awaits->generation != thread.seen);
}

// Runs the current thread until it waits or ends.
__attribute__((noinline)) static void resume() {
    Thread& thread = self();
    thread.awaits = nullptr;
    if (_setjmp(scheduler))
        return;
    if (thread.started)
        _longjmp(thread.state, 1);
    thread.started = true;
    setcontext(&thread.start);
}

// Runs a warp's lanes in turn until none is runnable.  Returns whether any ran.
static bool run_warp(int warp) {
    bool any = false;
    for (bool more = true; more;) {
        more = false;
        for (int i = 0; i < LANES; ++i) {
            block.current = warp * LANES + i;
            if (runnable(self())) {
                resume();
                if (!error.empty())
                    return false;
                any = more = true;
            }
        }
    }
    return any;
}

static void start_block(Index index, unsigned char* stacks) {
    block.index = index;
    memset(block.shared, 0xff, block.shared_bytes + GUARD);       // NaN, and an invalid index
    all = {};
    flag = false;
    for (Meeting& warp : warps)
        warp = {};
    forget_copies();
    order_block();
    for (Thread& thread : threads) {
        thread.started = thread.done = false;
        thread.awaits = nullptr;
        getcontext(&thread.start);
        thread.start.uc_stack.ss_sp = stacks;
        thread.start.uc_stack.ss_size = STACK_BYTES;
        thread.start.uc_link = nullptr;
        makecontext(&thread.start, start_thread, 0);
        stacks += STACK_BYTES;
    }
}

static bool finished() {
    for (const Thread& thread : threads)
        if (!thread.done)
            return false;
    return true;
}

// Runs a block that has been started.  If it fails, sets the error.
static void run_block(bool descending) {
    const int count = warps.size();
    while (!finished()) {
        bool any = false;
        for (int i = 0; i < count; ++i) {
            any |= run_warp(descending ? count - 1 - i : i);
            if (!error.empty())
                return;
        }
        if (!any) {
            error = "every thread waits; some are at " +
                    std::string(all.arrived ? "a barrier that others never reach" : "an operation of their warp");
            return;
        }
    }
    for (size_t i = 0; i < GUARD; ++i)
        if (block.shared[block.shared_bytes + i] != 0xff)
            error = "a write behind the end of the shared memory";
}

const char* run_grid(Index grid, unsigned count, size_t shared_bytes, bool descending, void (*of_thread)(void**),
                     void** at) {
    if (count % LANES || !count || count > MAX_THREADS)
        return "the number of threads has to be a multiple of 32";
    const std::unique_ptr<unsigned char[]> stacks(new unsigned char[count * STACK_BYTES]);
    std::vector<unsigned char> shared(shared_bytes + GUARD);
    threads.resize(count);
    warps.resize(count / LANES);
    error.clear();
    body = of_thread;
    arguments = at;
    block = {{}, grid, count, 0, shared.data(), shared_bytes};
    for (unsigned z = 0; z < grid.z; ++z)
        for (unsigned y = 0; y < grid.y; ++y)
            for (unsigned x = 0; x < grid.x; ++x) {
                start_block({x, y, z}, stacks.get());
                run_block(descending);
                if (!error.empty())
                    return error.c_str();
            }
    return nullptr;
}

}  // namespace emulation
