/* Times cuInit and the first primary context of a new process: prints "ready", waits until its input ends,
 * prints the nanoseconds of cuInit, waits until the pipe of its first argument ends, prints those of the
 * context, and stays until the pipe of its second argument ends. bench/startup.py starts many of them. */
#define _GNU_SOURCE
#include "driver_calls.h"

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Until whoever has the other end closes it. */
static int wait_for_end(int fd) {
    char byte;
    return read(fd, &byte, 1) >= 0;
}

static void report(uint64_t start) {
    printf("%" PRIu64 "\n", now() - start);
    fflush(stdout);
}

int main(int argc, char **argv) {
    void *context;
    if (argc < 3 || write(STDOUT_FILENO, "ready\n", 6) != 6 || !wait_for_end(STDIN_FILENO))
        return 2;
    uint64_t start = now();
    if (cuInit(0) != 0)
        return 1;
    report(start);
    if (!wait_for_end(atoi(argv[1])))
        return 2;
    start = now();
    if (cuDevicePrimaryCtxRetain(&context, 0) != 0)
        return 1;
    report(start);
    return !wait_for_end(atoi(argv[2])); /* holds its slot until all have been timed */
}
