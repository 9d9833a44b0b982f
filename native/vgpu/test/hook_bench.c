/* Times driver calls as a program makes them, with whatever is preloaded: prints lines "name nanoseconds".
 * Arguments: BLOCKS (live allocations besides the one that is measured), ROUNDS. One line per round and figure. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

extern int cuInit(unsigned);
extern int cuDevicePrimaryCtxRetain(void **, int);
extern int cuCtxSetCurrent(void *);
extern int cuCtxSynchronize(void);
extern int cuMemAlloc_v2(uint64_t *, size_t);
extern int cuMemFree_v2(uint64_t);
extern int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                          void **);
extern int cuModuleLoadData(void **, const void *);
extern int cuModuleGetFunction(void **, void *, const char *);

enum { BURST = 200, PAIRS = 400 };

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

static double launch_burst(void *kernel) {
    double start = now_ns();
    for (int i = 0; i < BURST; i++)
        cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL);
    double each = (now_ns() - start) / BURST;
    check(cuCtxSynchronize(), "cuCtxSynchronize");
    return each;
}

static double alloc_pairs(void) {
    double start = now_ns();
    for (int i = 0; i < PAIRS; i++) {
        uint64_t pointer;
        if (cuMemAlloc_v2(&pointer, 4096) != 0 || cuMemFree_v2(pointer) != 0)
            check(1, "cuMemAlloc");
    }
    return (now_ns() - start) / PAIRS;
}

int main(int argc, char **argv) {
    void *context;
    int blocks = argc > 1 ? atoi(argv[1]) : 0, rounds = argc > 2 ? atoi(argv[2]) : 20;
    check(cuInit(0), "cuInit");
    check(cuDevicePrimaryCtxRetain(&context, 0), "cuDevicePrimaryCtxRetain");
    check(cuCtxSetCurrent(context), "cuCtxSetCurrent");
    void *kernel = load_kernel();
    for (int i = 0; i < blocks; i++) {
        uint64_t pointer;
        check(cuMemAlloc_v2(&pointer, 4096), "cuMemAlloc");
    }
    launch_burst(kernel);
    alloc_pairs();
    printf("ready\n");
    fflush(stdout);
    /* One round per line read, so that two processes can be measured in turn. */
    char line[16];
    while (rounds-- > 0 && fgets(line, sizeof line, stdin) != NULL) {
        if (strcmp(line, "idle\n") == 0)
            continue;
        double launch = launch_burst(kernel), pairs = alloc_pairs();
        printf("%.2f %.2f\n", launch, pairs);
        fflush(stdout);
    }
    return 0;
}
