/* Times driver calls as a program makes them, with whatever is preloaded. Argument: live allocations besides
 * the one that is measured. Prints "ready", then for each line "go" read one line "LAUNCH PAIR": the median
 * time of one launch and of one allocation with its free over the batches of the round, ns. */
#define _GNU_SOURCE
#include "driver_calls.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { BURST = 64, PAIRS = 64, BATCHES = 41 };

static double now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static void check(int result, const char *what) {
    if (result != 0) {
        fprintf(stderr, "%s: CUDA result %d\n", what, result);
        exit(1);
    }
}

static void *load_kernel(void) {
    void *module, *kernel;
    check(cuModuleLoadData(&module, ".version 8.0\n.visible .entry work() {}\n"), "cuModuleLoadData");
    check(cuModuleGetFunction(&kernel, module, "work"), "cuModuleGetFunction");
    return kernel;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double launch_burst(void *kernel) {
    double start = now_ns();
    for (int i = 0; i < BURST; i++)
        cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL);
    return (now_ns() - start) / BURST;
}

static double alloc_pairs(void *unused) {
    (void)unused;
    double start = now_ns();
    for (int i = 0; i < PAIRS; i++) {
        uint64_t pointer;
        if (cuMemAlloc_v2(&pointer, 4096) != 0 || cuMemFree_v2(pointer) != 0)
            check(1, "cuMemAlloc");
    }
    return (now_ns() - start) / PAIRS;
}

static double median(double (*batch)(void *), void *argument) {
    double times[BATCHES];
    for (int i = 0; i < BATCHES; i++)
        times[i] = batch(argument);
    qsort(times, BATCHES, sizeof times[0], ascending);
    return times[BATCHES / 2];
}

int main(int argc, char **argv) {
    void *context;
    char line[16];
    int blocks = argc > 1 ? atoi(argv[1]) : 0;
    check(cuInit(0), "cuInit");
    check(cuDevicePrimaryCtxRetain(&context, 0), "cuDevicePrimaryCtxRetain");
    check(cuCtxSetCurrent(context), "cuCtxSetCurrent");
    void *kernel = load_kernel();
    for (int i = 0; i < blocks; i++) {
        uint64_t pointer;
        check(cuMemAlloc_v2(&pointer, 4096), "cuMemAlloc");
    }
    median(launch_burst, kernel);
    median(alloc_pairs, NULL);
    printf("ready\n");
    fflush(stdout);
    while (fgets(line, sizeof line, stdin) != NULL) {
        double launch = median(launch_burst, kernel), pair = median(alloc_pairs, NULL);
        printf("%.2f %.2f\n", launch, pair);
        fflush(stdout);
    }
    return 0;
}
