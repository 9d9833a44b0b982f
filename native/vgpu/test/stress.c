/* One worker of the stress test: "vgpu_stress THREADS LARGEST". Each line "run MS" makes its threads
 * allocate, free, launch and fork at random for that long; then the worker is quiet and answers with one
 * line: the results that nobody expects. What it holds stays until it is freed in a later round. Any other
 * line ends it. */
#define _GNU_SOURCE
#include "driver_calls.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MAX_THREADS = 16, BLOCKS = 24, OUT_OF_MEMORY = 2, GRANULE = 2 << 20 };
enum kind { KIND_NONE, KIND_PLAIN, KIND_MANAGED, KIND_ASYNC, KIND_PHYSICAL };

struct worker {
    pthread_t thread;
    uint64_t random, pointers[BLOCKS];
    enum kind kinds[BLOCKS];
};

static struct worker workers[MAX_THREADS];
static void *context, *kernel;
static uint64_t largest, milliseconds;
static _Atomic uint64_t unexpected, last_unexpected;

static uint64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

static uint64_t next(struct worker *worker, uint64_t below) {
    worker->random = worker->random * 6364136223846793005u + 1442695040888963407u;
    return (worker->random >> 33) % below;
}

static void expect(int result, int also) {
    if (result == 0 || result == also)
        return;
    atomic_fetch_add(&unexpected, 1);
    atomic_store(&last_unexpected, (uint64_t)result);
}

static void take(struct worker *worker, unsigned i) {
    uint64_t size = next(worker, largest) + 1, *pointer = &worker->pointers[i];
    const int prop[8] = {1, 0, 1, 0, 0, 0, 0, 0};
    enum kind kind = KIND_PLAIN;
    size_t pitch;
    int result;
    switch (next(worker, 6)) {
    case 0:
        kind = KIND_ASYNC;
        result = cuMemAllocAsync(pointer, size, NULL);
        break;
    case 1:
        kind = KIND_PHYSICAL;
        result = cuMemCreate(pointer, (size / GRANULE + 1) * GRANULE, prop, 0);
        break;
    case 2:
        result = cuMemAllocPitch_v2(pointer, &pitch, size / 64 + 1, 64, 4);
        break;
    case 3:
        kind = KIND_MANAGED;
        result = cuMemAllocManaged(pointer, size, 1);
        break;
    default:
        result = cuMemAlloc_v2(pointer, size);
    }
    expect(result, OUT_OF_MEMORY);
    worker->kinds[i] = result == 0 ? kind : KIND_NONE;
}

static void give(struct worker *worker, unsigned i) {
    uint64_t pointer = worker->pointers[i];
    enum kind kind = worker->kinds[i];
    bool in_order = kind == KIND_ASYNC || (kind == KIND_PLAIN && next(worker, 4) == 0);
    expect(kind == KIND_PHYSICAL ? cuMemRelease(pointer)
           : in_order            ? cuMemFreeAsync(pointer, NULL)
                                 : cuMemFree_v2(pointer),
           0);
    worker->kinds[i] = KIND_NONE;
}

/* A child may neither count nor free anything of its parent's. */
static void fork_one(void) {
    int status = 0;
    pid_t child = fork();
    if (child == 0) {
        uint64_t pointer;
        _exit(cuMemAlloc_v2(&pointer, 512) == 0);
    }
    if (child < 0)
        return;
    waitpid(child, &status, 0);
    expect(WIFEXITED(status) ? WEXITSTATUS(status) : 1000, 0);
}

static void *work(void *argument) {
    struct worker *worker = argument;
    uint64_t end = now_ms() + milliseconds;
    expect(cuCtxSetCurrent(context), 0);
    while (now_ms() < end) {
        uint64_t what = next(worker, 1000);
        unsigned i = (unsigned)next(worker, BLOCKS);
        if (what < 2)
            fork_one();
        else if (what < 150)
            expect(cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL), 0);
        else if (worker->kinds[i] == KIND_NONE)
            take(worker, i);
        else
            give(worker, i);
    }
    return NULL;
}

int main(int argc, char **argv) {
    char line[64];
    int threads = argc > 1 ? atoi(argv[1]) : 1;
    void *module;
    largest = argc > 2 ? strtoull(argv[2], NULL, 10) : 1 << 20;
    if (threads < 1 || threads > MAX_THREADS || largest == 0)
        return 2;
    if (cuInit(0) != 0 || cuDevicePrimaryCtxRetain(&context, 0) != 0 || cuCtxSetCurrent(context) != 0 ||
        cuModuleLoadData(&module, "image") != 0 || cuModuleGetFunction(&kernel, module, "spin_ns_2000") != 0)
        return 3;
    for (int i = 0; i < threads; i++)
        workers[i].random = (uint64_t)getpid() * 2654435761u + (uint64_t)i;
    setvbuf(stdout, NULL, _IOLBF, 0);
    while (fgets(line, sizeof line, stdin) != NULL && sscanf(line, "run %" SCNu64, &milliseconds) == 1) {
        size_t free_bytes, total_bytes;
        for (int i = 0; i < threads; i++)
            pthread_create(&workers[i].thread, NULL, work, &workers[i]);
        for (int i = 0; i < threads; i++)
            pthread_join(workers[i].thread, NULL);
        expect(cuCtxSynchronize(), 0);
        expect(cuMemGetInfo_v2(&free_bytes, &total_bytes), 0); /* settles the pools */
        printf("%" PRIu64 " %" PRIu64 "\n", atomic_load(&unexpected), atomic_load(&last_unexpected));
    }
    return 0;
}
