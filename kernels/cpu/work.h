// How a launch is shared out to threads, and how its caller is asked meanwhile.
//
// Pieces of work are taken in turn by whichever thread is free.  No result depends on who does what: a piece writes
// what no other does, or waits for its turn.  Threads live as long as a launch; the calling thread is number 0, and it
// alone asks the caller, about every half millisecond.

#pragma once

#include <pthread.h>
#include <sched.h>
#include <time.h>

#include "launch.h"
#include "small_numbers.h"
#ifdef __AVX512BF16__
#include "product_pairs.h"
#else
#include "product.h"
#endif

#define NANOSECONDS 500000
#define MIN_WORK 4e6                          // floating-point operations that are worth a thread
#define MAX_THREADS 256

struct job {
    const struct launch* of;
    long next;                                  // piece of work that is not yet taken
    int64_t done, all;                          // how far the launch is
    int stopped, busy;                          // whether the caller wants no more; threads at work
    int64_t asked;                              // when the caller was
};

typedef void (*worker)(struct job* job, int thread, void* with);

struct thread {
    struct job* job;
    int number;
    worker work;
    void* with;
    pthread_t id;
};

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * (int64_t)1000000000 + time.tv_nsec;
}

static void begin_job(struct job* job, const struct launch* of, int64_t all) {
    *job = (struct job){.of = of, .all = all, .asked = of->poll ? now() : 0};
}

static long take_piece(struct job* job) { return __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED); }

static void count_done(struct job* job, int64_t share) { __atomic_fetch_add(&job->done, share, __ATOMIC_RELAXED); }

static int is_stopped(const struct job* job) { return __atomic_load_n(&job->stopped, __ATOMIC_RELAXED); }

// Asks the caller, if this is its thread and it is time; returns whether it wants no more.
static int give_up(struct job* job, int thread) {
    if (thread == 0 && job->of->poll && !job->stopped) {
        const int64_t time = now();
        if (time - job->asked >= NANOSECONDS) {
            const uint64_t mode = count_small_numbers();
            const int answer = job->of->poll((double)__atomic_load_n(&job->done, __ATOMIC_RELAXED) / job->all);
            set_mode(mode);
            __atomic_store_n(&job->stopped, answer, __ATOMIC_RELAXED);
            job->asked = now();
            begin_products();                   // what the caller runs may use tiles too; a call need not keep them
        }
    }
    return is_stopped(job);
}

static void* run_thread(void* argument) {
    struct thread* thread = argument;
    begin_products();
    drop_small_numbers(thread->job->of);        // of this thread, which ends with the launch
    thread->work(thread->job, thread->number, thread->with);
    end_products();
    __atomic_fetch_sub(&thread->job->busy, 1, __ATOMIC_RELEASE);
    return 0;
}

// Runs `work` in that many threads until all return; returns whether the caller wants no more.
static int in_threads(struct job* job, int threads, worker work, void* with) {
    struct thread thread[MAX_THREADS];
    int started = 1;
    job->next = 0, job->busy = threads - 1;
    for (; started < threads; started++) {
        thread[started] = (struct thread){job, started, work, with, 0};
        if (pthread_create(&thread[started].id, 0, run_thread, thread + started)) {
            __atomic_fetch_sub(&job->busy, threads - started, __ATOMIC_RELAXED);     // the others do its share
            break;
        }
    }
    begin_products();
    const uint64_t mode = drop_small_numbers(job->of);
    work(job, 0, with);
    while (job->of->poll && __atomic_load_n(&job->busy, __ATOMIC_ACQUIRE)) {
        give_up(job, 0);
        sched_yield();
    }
    set_mode(mode);
    end_products();
    for (int i = 1; i < started; i++)
        pthread_join(thread[i].id, 0);
    return job->stopped;
}

// Threads for so many floating-point operations in so many pieces, of those that the launch may have.
static int threads_for(const struct launch* of, double operations, long pieces) {
    double threads = operations / MIN_WORK;
    threads = threads < pieces ? threads : pieces;
    threads = threads < of->threads ? threads : of->threads;
    threads = threads < MAX_THREADS ? threads : MAX_THREADS;
    return threads > 1 ? (int)threads : 1;
}
